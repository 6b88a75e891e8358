"""Rollout batches at a trainer: judged, stored, handed to the training process once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pulsenet import limits
from pulsenet.chain.records import RolloutBatch
from pulsenet.chain.signing import decode_signed, encode_signed
from pulsenet.errors import StorageError
from pulsenet.ids import RunId, Version
from pulsenet.local import protocol
from pulsenet.local.protocol import SignedBatch
from pulsenet.wire.schema import decode_value
from pulsenetd import rollout_inbox
from pulsenetd.identity import to_libp2p_text
from pulsenetd.metrics import Metrics
from pulsenetd.rollout_inbox import ADMITTED_SECONDS, BATCH_BURST, BATCHES_PER_SECOND, RolloutInbox
from pulsenetd.storage.shelf import RolloutShelf


def count(metrics: Metrics, outcome: str) -> float:
    return metrics.registry.get_sample_value("pulsenet_rollouts_total", {"outcome": outcome}) or 0.0


class Receiver:
    """An inbox with a clock that stands still unless moved."""

    def __init__(self, run: Any, hands: Any, path: Path, staleness_max: int | None = None) -> None:
        self.run, self.hands, self.path = run, hands, path
        self.staleness_max = staleness_max
        self.now = 1_000.0
        self.metrics = Metrics()
        self.trust = run.trust()
        self.open()

    def open(self) -> None:
        self.shelf = RolloutShelf.open(self.path)
        self.inbox = RolloutInbox(
            self.trust,
            self.shelf,
            self.metrics,
            lambda: self.now,
            threads=self.hands.InlineExecutor(),
            staleness_max=self.staleness_max,
        )

    def restart(self) -> None:
        self.shelf.close()
        self.open()

    def publish(self, number: int) -> None:
        """Have the trainer's version be this one."""
        self.trust.accept_head(self.run.news(number).head, self.run.now_ms)

    def take(self, number: int, key: Any = None, **changes: Any) -> str:
        return self.take_record(self.run.signed_batch(number, key, **changes))

    def take_record(self, record: bytes) -> str:
        return asyncio.run(self.inbox.take(record))

    def give(self, count_max: int = 100, is_delivered: bool = True) -> tuple[SignedBatch, ...]:
        async def exchange() -> tuple[SignedBatch, ...]:
            batches = await self.inbox.give(count_max, 0.0)
            await self.inbox.settle(batches, is_delivered)
            return batches

        return asyncio.run(exchange())

    def numbers(self, count_max: int = 100) -> list[int]:
        """Return the numbers of what the training process gets now."""
        batches = self.give(count_max)
        assert [decode_value(RolloutBatch, item.batch).sequence for item in batches] == [
            item.sequence for item in batches
        ]
        return [item.sequence for item in batches]

    def rejected(self, reason: str) -> float:
        return self.metrics.registry.get_sample_value("pulsenet_rejected_total", {"reason": reason}) or 0.0

    def counts_of(self, key: Any) -> dict[str, int]:
        counts: dict[str, int] = self.inbox.status()["keys"][to_libp2p_text(key.peer_id)]
        return counts


@pytest.fixture
def receiver(run: Any, hands: Any, tmp_path: Path) -> Iterator[Receiver]:
    made = Receiver(run, hands, tmp_path / "in.sqlite")
    yield made
    made.shelf.close()


@pytest.fixture
def open_receiver(make_run: Any, hands: Any, tmp_path: Path) -> Iterator[Any]:
    made: list[Receiver] = []

    def make(**changes: Any) -> Receiver:
        made.append(Receiver(make_run(**changes), hands, tmp_path / "open.sqlite"))
        return made[0]

    yield make
    made[0].shelf.close()


def test_batches_reach_the_training_process_in_order_with_their_signer(receiver: Receiver, run: Any) -> None:
    assert [receiver.take(number) for number in (1, 2, 3)] == ["", "", ""]
    assert receiver.numbers(2) == [1, 2]
    (last,) = receiver.give(2)
    assert last.peer_id == run.inferencer.peer_id
    assert decode_value(RolloutBatch, last.batch) == run.batch(3)
    assert receiver.numbers() == []
    assert receiver.metrics.registry.get_sample_value("pulsenet_rollout_queue_batches") == 0.0


async def test_a_training_process_that_waits_is_woken_by_the_first_batch(receiver: Receiver) -> None:
    waiting = asyncio.create_task(receiver.inbox.give(5, 60.0))
    await asyncio.sleep(0)
    await receiver.inbox.take(receiver.run.signed_batch(1))
    assert len(await waiting) == 1


def test_a_training_process_that_waits_in_vain_gets_nothing(receiver: Receiver) -> None:
    async def scenario() -> tuple[SignedBatch, ...]:
        return await receiver.inbox.give(5, 1.0)

    assert receiver.hands.run_quickly(scenario) == ()


def test_a_batch_sent_twice_counts_once(receiver: Receiver) -> None:
    """The first answer may have been lost, so the second one is friendly too."""
    assert [receiver.take(1), receiver.take(1)] == ["", ""]
    assert receiver.numbers() == [1]
    assert receiver.take(1) == ""
    assert receiver.numbers() == []
    assert (count(receiver.metrics, "taken"), count(receiver.metrics, "duplicate")) == (1, 2)


def test_a_batch_that_comes_again_lets_go_of_its_tasks_too(receiver: Receiver) -> None:
    """The node may have been killed between storing the batch and noting that its tasks are answered."""
    finished: list[bytes] = []

    async def finish(task_ids: Sequence[bytes]) -> None:
        finished.extend(task_ids)

    changes = {"trainer": receiver.run.publisher.peer_id, "task_ids": (b"t" * 16,)}
    assert receiver.take(1, **changes) == ""
    receiver.restart()
    receiver.inbox._finish_tasks = finish
    assert receiver.take(1, **changes) == ""
    assert finished == [b"t" * 16]


def test_nobody_takes_the_id_of_somebody_elses_batch(open_receiver: Any) -> None:
    receiver = open_receiver(open_inferencers_max=4)
    assert receiver.take(1, receiver.run.stranger) == ""
    assert receiver.take(1) == ""
    assert receiver.numbers() == [1, 1]


def test_a_stranger_of_a_closed_run_is_refused_and_counted(receiver: Receiver, run: Any) -> None:
    assert receiver.take(1, run.stranger) == "untrusted"
    assert receiver.numbers() == []
    assert (count(receiver.metrics, "refused"), receiver.rejected("untrusted")) == (1, 1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"body": b"\0\0\0\0"}, "rollouts-shape"),
        ({"version_first": Version(0, 0)}, "rollouts-value"),
        ({"metadata": "[1]"}, "rollouts-metadata"),
        ({"run_id": RunId(b"x" * 32)}, "wrong-run"),
        ({"version_last": Version(4, 9)}, "epoch"),
    ],
)
def test_a_batch_that_is_wrong_is_refused_with_its_code(receiver: Receiver, changes: Any, reason: str) -> None:
    assert receiver.take(1, **changes) == reason
    assert receiver.rejected(reason) == 1
    assert receiver.take(1) == "", "a refused batch uses up no id"


def test_bytes_and_signatures_that_do_not_hold_are_refused(receiver: Receiver, run: Any) -> None:
    assert receiver.take_record(b"\xc1") == "decode"
    signed = run.sign(run.batch(1), run.inferencer)
    forged = replace(signed, signatures=(bytes(64),))
    assert receiver.take_record(encode_signed(forged)) == "signature"
    assert receiver.take_record(encode_signed(run.news(1).manifest)) == "untrusted"


def test_a_key_may_send_a_burst_and_then_a_steady_rate(receiver: Receiver) -> None:
    numbers = iter(range(1, 10_000))
    assert [receiver.take(next(numbers)) for _ in range(BATCH_BURST)] == [""] * BATCH_BURST
    late = next(numbers)
    assert receiver.take(late) == "rate"
    receiver.now += 1.5 / BATCHES_PER_SECOND
    assert receiver.take(late) == ""
    assert receiver.take(next(numbers)) == "rate"
    assert receiver.rejected("rate") == 2


def test_the_rates_of_so_many_keys_are_kept_those_heard_of_last(
    open_receiver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_inbox, "KEYS_COUNTED_MAX", 2)
    receiver = open_receiver(open_inferencers_max=1)
    for index in range(5):
        assert receiver.take(index, receiver.run.key(f"passing-{index}")) == ""
        receiver.now += ADMITTED_SECONDS + 1
    assert len(receiver.inbox._rates) == 2


def test_an_open_run_admits_so_many_strangers_at_one_time(open_receiver: Any) -> None:
    receiver = open_receiver(open_inferencers_max=1)
    run = receiver.run
    other = run.key("other")
    assert receiver.take(1, run.stranger) == ""
    assert receiver.take(2, other) == "untrusted"
    assert receiver.take(3, run.stranger) == ""
    assert receiver.take(4) == "", "a listed key needs no place"
    receiver.now += ADMITTED_SECONDS
    assert receiver.take(5, other) == "", "the place of a key that fell silent is free"
    assert receiver.take(6, run.stranger) == "untrusted"


def test_one_reply_holds_no_more_than_a_frame_and_at_least_one_batch(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_size_bytes = len(decode_signed(receiver.run.signed_batch(1)).payload)
    for number in (1, 2, 3):
        receiver.take(number)
    monkeypatch.setattr(protocol, "ROLLOUTS_REPLY_SIZE_BYTES_MAX", 2 * batch_size_bytes)
    assert receiver.numbers() == [1, 2]
    assert receiver.numbers() == [3]
    receiver.take(4)
    monkeypatch.setattr(protocol, "ROLLOUTS_REPLY_SIZE_BYTES_MAX", 1)
    assert receiver.numbers() == [4]


# Nothing taken is lost, nothing counts twice


def test_what_was_taken_survives_a_restart_and_counts_once(receiver: Receiver) -> None:
    assert [receiver.take(number) for number in (1, 2, 3)] == ["", "", ""]
    assert receiver.numbers(1) == [1]
    receiver.restart()
    assert [receiver.take(number) for number in (1, 2, 3)] == ["", "", ""]
    assert receiver.numbers() == [2, 3]
    receiver.restart()
    assert receiver.take(3) == ""
    assert receiver.numbers() == []
    assert (count(receiver.metrics, "taken"), count(receiver.metrics, "duplicate")) == (3, 4)


def test_batches_that_did_not_arrive_come_first_the_next_time(receiver: Receiver) -> None:
    for number in (1, 2, 3):
        receiver.take(number)
    assert len(receiver.give(2, is_delivered=False)) == 2
    assert receiver.inbox.status()["queue_batches"] == 3
    assert receiver.numbers() == [1, 2, 3]
    assert receiver.inbox.status()["queue_bytes"] == 0


def test_batches_given_out_just_before_a_crash_come_again(receiver: Receiver) -> None:
    receiver.take(1)
    assert len(asyncio.run(receiver.inbox.give(1, 0.0))) == 1
    receiver.restart()
    assert receiver.numbers() == [1]


def test_a_number_below_the_window_is_refused(receiver: Receiver, run: Any) -> None:
    assert receiver.take(limits.ROLLOUT_WINDOW_COUNT + 5) == ""
    assert receiver.take(6) == ""
    assert receiver.take(5) == "replay"
    assert receiver.rejected("replay") == 1
    assert receiver.counts_of(run.inferencer)["refused"] == 1


def test_a_full_inbox_makes_the_inferencers_wait(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ROLLOUT_QUEUE_BATCHES_MAX", 2)
    assert [receiver.take(number) for number in (1, 2, 3)] == ["", "", "queue"]
    assert receiver.numbers(1) == [1]
    assert receiver.take(3) == "", "what was refused uses up no number"
    assert receiver.numbers() == [2, 3]


def test_an_inbox_is_full_by_bytes_too(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver.take(1)
    size_bytes = receiver.inbox.status()["queue_bytes"]
    monkeypatch.setattr(limits, "ROLLOUT_QUEUE_SIZE_BYTES_MAX", 2 * size_bytes - 1)
    assert receiver.take(2) == "queue"


def test_a_disk_that_refuses_takes_nothing(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise StorageError("no space left", "enospc")

    with monkeypatch.context() as patched:
        patched.setattr(receiver.shelf, "add", refuse)
        assert receiver.take(1) == "storage"
    assert receiver.take(1) == ""
    with monkeypatch.context() as patched:
        patched.setattr(receiver.shelf, "remove", refuse)
        assert receiver.numbers() == [1]
    assert receiver.numbers() == []


def test_a_batch_that_cannot_be_read_any_more_is_counted_and_passed_over(receiver: Receiver, run: Any) -> None:
    receiver.take(1)
    receiver.take(2)
    receiver.shelf.remove([(run.inferencer.peer_id, 1)])
    assert receiver.numbers() == [2]
    assert count(receiver.metrics, "lost") == 1


def test_a_process_that_goes_away_meanwhile_costs_no_other_batch(
    receiver: Receiver, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver.take(1)
    receiver.take(2)
    receiver.shelf.remove([(run.inferencer.peer_id, 1)])

    async def go_away(_: Any) -> None:
        raise asyncio.CancelledError

    with monkeypatch.context() as patched:
        patched.setattr(receiver.inbox, "_remove", go_away)
        with pytest.raises(asyncio.CancelledError):
            receiver.give()
    assert receiver.numbers() == [2]


def test_the_memory_of_keys_is_bounded(open_receiver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_inbox, "WINDOWS_MAX", 2)
    monkeypatch.setattr(rollout_inbox, "KEYS_COUNTED_MAX", 2)
    receiver = open_receiver(open_inferencers_max=4)
    first, second, third = (receiver.run.key(f"key-{index}") for index in range(3))
    for key in (first, second, first, third):
        assert receiver.take(len(receiver.inbox._queue), key) == ""
    for _ in range(2):
        assert set(receiver.inbox._windows) == {first.peer_id, third.peer_id}
        receiver.restart()
    for key in (first, second, third):
        receiver.inbox.note_checks(key.peer_id, 1, 0)
    assert len(receiver.inbox.status()["keys"]) == 2


# Staleness


def test_without_a_limit_no_batch_is_too_old(receiver: Receiver) -> None:
    receiver.publish(900)
    assert receiver.take(1) == ""
    assert receiver.give()[0].number_min == 0


def test_a_batch_is_refused_if_all_its_samples_are_too_old(receiver: Receiver, run: Any) -> None:
    receiver.staleness_max = 2
    receiver.restart()
    assert receiver.take(1, versions=(1, 1)) == "", "no version is known yet"
    receiver.publish(5)
    assert receiver.take(2, versions=(2, 2)) == "staleness"
    assert receiver.take(3, versions=(2, 3)) == ""
    assert receiver.take(4, versions=(9, 9)) == "", "newer than this node knows"
    assert (count(receiver.metrics, "stale"), receiver.rejected("staleness")) == (2, 1)
    assert receiver.counts_of(run.inferencer) == {
        "taken": 3,
        "stale": 2,
        "refused": 0,
        "samples_checked": 0,
        "samples_mismatched": 0,
    }
    given = receiver.give()
    assert [(item.sequence, item.number_min) for item in given] == [(3, 3), (4, 3)]


def test_batches_that_become_too_old_while_they_wait_make_way(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ROLLOUT_QUEUE_BATCHES_MAX", 2)
    receiver.staleness_max = 0
    receiver.restart()
    receiver.publish(1)
    assert [receiver.take(number) for number in (1, 2, 3)] == ["", "", "queue"]
    receiver.publish(2)
    assert receiver.take(4, versions=(2, 2)) == ""
    assert receiver.numbers() == [4]
    assert receiver.shelf.entries() == []
    assert count(receiver.metrics, "stale") == 2


# What the training process found


def test_checks_are_counted_by_key_and_the_worst_is_shown_first(
    open_receiver: Any, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = open_receiver(open_inferencers_max=1)
    run = receiver.run
    receiver.take(1)
    receiver.take(2, run.stranger)
    receiver.inbox.note_checks(run.inferencer.peer_id, 5, 0)
    receiver.inbox.note_checks(run.stranger.peer_id, 4, 3)
    assert "3 of 4 samples" in caplog.text
    assert list(receiver.inbox.status()["keys"]) == [
        to_libp2p_text(run.stranger.peer_id),
        to_libp2p_text(run.inferencer.peer_id),
    ]
    assert receiver.counts_of(run.stranger)["samples_mismatched"] == 3
    sample = receiver.metrics.registry.get_sample_value
    assert sample("pulsenet_rollout_checks_total", {"outcome": "matched"}) == 6
    assert sample("pulsenet_rollout_checks_total", {"outcome": "mismatched"}) == 3
