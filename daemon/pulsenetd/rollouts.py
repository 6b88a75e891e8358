"""A node's part in the run's rollouts: inbox, outbox, and the files that both are kept in."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pulsenet.chain.records import Have
from pulsenet.chain.trust import Trust
from pulsenet.ids import Digest, PeerId, RunId
from pulsenet.wire.messages import GetTasks, Message, PushReply, PushRollouts
from pulsenetd.config import Config
from pulsenetd.identity import Identity
from pulsenetd.metrics import Metrics
from pulsenetd.rollout_inbox import RolloutInbox
from pulsenetd.rollout_outbox import RolloutOutbox, rank_trainers
from pulsenetd.storage.shelf import RolloutShelf
from pulsenetd.storage.task_shelf import TaskShelf
from pulsenetd.tasks import InferencerTasks, TrainerTasks

INBOX_NAME = "rollouts-in.sqlite"
OUTBOX_NAME = "rollouts-out.sqlite"
TASKS_NAME = "tasks.sqlite"


class Rollouts:
    """What a trainer was sent and an inferencer is to send. Make it in a running loop.

    Args:
        config: Role and staleness.
        directory: The node's data directory, locked by this process.
        run_id: The run.
        identity: The node's key.
        trust: Says whose rollouts count and who trains.
        monotonic: Monotonic seconds.

    Raises:
        StorageError: The disk does not let the files be read or written.
    """

    def __init__(
        self,
        config: Config,
        directory: Path,
        run_id: RunId,
        identity: Identity,
        trust: Trust,
        metrics: Metrics,
        monotonic: Callable[[], float],
    ) -> None:
        self._role = config.role
        self._trust = trust
        self.tasks: TrainerTasks | InferencerTasks | None = None
        """Between the training process and the engines; ``None`` at a seed."""
        self._threads = ThreadPoolExecutor(1, "rollouts")
        self._shelves = [RolloutShelf.open(directory / INBOX_NAME), RolloutShelf.open(directory / OUTBOX_NAME)]
        self._task_shelf: TaskShelf | None = None
        trainer_tasks: TrainerTasks | None = None
        if config.role == "trainer":
            self._task_shelf = TaskShelf.open(directory / TASKS_NAME)
            self.tasks = trainer_tasks = TrainerTasks(
                lambda peer_id: self.inbox.counts(peer_id),
                self._task_shelf,
                metrics,
                monotonic,
                threads=self._threads,
                wall_ms=_wall_ms,
            )
        elif config.role == "inferencer":
            self.tasks = InferencerTasks()
        self.inbox = RolloutInbox(
            trust,
            self._shelves[0],
            metrics,
            monotonic,
            threads=self._threads,
            staleness_max=None if config.max_staleness < 0 else config.max_staleness,
            finish_tasks=None if trainer_tasks is None else trainer_tasks.finish,
        )
        self.outbox = RolloutOutbox(
            run_id,
            identity.peer_id,
            identity.sign,
            self._shelves[1],
            metrics,
            threads=self._threads,
            wall_ms=_wall_ms,
        )

    @property
    def take(self) -> Callable[[bytes], Awaitable[str]] | None:
        """Judges a pushed batch; ``None`` on a node that wants none."""
        return self.inbox.take if self._role == "trainer" else None

    async def send(
        self,
        connected: Callable[[], Collection[PeerId]],
        have_of: Callable[[PeerId], Have | None],
        request: Callable[[PeerId, Message], Awaitable[Message]],
    ) -> None:
        """Send what the outbox holds, until cancelled; meanwhile engines can ask for tasks.

        Args:
            connected: Returns the peers that can be asked.
            have_of: Returns what a peer said of itself last.
            request: Asks one of them, and returns its reply.
        """

        def is_trainer(peer_id: PeerId) -> bool:
            have = have_of(peer_id)
            return have is None or have.role == "trainer"

        def rank(digest: Digest) -> tuple[PeerId, ...]:
            head = self._trust.head_record
            publisher = None if head is None else head.signers[0]
            return rank_trainers(self._trust.descriptor, publisher, connected(), digest, is_trainer)

        async def push(peer_id: PeerId, batch: PushRollouts) -> PushReply:
            reply = await request(peer_id, batch)
            assert isinstance(reply, PushReply)
            return reply

        if isinstance(self.tasks, InferencerTasks):
            # A digest of nothing: each question goes to the trainers in an order of its own.
            self.tasks.bind(lambda: rank(Digest(secrets.token_bytes(32))), request)
        await self.outbox.run(rank, push)

    @property
    def give_tasks(self) -> Callable[[PeerId, GetTasks], Awaitable[Message]] | None:
        """Leases tasks to a peer; ``None`` on a node that is no trainer."""
        return self.tasks.answer if isinstance(self.tasks, TrainerTasks) else None

    def status(self) -> Mapping[str, Any]:
        """Return what waits, and at a trainer what became of each key's batches; called from any thread."""
        if isinstance(self.tasks, TrainerTasks):
            return {**self.inbox.status(), "tasks": self.tasks.status()}
        return {"queue_batches": len(self.outbox), "queue_bytes": self.outbox.size_bytes}

    def close(self) -> None:
        """Finish what is being written and close the files. Blocks."""
        self._threads.shutdown(wait=True)
        for shelf in self._shelves:
            shelf.close()
        if self._task_shelf is not None:
            self._task_shelf.close()


def _wall_ms() -> int:
    return int(time.time() * 1000)
