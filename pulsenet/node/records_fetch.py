"""Fetching signed records: heads, descriptors, epochs, catalogues, manifests.

The owner names what it still needs; this machine keeps one request in flight for each need and changes the
source when an answer does not satisfy the owner. It looks at no record: verification is the owner's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pulsenet import limits
from pulsenet.ids import Digest, PeerId
from pulsenet.node.effects import Count, Effect, SendRequest, StrikePeer
from pulsenet.node.events import Event, ReplyReceived
from pulsenet.node.requests import OpenRequest, OpenRequests
from pulsenet.node.sources import Claim, Source, Sources
from pulsenet.wire.messages import GetDescriptors, GetEpochs, GetHead, GetRecords, HeadReply, RecordsReply, Refusal

Need = GetHead | GetDescriptors | GetEpochs | GetRecords
"""What the owner needs, in the words of the request that brings it."""

NEEDS_MAX = 64
"""Needs at one time."""

RECORD_TIMEOUT_SECONDS = limits.REQUEST_OPEN_SECONDS_MAX
"""Records are small: a source that takes longer is given up for another."""

NO_KEY = Digest(b"")
"""Misses are remembered per need here, not in the table of sources."""


@dataclass(frozen=True, slots=True)
class RecordsArrived:
    """Encoded signed records, unverified, as ``peer_id`` answered them to ``need``."""

    need: Need
    peer_id: PeerId
    records: tuple[bytes, ...]


@dataclass(slots=True)
class _Pending:
    need: Need
    hint: PeerId | None
    """Asked first: it told us that the thing exists."""
    request_id: int | None = None
    attempt_count: int = 0
    retry_at: float = 0.0
    asked: set[PeerId] = field(default_factory=set)
    """Sources asked since the last lap over all of them."""


class RecordsFetcher:
    """Pure machine; shares its sources and request ids with the other fetchers of its owner."""

    def __init__(self, sources: Sources, take_request_id: Callable[[], int]) -> None:
        self._sources = sources
        self._take_request_id = take_request_id
        self._pending: dict[Need, _Pending] = {}
        self._requests: OpenRequests[_Pending] = OpenRequests()

    def set_needs(self, needs: Mapping[Need, PeerId | None]) -> None:
        """Replace the needs; each maps to the source to ask first. Those that stay keep their state."""
        for need in [need for need in self._pending if need not in needs]:
            del self._pending[need]
        for need, hint in needs.items():
            if need not in self._pending and len(self._pending) < NEEDS_MAX:
                self._pending[need] = _Pending(need, hint)

    def handle(self, event: Event, now: float) -> tuple[list[Effect], RecordsArrived | None]:
        """Take in an event about one of our requests; anything else is ignored."""
        request = self._requests.end(event)
        if request is None:
            return [], None
        self._free(request)
        if isinstance(event, ReplyReceived):
            return self._take_reply(request.about, event.peer_id, event.reply, now)
        # Done without a reply is no better than failed: the source did not answer as asked.
        self._sources.note_failure(request.peer_id, now)
        return [], None

    def lose_peer(self, peer_id: PeerId) -> None:
        """End every request to a peer that is gone; its needs are asked of others."""
        for request in self._requests.end_of(peer_id):
            self._free(request)

    def pump(self, now: float) -> list[Effect]:
        """Ask for every need that has no request in flight and is due."""
        for request in self._requests.end_overdue(now):
            self._free(request)
            self._sources.note_failure(request.peer_id, now)
        effects: list[Effect] = []
        for pending in self._pending.values():
            if pending.request_id is not None or pending.retry_at > now:
                continue
            source = self._choose(pending, now)
            if source is None:
                continue
            sent = SendRequest(self._take_request_id(), source.peer_id, pending.need, RECORD_TIMEOUT_SECONDS)
            pending.request_id = sent.request_id
            pending.asked.add(source.peer_id)
            source.requests_in_flight += 1
            effects.append(self._requests.add(sent, pending, now))
        return effects

    def next_wake(self, now: float) -> float | None:
        """Return the earliest later time at which :meth:`pump` may find something to do."""
        idle = [pending for pending in self._pending.values() if pending.request_id is None]
        times = [self._requests.next_wake(now), self._sources.next_retry_at(now) if idle else None]
        times += [pending.retry_at for pending in idle]
        return min((at for at in times if at is not None and at > now), default=None)

    def _choose(self, pending: _Pending, now: float) -> Source | None:
        ready = self._sources.candidates(NO_KEY, now, lambda source: Claim.UNKNOWN)
        hinted = [source for source in ready if source.peer_id == pending.hint and source.peer_id not in pending.asked]
        fresh = [source for source in ready if source.peer_id not in pending.asked]
        if not fresh and ready:
            # Everybody was asked once: start another lap, later each time.
            pending.asked.clear()
            pending.attempt_count += 1
            pending.retry_at = now + self._sources.backoff_seconds(pending.attempt_count)
            return None
        return next(iter(hinted or fresh), None)

    def _free(self, request: OpenRequest[_Pending]) -> None:
        """The need and the source of a request that is over have none under way."""
        request.about.request_id = None
        self._sources.note_ended(request.peer_id)

    def _take_reply(
        self, pending: _Pending, peer_id: PeerId, reply: object, now: float
    ) -> tuple[list[Effect], RecordsArrived | None]:
        match reply:
            case HeadReply(head) if isinstance(pending.need, GetHead):
                self._sources.note_success(peer_id, now)
                return [], RecordsArrived(pending.need, peer_id, () if head is None else (head,))
            case RecordsReply(records) if not isinstance(pending.need, GetHead):
                self._sources.note_success(peer_id, now)
                return [], RecordsArrived(pending.need, peer_id, records)
            case Refusal(_, _, retry_after_ms):
                self._sources.note_failure(peer_id, now, wait_seconds=retry_after_ms / 1000)
                return [], None
            case _:
                self._sources.note_failure(peer_id, now)
                return [StrikePeer(peer_id, "unexpected"), Count("rejected", "unexpected")], None
