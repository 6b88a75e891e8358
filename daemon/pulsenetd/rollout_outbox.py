"""Rollouts on their way from an inferencer to a trainer: signed, stored, sent until a trainer takes them.

A batch is accepted once it is on disk, and stays there until a trainer has it on its own disk: an answer that gets
lost has the batch sent again, and the trainer knows it by its number. A full outbox accepts nothing more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final

from pulsenet import limits
from pulsenet.chain import rules
from pulsenet.chain.records import ALGORITHM_NONE, Descriptor, RolloutBatch
from pulsenet.chain.rollouts import unpack_rollouts
from pulsenet.chain.signing import Sign, decode_signed, encode_signed, record_digest, seal
from pulsenet.errors import LocalProtocolError, RemoteProtocolError, StorageError, UnavailableError
from pulsenet.ids import Digest, PeerId, RunId, compute_digest
from pulsenet.local.protocol import RolloutsTaken, SubmitRollouts
from pulsenet.wire.messages import PushReply, PushRollouts
from pulsenet.wire.schema import decode_value
from pulsenetd.logs import logger
from pulsenetd.metrics import Metrics
from pulsenetd.storage.shelf import RolloutShelf, ShelfEntry

PASSING_REASONS: Final = frozenset({"rate", "queue", "storage", "not_publisher"})
"""Refusals that say nothing against the batch: another trainer is asked, or the same one later."""

UNANSWERED_COUNT_MAX: Final = 3
"""So often a trainer is asked whose answer gets lost: it may have the batch, and another would count it again."""

BUSY_RETRY_MS: Final = 1_000
"""When an engine whose batch did not fit should ask again."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    entry: ShelfEntry
    digest: Digest
    """Of the signed batch: says which trainer is asked first."""
    trainer: PeerId | None
    """Whose tasks it answers: asked before all others."""


class RolloutOutbox:
    """The inferencer's side.

    Args:
        run_id: The run, written into each batch.
        peer_id: This node's key.
        sign: Signs with it.
        shelf: Keeps what is not sent; read at once.
        threads: Where the shelf is written.
        wall_ms: Unix time in milliseconds: where numbers begin on a new shelf, above those of one that was lost.
    """

    def __init__(
        self,
        run_id: RunId,
        peer_id: PeerId,
        sign: Sign,
        shelf: RolloutShelf,
        metrics: Metrics,
        *,
        threads: Executor,
        wall_ms: Callable[[], int],
    ) -> None:
        self._run_id = run_id
        self._peer_id = peer_id
        self._sign = sign
        self._shelf = shelf
        self._metrics = metrics
        self._threads = threads
        mark = shelf.marks().get(peer_id)
        self._next_sequence = 1_000 * wall_ms() if mark is None else int.from_bytes(mark, "big")
        self._queue: deque[_Waiting] = deque(self._take_up(entry) for entry in shelf.entries())
        self._size_bytes = sum(waiting.entry.size_bytes for waiting in self._queue)
        self._filled = asyncio.Event()
        self._mutex = asyncio.Lock()
        if self._queue:
            self._filled.set()
            logger.info("%d rollout batches of the last run are still to be sent", len(self._queue))
        self._show()

    @property
    def size_bytes(self) -> int:
        """Of what is queued."""
        return self._size_bytes

    def __len__(self) -> int:
        return len(self._queue)

    async def take(self, submitted: SubmitRollouts) -> RolloutsTaken:
        """Sign a batch and store it; accepted means that it is durable and will be sent."""
        async with self._mutex:  # numbers rise in the order of the queue
            outcome, answer = await self._store(submitted)
        self._metrics.count("rollouts", outcome)
        self._show()
        return answer

    async def run(
        self,
        rank: Callable[[Digest], Sequence[PeerId]],
        send: Callable[[PeerId, PushRollouts], Awaitable[PushReply]],
    ) -> None:
        """Send what is queued, oldest first, until cancelled.

        Args:
            rank: Returns the connected trainers for a batch, the one to ask first in front.
            send: Sends one batch and returns the answer.
        """
        while True:
            await self._filled.wait()
            if not self._queue:
                self._filled.clear()
                continue
            await self._deliver(self._queue[0], rank, send)

    async def _store(self, submitted: SubmitRollouts) -> tuple[str, RolloutsTaken]:
        batch = RolloutBatch(
            run_id=self._run_id,
            sequence=self._next_sequence,
            version_first=submitted.version_first,
            version_last=submitted.version_last,
            sample_count=submitted.sample_count,
            part_names=submitted.part_names,
            logprob_bits=submitted.logprob_bits,
            trainer=submitted.trainer,
            task_ids=submitted.task_ids,
            body=submitted.body,
            metadata=submitted.metadata,
        )
        try:
            rules.check_record(batch)
            arrays = unpack_rollouts(batch)
            signed = seal(batch, self._sign, self._peer_id)
            record = encode_signed(signed)
        except (RemoteProtocolError, LocalProtocolError) as error:
            return "malformed", RolloutsTaken(False, str(error))
        is_full = len(self._queue) >= limits.ROLLOUT_QUEUE_BATCHES_MAX
        if is_full or self._size_bytes + len(record) > limits.ROLLOUT_QUEUE_SIZE_BYTES_MAX:
            text = f"busy: {len(self._queue)} batches wait to be sent; no trainer takes them fast enough"
            return "busy", RolloutsTaken(False, text, BUSY_RETRY_MS)
        entry = ShelfEntry(self._peer_id, self._next_sequence, int(arrays.versions[1].max()), len(record))
        mark = (self._next_sequence + 1).to_bytes(8, "big")
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._shelf.add, entry, record, mark)
        except StorageError as error:
            return "refused", RolloutsTaken(False, f"storage: {error}", BUSY_RETRY_MS)
        self._next_sequence += 1
        self._queue.append(_Waiting(entry, record_digest(signed), batch.trainer))
        self._size_bytes += entry.size_bytes
        self._filled.set()
        return "queued", RolloutsTaken(True, "")

    async def _deliver(
        self,
        waiting: _Waiting,
        rank: Callable[[Digest], Sequence[PeerId]],
        send: Callable[[PeerId, PushRollouts], Awaitable[PushReply]],
    ) -> None:
        """Ask one trainer after another until one has the batch, or one says that none will take it."""
        loop = asyncio.get_running_loop()
        pause_seconds = limits.RETRY_SECONDS_MIN
        asked: dict[PeerId, int] = {}
        try:
            push = PushRollouts(await loop.run_in_executor(self._threads, self._shelf.read, waiting.entry.name))
        except StorageError as error:
            await self._drop(waiting, "lost", f"a rollout batch cannot be read any more: {error}")
            return
        while True:
            # Stable: all but the trainer whose tasks these are keep their order.
            order = sorted(rank(waiting.digest), key=lambda peer_id: peer_id != waiting.trainer)
            target = next((peer_id for peer_id in order if asked.get(peer_id, 0) < UNANSWERED_COUNT_MAX), None)
            answer = None if target is None else await _try_send(send, target, push)
            if answer is not None and answer.accepted:
                await self._drop(waiting, "sent", "")
                return
            if answer is not None and answer.reason not in PASSING_REASONS:
                await self._drop(waiting, "refused", f"a trainer refused a rollout batch: {answer.reason}")
                return
            if target is not None:
                asked[target] = UNANSWERED_COUNT_MAX if answer is not None else asked.get(target, 0) + 1
            rest = [peer_id for peer_id in order if asked.get(peer_id, 0) < UNANSWERED_COUNT_MAX]
            if answer is not None and rest:
                continue
            if not rest:
                asked.clear()
            await asyncio.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, limits.RETRY_SECONDS_MAX)

    async def _drop(self, waiting: _Waiting, outcome: str, complaint: str) -> None:
        assert self._queue[0] is waiting
        self._queue.popleft()
        self._size_bytes -= waiting.entry.size_bytes
        self._metrics.count("rollouts", outcome)
        self._show()
        if complaint:
            logger.warning("%s", complaint)
        try:
            names = [waiting.entry.name]
            await asyncio.get_running_loop().run_in_executor(self._threads, self._shelf.remove, names)
        except StorageError as error:
            # It is sent once more after a restart; the trainer knows its number.
            logger.warning("a rollout batch that was sent stays stored: %s", error)

    def _take_up(self, entry: ShelfEntry) -> _Waiting:
        signed = decode_signed(self._shelf.read(entry.name))
        return _Waiting(entry, record_digest(signed), decode_value(RolloutBatch, signed.payload).trainer)

    def _show(self) -> None:
        self._metrics.set("rollout_queue_batches", len(self._queue))


def rank_trainers(
    descriptor: Descriptor | None,
    publisher: PeerId | None,
    connected: Collection[PeerId],
    digest: Digest,
    is_trainer: Callable[[PeerId], bool],
) -> tuple[PeerId, ...]:
    """Return who may take a batch, the one to ask first in front.

    Where one publisher trains alone, the batch is for whoever signed the newest head. In rounds every trainer learns
    from a share of the batches: each batch has its own order of the trainers, the same on every try, so that a batch
    whose answer got lost goes back to the trainer that may have it.

    Args:
        descriptor: The run's, if known.
        publisher: Signer of the newest head, if one was heard.
        connected: Peers that can be asked now.
        digest: Of the batch.
        is_trainer: Whether a peer, by what it said of itself, may have a training process: authorities need not.
    """
    if descriptor is None:
        return ()
    if descriptor.algorithm == ALGORITHM_NONE and publisher is not None:
        return (publisher,) if publisher in connected else ()
    able = [peer for peer in {*descriptor.authorities, *descriptor.trainers} & set(connected) if is_trainer(peer)]
    return tuple(sorted(able, key=lambda peer_id: compute_digest(digest + peer_id)))


async def _try_send(
    send: Callable[[PeerId, PushRollouts], Awaitable[PushReply]], target: PeerId, push: PushRollouts
) -> PushReply | None:
    try:
        return await send(target, push)
    except (UnavailableError, RemoteProtocolError) as error:
        logger.debug("a rollout batch was not delivered: %s", error)
        return None
