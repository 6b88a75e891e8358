"""Which connected trainers a round waits for: seldom for one that missed many in a row (SPEC section 6.12).

A connection says that a daemon is there, not that its training process is. One that began in the middle of a round
comes nearer to the others with every round that waits for it, and nobody hears of it before it is in time: so the first
rounds all wait for a trainer, and later ones still do now and then.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from pulsenet.ids import PeerId

MISSED_MAX: Final = 8
"""Rounds in a row that wait for a trainer in vain."""

AGAIN_ROUNDS: Final = 16
"""Of the rounds after those, one in so many waits for it."""


class Patience:
    """The rounds in a row that this coordinator closed without trainers that were connected."""

    def __init__(self) -> None:
        self._missed: dict[PeerId, int] = {}

    def note_closed(self, connected: Collection[PeerId], came: Collection[PeerId]) -> None:
        """A round is closed.

        Args:
            connected: Trainers whose contribution could come; whoever was away is met anew when it is back.
            came: Whose contribution came.
        """
        self._missed = {peer_id: self._missed.get(peer_id, 0) + 1 for peer_id in connected if peer_id not in came}

    def note_late(self, peer_id: PeerId) -> None:
        """A contribution came after its round was closed: its sender trains, and may come in time to the next."""
        self._missed.pop(peer_id, None)

    def awaits(self, peer_id: PeerId) -> bool:
        """Say whether the round that is open waits for a trainer that is connected."""
        missed = self._missed.get(peer_id, 0)
        return missed < MISSED_MAX or missed % AGAIN_ROUNDS == 0
