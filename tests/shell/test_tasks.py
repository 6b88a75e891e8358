"""Tasks at a trainer's node and at an inferencer's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pulsenet import limits
from pulsenet.errors import RemoteProtocolError, UnavailableError
from pulsenet.ids import PeerId
from pulsenet.local.protocol import GivenTask, TasksQueued
from pulsenet.node.tasks import LEASES_PER_TASK_MAX
from pulsenet.wire.messages import GetTasks, Message, Refusal, Task, TasksReply
from pulsenetd.metrics import Metrics
from pulsenetd.storage.task_shelf import TaskShelf
from pulsenetd.tasks import ASK_SECONDS, BUSY_RETRY_MS, InferencerTasks, TrainerTasks

ONE, TWO, THREE = PeerId(b"1" * 32), PeerId(b"2" * 32), PeerId(b"3" * 32)
TASK = Task(bytes(16), "{}", 5_000)


class Clock:
    """Monotonic and wall time of one machine."""

    now = 1_000.0

    def wall_ms(self) -> int:
        return int(self.now * 1000) + 10**12


@dataclass
class Node:
    """A trainer's node; each :meth:`start` is another life on the same disk."""

    path: Path
    clock: Clock = field(default_factory=Clock)
    metrics: Metrics = field(default_factory=Metrics)
    stack: ExitStack = field(default_factory=ExitStack)

    def start(self) -> TrainerTasks:
        """Start, as after a kill: nothing of the life before is told that it ends."""
        threads = self.stack.enter_context(ThreadPoolExecutor(1))
        shelf = TaskShelf.open(self.path / "tasks.sqlite")
        self.stack.callback(shelf.close)
        return TrainerTasks(
            lambda peer_id: peer_id in (ONE, THREE),
            shelf,
            self.metrics,
            lambda: self.clock.now,
            threads=threads,
            wall_ms=self.clock.wall_ms,
        )


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    with made.stack:
        yield made


@pytest.fixture
def board(node: Node) -> TrainerTasks:
    return node.start()


async def send(board: TrainerTasks, *contents: str, lease_ms: int = 5_000) -> TasksQueued:
    return await board.send(contents, lease_ms)


async def lease(board: TrainerTasks, peer_id: PeerId, count_max: int = 4) -> list[str]:
    """Return the contents of what a peer is given."""
    reply = await board.answer(peer_id, GetTasks(count_max))
    assert isinstance(reply, TasksReply)
    return [task.content for task in reply.tasks]


async def test_tasks_go_to_inferencers_that_count_and_are_counted(board: TrainerTasks) -> None:
    queued = await send(board, "{}", "[]")
    refusal = await board.answer(TWO, GetTasks(4))
    assert isinstance(refusal, Refusal)
    assert refusal.code == "untrusted"
    reply = await board.answer(ONE, GetTasks(4))
    assert reply == TasksReply((Task(queued.task_ids[0], "{}", 5_000), Task(queued.task_ids[1], "[]", 5_000)))
    assert await board.answer(ONE, GetTasks(4)) == TasksReply(())
    await board.finish(queued.task_ids[:1])
    assert board.status() == {"waiting": 0, "leased": 1, "done": 1, "expired": 0, "given_up": 0}
    sample = board._metrics.registry.get_sample_value
    for outcome, count in (("queued", 2), ("leased", 2), ("done", 1)):
        assert sample("pulsenet_tasks_total", {"outcome": outcome}) == count


async def test_a_node_that_is_killed_gives_again_what_was_not_answered(node: Node) -> None:
    """Queued, leased and answered tasks of the life before; no lease is cut short."""
    board = node.start()
    queued = await send(board, "answered", "given", "waiting")
    assert await lease(board, ONE, 2) == ["answered", "given"]
    await board.finish(queued.task_ids[:1])
    node.clock.now += 2.0
    board = node.start()
    assert board.status() == {"waiting": 1, "leased": 1, "done": 0, "expired": 0, "given_up": 0}
    assert await lease(board, THREE) == ["waiting"], "the other one still is the first's for three seconds"
    node.clock.now += 3.0
    board = node.start()
    assert await lease(board, THREE) == ["given"]
    await board.finish(queued.task_ids)
    assert board.status()["done"] == 2
    assert node.start().status() == {"waiting": 0, "leased": 0, "done": 0, "expired": 0, "given_up": 0}


async def test_a_task_that_breaks_whoever_has_it_is_given_up_across_restarts(node: Node) -> None:
    assert len((await send(node.start(), "{}")).task_ids) == 1
    for _ in range(LEASES_PER_TASK_MAX):
        assert await lease(node.start(), ONE) == ["{}"]
        node.clock.now += 5.0
    board = node.start()
    assert board.status()["given_up"] == 1
    assert await lease(board, ONE) == []
    assert node.metrics.registry.get_sample_value("pulsenet_tasks_total", {"outcome": "given_up"}) == 1
    assert node.start().status() == {"waiting": 0, "leased": 0, "done": 0, "expired": 0, "given_up": 0}


async def test_tasks_that_the_disk_does_not_take_are_not_queued(node: Node) -> None:
    board = node.start()
    assert len((await send(board, "kept")).task_ids) == 1
    board._shelf.close()  # a disk that is gone
    refused = await send(board, "lost")
    assert (refused.task_ids, refused.reason[:8], refused.retry_after_ms) == ((), "storage:", BUSY_RETRY_MS)
    assert board.status()["waiting"] == 1
    # What is queued is given out all the same: at worst its lease is forgotten.
    assert await lease(board, ONE) == ["kept"]
    assert await lease(node.start(), THREE) == ["kept"]


async def test_a_full_board_says_when_to_ask_again(board: TrainerTasks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TASKS_MAX", 1)
    refused = await send(board, "{}", "{}")
    assert (refused.task_ids, refused.reason[:5], refused.retry_after_ms) == ((), "busy:", BUSY_RETRY_MS)
    assert len((await send(board, "{}")).task_ids) == 1


@pytest.mark.parametrize("lease_ms", [0, 86_400_001])
async def test_a_lease_out_of_range_is_refused(board: TrainerTasks, lease_ms: int) -> None:
    refused = await send(board, "{}", lease_ms=lease_ms)
    assert "lease" in refused.reason
    assert refused.retry_after_ms == 0


async def test_each_side_refuses_what_belongs_to_the_other(board: TrainerTasks) -> None:
    assert await board.take(4, 0.0) == ()
    assert "sent at a trainer" in (await InferencerTasks().send(["{}"], 1)).reason


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


async def test_before_the_node_serves_there_is_no_work() -> None:
    tasks = InferencerTasks()
    assert await tasks.take(3, 0.0) == ()
    tasks._find_trainers = lambda: (ONE,)
    assert await tasks.take(3, 0.0) == ()
