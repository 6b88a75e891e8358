"""Fetching blobs: chunk lists in pages, then chunks by digest from whoever has them (SPEC section 5).

The owner names the blobs it wants, most urgent first; the machine keeps requests in flight, checks every byte
against the signed names before it is stored, and resumes from what the store already holds. Nothing is
forgotten by a failure: a chunk is always queued, in flight, being stored, or durable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from pulsenet import limits
from pulsenet.errors import RemoteProtocolError
from pulsenet.ids import Digest, PeerId, compute_digest
from pulsenet.node.effects import Count, Effect, SendRequest, StoreChunk, StoreChunkList, StrikePeer
from pulsenet.node.events import ChunkStored, Event, ReplyReceived, RequestDone, RequestFailed, StoreFailed
from pulsenet.node.list_fetch import GRACE_SECONDS, BlobWant, ListFetcher, ListOutcome, open_list
from pulsenet.node.sources import Claim, Source, Sources
from pulsenet.wire.chunks import ChunkList
from pulsenet.wire.messages import ChunkReply, GetChunks, Refusal

CHUNKS_IN_FLIGHT_MAX = 64
"""Chunks asked for or being stored at one time: bounds the buffers at 64 MiB."""

STALL_SECONDS_MIN = 8.0
"""A request without a reply for this long is hedged: its chunks may be asked of somebody else too."""

STALL_RATIO = 4.0
"""On slow links the limit is this many times the time a chunk usually takes."""

CHUNK_TIMEOUT_SECONDS = limits.READ_STALL_SECONDS_MAX
"""Allowance of a request per chunk, on top of opening it."""

UNAVAILABLE_SECONDS = 10.0
"""A blob that every live source lacks for this long is called unavailable."""

LOOK_AHEAD_CHUNKS = 64
"""Queued chunks looked at for one request."""


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


@dataclass(slots=True, eq=False)
class _Blob:
    want: BlobWant
    chunk_list: ChunkList | None = None
    sizes: dict[Digest, int] = field(default_factory=dict)
    pending: deque[Digest] = field(default_factory=deque)
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


@dataclass(slots=True, eq=False)
class _Request:
    peer_id: PeerId
    blob_id: Digest
    asked: frozenset[Digest]
    awaited: set[Digest]
    progress_at: float
    idle_at: float
    """Without progress by then, its chunks may be asked of others too."""
    gives_up_at: float
    is_stalled: bool = False
    good_count: int = 0
    bad_count: int = 0


class Fetcher:
    """Pure machine; shares its sources and request ids with the other fetchers of its owner.

    Args:
        sources: Providers; the owner adds, removes and informs them.
        take_request_id: Returns an id the owner never used before.
        index: What the store holds; asked once per chunk when a blob's list is known.
    """

    def __init__(self, sources: Sources, take_request_id: Callable[[], int], index: StoreIndex) -> None:
        self._sources = sources
        self._take_request_id = take_request_id
        self._index = index
        self._lists = ListFetcher(sources, take_request_id)
        self._blobs: dict[Digest, _Blob] = {}
        self._requests: dict[int, _Request] = {}
        self._asked: dict[Digest, list[_Request]] = {}
        self._storing: dict[Digest, int] = {}
        self._paused_until = 0.0
        self._store_failure_count = 0
        self._store_failure = ""
        self._chunk_seconds = 0.0
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
        return now - blob.missed_since >= UNAVAILABLE_SECONDS and self._sources.all_miss(blob_id)

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
            requests_in_flight=len(self._requests) + self._lists.requests_in_flight,
            source_count=source_count,
            reason=reason if waits else "",
        )

    @property
    def chunks_in_flight(self) -> int:
        """Chunks asked for or being stored."""
        return len(self._asked) + len(self._storing)

    # What happens

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in an event about our requests or chunks; anything else is ignored."""
        match event:
            case ReplyReceived(request_id, _, Refusal() as refusal) if request_id in self._requests:
                return self._take_refusal(request_id, refusal, now)
            case ReplyReceived(request_id, _, reply) if request_id in self._requests:
                return self._take_chunk(self._requests[request_id], reply, now)
            case RequestDone(request_id) if request_id in self._requests:
                self._finish(request_id, now)
                return []
            case RequestFailed(request_id, _, reason) if request_id in self._requests:
                return self._fail(request_id, reason, now)
            case ChunkStored(digest):
                self._mark_stored(digest)
                return []
            case StoreFailed(digest, reason):
                self._note_store_failure(digest, reason, now)
                return []
        effects, outcome = self._lists.handle(event, now)
        if outcome is not None:
            self._take_list(outcome, now)
        return effects

    def lose_peer(self, peer_id: PeerId, now: float) -> list[Effect]:
        """End every request to a peer that is gone; their chunks are asked of others."""
        effects = self._lists.lose_peer(peer_id, now)
        for request_id in [rid for rid, request in self._requests.items() if request.peer_id == peer_id]:
            effects += self._fail(request_id, "closed", now)
        return effects

    def pump(self, now: float) -> list[Effect]:
        """Hedge what stalled, then ask for everything that may be asked for now."""
        effects = self._expire(now)
        if now < self._paused_until:
            return effects
        if self._lost_wants:
            effects += self.set_wants(self._lost_wants)
        effects += self._lists.pump(now)
        for blob in self._blobs.values():
            if blob.pending:
                effects += self._ask_chunks(blob, now)
        return effects

    def next_wake(self, now: float) -> float | None:
        """Return the earliest later time at which :meth:`pump` may find something to do."""
        list_wake = self._lists.next_wake(now)
        times = [] if list_wake is None else [list_wake]
        times += [request.gives_up_at for request in self._requests.values()]
        times += [request.idle_at for request in self._requests.values() if not request.is_stalled]
        open_blobs = [blob for blob in self._blobs.values() if not blob.is_whole and not blob.refused]
        times += [blob.missed_since + UNAVAILABLE_SECONDS for blob in open_blobs if blob.missed_since is not None]
        if open_blobs or self._lost_wants:
            times.append(self._paused_until)
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
        blob.pending = deque(digest for digest in blob.sizes if digest in blob.unfinished)

    # Chunks

    def _ask_chunks(self, blob: _Blob, now: float) -> list[Effect]:
        effects: list[Effect] = []
        while blob.pending:
            for source in self._sources.candidates(blob.blob_id, now, partial(BlobWant.claim_of, blob.want)):
                room = min(source.room_chunks, CHUNKS_IN_FLIGHT_MAX - self.chunks_in_flight)
                digests = self._take_pending(blob, source, room if blob.want.may_ask(source) else 0)
                if not digests:
                    continue
                effects.append(self._send(source, blob, digests, now))
                # The order changes with the load, so choose again for the next request.
                break
            else:
                break
        return effects

    def _take_pending(self, blob: _Blob, source: Source, room: int) -> tuple[Digest, ...]:
        taken: list[Digest] = []
        passed_over: list[Digest] = []
        while blob.pending and len(taken) < room and len(passed_over) < LOOK_AHEAD_CHUNKS:
            digest = blob.pending.popleft()
            if digest not in blob.unfinished or digest in self._storing:
                continue
            requests = self._asked.get(digest, ())
            if any(not request.is_stalled for request in requests):
                continue  # that request puts it back if it fails
            if any(request.peer_id == source.peer_id for request in requests) or digest in taken:
                passed_over.append(digest)
                continue
            taken.append(digest)
        blob.pending.extendleft(reversed(passed_over))
        return tuple(taken)

    def _take_chunk(self, request: _Request, reply: object, now: float) -> list[Effect]:
        if not isinstance(reply, ChunkReply) or reply.digest not in request.asked:
            return self._refuse_chunk(request, now)
        if reply.digest not in request.awaited:
            size_bytes = 0 if reply.data is None else len(reply.data)
            return [Count("wasted_bytes", "duplicate", float(size_bytes))]
        self._stop_awaiting(request, reply.digest)
        self._chunk_seconds += (now - request.progress_at - self._chunk_seconds) / 8
        request.progress_at, request.idle_at = now, now + self._stall_seconds()
        if reply.data is None:
            self._requeue(reply.digest)
            self._note_request_miss(request, now)
            return []
        owners = [blob for blob in self._blobs.values() if reply.digest in blob.unfinished]
        if reply.digest in self._storing or not owners:
            request.good_count += 1
            return [Count("wasted_bytes", "duplicate", float(len(reply.data)))]
        if len(reply.data) != owners[0].sizes[reply.digest] or compute_digest(reply.data) != reply.digest:
            self._requeue(reply.digest)
            wasted = Count("wasted_bytes", "bad-chunk", float(len(reply.data)))
            return [wasted, *self._refuse_chunk(request, now)]
        request.good_count += 1
        for blob in owners:
            blob.missed_since = None
        self._storing[reply.digest] = len(reply.data)
        return [StoreChunk(reply.digest, reply.data)]

    def _refuse_chunk(self, request: _Request, now: float) -> list[Effect]:
        request.bad_count += 1
        self._sources.note_failure(request.peer_id, now)
        return [StrikePeer(request.peer_id, "bad-chunk"), Count("rejected", "bad-chunk")]

    def _note_request_miss(self, request: _Request, now: float) -> None:
        blob = self._blobs.get(request.blob_id)
        if blob is not None:
            self._note_miss(blob, request.peer_id, now)

    def _note_miss(self, blob: _Blob, peer_id: PeerId, now: float) -> None:
        source = self._sources.get(peer_id)
        if source is None:
            return
        blob.missed_since = now if blob.missed_since is None else blob.missed_since
        # The publisher may be replacing the blob; anybody else who claimed it was wrong.
        claimed = peer_id != blob.want.publisher and blob.want.claim_of(source) is Claim.HOLDS
        self._sources.note_miss(peer_id, blob.blob_id, now, claimed=claimed)

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

    # Requests

    def _send(self, source: Source, blob: _Blob, digests: tuple[Digest, ...], now: float) -> Effect:
        timeout_seconds = limits.REQUEST_OPEN_SECONDS_MAX + CHUNK_TIMEOUT_SECONDS * len(digests)
        request_id = self._take_request_id()
        request = _Request(
            peer_id=source.peer_id,
            blob_id=blob.blob_id,
            asked=frozenset(digests),
            awaited=set(digests),
            progress_at=now,
            idle_at=now + self._stall_seconds(),
            gives_up_at=now + timeout_seconds + GRACE_SECONDS,
        )
        self._requests[request_id] = request
        for digest in digests:
            self._asked.setdefault(digest, []).append(request)
        source.requests_in_flight += 1
        source.chunks_in_flight += len(digests)
        return SendRequest(request_id, source.peer_id, GetChunks(digests), timeout_seconds)

    def _stop_awaiting(self, request: _Request, digest: Digest) -> None:
        request.awaited.discard(digest)
        requests = self._asked[digest]
        requests.remove(request)
        if not requests:
            del self._asked[digest]
        source = self._sources.get(request.peer_id)
        if source is not None:
            source.chunks_in_flight = max(source.chunks_in_flight - 1, 0)

    def _end(self, request_id: int) -> _Request:
        """Take a request off every account and queue again what it did not bring."""
        request = self._requests.pop(request_id)
        for digest in sorted(request.awaited):
            self._stop_awaiting(request, digest)
            self._requeue(digest)
        source = self._sources.get(request.peer_id)
        if source is not None:
            source.requests_in_flight = max(source.requests_in_flight - 1, 0)
        return request

    def _finish(self, request_id: int, now: float) -> None:
        is_short = bool(self._requests[request_id].awaited)
        request = self._end(request_id)
        if is_short:
            self._sources.note_failure(request.peer_id, now)
        elif request.bad_count == 0 and request.good_count > 0:
            self._sources.note_success(request.peer_id, chunk_count=request.good_count)

    def _fail(self, request_id: int, reason: str, now: float) -> list[Effect]:
        request = self._end(request_id)
        self._sources.note_failure(request.peer_id, now)
        return [Count("retries", reason)]

    def _take_refusal(self, request_id: int, refusal: Refusal, now: float) -> list[Effect]:
        request = self._end(request_id)
        if refusal.code == "not-found":
            self._note_request_miss(request, now)
            return []
        self._sources.note_failure(request.peer_id, now, wait_seconds=refusal.retry_after_ms / 1000)
        return [Count("retries", "refused")]

    def _expire(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for request_id, request in tuple(self._requests.items()):
            if request.gives_up_at <= now:
                effects += self._fail(request_id, "timeout", now)
            elif request.idle_at <= now and not request.is_stalled:
                request.is_stalled = True
                for digest in sorted(request.awaited, reverse=True):
                    self._requeue(digest, first=True)
                source = self._sources.get(request.peer_id)
                if source is not None:
                    source.window_chunks = max(source.window_chunks // 2, 1)
                effects.append(Count("retries", "timeout"))
        return effects

    def _requeue(self, digest: Digest, *, first: bool = False) -> None:
        for blob in self._blobs.values():
            if digest in blob.unfinished:
                (blob.pending.appendleft if first else blob.pending.append)(digest)

    def _stall_seconds(self) -> float:
        return max(STALL_SECONDS_MIN, STALL_RATIO * self._chunk_seconds)
