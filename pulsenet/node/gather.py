"""Getting hold of what receipts and state anchors name: contribution records first, then every blob, or slices of them.

Thin: records come by :class:`RecordsFetcher`, blobs by :class:`Fetcher`, and what is known is the ledger's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pulsenet import limits
from pulsenet.chain.ledger import Ledger
from pulsenet.chain.records import SliceName, StateAnchor
from pulsenet.chain.signing import decode_signed, record_digest
from pulsenet.errors import RemoteProtocolError, TrustError
from pulsenet.ids import Digest, PeerId
from pulsenet.node.blame import blame
from pulsenet.node.effects import Effect, StoreRecord
from pulsenet.node.events import Event, PeerConnected, PeerLost, StoreFailed
from pulsenet.node.fetch import Fetcher, FetchProgress, StoreIndex
from pulsenet.node.list_fetch import BlobWant, SliceChoice
from pulsenet.node.machine import Draw
from pulsenet.node.records_fetch import Need, RecordsArrived, RecordsFetcher
from pulsenet.node.sources import Sources
from pulsenet.wire.chunks import ChunkList
from pulsenet.wire.messages import GetRecords


@dataclass(frozen=True, slots=True)
class SliceWants:
    """What is wanted of a round that is summed by slice."""

    choice: SliceChoice
    """Slices of every contribution."""
    whole: frozenset[Digest] = frozenset()
    """Contributions of which everything is wanted."""
    named: tuple[tuple[SliceName, PeerId, bool], ...] = ()
    """Slices of the aggregate, each with its owner, and whether nobody else is asked for it."""


class Gatherer:
    """Pure machine; its owner says what it wants and asks what is whole.

    Args:
        ledger: Where contribution records go.
        draw: Chance, for back-off and the choice of sources.
        index: What the store holds.
        take_request_id: Returns an id the owner never used before.
    """

    def __init__(self, ledger: Ledger, draw: Draw, index: StoreIndex, take_request_id: Callable[[], int]) -> None:
        self._ledger = ledger
        self._index = index
        self._take_request_id = take_request_id
        self._sources = Sources(draw)
        self._records = RecordsFetcher(self._sources, take_request_id)
        self._blobs = Fetcher(self._sources, take_request_id, index)
        self._wanted: dict[Digest, PeerId | None] = {}
        self._known: frozenset[Digest] = frozenset()
        self._anchor: StateAnchor | None = None
        self._slices: SliceWants | None = None

    def set_wants(
        self,
        contributions: Mapping[Digest, PeerId | None],
        anchor: StateAnchor | None,
        slices: SliceWants | None = None,
    ) -> list[Effect]:
        """Replace what is wanted: contributions by digest, each with a peer that knows it, and one state anchor.

        Args:
            contributions: Of all of them the records.
            anchor: Its blob.
            slices: Which parts of the contributions' blobs, and which slices; ``None`` means all of every blob.
        """
        known = frozenset(digest for digest in contributions if self._ledger.contribution(digest) is not None)
        wanted = (dict(contributions), known, anchor, slices)
        if wanted == (self._wanted, self._known, self._anchor, self._slices):
            return []
        self._wanted, self._anchor, self._slices = dict(contributions), anchor, slices
        return self._renew()

    def holds_contributions(self, digests: Sequence[Digest]) -> bool:
        """Say whether all these wanted contributions are here, record and blob, or what is wanted of it."""
        entries = [self._ledger.contribution(digest) for digest in digests]
        return all(entry is not None and self._blobs.is_whole(entry.contribution.blob_id) for entry in entries)

    def knows_contributions(self, digests: Sequence[Digest]) -> bool:
        """Say whether the records of all these contributions are here."""
        return all(self._ledger.contribution(digest) is not None for digest in digests)

    def list_of(self, blob_id: Digest) -> ChunkList | None:
        """Return a wanted blob's chunk list once it is known."""
        return self._blobs.list_of(blob_id)

    def is_whole(self, blob_id: Digest) -> bool:
        """Say whether a wanted blob is here: a slice, or a state anchor's."""
        return self._blobs.is_whole(blob_id)

    def refusal_of(self, blob_id: Digest) -> str:
        """Return why a wanted blob can never be fetched, or the empty string."""
        return self._blobs.refusal_of(blob_id)

    def progress(self) -> FetchProgress:
        """Return how far the wanted blobs are."""
        return self._blobs.progress()

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in an event about peers, our requests or chunks; anything else is ignored."""
        if isinstance(event, PeerConnected):
            self._sources.connect(event.peer_id, sought=event.outbound)
            return []
        if isinstance(event, PeerLost):
            self._records.lose_peer(event.peer_id)
            effects = self._blobs.lose_peer(event.peer_id, now)
            self._sources.disconnect(event.peer_id)
            return effects
        if isinstance(event, StoreFailed) and event.digest is None:
            return self._start_over(now)
        effects, arrived = self._records.handle(event, now)
        if arrived is not None:
            effects += self._take_records(arrived)
        return effects + self._blobs.handle(event, now)

    def _start_over(self, now: float) -> list[Effect]:
        """Begin again from what the store holds: lists, chunks and records may be known here and not be on disk."""
        effects = [effect for source in self._sources for effect in self._blobs.lose_peer(source.peer_id, now)]
        self._blobs = Fetcher(self._sources, self._take_request_id, self._index)
        self._wanted, self._known, self._anchor, self._slices = {}, frozenset(), None, None
        return effects

    def pump(self, now: float) -> list[Effect]:
        """Ask for everything that may be asked for now."""
        return self._records.pump(now) + self._blobs.pump(now)

    def next_wake(self, now: float) -> float | None:
        """Return the earliest later time at which :meth:`pump` may find something to do."""
        times = (self._records.next_wake(now), self._blobs.next_wake(now))
        return min((at for at in times if at is not None), default=None)

    def _renew(self) -> list[Effect]:
        self._known = frozenset(digest for digest in self._wanted if self._ledger.contribution(digest) is not None)
        unknown = [digest for digest in self._wanted if digest not in self._known]
        needs: dict[Need, PeerId | None] = {}
        for start in range(0, len(unknown), limits.RECORDS_PER_REQUEST_MAX):
            digests = tuple(unknown[start : start + limits.RECORDS_PER_REQUEST_MAX])
            needs[GetRecords(digests)] = self._wanted[digests[0]]
        self._records.set_needs(needs)
        wants = []
        if self._anchor is not None:
            wants.append(BlobWant(self._anchor, self._ledger.anchor_signer(self._anchor)))
        for digest in self._wanted:
            entry = self._ledger.contribution(digest)
            if entry is None:
                continue
            choice = None if self._slices is None or digest in self._slices.whole else self._slices.choice
            if choice is None or choice.slices:
                wants.append(BlobWant(entry.contribution, entry.peer_id, choice))
        if self._slices is not None:
            wants += [BlobWant(name, owner, None, is_exclusive) for name, owner, is_exclusive in self._slices.named]
        return self._blobs.set_wants(wants)

    def _take_records(self, arrived: RecordsArrived) -> list[Effect]:
        effects: list[Effect] = []
        for data in arrived.records:
            try:
                signed = decode_signed(data)
                if record_digest(signed) not in self._wanted:
                    raise RemoteProtocolError("unexpected", "a record nobody asked for")
                self._ledger.accept_listed(signed)
                effects.append(StoreRecord(signed))
            except (RemoteProtocolError, TrustError) as error:
                effects += blame(error, arrived.peer_id)
        return effects + self._renew()
