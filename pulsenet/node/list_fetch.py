"""Fetching chunk lists, page by page (SPEC section 5).

All pages of one list come from one source, so that a list that does not match its name has one culprit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from pulsenet import limits
from pulsenet.chain.records import Contribution, Manifest, SliceName, StateAnchor
from pulsenet.errors import IntegrityError, RemoteProtocolError
from pulsenet.ids import Digest, PeerId, compute_digest
from pulsenet.node.effects import Count, Effect, SendRequest, StoreChunkList, StrikePeer
from pulsenet.node.events import Event, ReplyReceived, RequestFailed
from pulsenet.node.requests import GRACE_SECONDS as GRACE_SECONDS
from pulsenet.node.requests import OpenRequest, OpenRequests
from pulsenet.node.sources import Claim, Source, Sources, claim_of
from pulsenet.wire.chunks import ChunkList, compute_list_size_bytes_max, open_chunk_list
from pulsenet.wire.messages import ChunkListReply, GetChunkList, Refusal
from pulsenet.wire.sections import find_slice_chunks

LISTS_IN_FLIGHT_MAX = 4
"""Chunk lists being paged in at one time."""

PAGES_SPARE = 4
"""A list may come in twice the pages it needs, and so many more: whoever gives it in crumbs would hold a reader up."""

PAGE_TIMEOUT_SECONDS = limits.REQUEST_OPEN_SECONDS_MAX + limits.READ_STALL_SECONDS_MAX
"""A page is at most as large as a chunk."""

Naming = Manifest | Contribution | StateAnchor | SliceName
"""What says a blob's id and size, and was verified."""


@dataclass(frozen=True, slots=True)
class SliceChoice:
    """Some slices of a contribution."""

    slices: frozenset[int]
    slice_count: int


@dataclass(frozen=True, slots=True)
class BlobWant:
    """A blob to fetch: the verified record that names it, and who signed that or serves it first."""

    manifest: Naming
    publisher: PeerId | None
    choice: SliceChoice | None = None
    """What is wanted of it; ``None`` means all."""
    is_exclusive: bool = False
    """Whether nobody but ``publisher`` is asked: the others want it from there too."""

    @property
    def is_shared(self) -> bool:
        """Whether many nodes want all of it, so that they can feed one another."""
        return self.choice is None and not self.is_exclusive

    def may_ask(self, source: Source) -> bool:
        """Say whether ``source`` may be asked for this blob at all."""
        return not self.is_exclusive or source.peer_id == self.publisher

    def pick(self, chunk_list: ChunkList) -> dict[Digest, int]:
        """Return the chunks that are wanted, each once with its size, in the order of their first use.

        Raises:
            RemoteProtocolError: ``chunk-list`` for a part of a blob that was not cut so that it has parts.
        """
        places = range(len(chunk_list.entries))
        if self.choice is None:
            return {chunk_list.entries[place][1]: chunk_list.entries[place][0] for place in places}
        wanted: set[int] = set()
        for slice_index in self.choice.slices:
            header, body = find_slice_chunks(chunk_list, slice_index, self.choice.slice_count)
            wanted |= {*header, *body}
        return {chunk_list.entries[place][1]: chunk_list.entries[place][0] for place in sorted(wanted)}

    def claim_of(self, source: Source) -> Claim:
        """Return what ``source`` says about holding this blob."""
        if isinstance(self.manifest, Manifest):
            return claim_of(source, self.manifest, self.publisher)
        # Haves say nothing of rounds; the signer stored what it signed.
        return Claim.HOLDS if source.peer_id == self.publisher else Claim.UNKNOWN


@dataclass(frozen=True, slots=True)
class ListOutcome:
    """What became of one blob's list: exactly one of the three."""

    blob_id: Digest
    chunk_list: ChunkList | None = None
    refused: str = ""
    """The list is the signed one and still wrong, so no source will help."""
    missed_by: PeerId | None = None


@dataclass(slots=True, eq=False)
class _Paging:
    want: BlobWant
    data: bytearray = field(default_factory=bytearray)
    page_count: int = 0
    source: PeerId | None = None
    request_id: int | None = None


class ListFetcher:
    """Pure machine for the lists of wanted blobs; a list leaves it once it is opened or refused."""

    def __init__(self, sources: Sources, take_request_id: Callable[[], int]) -> None:
        self._sources = sources
        self._take_request_id = take_request_id
        self._paging: dict[Digest, _Paging] = {}
        self._requests: OpenRequests[Digest] = OpenRequests()
        """Requests under way, and the blob that each is about."""

    @property
    def requests_in_flight(self) -> int:
        """Requests not ended yet."""
        return len(self._requests)

    def set_wants(self, wants: Sequence[BlobWant]) -> None:
        """Replace the blobs whose lists are wanted, most urgent first; those that stay keep their pages."""
        self._paging = {
            want.manifest.blob_id: self._paging.get(want.manifest.blob_id) or _Paging(want) for want in wants
        }

    def handle(self, event: Event, now: float) -> tuple[list[Effect], ListOutcome | None]:
        """Take in an event about one of our requests; anything else is ignored."""
        request = self._requests.end(event)
        if request is None:
            return [], None
        if not isinstance(event, ReplyReceived):
            return self._fail(request, event.reason if isinstance(event, RequestFailed) else "closed", now), None
        paging = self._free(request)
        return ([], None) if paging is None else self._take_reply(paging, request.peer_id, event.reply, now)

    def lose_peer(self, peer_id: PeerId, now: float) -> list[Effect]:
        """End every request to a peer that is gone."""
        ended = self._requests.end_of(peer_id)
        return [effect for request in ended for effect in self._fail(request, "closed", now)]

    def pump(self, now: float) -> list[Effect]:
        """Give up what is overdue and ask for the next pages."""
        overdue = self._requests.end_overdue(now)
        effects = [effect for request in overdue for effect in self._fail(request, "timeout", now)]
        for paging in self._paging.values():
            if len(self._requests) >= LISTS_IN_FLIGHT_MAX:
                break
            if paging.request_id is None:
                effects += self._ask(paging, now)
        return effects

    def next_wake(self, now: float) -> float | None:
        """Return the earliest later time at which a request is overdue."""
        return self._requests.next_wake(now)

    def _ask(self, paging: _Paging, now: float) -> list[Effect]:
        blob_id = paging.want.manifest.blob_id
        found = self._sources.candidates(blob_id, now, partial(BlobWant.claim_of, paging.want))
        candidates = [source for source in found if paging.want.may_ask(source)]
        if not candidates:
            return []
        source = next((s for s in candidates if s.peer_id == paging.source), None)
        if source is None:
            source = candidates[0]
            paging.source = source.peer_id
            paging.data, paging.page_count = bytearray(), 0
        message = GetChunkList(blob_id, len(paging.data))
        request = SendRequest(self._take_request_id(), source.peer_id, message, PAGE_TIMEOUT_SECONDS)
        paging.request_id = request.request_id
        source.requests_in_flight += 1
        return [self._requests.add(request, blob_id, now)]

    def _take_reply(
        self, paging: _Paging, peer_id: PeerId, reply: object, now: float
    ) -> tuple[list[Effect], ListOutcome | None]:
        manifest = paging.want.manifest
        if isinstance(reply, Refusal):
            paging.source = None
            if reply.code == "not-found":
                return [], ListOutcome(manifest.blob_id, missed_by=peer_id)
            self._sources.note_failure(peer_id, now, wait_seconds=reply.retry_after_ms / 1000)
            return [Count("retries", "refused")], None
        size_bytes_max = compute_list_size_bytes_max(manifest.encoded_size_bytes)
        if (
            not isinstance(reply, ChunkListReply)
            or reply.blob_id != manifest.blob_id
            or not reply.data
            or len(paging.data) + len(reply.data) > min(reply.total_size_bytes, size_bytes_max)
        ):
            return self._refuse(paging, peer_id, now), None
        paging.data += reply.data
        paging.page_count += 1
        if len(paging.data) < reply.total_size_bytes:
            if paging.page_count < 2 * -(-size_bytes_max // limits.CHUNK_SIZE_BYTES_MAX) + PAGES_SPARE:
                return [], None
            paging.source = None
            self._sources.note_failure(peer_id, now)
            return [Count("retries", "timeout")], None
        data = bytes(paging.data)
        if compute_digest(data) != manifest.blob_id:
            return self._refuse(paging, peer_id, now), None
        self._sources.note_success(peer_id, now)
        del self._paging[manifest.blob_id]
        outcome, effects = open_list(manifest, data)
        return ([StoreChunkList(manifest.blob_id, data)] if outcome.chunk_list is not None else effects), outcome

    def _refuse(self, paging: _Paging, peer_id: PeerId, now: float) -> list[Effect]:
        paging.source = None
        self._sources.note_failure(peer_id, now)
        return [StrikePeer(peer_id, "chunk-list"), Count("rejected", "chunk-list")]

    def _fail(self, request: OpenRequest[Digest], reason: str, now: float) -> list[Effect]:
        self._free(request)
        self._sources.note_failure(request.peer_id, now)
        return [Count("retries", reason)]

    def _free(self, request: OpenRequest[Digest]) -> _Paging | None:
        """Return the list that waited for a request that is over: none, if it was wanted anew since."""
        self._sources.note_ended(request.peer_id)
        paging = self._paging.get(request.about)
        if paging is None or paging.request_id != request.request_id:
            return None
        paging.request_id = None
        return paging


def open_list(manifest: Naming, data: bytes) -> tuple[ListOutcome, list[Effect]]:
    """Open a list whose digest is the one ``manifest`` names; what is wrong with it is then its signer's fault."""
    try:
        chunk_list = open_chunk_list(data, blob_id=manifest.blob_id, size_bytes=manifest.encoded_size_bytes)
    except (IntegrityError, RemoteProtocolError):
        return ListOutcome(manifest.blob_id, refused="chunk-list"), [Count("rejected", "chunk-list")]
    return ListOutcome(manifest.blob_id, chunk_list=chunk_list), []
