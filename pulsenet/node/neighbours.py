"""One connected peer as the mesh sees it, and which of them become neighbours."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from pulsenet import limits
from pulsenet.ids import Digest, PeerId
from pulsenet.node.machine import Draw, draw_backoff_seconds
from pulsenet.node.rate import RateCap

KNOWN_MAX = 32
"""Heads and proofs remembered per peer; the one told longest ago is forgotten beyond."""

PUSHES_PER_SECOND = 2.0
PUSHES_BURST = 4
"""Pushes to one peer. What is held back is not queued: the next push carries the newest head."""

INCOMING_PER_SECOND = 10.0
INCOMING_BURST = 40
"""Records of one peer looked at; a signature check costs about 0.1 ms, so a flood costs little."""


class Link:
    """What was said to and heard from one connected peer.

    Args:
        peer_id: The peer.
        outbound: Whether this node opened the connection.
    """

    __slots__ = (
        "_failure_count",
        "_known",
        "_pushing",
        "_retry_at",
        "incoming",
        "outbound",
        "outgoing",
        "peer_id",
        "rtt_seconds",
    )

    def __init__(self, peer_id: PeerId, outbound: bool) -> None:
        self.peer_id = peer_id
        self.outbound = outbound
        self.rtt_seconds: float | None = None
        """Time the last exchange took; ``None`` before the first."""
        self.incoming = RateCap(per_second=INCOMING_PER_SECOND, burst=INCOMING_BURST)
        self.outgoing = RateCap(per_second=PUSHES_PER_SECOND, burst=PUSHES_BURST)
        self._known: OrderedDict[Digest, None] = OrderedDict()
        self._pushing: dict[int, Digest] = {}
        self._failure_count = 0
        self._retry_at = float("-inf")

    def knows(self, digest: Digest) -> bool:
        """Say whether the peer has this item, from us or by itself."""
        return digest in self._known

    def note_known(self, digest: Digest) -> None:
        """The peer has this item."""
        self._known[digest] = None
        self._known.move_to_end(digest)
        if len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)

    def wants_at(self, digest: Digest, now: float) -> float | None:
        """Return from when the item may be pushed to the peer; ``None`` if it has it already."""
        return None if self.knows(digest) else max(self._retry_at, self.outgoing.next_at(now))

    def start_push(self, request_id: int, digest: Digest) -> None:
        """The item is on its way, so it is not sent again."""
        self._pushing[request_id] = digest
        self.note_known(digest)

    def end_push(self, request_id: int) -> None:
        """The peer answered: whatever it made of the item, it has seen it."""
        if self._pushing.pop(request_id, None) is not None:
            self._failure_count = 0

    def fail_push(self, request_id: int, now: float, draw: Draw) -> None:
        """The item may not have arrived: push it again, later each time."""
        digest = self._pushing.pop(request_id, None)
        if digest is None:
            return
        self._known.pop(digest, None)
        self._retry_at = now + draw_backoff_seconds(draw, self._failure_count)
        self._failure_count += 1


def choose_neighbours(
    links: Mapping[PeerId, Link], current: Sequence[PeerId], outbound_min: int, draw: Draw
) -> tuple[PeerId, ...]:
    """Return up to ``NEIGHBOURS_MAX`` connected peers, ascending.

    The ``current`` ones that are still connected stay. Then, while there is room: outbound peers by chance
    until there are ``outbound_min``, the nearest by round trip until there are ``NEIGHBOURS_MIN``, and the
    rest by chance, so that the mesh is neither all near nor all chosen by others.
    """
    chosen = [peer_id for peer_id in current if peer_id in links][: limits.NEIGHBOURS_MAX]
    others = sorted(peer_id for peer_id in links if peer_id not in chosen)

    def pick(candidates: Sequence[PeerId]) -> None:
        peer_id = candidates[draw(len(candidates))]
        chosen.append(peer_id)
        others.remove(peer_id)

    missing = outbound_min - sum(links[peer_id].outbound for peer_id in chosen)
    outbound = [peer_id for peer_id in others if links[peer_id].outbound]
    while missing > 0 and outbound:
        if len(chosen) >= limits.NEIGHBOURS_MAX:
            # Inbound peers filled the table: the last of them gives way.
            given_up = next(peer_id for peer_id in reversed(chosen) if not links[peer_id].outbound)
            chosen.remove(given_up)
            others.append(given_up)
        pick(outbound)
        outbound = [peer_id for peer_id in others if links[peer_id].outbound]
        missing -= 1
    near = sorted((rtt, peer_id) for peer_id in others if (rtt := links[peer_id].rtt_seconds) is not None)
    for _, peer_id in near[: max(limits.NEIGHBOURS_MIN - len(chosen), 0)]:
        pick([peer_id])
    while others and len(chosen) < limits.NEIGHBOURS_MAX:
        pick(others)
    return tuple(sorted(chosen))
