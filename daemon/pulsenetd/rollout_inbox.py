"""Rollouts at a trainer: judged, stored, and handed to the training process once.

A batch is answered once it is on disk together with its key's replay window, so what was taken survives a crash and
counts once. A full inbox takes nothing more, and the inferencers wait. Batches that have become too old are dropped.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from typing import Any, Final

from pulsenet import limits
from pulsenet.chain.records import RolloutBatch, SignedRecord
from pulsenet.chain.replay import ReplayWindow, Seen
from pulsenet.chain.rollouts import unpack_rollouts
from pulsenet.chain.signing import decode_signed
from pulsenet.chain.trust import Trust
from pulsenet.errors import RemoteProtocolError, StorageError, TrustError
from pulsenet.ids import PeerId
from pulsenet.local import protocol
from pulsenet.local.protocol import SignedBatch
from pulsenet.node.rate import RateCap
from pulsenetd.identity import to_libp2p_text
from pulsenetd.logs import logger
from pulsenetd.metrics import Metrics
from pulsenetd.storage.shelf import RolloutShelf, ShelfEntry

ADMITTED_SECONDS: Final = 600.0
"""An unlisted inferencer keeps its place this long after its last batch."""

BATCHES_PER_SECOND: Final = 20.0
BATCH_BURST: Final = 64
"""Batches of one key: refilled so fast, and so many at once."""

WINDOWS_MAX: Final = 16_384
"""Keys whose window is remembered; then the one silent for longest is forgotten, as only open runs have so many."""

KEYS_COUNTED_MAX: Final = 2_048
KEYS_SHOWN_MAX: Final = 64
"""Keys whose batches are counted and whose rate is kept, and those of them a status shows."""


@dataclass(slots=True)
class KeyCounts:
    """What came of one key's batches since the node started."""

    taken: int = 0
    stale: int = 0
    refused: int = 0
    """For what they are: not for a full queue or too many at once."""
    samples_checked: int = 0
    samples_mismatched: int = 0
    """Whose logprobs the training process could not reproduce."""


class RolloutInbox:
    """The trainer's side.

    Args:
        trust: Says whose rollouts count, and what the newest version is.
        shelf: Keeps what the training process did not take yet; read at once.
        monotonic: Monotonic seconds, for rates.
        threads: Where the shelf is read and written.
        staleness_max: Samples further behind the newest version are dropped; ``None`` keeps all.
        finish_tasks: Told which tasks a batch answers, once it is stored.
    """

    def __init__(
        self,
        trust: Trust,
        shelf: RolloutShelf,
        metrics: Metrics,
        monotonic: Callable[[], float],
        *,
        threads: Executor,
        staleness_max: int | None = None,
        finish_tasks: Callable[[Sequence[bytes]], Awaitable[None]] | None = None,
    ) -> None:
        self._trust = trust
        self._shelf = shelf
        self._metrics = metrics
        self._monotonic = monotonic
        self._threads = threads
        self._staleness_max = staleness_max
        self._finish_tasks = finish_tasks
        self._windows = {peer_id: ReplayWindow.decode(mark) for peer_id, mark in shelf.marks().items()}
        self._queue: deque[ShelfEntry] = deque(shelf.entries())
        self._size_bytes = sum(entry.size_bytes for entry in self._queue)
        self._given: dict[tuple[PeerId, int], ShelfEntry] = {}
        self._admitted: dict[PeerId, float] = {}
        self._rates: OrderedDict[PeerId, RateCap] = OrderedDict()
        self._counts: dict[PeerId, KeyCounts] = {}
        self._mutex = asyncio.Lock()
        self._arrived = asyncio.Condition()
        self._show()

    async def take(self, record: bytes) -> str:
        """Check and store a batch; return the empty string, or why it was refused."""
        async with self._mutex:
            outcome, reason = await self._judge(record)
        self._metrics.count("rollouts", outcome)
        if reason:
            self._metrics.count("rejected", reason)
        self._show()
        async with self._arrived:
            self._arrived.notify_all()
        return reason

    async def give(self, count_max: int, wait_seconds: float) -> tuple[SignedBatch, ...]:
        """Return up to so many batches, oldest first, waiting for the first.

        They are the caller's only once :meth:`settle` is told so.
        """
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + wait_seconds
        while True:
            async with self._mutex:
                batches = await self._collect(count_max)
            if batches or loop.time() >= give_up_at:
                return batches
            try:
                async with asyncio.timeout_at(give_up_at), self._arrived:
                    await self._arrived.wait_for(lambda: bool(self._queue))
            except TimeoutError:
                return ()

    async def settle(self, batches: Sequence[SignedBatch], is_delivered: bool) -> None:
        """Forget batches that were given out and arrived; queue again, in front, those that did not."""
        entries = [self._given.pop((batch.peer_id, batch.sequence)) for batch in batches]
        if is_delivered:
            await self._remove(entries)
            return
        self._queue.extendleft(reversed(entries))
        self._size_bytes += sum(entry.size_bytes for entry in entries)
        self._show()
        async with self._arrived:
            self._arrived.notify_all()

    def counts(self, peer_id: PeerId) -> bool:
        """Return whether rollouts of this key would count now."""
        now = self._monotonic()
        admitted = [key for key, at in self._admitted.items() if now - at < ADMITTED_SECONDS]
        return self._trust.counts_rollouts(peer_id, admitted)

    def note_checks(self, peer_id: PeerId, checked: int, mismatched: int) -> None:
        """Count samples of a key whose logprobs the training process recomputed."""
        counts = self._counts_of(peer_id)
        counts.samples_checked += checked
        counts.samples_mismatched += mismatched
        self._metrics.count("rollout_checks", "matched", checked - mismatched)
        self._metrics.count("rollout_checks", "mismatched", mismatched)
        if mismatched:
            text = "%d of %d samples of %s have other logprobs than their weights give; see 'pulsenet status'"
            logger.warning(text, mismatched, checked, to_libp2p_text(peer_id))

    def status(self) -> Mapping[str, Any]:
        """Return what waits and what became of each key's batches, the worst first; called from any thread."""
        counts = list(self._counts.items())  # at once: the loop goes on counting
        counts.sort(key=lambda item: (-item[1].samples_mismatched, -item[1].refused, -item[1].taken, item[0]))
        return {
            "queue_batches": len(self._queue),
            "queue_bytes": self._size_bytes,
            "staleness_max": self._staleness_max,
            "keys": {to_libp2p_text(key): asdict(count) for key, count in counts[:KEYS_SHOWN_MAX]},
        }

    async def _judge(self, record: bytes) -> tuple[str, str]:
        """Store a batch that counts; return the outcome's label, and the reason of a refusal."""
        now = self._monotonic()
        self._admitted = {key: at for key, at in self._admitted.items() if now - at < ADMITTED_SECONDS}
        try:
            signed = decode_signed(record)
            signer = signed.signers[0]
            batch = self._trust.accept_rollouts(signed, frozenset(self._admitted))
        except (RemoteProtocolError, TrustError) as error:
            return "refused", error.code
        # From here on the key is one that counts, and signed this.
        if not self._spend(signer, now):
            return "refused", "rate"
        seen = self._windows.get(signer, ReplayWindow()).look_up(batch.sequence)
        if seen is Seen.TAKEN:
            # A crash may have come between the batch and its tasks.
            await self._note_answered(batch)
            return "duplicate", ""
        outcome, reason = await self._store_new(signed, batch, seen)
        if outcome == "taken":
            self._note_place(signer, now)
        return outcome, reason

    async def _store_new(self, signed: SignedRecord, batch: RolloutBatch, seen: Seen) -> tuple[str, str]:
        signer = signed.signers[0]
        counts = self._counts_of(signer)
        if seen is Seen.TOO_OLD:
            counts.refused += 1
            return "refused", "replay"
        try:
            version_number = int(unpack_rollouts(batch).versions[1].max())
        except RemoteProtocolError as error:
            counts.refused += 1
            return "refused", error.code
        if version_number < self._number_min():
            counts.stale += 1
            return "stale", "staleness"
        await self._drop_stale()
        entry = ShelfEntry(signer, batch.sequence, version_number, len(signed.payload))
        if (
            len(self._queue) >= limits.ROLLOUT_QUEUE_BATCHES_MAX
            or self._size_bytes + entry.size_bytes > limits.ROLLOUT_QUEUE_SIZE_BYTES_MAX
        ):
            return "refused", "queue"
        window = self._windows.get(signer, ReplayWindow()).take(batch.sequence)
        is_full = signer not in self._windows and len(self._windows) >= WINDOWS_MAX
        forgotten = next(iter(self._windows)) if is_full else None
        try:
            await self._run(self._shelf.add, entry, signed.payload, window.encode(), forgotten)
        except StorageError as error:
            logger.warning("a rollout batch cannot be stored: %s", error)
            return "refused", "storage"
        if forgotten is not None:
            del self._windows[forgotten]
        self._windows.pop(signer, None)
        self._windows[signer] = window  # the key heard of last stands last
        self._queue.append(entry)
        self._size_bytes += entry.size_bytes
        counts.taken += 1
        await self._note_answered(batch)
        return "taken", ""

    async def _note_answered(self, batch: RolloutBatch) -> None:
        """Let go of the tasks that a stored batch answers. Ids are random: another trainer's are on no board here."""
        if self._finish_tasks is not None:
            await self._finish_tasks(batch.task_ids)

    def _note_place(self, signer: PeerId, now: float) -> None:
        descriptor = self._trust.descriptor
        if descriptor is not None and signer not in descriptor.inferencers:
            self._admitted[signer] = now

    async def _collect(self, count_max: int) -> tuple[SignedBatch, ...]:
        """Take what fits one reply off the queue; nothing is taken off if this is cancelled."""
        await self._drop_stale()
        number_min = self._number_min()
        chosen: list[ShelfEntry] = []
        batches: list[SignedBatch] = []
        lost: list[ShelfEntry] = []
        size_bytes = 0
        for entry in list(self._queue):
            size_bytes += entry.size_bytes
            if len(chosen) >= count_max or (chosen and size_bytes > protocol.ROLLOUTS_REPLY_SIZE_BYTES_MAX):
                break
            try:
                payload = await self._run(self._shelf.read, entry.name)
            except StorageError as error:
                logger.warning("a rollout batch cannot be read any more: %s", error)
                lost.append(entry)
                continue
            chosen.append(entry)
            batches.append(SignedBatch(entry.peer_id, entry.sequence, number_min, payload))
        if lost:
            self._dequeue(lost)
            self._metrics.count("rollouts", "lost", len(lost))
            await self._remove(lost)
        self._dequeue(chosen)
        self._given.update((entry.name, entry) for entry in chosen)
        self._show()
        return tuple(batches)

    async def _drop_stale(self) -> None:
        """Drop batches that became too old while they waited."""
        number_min = self._number_min()
        stale = [entry for entry in self._queue if entry.version_number < number_min]
        if not stale:
            return
        self._dequeue(stale)
        for entry in stale:
            self._counts_of(entry.peer_id).stale += 1
        self._metrics.count("rollouts", "stale", len(stale))
        await self._remove(stale)

    def _dequeue(self, entries: Sequence[ShelfEntry]) -> None:
        for entry in entries:
            self._queue.remove(entry)
            self._size_bytes -= entry.size_bytes

    async def _remove(self, entries: Sequence[ShelfEntry]) -> None:
        try:
            await self._run(self._shelf.remove, [entry.name for entry in entries])
        except StorageError as error:
            # They are given out once more after a restart; the training process knows them by their numbers.
            logger.warning("rollout batches that were given out stay stored: %s", error)

    async def _run(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def _number_min(self) -> int:
        """Return the least version number a sample may have begun with."""
        head = self._trust.head
        if self._staleness_max is None or head is None:
            return 0
        return max(0, head.version.number - self._staleness_max)

    def _counts_of(self, peer_id: PeerId) -> KeyCounts:
        counts = self._counts.pop(peer_id, None) or KeyCounts()
        self._counts[peer_id] = counts  # the one heard of last stands last
        if len(self._counts) > KEYS_COUNTED_MAX:
            del self._counts[next(iter(self._counts))]
        return counts

    def _show(self) -> None:
        self._metrics.set("rollout_queue_batches", len(self._queue))

    def _spend(self, signer: PeerId, now: float) -> bool:
        """Take one batch from the key's rate. Only keys that count get here."""
        rate = self._rates.pop(signer, None) or RateCap(per_second=BATCHES_PER_SECOND, burst=BATCH_BURST)
        self._rates[signer] = rate  # the one heard of last stands last
        if len(self._rates) > KEYS_COUNTED_MAX:
            self._rates.popitem(last=False)
        return rate.take(now)
