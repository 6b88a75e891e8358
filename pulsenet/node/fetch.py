"""Fetching blobs: chunk lists in pages, then chunks by digest from whoever has them (SPEC section 5).

The owner names the blobs it wants, most urgent first; the machine keeps requests in flight, checks every byte
against the signed names before it is stored, and resumes from what the store already holds. Nothing is
forgotten by a failure: a chunk is always open, in flight, being stored, or durable. Which chunk is asked of whom is
decided in :mod:`pulsenet.node.sharing`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pulsenet.errors import RemoteProtocolError
from pulsenet.ids import Digest, PeerId, compute_digest
from pulsenet.node.effects import Count, Effect, SendRequest, StoreChunk, StoreChunkList, StrikePeer
from pulsenet.node.events import ChunkStored, Event, ReplyReceived, RequestDone, RequestFailed, StoreFailed
from pulsenet.node.list_fetch import GRACE_SECONDS, BlobWant, ListFetcher, ListOutcome, open_list
from pulsenet.node.sharing import Sharing
from pulsenet.node.sources import Claim, Source, Sources
from pulsenet.node.transfers import Patience, Transfer, Transfers
from pulsenet.wire.chunks import ChunkList
from pulsenet.wire.messages import ChunkReply, GetChunks, Refusal

CHUNKS_IN_FLIGHT_MAX = 64
"""Chunks asked for or being stored at one time: bounds the buffers at 64 MiB."""

HEDGES_MAX = 2
"""Providers asked for one chunk at a time."""

HEDGED_RATIO = 0.05
HEDGED_MIN = 2
"""Chunks asked for twice only because little is left, as a share of what came: under load more would make more load."""

UNAVAILABLE_SECONDS = 10.0
"""A blob that every live source lacks for this long is called unavailable."""


class StoreIndex(Protocol):
    """What is durable here already; quick look-ups, no reading of blobs."""

    def has_chunk(self, digest: Digest) -> bool:
        """Say whether this chunk is durable and was verified."""
        ...

    def chunk_list(self, blob_id: Digest) -> bytes | None:
        """Return the encoded chunk list of a blob, if held."""
        ...

    def record(self, digest: Digest) -> bytes | None:
        """Return the encoded signed record whose payload has this digest, if held."""
        ...


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """How far the wanted blobs are. Sizes count each distinct chunk once."""

    wanted_size_bytes: int
    held_size_bytes: int
    requests_in_flight: int
    source_count: int
    reason: str
    """Why nothing moves: ``enospc`` or another store failure, ``no-source``, or empty."""
    publisher_size_bytes: int = 0
    """Bytes of chunks that came from the publishers of the blobs, so far."""
    reader_size_bytes: int = 0
    """Bytes of chunks that came from anybody else."""
    shortfall: str = ""
    """Why the publisher serves what other readers should: ``thin-upload``, ``no-readers``, or empty."""


@dataclass(slots=True, eq=False)
class _Blob:
    want: BlobWant
    chunk_list: ChunkList | None = None
    sizes: dict[Digest, int] = field(default_factory=dict)
    unfinished: set[Digest] = field(default_factory=set)
    """Chunks not durable yet."""
    missed_since: float | None = None
    refused: str = ""

    @property
    def blob_id(self) -> Digest:
        return self.want.manifest.blob_id

    @property
    def is_whole(self) -> bool:
        return self.chunk_list is not None and not self.unfinished and not self.refused


class Fetcher:
    """Pure machine; shares its sources and request ids with the other fetchers of its owner.

    Args:
        sources: Providers; the owner adds, removes and informs them.
        take_request_id: Returns an id the owner never used before.
        index: What the store holds; asked once per chunk when a blob's list is known.
        own_id: This node's key, by which readers divide what only the publisher holds.
    """

    def __init__(
        self,
        sources: Sources,
        take_request_id: Callable[[], int],
        index: StoreIndex,
        own_id: PeerId | None = None,
    ) -> None:
        self._sources = sources
        self._take_request_id = take_request_id
        self._index = index
        self._lists = ListFetcher(sources, take_request_id)
        self._blobs: dict[Digest, _Blob] = {}
        self._transfers = Transfers(sources)
        self._sharing = Sharing(sources, self._transfers, take_request_id, own_id)
        self._storing: dict[Digest, int] = {}
        self._paused_until = 0.0
        self._store_failure_count = 0
        self._store_failure = ""
        self._patience = Patience()
        self._good_count = 0
        self._hedged_count = 0
        self._lost_wants: Sequence[BlobWant] = ()
        """What is wanted, while the disk has refused a chunk list of it."""

    # What the owner asks

    def set_wants(self, wants: Sequence[BlobWant]) -> list[Effect]:
        """Replace the wanted blobs, most urgent first; those that stay keep what they have."""
        blobs: dict[Digest, _Blob] = {}
        effects: list[Effect] = []
        for want in wants:
            blob = self._blobs.get(want.manifest.blob_id)
            if blob is None:
                blob = _Blob(want)
                effects += self._open_known_list(blob)
            elif blob.want != want:
                # Another part of it, or another that serves it first; what is on its way still counts.
                blob.want = want
                if blob.chunk_list is not None:
                    self._begin(blob, blob.chunk_list)
            blobs[blob.blob_id] = blob
        self._blobs, self._lost_wants = blobs, ()
        self._sharing.keep(blobs)
        self._sources.keep_misses(blobs)
        self._lists.set_wants([b.want for b in blobs.values() if b.chunk_list is None and not b.refused])
        return effects

    def look_again(self, blob_id: Digest) -> None:
        """The store found chunks of a whole blob damaged and dropped them: fetch what it lacks now."""
        blob = self._blobs.get(blob_id)
        if blob is not None and blob.is_whole and blob.chunk_list is not None:
            self._begin(blob, blob.chunk_list)

    def is_whole(self, blob_id: Digest) -> bool:
        """Say whether a wanted blob is durable, list and all."""
        blob = self._blobs.get(blob_id)
        return blob is not None and blob.is_whole

    def list_of(self, blob_id: Digest) -> ChunkList | None:
        """Return a wanted blob's chunk list once it is known; it may be on its way to the disk."""
        blob = self._blobs.get(blob_id)
        return None if blob is None else blob.chunk_list

    def is_arriving(self, blob_id: Digest) -> bool:
        """Say whether a wanted blob's list is known and chunks of it are still to come."""
        blob = self._blobs.get(blob_id)
        return blob is not None and blob.chunk_list is not None and not blob.is_whole

    def refusal_of(self, blob_id: Digest) -> str:
        """Return why a wanted blob can never be fetched, or the empty string."""
        blob = self._blobs.get(blob_id)
        return "" if blob is None else blob.refused

    def is_unavailable(self, blob_id: Digest, now: float) -> bool:
        """Say whether every live source has lacked a part of this blob for ``UNAVAILABLE_SECONDS``."""
        blob = self._blobs.get(blob_id)
        if blob is None or blob.is_whole or blob.missed_since is None:
            return False
        if now - blob.missed_since < UNAVAILABLE_SECONDS:
            return False
        return self._sharing.lack_everywhere(blob_id, blob.unfinished)

    def progress(self) -> FetchProgress:
        """Return how far the wanted blobs are."""
        sizes: dict[Digest, int] = {}
        unfinished: set[Digest] = set()
        for blob in self._blobs.values():
            sizes.update(blob.sizes)
            unfinished |= blob.unfinished
        listless = [blob.want.manifest for blob in self._blobs.values() if blob.chunk_list is None]
        listless_size_bytes = sum(manifest.encoded_size_bytes for manifest in listless)
        source_count = sum(1 for source in self._sources if not source.is_parked)
        waits = bool(unfinished) or listless_size_bytes > 0
        reason = self._store_failure or ("" if source_count else "no-source")
        return FetchProgress(
            wanted_size_bytes=sum(sizes.values()) + listless_size_bytes,
            held_size_bytes=sum(size for digest, size in sizes.items() if digest not in unfinished),
            requests_in_flight=len(self._transfers) + self._lists.requests_in_flight,
            source_count=source_count,
            reason=reason if waits else "",
            publisher_size_bytes=self._sharing.publisher_size_bytes,
            reader_size_bytes=self._sharing.reader_size_bytes,
            shortfall=self._sharing.shortfall if unfinished else "",
        )

    @property
    def chunks_in_flight(self) -> int:
        """Chunks asked for or being stored."""
        return self._transfers.chunk_count + len(self._storing)

    # What happens

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in an event about our requests or chunks; anything else is ignored."""
        match event:
            case ReplyReceived(request_id, _, Refusal() as refusal) if request_id in self._transfers:
                return self._take_refusal(request_id, refusal, now)
            case ReplyReceived(request_id, _, reply) if request_id in self._transfers:
                return self._take_chunk(self._transfers[request_id], reply, now)
            case RequestDone(request_id) if request_id in self._transfers:
                self._finish(request_id, now)
                return []
            case RequestFailed(request_id, _, reason) if request_id in self._transfers:
                return self._fail(request_id, reason, now)
            case ChunkStored(digest):
                self._mark_stored(digest)
                return []
            case StoreFailed(digest, reason):
                self._note_store_failure(digest, reason, now)
                return []
        effects, missed = self._sharing.handle(event, now)
        if missed is not None and missed.blob_id in self._blobs:
            self._note_miss(self._blobs[missed.blob_id], missed.peer_id, now)
        more, outcome = self._lists.handle(event, now)
        if outcome is not None:
            self._take_list(outcome, now)
        return effects + more

    def lose_peer(self, peer_id: PeerId, now: float) -> list[Effect]:
        """End every request to a peer that is gone; their chunks are asked of others."""
        effects = self._lists.lose_peer(peer_id, now)
        self._sharing.lose_peer(peer_id)
        for request_id in self._transfers.of_peer(peer_id):
            effects += [self._transfers.call_back(request_id), *self._fail(request_id, "closed", now)]
        return effects

    def pump(self, now: float) -> list[Effect]:
        """Hedge what stalled, then ask for everything that may be asked for now."""
        effects = self._expire(now)
        if now < self._paused_until:
            return effects
        if self._lost_wants:
            effects += self.set_wants(self._lost_wants)
        effects += self._lists.pump(now)
        effects += self._sharing.ask_around(now)
        for request_id in self._sharing.find_late(now):
            effects += [self._transfers.call_back(request_id), Count("retries", "thin-upload")]
            self._end(request_id)
        for blob in self._blobs.values():
            if self._sharing.has_open(blob.blob_id):
                effects += self._ask_chunks(blob, now)
        return effects

    def next_wake(self, now: float) -> float | None:
        """Return the earliest later time at which :meth:`pump` may find something to do."""
        list_wake = self._lists.next_wake(now)
        times = [] if list_wake is None else [list_wake]
        times += [transfer.gives_up_at for transfer in self._transfers]
        times += [self._idle_at(transfer) for transfer in self._transfers if not transfer.is_stalled]
        open_blobs = [blob for blob in self._blobs.values() if not blob.is_whole and not blob.refused]
        times += [blob.missed_since + UNAVAILABLE_SECONDS for blob in open_blobs if blob.missed_since is not None]
        if open_blobs or self._lost_wants:
            times.append(self._paused_until)
            times += self._sharing.wakes(now)
            retry_at = self._sources.next_retry_at(now)
            times += [] if retry_at is None else [retry_at]
        return min((at for at in times if at > now), default=None)

    # Chunk lists

    def _open_known_list(self, blob: _Blob) -> list[Effect]:
        manifest = blob.want.manifest
        if manifest.encoded_size_bytes == 0:
            # An empty patch needs no asking: the only list of 0 bytes is known.
            data = ChunkList(()).encode()
            if compute_digest(data) != blob.blob_id:
                blob.refused = "chunk-list"
                return [Count("rejected", "chunk-list")]
            self._begin(blob, ChunkList(()))
            return [StoreChunkList(blob.blob_id, data)]
        stored = self._index.chunk_list(blob.blob_id)
        if stored is None or compute_digest(stored) != blob.blob_id:
            return []
        outcome, effects = open_list(manifest, stored)
        blob.refused = outcome.refused
        if outcome.chunk_list is not None:
            self._begin(blob, outcome.chunk_list)
        return effects

    def _take_list(self, outcome: ListOutcome, now: float) -> None:
        blob = self._blobs[outcome.blob_id]
        blob.refused = outcome.refused
        if outcome.missed_by is not None:
            self._note_miss(blob, outcome.missed_by, now)
        if outcome.chunk_list is not None:
            self._begin(blob, outcome.chunk_list)

    def _begin(self, blob: _Blob, chunk_list: ChunkList) -> None:
        blob.chunk_list, blob.refused, blob.sizes = chunk_list, "", {}
        try:
            blob.sizes = blob.want.pick(chunk_list)
        except RemoteProtocolError as error:
            blob.refused = error.code
        blob.unfinished = {digest for digest in blob.sizes if not self._index.has_chunk(digest)}
        self._sharing.open(blob.want, chunk_list, blob.sizes, blob.unfinished)

    # Chunks

    def _ask_chunks(self, blob: _Blob, now: float) -> list[Effect]:
        effects: list[Effect] = []
        while (room := CHUNKS_IN_FLIGHT_MAX - self.chunks_in_flight) > 0:
            choice = self._sharing.choose(blob.blob_id, room, now)
            if choice is None:
                break
            source, chosen = choice
            # What another blob's request will bring comes back to us if that fails.
            digests = tuple(digest for digest in chosen if self._is_lacking(blob, digest))
            if digests:
                effects.append(self._send(source, blob, digests, now))
        if not self._transfers and blob.missed_since is None and self._sharing.has_open(blob.blob_id):
            is_lost = self._sharing.lack_everywhere(blob.blob_id, blob.unfinished)
            blob.missed_since = now if is_lost else None
        return effects

    def _is_lacking(self, blob: _Blob, digest: Digest) -> bool:
        return digest in blob.unfinished and digest not in self._storing and not self._transfers.is_due(digest)

    def _take_chunk(self, transfer: Transfer, reply: object, now: float) -> list[Effect]:
        if not isinstance(reply, ChunkReply) or reply.digest not in transfer.asked:
            return self._refuse_chunk(transfer, now)
        if reply.digest not in transfer.awaited:
            size_bytes = 0 if reply.data is None else len(reply.data)
            return [Count("wasted_bytes", "duplicate", float(size_bytes))]
        self._transfers.stop_awaiting(transfer, reply.digest)
        self._patience.note_chunk(now - transfer.progress_at, now - transfer.began_at)
        transfer.progress_at = now
        if reply.data is None:
            self._requeue(reply.digest)
            self._note_transfer_miss(transfer, now)
            return []
        owners = [blob for blob in self._blobs.values() if reply.digest in blob.unfinished]
        if reply.digest in self._storing or not owners:
            transfer.good_count += 1
            return [Count("wasted_bytes", "duplicate", float(len(reply.data)))]
        if len(reply.data) != owners[0].sizes[reply.digest] or compute_digest(reply.data) != reply.digest:
            self._requeue(reply.digest)
            wasted = Count("wasted_bytes", "bad-chunk", float(len(reply.data)))
            return [wasted, *self._refuse_chunk(transfer, now)]
        transfer.good_count += 1
        self._good_count += 1
        self._sources.note_chunk(transfer.peer_id, now)
        self._sharing.note_chunk(transfer, len(reply.data), now)
        for blob in owners:
            blob.missed_since = None
        self._storing[reply.digest] = len(reply.data)
        return [StoreChunk(reply.digest, reply.data)]

    def _refuse_chunk(self, transfer: Transfer, now: float) -> list[Effect]:
        transfer.bad_count += 1
        self._sources.note_strike(transfer.peer_id, now)
        return [StrikePeer(transfer.peer_id, "bad-chunk"), Count("rejected", "bad-chunk")]

    def _note_transfer_miss(self, transfer: Transfer, now: float) -> None:
        blob = self._blobs.get(transfer.blob_id)
        if blob is not None:
            self._note_miss(blob, transfer.peer_id, now)

    def _note_miss(self, blob: _Blob, peer_id: PeerId, now: float) -> None:
        source = self._sources.get(peer_id)
        if source is None:
            return
        blob.missed_since = now if blob.missed_since is None else blob.missed_since
        # The publisher may be replacing the blob; anybody else who claimed it was wrong.
        claimed = peer_id != blob.want.publisher and blob.want.claim_of(source) is Claim.HOLDS
        self._sources.note_miss(peer_id, blob.blob_id, now, claimed=claimed)
        self._sharing.note_miss(blob.blob_id, peer_id)

    def _mark_stored(self, digest: Digest) -> None:
        if self._storing.pop(digest, None) is None:
            return
        self._store_failure_count = 0
        self._store_failure = ""
        for blob in self._blobs.values():
            blob.unfinished.discard(digest)

    def _note_store_failure(self, digest: Digest | None, reason: str, now: float) -> None:
        if digest is None:
            self._forget_lost_lists()
        elif self._storing.pop(digest, None) is None:
            return
        else:
            self._requeue(digest)
        self._store_failure_count += 1
        self._store_failure = reason
        self._paused_until = now + self._sources.backoff_seconds(self._store_failure_count)

    def _forget_lost_lists(self) -> None:
        """Begin blobs anew whose chunk list is known here and not on disk."""
        blobs = self._blobs
        kept = {b: blob for b, blob in blobs.items() if blob.chunk_list is None or self._index.chunk_list(b)}
        if len(kept) < len(blobs):
            self._blobs, self._lost_wants = kept, [blob.want for blob in blobs.values()]
            self._sharing.keep(kept)

    # Requests

    def _send(self, source: Source, blob: _Blob, digests: tuple[Digest, ...], now: float) -> Effect:
        timeout_seconds = self._patience.timeout_seconds(len(digests), source.chunks_in_flight)
        request_id = self._take_request_id()
        transfer = Transfer(
            peer_id=source.peer_id,
            blob_id=blob.blob_id,
            asked=frozenset(digests),
            awaited=set(digests),
            began_at=now,
            progress_at=now,
            gives_up_at=now + timeout_seconds + GRACE_SECONDS,
        )
        self._transfers.start(request_id, transfer)
        return SendRequest(request_id, source.peer_id, GetChunks(digests, blob.blob_id), timeout_seconds)

    def _end(self, request_id: int) -> Transfer:
        """Take a request off every account and open again what it did not bring."""
        transfer, missing = self._transfers.end(request_id)
        for digest in missing:
            self._requeue(digest)
        return transfer

    def _finish(self, request_id: int, now: float) -> None:
        is_short = bool(self._transfers[request_id].awaited)
        transfer = self._end(request_id)
        if is_short:
            self._sources.note_failure(transfer.peer_id, now)
        elif transfer.bad_count == 0 and transfer.good_count > 0:
            self._sources.note_success(transfer.peer_id, now)
            self._patience.note_success()

    def _fail(self, request_id: int, reason: str, now: float) -> list[Effect]:
        transfer = self._end(request_id)
        self._sources.note_failure(transfer.peer_id, now)
        if reason == "timeout":
            self._patience.note_timeout()
        return [Count("retries", reason)]

    def _take_refusal(self, request_id: int, refusal: Refusal, now: float) -> list[Effect]:
        transfer = self._end(request_id)
        if refusal.code == "not-found":
            self._note_transfer_miss(transfer, now)
            return []
        if refusal.code == "busy":
            self._sources.note_busy(transfer.peer_id, now, wait_seconds=refusal.retry_after_ms / 1000)
        else:
            self._sources.note_failure(transfer.peer_id, now, wait_seconds=refusal.retry_after_ms / 1000)
        return [Count("retries", "refused")]

    def _expire(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for request_id, transfer in self._transfers.items():
            if transfer.gives_up_at <= now:
                effects += self._fail(request_id, "timeout", now)
            elif not transfer.is_stalled and self._idle_at(transfer) <= now:
                effects += self._hedge(transfer, now)
        return effects

    def _hedge(self, transfer: Transfer, now: float) -> list[Effect]:
        """Let others be asked too for what a request owes that stands still."""
        is_slow = now >= transfer.progress_at + self._patience.stall_seconds()
        self._hedged_count += 0 if is_slow else len(transfer.awaited)
        transfer.is_stalled = True
        for digest in sorted(transfer.awaited):
            if len(self._transfers.of_chunk(digest)) < HEDGES_MAX:
                self._requeue(digest)
        source = self._sources.get(transfer.peer_id)
        if source is not None and is_slow:
            source.window.shrink()
        return [Count("retries", "timeout" if is_slow else "hedge")]

    def _requeue(self, digest: Digest) -> None:
        self._sharing.put_back(digest, [b for b, blob in self._blobs.items() if digest in blob.unfinished])

    def _idle_at(self, transfer: Transfer) -> float:
        """Return when a request without progress is hedged: earlier at the end of its blob, if others can be asked."""
        is_end = len(self._sources) > 1 and not self._sharing.has_open(transfer.blob_id)
        is_end = is_end and self._hedged_count < HEDGED_MIN + HEDGED_RATIO * self._good_count
        return transfer.progress_at + self._patience.stall_seconds(is_end=is_end)
