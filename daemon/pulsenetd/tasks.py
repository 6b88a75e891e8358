"""Tasks between a training process and the engines: the board at a trainer, the asking at an inferencer.

A task is queued once it is on disk, and stays there until a batch that answers it is: a trainer's node that is killed
gives its tasks again, each once its lease is over.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict
from typing import Any, Final

from pulsenet.errors import RemoteProtocolError, StorageError, UnavailableError
from pulsenet.ids import PeerId
from pulsenet.local.protocol import GivenTask, TasksQueued
from pulsenet.node.tasks import StoredTask, TaskBoard
from pulsenet.wire.messages import GetTasks, Message, Refusal, TasksReply
from pulsenetd.logs import logger
from pulsenetd.metrics import Metrics
from pulsenetd.storage.task_shelf import TaskShelf

ASK_SECONDS: Final = 1.0
"""Between two questions while no trainer has work."""

BUSY_RETRY_MS: Final = 1_000
LEASE_SECONDS_MAX: Final = 86_400.0

Ask = Callable[[PeerId, GetTasks], Awaitable[Message]]


class TrainerTasks:
    """The trainer's side.

    Args:
        counts: Whether a peer's rollouts would count: nobody else is given work.
        shelf: Keeps what is not answered; read at once.
        monotonic: Monotonic seconds, for leases.
        threads: Where the shelf is written.
        wall_ms: Unix time in milliseconds: when leases end, for the next life of this node.
    """

    def __init__(
        self,
        counts: Callable[[PeerId], bool],
        shelf: TaskShelf,
        metrics: Metrics,
        monotonic: Callable[[], float],
        *,
        threads: Executor,
        wall_ms: Callable[[], int],
    ) -> None:
        self._counts = counts
        self._shelf = shelf
        self._metrics = metrics
        self._monotonic = monotonic
        self._threads = threads
        self._wall_ms = wall_ms
        self._mutex = asyncio.Lock()
        self._board = TaskBoard(secrets.token_bytes)
        left = shelf.tasks()
        now_ms = wall_ms()
        self._board.restore(
            (
                StoredTask(
                    task.task_id,
                    task.content,
                    task.lease_ms / 1000,
                    task.lease_count,
                    task.peer_id,
                    (task.until_ms - now_ms) / 1000,
                )
                for task in left
            ),
            monotonic(),
        )
        if left:
            logger.info("%d tasks of the last run are still to be answered", len(left))

    async def send(self, contents: Sequence[str], lease_ms: int) -> TasksQueued:
        """Put tasks of the training process on the board and on disk, all or none."""
        lease_seconds = lease_ms / 1000
        if not 0 < lease_seconds <= LEASE_SECONDS_MAX:
            return TasksQueued((), f"a lease of {lease_seconds} s: above 0 and at most {LEASE_SECONDS_MAX:.0f} s", 0)
        async with self._mutex:  # nothing is leased before it is durable
            task_ids = self._board.put(contents, lease_seconds)
            if task_ids is None:
                return TasksQueued((), "busy: too many tasks wait for inferencers or for their answers", BUSY_RETRY_MS)
            try:
                await self._run(self._shelf.add, tuple(zip(task_ids, contents, strict=True)), lease_ms)
            except StorageError as error:
                self._board.withdraw(task_ids)
                return TasksQueued((), f"storage: {error}", BUSY_RETRY_MS)
        self._metrics.count("tasks", "queued", len(task_ids))
        return TasksQueued(task_ids, "", 0)

    async def take(self, count_max: int, wait_seconds: float) -> tuple[GivenTask, ...]:
        """Engines have nothing to ask here."""
        await asyncio.sleep(min(wait_seconds, 1.0))
        return ()

    async def answer(self, peer_id: PeerId, request: GetTasks) -> Message:
        """Lease tasks to an inferencer's node."""
        if not self._counts(peer_id):
            return Refusal("untrusted", "the rollouts of this key do not count", 0)
        async with self._mutex:
            tasks = self._board.lease(peer_id, request.count_max, self._monotonic())
            given_up = self._board.take_given_up()
            if given_up:
                await self._try_to_note("tasks that were given up", self._shelf.remove, given_up)
                self._metrics.count("tasks", "given_up", len(given_up))
            if tasks:
                now_ms = self._wall_ms()
                task_ids, ends = [task.task_id for task in tasks], [now_ms + task.lease_ms for task in tasks]
                await self._try_to_note("leases of tasks", self._shelf.note_leases, task_ids, peer_id, ends)
        self._metrics.count("tasks", "leased", len(tasks))
        return TasksReply(tasks)

    async def finish(self, task_ids: Sequence[bytes]) -> None:
        """Take tasks off the board that a batch answers, once that is on disk."""
        if not task_ids:
            return
        async with self._mutex:
            count = self._board.finish(task_ids)
            if count:
                await self._try_to_note("tasks that were answered", self._shelf.remove, task_ids)
        self._metrics.count("tasks", "done", count)

    def status(self) -> Mapping[str, Any]:
        """Return how the tasks stand; called from any thread."""
        return asdict(self._board.counts(self._monotonic()))

    async def _try_to_note(self, what: str, write: Callable[..., None], *arguments: Any) -> None:
        """Write down what the next life of this node should know; work goes on without it.

        Without the note a task is given once more, or too early: an answer too many, which a loop must expect anyway.
        """
        try:
            await self._run(write, *arguments)
        except StorageError as error:
            logger.warning("%s cannot be noted: %s", what, error)

    async def _run(self, work: Callable[..., None], *arguments: Any) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)


class InferencerTasks:
    """The inferencer's side; :meth:`bind` it before engines ask."""

    def __init__(self) -> None:
        self._find_trainers: Callable[[], Sequence[PeerId]] = tuple
        self._ask: Ask | None = None

    def bind(self, find_trainers: Callable[[], Sequence[PeerId]], ask: Ask) -> None:
        """Learn whom to ask, in which order, and how."""
        self._find_trainers = find_trainers
        self._ask = ask

    async def send(self, contents: Sequence[str], lease_ms: int) -> TasksQueued:
        """Refuse: tasks come from a training process."""
        return TasksQueued((), "this node is no trainer; tasks are sent at a trainer", 0)

    async def take(self, count_max: int, wait_seconds: float) -> tuple[GivenTask, ...]:
        """Ask one trainer after another, until one has work or the time is up."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + wait_seconds
        while True:
            for trainer in self._find_trainers():
                tasks = await self._ask_trainer(trainer, count_max)
                if tasks:
                    return tasks
            rest_seconds = give_up_at - loop.time()
            if rest_seconds <= 0:
                return ()
            await asyncio.sleep(min(ASK_SECONDS, rest_seconds))

    async def _ask_trainer(self, trainer: PeerId, count_max: int) -> tuple[GivenTask, ...]:
        if self._ask is None:
            return ()
        try:
            reply = await self._ask(trainer, GetTasks(count_max))
        except (UnavailableError, RemoteProtocolError) as error:
            logger.debug("a trainer was not asked for tasks: %s", error)
            return ()
        assert isinstance(reply, TasksReply)
        return tuple(GivenTask(trainer, task.task_id, task.content, task.lease_ms) for task in reply.tasks)
