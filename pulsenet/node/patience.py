"""Which connected trainers a round waits for: seldom for one that missed many in a row (SPEC section 6.12).

A connection says that a daemon is there, not that its training process is. One that began in the middle of a round
comes nearer to the others with every round that waits for it, and nobody hears of it before it is in time: so the first
rounds all wait for a trainer, and later ones still do now and then.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from pulsenet.ids import PeerId
from pulsenet.node.closing import REFUSED_WAITS

MISSED_MAX: Final = 8
"""Rounds in a row that wait for a trainer in vain."""

AGAIN_ROUNDS: Final = 16
"""Of the rounds after those, one in so many waits for it."""

DOUBLINGS_MAX: Final = 6
"""How often the wait beside a refused contribution is doubled: to 5 h, where the usual one is 30 s."""


class Patience:
    """The rounds in a row that this coordinator closed without trainers that were connected."""

    def __init__(self) -> None:
        self._missed: dict[PeerId, int] = {}
        self._doublings = 0

    @property
    def refused_waits(self) -> int:
        """How many times the usual wait the round that is open waits once a contribution was refused.

        What is refused takes no inner steps to make. Whoever sends such a thing in each round would end all of them
        before anybody else is there, so each that ended so makes the next one wait longer.
        """
        return REFUSED_WAITS << self._doublings

    def note_closed(self, connected: Collection[PeerId], came: Collection[PeerId], *, has_members: bool) -> None:
        """A round is closed.

        Args:
            connected: Trainers whose contribution could come; whoever was away is met anew when it is back.
            came: Whose contribution came.
            has_members: Whether it moves the state; one that does not is missed by nobody.
        """
        if not has_members:
            has_silent = any(self.awaits(peer_id) for peer_id in connected if peer_id not in came)
            self._doublings = min(self._doublings + has_silent, DOUBLINGS_MAX)
            return
        self._doublings = max(self._doublings - 1, 0)
        self._missed = {peer_id: self._missed.get(peer_id, 0) + 1 for peer_id in connected if peer_id not in came}

    def note_late(self, peer_id: PeerId) -> None:
        """A contribution came after its round was closed: its sender trains, and may come in time to the next."""
        self._missed.pop(peer_id, None)

    def awaits(self, peer_id: PeerId) -> bool:
        """Say whether the round that is open waits for a trainer that is connected."""
        missed = self._missed.get(peer_id, 0)
        return missed < MISSED_MAX or missed % AGAIN_ROUNDS == 0
