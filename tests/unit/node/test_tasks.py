"""Each task is one inferencer's at a time, and comes back until a batch answers it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsenet import limits
from pulsenet.ids import PeerId
from pulsenet.node import tasks
from pulsenet.node.tasks import StoredTask, TaskBoard, TaskCounts

ONE, TWO = PeerId(b"1" * 32), PeerId(b"2" * 32)


def make_board() -> TaskBoard:
    numbers = iter(range(1 << 20))
    return TaskBoard(lambda size_bytes: next(numbers).to_bytes(size_bytes, "big"))


def put(board: TaskBoard, *contents: str, lease_seconds: float = 10.0) -> tuple[bytes, ...]:
    ids = board.put(contents, lease_seconds)
    assert ids is not None
    return ids


def test_a_task_is_leased_to_one_inferencer_at_a_time() -> None:
    board = make_board()
    first, second, third = put(board, "a", "b", "c")
    assert [(task.task_id, task.content, task.lease_ms) for task in board.lease(ONE, 2, 0.0)] == [
        (first, "a", 10_000),
        (second, "b", 10_000),
    ]
    assert [task.task_id for task in board.lease(TWO, 2, 0.0)] == [third]
    assert board.lease(TWO, 2, 9.9) == ()
    assert board.counts(9.9) == TaskCounts(waiting=0, leased=3, done=0, expired=0, given_up=0)


def test_a_task_whose_lease_is_over_is_leased_again_before_newer_ones() -> None:
    board = make_board()
    first, second = put(board, "a", "b")
    (third,) = put(board, "c", lease_seconds=99.0)
    board.lease(ONE, 2, 0.0)
    assert [task.task_id for task in board.lease(TWO, 5, 10.0)] == [first, second, third]
    assert board.counts(10.0) == TaskCounts(waiting=0, leased=3, done=0, expired=2, given_up=0)


def test_an_answer_counts_whoever_held_the_task_and_once() -> None:
    board = make_board()
    ids = put(board, "a", "b", "c")
    board.lease(ONE, 1, 0.0)
    board.lease(TWO, 1, 10.0)
    assert board.finish([ids[0], ids[0], ids[2], b"?" * 16]) == 2
    assert board.finish(ids[:1]) == 0
    assert board.counts(10.0) == TaskCounts(waiting=1, leased=0, done=2, expired=1, given_up=0)
    assert [task.content for task in board.lease(ONE, 5, 10.0)] == ["b"]


def test_a_task_nobody_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "LEASES_PER_TASK_MAX", 2)
    board = make_board()
    put(board, "a")
    assert len(board.lease(ONE, 1, 0.0)) == 1
    assert len(board.lease(ONE, 1, 10.0)) == 1
    assert board.lease(ONE, 1, 20.0) == ()
    assert board.counts(20.0) == TaskCounts(waiting=0, leased=0, done=0, expired=2, given_up=1)


def test_no_inferencer_hoards_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "LEASED_PER_PEER_MAX", 2)
    board = make_board()
    ids = put(board, *"abcd")
    assert len(board.lease(ONE, 9, 0.0)) == 2
    assert board.lease(ONE, 9, 0.0) == ()
    board.finish(ids[:1])
    assert len(board.lease(ONE, 9, 0.0)) == 1
    assert len(board.lease(TWO, 9, 0.0)) == 1


def test_tasks_of_an_earlier_life_are_given_again_once_their_leases_are_over() -> None:
    board = make_board()
    names = [bytes([number]) * 16 for number in range(4)]
    board.restore(
        [
            StoredTask(names[0], "a", 10.0, 2, ONE, 4.0),
            StoredTask(names[1], "b", 10.0, 1, TWO, -3.0),
            StoredTask(names[2], "c", 10.0, 0, None, 0.0),
            StoredTask(names[3], "d", 10.0, tasks.LEASES_PER_TASK_MAX, ONE, 0.0),
        ],
        100.0,
    )
    assert board.counts(100.0) == TaskCounts(waiting=2, leased=1, done=0, expired=2, given_up=1)
    assert [task.task_id for task in board.lease(TWO, 9, 100.0)] == names[1:3], "one is still another's"
    assert board.take_given_up() == (names[3],)
    assert board.take_given_up() == ()
    assert [task.task_id for task in board.lease(TWO, 9, 104.0)] == names[:1]
    assert board.finish(names) == 3
    assert board.counts(104.0) == TaskCounts(waiting=0, leased=0, done=3, expired=3, given_up=1)


def test_the_lease_of_an_earlier_life_ends_no_later_than_a_new_one_would() -> None:
    """Wall clocks jump."""
    board = make_board()
    board.restore([StoredTask(b"t" * 16, "a", 10.0, 1, ONE, 9e9)], 0.0)
    assert board.lease(TWO, 1, 9.9) == ()
    assert len(board.lease(TWO, 1, 10.0)) == 1


def test_an_earlier_life_counts_against_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TASKS_MAX", 2)
    monkeypatch.setattr(tasks, "LEASED_PER_PEER_MAX", 1)
    board = make_board()
    board.restore([StoredTask(b"t" * 16, "a", 10.0, 1, ONE, 5.0)], 0.0)
    assert board.put(["b", "c"], 1.0) is None
    put(board, "b")
    assert board.lease(ONE, 1, 0.0) == ()
    assert len(board.lease(TWO, 1, 0.0)) == 1


def test_tasks_that_cannot_be_kept_are_withdrawn() -> None:
    board = make_board()
    kept = put(board, "a")
    withdrawn = put(board, "b", "c")
    board.withdraw(withdrawn)
    assert board.counts(0.0) == TaskCounts(waiting=1, leased=0, done=0, expired=0, given_up=0)
    assert [task.task_id for task in board.lease(ONE, 9, 0.0)] == list(kept)


def test_counting_changes_nothing() -> None:
    """A status is asked for in another thread."""
    board = make_board()
    (task_id,) = put(board, "a")
    board.lease(ONE, 1, 0.0)
    counted = TaskCounts(waiting=1, leased=0, done=0, expired=1, given_up=0)
    assert board.counts(10.0) == board.counts(10.0) == counted
    assert [task.task_id for task in board.lease(TWO, 1, 10.0)] == [task_id]
    assert board.counts(10.0) == TaskCounts(waiting=0, leased=1, done=0, expired=1, given_up=0)


def test_the_board_is_bounded_by_count_and_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TASKS_MAX", 3)
    monkeypatch.setattr(limits, "TASKS_SIZE_BYTES_MAX", 10)
    board = make_board()
    put(board, "a", "b")
    assert board.put(["c", "d"], 1.0) is None
    assert board.put(["nine bytes"], 1.0) is None
    ids = put(board, "c")
    board.finish(ids)
    put(board, "8 bytes.")


def test_a_reply_holds_no_more_than_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TASKS_PER_REPLY_MAX", 5)
    board = make_board()
    put(board, *["x"] * 9)
    assert len(board.lease(ONE, 9, 0.0)) == 5
    monkeypatch.setattr(limits, "CHUNK_SIZE_BYTES_MAX", 3 * 65)
    assert len(board.lease(ONE, 9, 0.0)) == 3
    monkeypatch.setattr(limits, "CHUNK_SIZE_BYTES_MAX", 1)
    assert len(board.lease(ONE, 9, 0.0)) == 1, "the first always goes, or it would stand in the way"


@given(st.lists(st.tuples(st.sampled_from(["put", "lease", "finish"]), st.integers(0, 5)), max_size=40))
def test_no_task_is_lost_or_held_twice(steps: list[tuple[str, int]]) -> None:
    board = make_board()
    open_ids: set[bytes] = set()
    leased_until: dict[bytes, float] = {}
    now = 0.0
    for kind, number in steps:
        now += 3.0
        arguments: dict[str, Any] = {"lease_seconds": 30.0}
        if kind == "put":
            open_ids.update(put(board, *["t"] * number, **arguments))
        elif kind == "lease":
            for task in board.lease(ONE if number % 2 else TWO, number, now):
                assert task.task_id in open_ids
                assert leased_until.get(task.task_id, 0.0) <= now
                leased_until[task.task_id] = now + 30.0
        else:
            done = sorted(open_ids)[:number]
            assert board.finish(done) == len(done)
            open_ids.difference_update(done)
        counts = board.counts(now)
        assert counts.waiting + counts.leased == len(open_ids)
