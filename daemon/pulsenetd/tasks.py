"""Tasks between a training process and the engines: the board at a trainer, the asking at an inferencer."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from pulsenet.errors import RemoteProtocolError, UnavailableError
from pulsenet.ids import PeerId
from pulsenet.local.protocol import GivenTask, TasksQueued
from pulsenet.node.tasks import TaskBoard
from pulsenet.wire.messages import GetTasks, Message, Refusal, TasksReply
from pulsenetd.logs import logger
from pulsenetd.metrics import Metrics

ASK_SECONDS: Final = 1.0
"""Between two questions while no trainer has work."""

BUSY_RETRY_MS: Final = 1_000
LEASE_SECONDS_MAX: Final = 86_400.0

Ask = Callable[[PeerId, GetTasks], Awaitable[Message]]


class TrainerTasks:
    """The trainer's side.

    Args:
        counts: Whether a peer's rollouts would count: nobody else is given work.
        monotonic: Monotonic seconds, for leases.
    """

    def __init__(self, counts: Callable[[PeerId], bool], metrics: Metrics, monotonic: Callable[[], float]) -> None:
        self._counts = counts
        self._metrics = metrics
        self._monotonic = monotonic
        self._board = TaskBoard(secrets.token_bytes)

    async def send(self, contents: Sequence[str], lease_ms: int) -> TasksQueued:
        """Put tasks of the training process on the board."""
        lease_seconds = lease_ms / 1000
        if not 0 < lease_seconds <= LEASE_SECONDS_MAX:
            return TasksQueued((), f"a lease of {lease_seconds} s: above 0 and at most {LEASE_SECONDS_MAX:.0f} s", 0)
        task_ids = self._board.put(contents, lease_seconds)
        if task_ids is None:
            return TasksQueued((), "busy: too many tasks wait for inferencers or for their answers", BUSY_RETRY_MS)
        self._metrics.count("tasks", "queued", len(task_ids))
        return TasksQueued(task_ids, "", 0)

    async def take(self, count_max: int, wait_seconds: float) -> tuple[GivenTask, ...]:
        """Engines have nothing to ask here."""
        await asyncio.sleep(min(wait_seconds, 1.0))
        return ()

    def answer(self, peer_id: PeerId, request: GetTasks) -> Message:
        """Lease tasks to an inferencer's node."""
        if not self._counts(peer_id):
            return Refusal("untrusted", "the rollouts of this key do not count", 0)
        tasks = self._board.lease(peer_id, request.count_max, self._monotonic())
        self._metrics.count("tasks", "leased", len(tasks))
        return TasksReply(tasks)

    def finish(self, task_ids: Iterable[bytes]) -> None:
        """Take tasks off the board that a batch answers."""
        self._metrics.count("tasks", "done", self._board.finish(task_ids))

    def status(self) -> Mapping[str, Any]:
        """Return how the tasks stand."""
        return asdict(self._board.counts(self._monotonic()))


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
