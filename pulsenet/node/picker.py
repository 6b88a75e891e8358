"""Which chunks of one blob to ask of whom, so that readers feed one another.

From other readers: the rarest first, ties by chance, so that readers come to hold different chunks. From the
publisher, who has to serve everybody: only what no other reader that can be asked holds. Readers that know of each
other divide even that by a hash of reader and chunk, and leave alone for a while what the publisher has given to
somebody already. So each chunk leaves the publisher few times, however many read. A reader that knows of no
other asks in the order of the blob, which lets it be decoded while it arrives.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from pulsenet.errors import RemoteProtocolError
from pulsenet.ids import Digest, PeerId
from pulsenet.node.holdings import Flags, unpack_flags
from pulsenet.node.machine import Draw
from pulsenet.wire.messages import HoldingsReply

SETTLE_SECONDS = 0.5
"""A reader that sees other readers waits so long for what they hold before it asks the publisher."""

TURN_SECONDS_MIN = 1.0
TURN_SECONDS_MAX = 10.0
"""A reader takes a chunk that is another's to fetch from the publisher after this time per reader before it."""

TURNS_MAX = 4
"""Readers that come before, at most."""

GIVEN_SECONDS = 20.0
"""How long a chunk that the publisher gave to somebody may take to come around."""

_MIX = np.uint64(0x9E3779B97F4A7C15)


class Picker:
    """The open chunks of one blob and what others told of them. Pure.

    Args:
        digests: Distinct chunks wanted, in the order of the blob.
        places: For each of them its place among the entries of the chunk list.
        entry_count: Entries of the chunk list.
        own_id: This node's key; ``None`` draws a random one, which divides the work less evenly.
        draw: Chance, for ties.
    """

    def __init__(
        self,
        digests: Sequence[Digest],
        places: Sequence[int],
        entry_count: int,
        *,
        own_id: PeerId | None,
        draw: Draw,
    ) -> None:
        self.entry_count = entry_count
        self.is_begun = False
        self._digests = tuple(digests)
        self._index = {digest: index for index, digest in enumerate(self._digests)}
        self._places = np.asarray(places, np.int64)
        self._draw = draw
        self._pending: Flags = np.zeros(len(self._digests), np.bool_)
        self._open_count = 0
        self._held: dict[PeerId, Flags] = {}
        self._given: dict[PeerId, Flags] = {}
        self._whole: set[PeerId] = set()
        self._answer_counts: dict[PeerId, int] = {}
        self._keys = np.frombuffer(b"".join(self._digests), np.uint64)[::4] if self._digests else np.zeros(0, np.uint64)
        self._own_key = np.uint64(draw(1 << 62)) if own_id is None else _key_of(own_id)
        self._lonely_since = np.zeros(len(self._digests))
        """Since when nobody but the publisher can be asked for a chunk."""

    # Open chunks

    @property
    def chunk_count(self) -> int:
        """Distinct chunks wanted, open or not."""
        return len(self._digests)

    def begin(self, now: float) -> None:
        """Chunks are asked for from now on."""
        self.is_begun = True
        self._lonely_since[:] = now

    def __len__(self) -> int:
        return self._open_count

    def open(self, digests: Iterable[Digest]) -> None:
        """These chunks may be asked for; ones that are not wanted are ignored."""
        for digest in digests:
            index = self._index.get(digest)
            if index is not None and not self._pending[index]:
                self._pending[index] = True
                self._open_count += 1

    # What others hold

    def note(self, peer_id: PeerId, reply: HoldingsReply) -> bool:
        """Take in what a peer tells; say whether it is news.

        Raises:
            RemoteProtocolError: ``schema``.
        """
        held = unpack_flags(reply.held, self.entry_count)[self._places]
        given = unpack_flags(reply.given, self.entry_count)[self._places]
        before = (self._held.get(peer_id), self._given.get(peer_id))
        self._held[peer_id], self._given[peer_id] = held, given
        self._answer_counts[peer_id] = self._answer_counts.get(peer_id, 0) + 1
        (self._whole.add if held.all() else self._whole.discard)(peer_id)
        return any(old is None or not np.array_equal(old, new) for old, new in zip(before, (held, given), strict=True))

    def forget(self, peer_id: PeerId) -> None:
        """What a peer told holds no longer."""
        self._held.pop(peer_id, None)
        self._given.pop(peer_id, None)
        self._whole.discard(peer_id)

    def knows(self, peer_id: PeerId) -> bool:
        """Say whether the peer told what it holds."""
        return peer_id in self._held

    def is_whole_at(self, peer_id: PeerId) -> bool:
        """Say whether the peer told that it holds every chunk."""
        return peer_id in self._whole

    def count_answers(self, peer_id: PeerId) -> int:
        """Return how often the peer told what it holds."""
        return self._answer_counts.get(peer_id, 0)

    def may_help(self, peer_id: PeerId) -> bool:
        """Say whether the peer told of an open chunk."""
        held = self._held.get(peer_id)
        return held is not None and bool((held & self._pending).any())

    def covers(self, peer_ids: Iterable[PeerId], missing: Collection[Digest]) -> bool:
        """Say whether every one of these chunks is held by one of these peers, as they told."""
        union = self.held_by_any(peer_ids)
        return all(union[self._index[digest]] for digest in missing)

    def held_by_any(self, peer_ids: Iterable[PeerId]) -> Flags:
        """Return which chunks one of these peers told it holds."""
        union = np.zeros(len(self._digests), np.bool_)
        for peer_id in peer_ids:
            held = self._held.get(peer_id)
            if held is not None:
                union |= held
        return union

    # Choosing

    def choose(self, allowed: Flags | None, room: int, *, in_order: bool, skip: Collection[Digest]) -> list[Digest]:
        """Return up to ``room`` open chunks, rarest first, and close them.

        Args:
            allowed: Which may be chosen; ``None`` means all.
            room: How many at most.
            in_order: Take them in the order of the blob instead.
            skip: Chunks that this provider is asked for already.
        """
        mask = self._pending if allowed is None else self._pending & allowed
        if skip:
            mask = mask.copy()
            mask[[self._index[digest] for digest in skip if digest in self._index]] = False
        indices = np.flatnonzero(mask)
        if not in_order and len(indices) > 1:
            indices = self._rarest(indices, room)
        chosen = indices[:room]
        self._pending[chosen] = False
        self._open_count -= len(chosen)
        return [self._digests[index] for index in chosen]

    def held_by(self, peer_id: PeerId) -> Flags | None:
        """Return which chunks the peer told it holds."""
        return self._held.get(peer_id)

    def at_publisher(
        self,
        publisher: PeerId,
        holders: Collection[PeerId],
        readers: Collection[PeerId],
        turn_seconds: float,
        now: float,
    ) -> Flags:
        """Return which chunks the publisher may be asked for now.

        Args:
            publisher: Whose ``given`` counts.
            holders: Peers that told what they hold and can be asked.
            readers: Peers that told and read this blob too.
            turn_seconds: About how long a chunk takes from the publisher to a reader.
            now: Monotonic time.
        """
        held = self.held_by_any(holders)
        self._lonely_since[held] = now
        turn_seconds = min(max(turn_seconds, TURN_SECONDS_MIN), TURN_SECONDS_MAX)
        waits = self._count_before(readers) * turn_seconds
        given = self._given.get(publisher)
        if given is not None:
            waits[given] = np.maximum(waits[given], GIVEN_SECONDS)
        return ~held & (now >= self._lonely_since + waits)

    def note_held(self, now: float) -> None:
        """Somebody who can be asked holds every chunk."""
        self._lonely_since[:] = now

    def _count_before(self, readers: Iterable[PeerId]) -> NDArray[np.int64]:
        """Return for each chunk how many of these readers come before this node."""
        own = _mix(self._keys, self._own_key)
        before = np.zeros(len(self._digests), np.int64)
        for peer_id in readers:
            before += _mix(self._keys, _key_of(peer_id)) < own
        return np.minimum(before, TURNS_MAX)

    def _rarest(self, indices: NDArray[np.int64], room: int) -> NDArray[np.int64]:
        """Return ``room`` of ``indices``, those that fewest peers hold first, equal ones by chance."""
        counts = np.zeros(len(indices), np.int64)
        for held in self._held.values():
            counts += held[indices]
        chosen: list[int] = []
        while len(chosen) < min(room, len(indices)):
            rarest = np.flatnonzero(counts == counts.min())
            pick = int(rarest[self._draw(len(rarest))])
            chosen.append(pick)
            counts[pick] = np.iinfo(np.int64).max
        return indices[chosen]


def check_reply(reply: object, blob_id: Digest) -> HoldingsReply:
    """Return the reply if it is one about this blob.

    Raises:
        RemoteProtocolError: ``unexpected``.
    """
    if not isinstance(reply, HoldingsReply) or reply.blob_id != blob_id:
        raise RemoteProtocolError("unexpected", f"{type(reply).__name__} where holdings are due")
    return reply


def _key_of(peer_id: PeerId) -> np.uint64:
    return np.uint64(int.from_bytes(peer_id[:8], "little"))


def _mix(keys: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Return a hash of each chunk and one peer; both are digests or keys already, so two rounds mix enough."""
    mixed = (keys ^ key) * _MIX
    mixed ^= mixed >> np.uint64(29)
    return mixed * _MIX
