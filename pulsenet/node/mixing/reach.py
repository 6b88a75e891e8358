"""Who can be reached, and since when somebody cannot."""

from __future__ import annotations

from typing import Final

from pulsenet.ids import PeerId
from pulsenet.node.courier import Courier
from pulsenet.node.events import Event, PeerConnected, PeerLost

GRACE_SECONDS: Final = 2.0
"""How long somebody who cannot be reached is hoped for, while the training process waits."""


class Reach:
    """Keeps the courier's set, and how long others have been away.

    Args:
        courier: Whose set it is.
    """

    def __init__(self, courier: Courier) -> None:
        self._courier = courier
        self._lost_at: dict[PeerId, float] = {}

    def handle(self, event: Event, now: float) -> None:
        """Take in who comes and goes."""
        if isinstance(event, PeerConnected):
            self._courier.connected.add(event.peer_id)
            self._lost_at.pop(event.peer_id, None)
        elif isinstance(event, PeerLost) and event.peer_id in self._courier.connected:
            self._courier.connected.discard(event.peer_id)
            self._lost_at[event.peer_id] = now
            if len(self._lost_at) > 4096:
                del self._lost_at[next(iter(self._lost_at))]

    def is_here(self, peer_id: PeerId) -> bool:
        """Say whether a peer can be reached now."""
        return peer_id in self._courier.connected

    def is_lost(self, peer_id: PeerId, now: float, since: float) -> bool:
        """Say whether a peer has been away for the grace, counted from ``since`` at the earliest."""
        return not self.is_here(peer_id) and now >= self.lost_at(peer_id, since)

    def lost_at(self, peer_id: PeerId, since: float) -> float:
        """Return when a peer that is away counts as lost."""
        return max(self._lost_at.get(peer_id, since), since) + GRACE_SECONDS
