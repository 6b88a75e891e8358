"""The peers of a node: who they are, and how much each feeds it or is fed by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pulsenet.ids import PeerId
from pulsenet.node.mesh import Mesh
from pulsenetd.identity import to_libp2p_text
from pulsenetd.network.transport import PeerLink

PEERS_SHOWN_MAX: Final = 64
DIRECTIONS: Final = ("received", "sent")


class PeerMeter:
    """Rates by peer, between one look and the next."""

    def __init__(self) -> None:
        self._before: dict[PeerId, dict[str, int]] = {}
        self._at: float | None = None

    def measure(self, now: float, counted: Mapping[PeerId, Mapping[str, int]]) -> dict[PeerId, dict[str, float]]:
        """Return bytes per second by peer and direction; nothing at the first look.

        Args:
            now: Monotonic seconds.
            counted: Bytes by peer and direction; a peer may be forgotten and begin again at 0.
        """
        totals = {peer_id: {name: sizes.get(name, 0) for name in DIRECTIONS} for peer_id, sizes in counted.items()}
        before, at, self._before, self._at = self._before, self._at, totals, now
        if at is None or now <= at:
            return {}
        return {
            peer_id: {
                name: max(0, size - before.get(peer_id, {}).get(name, 0)) / (now - at) for name, size in sizes.items()
            }
            for peer_id, sizes in totals.items()
        }


def list_peers(
    links: Sequence[PeerLink],
    mesh: Mesh,
    counted: Mapping[PeerId, Mapping[str, int]],
    rates: Mapping[PeerId, Mapping[str, float]],
) -> list[dict[str, Any]]:
    """Return the peers with a connection, and those that moved bytes lately, busiest first; never an address.

    Args:
        links: Connections, as libp2p sees them.
        mesh: Knows who is a neighbour, and what each said it holds.
        counted: Bytes of chunks by peer and direction.
        rates: The same a second.
    """
    by_peer = {link.peer_id: link for link in links}
    neighbours = frozenset(mesh.neighbours)
    peers = []
    for peer_id in {**by_peer, **counted}:
        link, have = by_peer.get(peer_id), mesh.have_of(peer_id)
        sizes, speeds = counted.get(peer_id, {}), rates.get(peer_id, {})
        peers.append(
            {
                "peer_id": to_libp2p_text(peer_id),
                "role": None if have is None else have.role,
                "version": None if have is None or not have.version_last else f"{have.epoch}.{have.version_last}",
                "is_connected": link is not None,
                "is_neighbour": peer_id in neighbours,
                "is_outbound": link is not None and link.outbound,
                "round_trip_seconds": None if link is None else link.round_trip_seconds,
                **{f"{name}_bytes": sizes.get(name, 0) for name in DIRECTIONS},
                **{f"{name}_bytes_per_second": speeds.get(name) for name in DIRECTIONS},
            }
        )
    peers.sort(key=_busiest_first)
    return peers[:PEERS_SHOWN_MAX]


def _busiest_first(peer: Mapping[str, Any]) -> tuple[Any, ...]:
    rate = sum(peer[f"{name}_bytes_per_second"] or 0.0 for name in DIRECTIONS)
    size = sum(peer[f"{name}_bytes"] for name in DIRECTIONS)
    return -rate, -size, not peer["is_connected"], peer["peer_id"]
