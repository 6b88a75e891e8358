"""Tasks at a trainer's node and at an inferencer's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from pulsenet import limits
from pulsenet.errors import RemoteProtocolError, UnavailableError
from pulsenet.ids import PeerId
from pulsenet.local.protocol import GivenTask, TasksQueued
from pulsenet.wire.messages import GetTasks, Message, Refusal, Task, TasksReply
from pulsenetd.metrics import Metrics
from pulsenetd.tasks import ASK_SECONDS, BUSY_RETRY_MS, InferencerTasks, TrainerTasks

ONE, TWO = PeerId(b"1" * 32), PeerId(b"2" * 32)
TASK = Task(bytes(16), "{}", 5_000)


@pytest.fixture
def board() -> TrainerTasks:
    return TrainerTasks(lambda peer_id: peer_id == ONE, Metrics(), lambda: 0.0)


def send(board: TrainerTasks, *contents: str, lease_ms: int = 5_000) -> TasksQueued:
    return asyncio.run(board.send(contents, lease_ms))


def test_tasks_go_to_inferencers_that_count_and_are_counted(board: TrainerTasks) -> None:
    queued = send(board, "{}", "[]")
    refusal = board.answer(TWO, GetTasks(4))
    assert isinstance(refusal, Refusal)
    assert refusal.code == "untrusted"
    reply = board.answer(ONE, GetTasks(4))
    assert reply == TasksReply((Task(queued.task_ids[0], "{}", 5_000), Task(queued.task_ids[1], "[]", 5_000)))
    assert board.answer(ONE, GetTasks(4)) == TasksReply(())
    board.finish(queued.task_ids[:1])
    assert board.status() == {"waiting": 0, "leased": 1, "done": 1, "expired": 0, "given_up": 0}
    sample = board._metrics.registry.get_sample_value
    for outcome, count in (("queued", 2), ("leased", 2), ("done", 1)):
        assert sample("pulsenet_tasks_total", {"outcome": outcome}) == count


def test_a_full_board_says_when_to_ask_again(board: TrainerTasks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TASKS_MAX", 1)
    refused = send(board, "{}", "{}")
    assert (refused.task_ids, refused.reason[:5], refused.retry_after_ms) == ((), "busy:", BUSY_RETRY_MS)
    assert len(send(board, "{}").task_ids) == 1


@pytest.mark.parametrize("lease_ms", [0, 86_400_001])
def test_a_lease_out_of_range_is_refused(board: TrainerTasks, lease_ms: int) -> None:
    refused = send(board, "{}", lease_ms=lease_ms)
    assert "lease" in refused.reason
    assert refused.retry_after_ms == 0


def test_each_side_refuses_what_belongs_to_the_other(board: TrainerTasks) -> None:
    assert asyncio.run(board.take(4, 0.0)) == ()
    assert "sent at a trainer" in asyncio.run(InferencerTasks().send(["{}"], 1)).reason


class Trainers:
    """Trainers that answer by a script; the last answer is repeated."""

    def __init__(self, *answers: Message | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[PeerId] = []

    def find(self) -> Sequence[PeerId]:
        return (ONE, TWO)

    async def ask(self, peer_id: PeerId, request: GetTasks) -> Message:
        assert request == GetTasks(3)
        self.asked.append(peer_id)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def take(hands: Any, trainers: Trainers, wait_seconds: float) -> tuple[tuple[GivenTask, ...], float]:
    """Return what an engine gets, and how long it waited."""
    tasks = InferencerTasks()
    tasks.bind(trainers.find, trainers.ask)

    async def scenario() -> tuple[tuple[GivenTask, ...], float]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        return await tasks.take(3, wait_seconds), loop.time() - began

    answer: tuple[tuple[GivenTask, ...], float] = hands.run_quickly(scenario)
    return answer


def test_the_next_trainer_is_asked_where_one_has_nothing_or_is_away(hands: Any) -> None:
    for empty in (TasksReply(()), UnavailableError("gone"), RemoteProtocolError("framing", "cut")):
        trainers = Trainers(empty, TasksReply((TASK,)))
        tasks, seconds = take(hands, trainers, 0.0)
        assert tasks == (GivenTask(TWO, TASK.task_id, "{}", 5_000),)
        assert trainers.asked == [ONE, TWO]
        assert seconds < 0.5


def test_an_engine_waits_for_work_until_its_time_is_up(hands: Any) -> None:
    trainers = Trainers(*[TasksReply(())] * 5, TasksReply((TASK,)))
    tasks, seconds = take(hands, trainers, 60.0)
    assert len(tasks) == 1
    assert seconds == pytest.approx(2 * ASK_SECONDS, abs=0.5)
    trainers = Trainers(TasksReply(()))
    tasks, seconds = take(hands, trainers, 2.5)
    assert tasks == ()
    assert seconds == pytest.approx(2.5, abs=0.5)


def test_before_the_node_serves_there_is_no_work() -> None:
    tasks = InferencerTasks()
    assert asyncio.run(tasks.take(3, 0.0)) == ()
    tasks._find_trainers = lambda: (ONE,)
    assert asyncio.run(tasks.take(3, 0.0)) == ()
