"""One key in two places: a copied key file or a cloned machine. It is reported, never obeyed.

Whoever holds the key hears of it when a have record comes back that it did not sign. Others see the addresses of one
key go to and fro: a node that moved does not move back and forth within minutes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from pulsenet.chain.records import Have
from pulsenet.ids import PeerId, short

OWN_RECORDS_MAX = 256
"""Own records remembered by the time they were issued: far more than are valid at one time."""

RETURNS_MIN = 2
"""How often addresses that were left have to come back."""

RETURN_SECONDS_MAX = 600.0
"""Within so long."""

TELL_AGAIN_SECONDS = 3_600.0
PEERS_MAX = 1_024
"""Peers whose addresses are compared; the one heard of longest ago is forgotten beyond."""


@dataclass(slots=True)
class _Places:
    here: frozenset[str]
    before: frozenset[str]
    returned_at: deque[float]
    told_at: float = float("-inf")


class Doubles:
    """Looks at have records as they come; says each finding once an hour."""

    def __init__(self, peer_id: PeerId) -> None:
        self._peer_id = peer_id
        self._own: deque[int] = deque(maxlen=OWN_RECORDS_MAX)
        self._first_ms: int | None = None
        self._own_told_at = float("-inf")
        self._places: dict[PeerId, _Places] = {}

    def note_own(self, issued_at_ms: int) -> None:
        """This node signed a have record."""
        self._own.append(issued_at_ms)
        if self._first_ms is None:
            self._first_ms = issued_at_ms

    def look(self, peer_id: PeerId, have: Have, now: float) -> str | None:
        """Return what to tell the operator about a verified record, if anything."""
        return self._look_own(have, now) if peer_id == self._peer_id else self._look_other(peer_id, have, now)

    def _look_own(self, have: Have, now: float) -> str | None:
        # What this node signed before it was started anew is older than its first record.
        if self._first_ms is None or have.issued_at_ms <= self._first_ms or have.issued_at_ms in self._own:
            return None
        if now < self._own_told_at + TELL_AGAIN_SECONDS:
            return None
        self._own_told_at = now
        places = ", ".join(have.addresses) or "an address it does not tell"
        return (
            f"another node uses this node's key: a {have.role} at {places}. Two nodes with one key keep cutting each "
            "other off; give one of them a key of its own, and revoke this one if you did not copy it"
        )

    def _look_other(self, peer_id: PeerId, have: Have, now: float) -> str | None:
        if not have.addresses:
            return None  # a node nobody can dial tells none; that is no other place
        found = frozenset(have.addresses)
        places = self._places.pop(peer_id, None) or _Places(found, frozenset(), deque(maxlen=RETURNS_MIN))
        self._places[peer_id] = places
        if len(self._places) > PEERS_MAX:
            del self._places[next(iter(self._places))]
        if found & places.here:
            places.here = found
            return None
        if found & places.before:
            places.returned_at.append(now)
        places.here, places.before = found, places.here
        is_double = len(places.returned_at) == RETURNS_MIN and now - places.returned_at[0] < RETURN_SECONDS_MAX
        if not is_double or now < places.told_at + TELL_AGAIN_SECONDS:
            return None
        places.told_at = now
        here, there = min(places.here), min(places.before)
        return (
            f"the key {short(peer_id)} is used in two places, {here} and {there}: a copied key file or a cloned machine"
        )
