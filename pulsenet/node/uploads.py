"""Who is served next: a bounded number of transfers at a time, fair between readers, patches before anchors.

A transfer is one request for chunks. Fair means by bytes (start-time fair queueing): the reader that was given least
goes first, and the more readers there are, the fewer slots one of them may hold. So a reader with many requests, or one
that comes back after a refusal, neither pushes others out nor starves. Every ``ANCHOR_TURNS``-th place goes to what is
not urgent, if it waits: anchors get on while patches never end.
"""

from __future__ import annotations

from dataclasses import dataclass

from pulsenet import limits
from pulsenet.ids import PeerId
from pulsenet.node.windows import Meter

URGENT_KINDS = frozenset({"patch", "skip", "contribution", "slice"})
"""What somebody waits for at every version or round; anchors and state anchors are for who joins."""

ANCHOR_TURNS = 4

SLOTS_START = 8
SLOTS_MIN = 4
"""Transfers at a time before the pace is known, and on however thin a link."""

SLOT_SECONDS = 8.0
"""There are as many slots as chunks leave in so much time: a transfer moves before its reader gives up on it."""

MEASURE_SECONDS = 2.0
"""A pace is believed after so long without a pause."""

CHUNK_WEIGHT = 1 / 8
"""A chunk's size counts so much against what is known."""

CHUNK_SIZE_BYTES_MIN = 1 << 16
"""Smaller ones count as this: the last chunk of a blob says nothing of the next."""

SLOT_BYTES_PER_SECOND = limits.CHUNK_SIZE_BYTES / SLOT_SECONDS
"""What holding a slot is counted as, however little goes through it."""

LEASE_SECONDS = 30.0
"""After so long a slot is given up between two chunks, if somebody who has none waits."""

WAIT_SECONDS_MAX = 8.0
"""Who waited so long for a slot is sent elsewhere."""

WAITING_MAX = 256
WAITING_PER_PEER_MAX = limits.STREAMS_PER_PEER_MAX
"""Transfers waiting for a slot, of all readers and of one."""

READERS_MAX = 1_024
"""Readers whose share is remembered."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    ticket: int
    peer_id: PeerId
    is_urgent: bool


@dataclass(slots=True)
class _Serving:
    peer_id: PeerId
    since: float
    charged_at: float


class Uploads:
    """Pure; the shell asks before each transfer and tells what it sent.

    Args:
        slots_max: Transfers at a time, however fast the link is.
        bytes_per_second: The operator's cap; 0 means none. It bounds the slots here and is kept by a
            :class:`pulsenet.node.rate.ByteCap`.
    """

    def __init__(self, slots_max: int, bytes_per_second: int = 0) -> None:
        self._slots_max = slots_max
        self._cap = bytes_per_second
        self._waiting: list[_Waiting] = []
        self._serving: dict[int, _Serving] = {}
        self._served_until: dict[PeerId, int] = {}
        """Bytes of each reader, counted so that one who was away has no arrears to collect."""
        self._virtual_size_bytes = 0
        self._grant_count = 0
        self._pace = Meter()
        self._chunk_size_bytes = float(limits.CHUNK_SIZE_BYTES)
        """What chunks have lately, on average."""
        self._busy_since: float | None = None

    @property
    def serving_count(self) -> int:
        """Transfers under way."""
        return len(self._serving)

    @property
    def waiting_count(self) -> int:
        """Transfers that wait for a slot."""
        return len(self._waiting)

    def slots(self, now: float) -> int:
        """Return how many transfers may be under way at ``now``."""
        least = SLOTS_MIN
        if self._cap:
            per_second: float = self._cap
            least = 1
        elif self._busy_since is None or now - self._busy_since < MEASURE_SECONDS:
            return min(SLOTS_START, self._slots_max)
        else:
            per_second = self._pace.per_second(now)
        # Two more than the pace fills: were there never a free one, a faster link would not show.
        count = int(per_second * SLOT_SECONDS / self._chunk_size_bytes) + (0 if self._cap else 2)
        return min(max(count, least), self._slots_max)

    def ask(self, ticket: int, peer_id: PeerId, kind: str) -> bool:
        """Put a transfer in the queue; ``False`` if there is no room for it."""
        own_count = sum(1 for waiting in self._waiting if waiting.peer_id == peer_id)
        if len(self._waiting) >= WAITING_MAX or own_count >= WAITING_PER_PEER_MAX:
            return False
        self._waiting.append(_Waiting(ticket, peer_id, kind in URGENT_KINDS))
        return True

    def leave(self, ticket: int) -> None:
        """The reader waited too long or is gone."""
        self._waiting = [waiting for waiting in self._waiting if waiting.ticket != ticket]

    def advance(self, now: float) -> list[int]:
        """Give free slots away; return the tickets that have one now."""
        granted: list[int] = []
        while (chosen := self._choose(self.slots(now))) is not None:
            self._grant(chosen, now)
            granted.append(chosen.ticket)
        return granted

    def note_sent(self, ticket: int, size_bytes: int, now: float) -> None:
        """A part of a transfer left."""
        self._pace.note(float(size_bytes), now)
        self._chunk_size_bytes += CHUNK_WEIGHT * (max(size_bytes, CHUNK_SIZE_BYTES_MIN) - self._chunk_size_bytes)
        self._charge(self._serving[ticket], size_bytes, now)

    def must_yield(self, ticket: int, now: float) -> bool:
        """Say whether a transfer has to end before its next chunk, because others wait for its slot."""
        if now < self._serving[ticket].since + LEASE_SECONDS:
            return False
        holders = {serving.peer_id for serving in self._serving.values()}
        return any(waiting.peer_id not in holders for waiting in self._waiting)

    def end(self, ticket: int, now: float) -> None:
        """A transfer is over, whatever came of it."""
        self._charge(self._serving.pop(ticket), 0, now)
        if not self._serving:
            self._busy_since = None

    def _charge(self, serving: _Serving, size_bytes: int, now: float) -> None:
        held_size_bytes = round((now - serving.charged_at) * SLOT_BYTES_PER_SECOND)
        self._served_until[serving.peer_id] += max(size_bytes, held_size_bytes)
        serving.charged_at = now

    def _choose(self, slots: int) -> _Waiting | None:
        if not self._waiting or len(self._serving) >= self._slots_max:
            return None
        slots_held: dict[PeerId, int] = {}
        for serving in self._serving.values():
            slots_held[serving.peer_id] = slots_held.get(serving.peer_id, 0) + 1
        readers = slots_held.keys() | {waiting.peer_id for waiting in self._waiting}
        slots_each = -(-SLOTS_START // max(len(readers), 1))
        if len(self._serving) >= slots:
            # The pace may be that of slow readers, not of the link: they keep nobody else out.
            readers_max = slots if self._cap else max(slots, SLOTS_START)
            slots_each = 1 if len(slots_held) < readers_max else 0
        allowed = [waiting for waiting in self._waiting if slots_held.get(waiting.peer_id, 0) < slots_each]
        wants_urgent = (self._grant_count + 1) % ANCHOR_TURNS != 0

        def rank(waiting: _Waiting) -> tuple[bool, int, int, int]:
            share = max(self._served_until.get(waiting.peer_id, 0), self._virtual_size_bytes)
            return waiting.is_urgent is not wants_urgent, slots_held.get(waiting.peer_id, 0), share, waiting.ticket

        return min(allowed, key=rank, default=None)

    def _grant(self, chosen: _Waiting, now: float) -> None:
        self._grant_count += 1
        self._waiting.remove(chosen)
        share = max(self._served_until.pop(chosen.peer_id, 0), self._virtual_size_bytes)
        # Only what others that wait were given as well is forgotten.
        others = [self._served_until.get(waiting.peer_id, 0) for waiting in self._waiting]
        self._virtual_size_bytes = max(self._virtual_size_bytes, min([share, *others]))
        self._served_until[chosen.peer_id] = share
        if len(self._served_until) > READERS_MAX:
            self._forget_one()
        if self._busy_since is None:
            self._busy_since = now
            self._pace = Meter()
            self._pace.note(0.0, now)
        self._serving[chosen.ticket] = _Serving(chosen.peer_id, since=now, charged_at=now)

    def _forget_one(self) -> None:
        busy = {serving.peer_id for serving in self._serving.values()}
        assert len(busy) < READERS_MAX, "nobody has as many slots"
        del self._served_until[next(peer_id for peer_id in self._served_until if peer_id not in busy)]
