"""Getting hold of the blobs that shares name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from pulsenet.chain.records import SliceName
from pulsenet.ids import Digest, PeerId
from pulsenet.node.effects import Effect
from pulsenet.node.events import Event, PeerConnected, PeerLost, StoreFailed
from pulsenet.node.fetch import Fetcher, StoreIndex
from pulsenet.node.list_fetch import BlobWant
from pulsenet.node.machine import Draw
from pulsenet.node.sources import Sources

OWED_CHUNKS_MIN: Final = 8
"""What one member may owe, however thin the line. Members fetch from each other at the same time, over one connection,
so a request waits behind what its sender owes. Where that is more than the other owes, the other has nothing to send
meanwhile, looks slow, and is asked for still less: one way would stand still until the other is done."""


class Blobs:
    """Thin part of the machine: it says what it wants and asks what is whole.

    Args:
        draw: Chance, for back-off and the choice of sources.
        index: What the store holds.
        take_request_id: Returns an id the owner never used before.
    """

    def __init__(self, draw: Draw, index: StoreIndex, take_request_id: Callable[[], int]) -> None:
        self._index = index
        self._take_request_id = take_request_id
        self._sources = Sources(draw, OWED_CHUNKS_MIN)
        self._fetcher = Fetcher(self._sources, take_request_id, index)
        self._wanted: dict[Digest, tuple[SliceName, PeerId]] = {}
        self._here: set[PeerId] = set()

    def set_wants(self, wanted: Mapping[Digest, tuple[SliceName, PeerId]]) -> list[Effect]:
        """Replace what is wanted: blobs, each with the member that shared it and that alone is asked for it."""
        if wanted == self._wanted:
            return []
        self._wanted = dict(wanted)
        for owner in self._owners & self._here:
            if self._sources.get(owner) is None:
                self._sources.connect(owner, sought=True)
        # A mean is everybody's, a part one owner's; asking its maker alone keeps every member's upload what is planned.
        return self._fetcher.set_wants([BlobWant(name, owner, None, True) for name, owner in wanted.values()])

    @property
    def _owners(self) -> set[PeerId]:
        """Members of whom something is wanted."""
        return {owner for _, owner in self._wanted.values()}

    def is_whole(self, blob_id: Digest) -> bool:
        """Say whether a wanted blob is durable here."""
        return self._fetcher.is_whole(blob_id)

    def refusal_of(self, blob_id: Digest) -> str:
        """Return why a wanted blob can never be fetched, or the empty string."""
        return self._fetcher.refusal_of(blob_id)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in an event about peers, our requests or chunks; anything else is ignored."""
        match event:
            case PeerConnected(peer_id):
                self._here.add(peer_id)
                self._sources.connect(peer_id, sought=peer_id in self._owners)
                return []
            case PeerLost(peer_id):
                self._here.discard(peer_id)
                effects = self._fetcher.lose_peer(peer_id, now)
                self._sources.disconnect(peer_id)
                return effects
            case StoreFailed(None):
                # Lists and chunks may be known here and not be on disk: begin again from what the store holds.
                effects = [
                    effect for source in self._sources for effect in self._fetcher.lose_peer(source.peer_id, now)
                ]
                self._fetcher = Fetcher(self._sources, self._take_request_id, self._index)
                wanted, self._wanted = self._wanted, {}
                return effects + self.set_wants(wanted)
        return self._fetcher.handle(event, now)

    def pump(self, now: float) -> list[Effect]:
        """Ask for everything that may be asked for now."""
        return self._fetcher.pump(now)

    def next_wake(self, now: float) -> float | None:
        """Return the earliest later time at which :meth:`pump` may find something to do."""
        return self._fetcher.next_wake(now)
