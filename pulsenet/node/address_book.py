"""Peers this node could dial: bootstraps, peers it knew before, peers it was told about."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Annotated

from pulsenet.errors import RemoteProtocolError, StorageError
from pulsenet.ids import PeerId
from pulsenet.node.machine import Draw, draw_backoff_seconds
from pulsenet.wire.messages import PeerAddress
from pulsenet.wire.schema import CountMax, decode_value, encode_value

REMEMBERED_MAX = 64
"""Peers kept beside the bootstraps. Those that once answered stay longest."""

DIAL_SECONDS_MAX = 30.0
"""A dial the shell never answered counts as failed after this; p2pd gives up much earlier."""


@dataclass(frozen=True, slots=True)
class _Saved:
    """The form kept on disk: peers that answered, the latest first."""

    peers: Annotated[tuple[PeerAddress, ...], CountMax(REMEMBERED_MAX)]


@dataclass(slots=True)
class _Entry:
    addresses: tuple[str, ...]
    is_bootstrap: bool = False
    answered: int = 0
    """Order in which peers last answered; 0 for one that never did."""
    is_sought: bool = False
    """Whether this node reached it by a dial of its own, in this life."""
    failure_count: int = 0
    dial_not_before: float = float("-inf")
    dialling_since: float | None = None


class AddressBook:
    """Bounded, with a back-off per peer.

    Args:
        peer_id: This node, which is never dialled.
        bootstraps: Always kept, in the order given.
        saved: What :meth:`encode` returned earlier, or ``None``.
        draw: Chance, for jitter.

    Raises:
        StorageError: ``saved`` is damaged.
    """

    def __init__(self, peer_id: PeerId, bootstraps: Iterable[PeerAddress], saved: bytes | None, draw: Draw) -> None:
        self._peer_id = peer_id
        self._draw = draw
        self._answer_count = 0
        self._entries: dict[PeerId, _Entry] = {}
        for peer in bootstraps:
            if peer.peer_id != peer_id:
                self._entries[peer.peer_id] = _Entry(peer.addresses, is_bootstrap=True)
        for peer in reversed(_decode(saved)):
            self.confirm(peer.peer_id, peer.addresses, is_sought=False)

    def __len__(self) -> int:
        return len(self._entries)

    def addresses_of(self, peer_id: PeerId) -> tuple[str, ...]:
        """Return where the peer can be dialled; empty if unknown."""
        entry = self._entries.get(peer_id)
        return () if entry is None else entry.addresses

    def learn(self, peer_id: PeerId, addresses: tuple[str, ...]) -> None:
        """Take in hearsay: it adds a peer or its newer address, but displaces nobody who ever answered."""
        if peer_id == self._peer_id or not addresses:
            return
        entry = self._entries.get(peer_id)
        if entry is None:
            if self._make_room():
                self._entries[peer_id] = _Entry(addresses)
        elif not entry.answered and not entry.is_bootstrap:
            entry.addresses = addresses

    def confirm(self, peer_id: PeerId, addresses: tuple[str, ...], *, is_sought: bool = True) -> None:
        """The peer answered: remember it, and forget its failures.

        Args:
            peer_id: Whose key.
            addresses: Where it was reached.
            is_sought: Whether this node dialled it. Anybody may come here, with as many keys as they like: those that
                did displace nobody whom this node went to.
        """
        if peer_id == self._peer_id:
            return
        entry = self._entries.get(peer_id)
        if entry is None:
            if not addresses:
                return
            if not self._make_room():
                first = min(self._others(), key=self._rank_remembered)
                if self._entries[first].is_sought and not is_sought:
                    return
                del self._entries[first]
            entry = self._entries[peer_id] = _Entry(addresses)
        self._answer_count += 1
        entry.addresses = addresses or entry.addresses
        entry.answered = self._answer_count
        entry.is_sought |= is_sought
        entry.failure_count = 0
        entry.dial_not_before = float("-inf")
        entry.dialling_since = None

    def fail(self, peer_id: PeerId, now: float) -> None:
        """A dial failed, or a connection was lost: wait longer each time before the next dial, with jitter."""
        entry = self._entries.get(peer_id)
        if entry is None:
            return
        entry.dial_not_before = now + draw_backoff_seconds(self._draw, entry.failure_count)
        entry.failure_count += 1
        entry.dialling_since = None

    def expire_dials(self, now: float) -> None:
        """Count dials without an answer as failed."""
        for peer_id, entry in self._entries.items():
            if entry.dialling_since is not None and now >= entry.dialling_since + DIAL_SECONDS_MAX:
                self.fail(peer_id, now)

    @property
    def dialling_count(self) -> int:
        """Dials that have no answer yet."""
        return sum(entry.dialling_since is not None for entry in self._entries.values())

    def choose(self, connected: Collection[PeerId], now: float) -> PeerId | None:
        """Return whom to dial next: bootstraps first, then who failed least, then by chance; ``None`` if nobody."""
        due = [peer for peer, entry in self._idle(connected) if entry.dial_not_before <= now]
        if not due:
            return None

        def rank(peer_id: PeerId) -> tuple[bool, int]:
            entry = self._entries[peer_id]
            return (not entry.is_bootstrap, entry.failure_count)

        best = min(map(rank, due))
        equals = [peer_id for peer_id in due if rank(peer_id) == best]
        return equals[self._draw(len(equals))]

    def start_dial(self, peer_id: PeerId, now: float) -> tuple[str, ...]:
        """Note that a dial starts, and return where to."""
        entry = self._entries[peer_id]
        entry.dialling_since = now
        return entry.addresses

    def next_dial_at(self, connected: Collection[PeerId]) -> float | None:
        """Return the earliest time :meth:`choose` may name somebody; ``None`` if there is nobody to dial."""
        return min((entry.dial_not_before for _, entry in self._idle(connected)), default=None)

    def encode(self) -> bytes:
        """Return the peers that answered, for the next start."""
        answered = [peer for peer in self._entries if self._entries[peer].answered]
        answered.sort(key=lambda peer: self._entries[peer].answered, reverse=True)
        peers = tuple(PeerAddress(peer, self._entries[peer].addresses) for peer in answered[:REMEMBERED_MAX])
        return encode_value(_Saved(peers))

    def _idle(self, connected: Collection[PeerId]) -> list[tuple[PeerId, _Entry]]:
        return [
            (peer_id, entry)
            for peer_id, entry in self._entries.items()
            if peer_id not in connected and entry.dialling_since is None
        ]

    def _others(self) -> list[PeerId]:
        return [peer_id for peer_id, entry in self._entries.items() if not entry.is_bootstrap]

    def _rank_remembered(self, peer_id: PeerId) -> tuple[bool, int]:
        entry = self._entries[peer_id]
        return entry.is_sought, entry.answered

    def _make_room(self) -> bool:
        """Say whether there is room for one more; hearsay gives way, the oldest first."""
        others = self._others()
        if len(others) < REMEMBERED_MAX:
            return True
        hearsay = [peer_id for peer_id in others if not self._entries[peer_id].answered]
        if not hearsay:
            return False
        del self._entries[hearsay[0]]
        return True


def _decode(saved: bytes | None) -> tuple[PeerAddress, ...]:
    if saved is None:
        return ()
    try:
        return decode_value(_Saved, saved).peers
    except RemoteProtocolError as error:
        raise StorageError(f"the saved list of peers is damaged: {error}") from error
