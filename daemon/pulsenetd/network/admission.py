"""Who is let in, and how much of this node one peer, and all that nobody listed, may take up.

Keys that the run's descriptor lists share the whole of each budget; those it does not list share a part, so that any
number of keys made for the purpose leaves room for the run's own.
"""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

from pulsenet import limits
from pulsenet.ids import PeerId
from pulsenet.node.rate import RateCap
from pulsenet.node.standing import Standing
from pulsenet.wire.messages import GetChunks, Message, Refusal

STREAMS_ACCEPTED_PER_PEER_MAX: Final = 2 * limits.STREAMS_PER_PEER_MAX
"""Streams served to one peer: twice what it may keep, for those it lost and we have not noticed."""

STREAMS_ACCEPTED_MAX: Final = 1_024
"""Streams served to all peers; an idle one costs a few kilobytes."""

UNLISTED_STREAMS_ACCEPTED_MAX: Final = 768
"""Of those, streams of keys the run does not list."""

REQUESTS_PER_SECOND: Final = 100.0
REQUESTS_BURST: Final = 400
"""Requests answered to one peer, those for chunks apart."""

CHUNK_REQUESTS_PER_SECOND: Final = 1_000.0
CHUNK_REQUESTS_BURST: Final = 2_000
"""Requests for chunks looked at: far more than any link carries, for upload slots bound what is sent."""

UNLISTED_REQUESTS_PER_SECOND: Final = 2_000.0
UNLISTED_REQUESTS_BURST: Final = 4_000
"""Requests answered to all keys the run does not list together, those for chunks apart."""

BUFFERED_SIZE_BYTES_MAX: Final = 128 << 20
"""Frames that have not arrived whole, or have not left, of all streams served."""

UNLISTED_BUFFERED_SIZE_BYTES_MAX: Final = 96 << 20
"""Of those, frames of keys the run does not list."""

PEERS_MAX: Final = 2_048
"""Peers whose rate is remembered; the one heard of longest ago is forgotten beyond."""

RETRY_MS: Final = 1_000


class Rules(Protocol):
    """What the run's newest descriptor says about a key."""

    def admits(self, peer_id: PeerId) -> bool:
        """Whether the peer may ask anything at all."""
        ...

    def is_member(self, peer_id: PeerId) -> bool:
        """Whether the descriptor lists it in any role."""
        ...


@dataclass(slots=True)
class _Rates:
    requests: RateCap = field(default_factory=lambda: RateCap(per_second=REQUESTS_PER_SECOND, burst=REQUESTS_BURST))
    chunks: RateCap = field(
        default_factory=lambda: RateCap(per_second=CHUNK_REQUESTS_PER_SECOND, burst=CHUNK_REQUESTS_BURST)
    )


class Doorkeeper:
    """Keeps the budgets of the answering side.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.rules: Rules | None = None
        """``None`` until the run is known; everybody is let in, and nobody is listed."""
        self.standing = Standing()
        self._streams: Counter[PeerId] = Counter()
        self._unlisted_stream_count = 0
        self._rates: OrderedDict[PeerId, _Rates] = OrderedDict()
        self._unlisted_rate = RateCap(per_second=UNLISTED_REQUESTS_PER_SECOND, burst=UNLISTED_REQUESTS_BURST)
        self._buffered: Counter[bool] = Counter()
        """Bytes, of keys that are listed or not."""

    @property
    def peers(self) -> frozenset[PeerId]:
        """Peers that have a stream to this node open."""
        return frozenset(self._streams)

    @property
    def buffered_size_bytes(self) -> int:
        """Bytes of frames that are held at present."""
        return self._buffered.total()

    @contextlib.contextmanager
    def enter(self, peer_id: PeerId) -> Iterator[Refusal | None]:
        """Count a stream while the block runs; gives the block why it must not be served, if so."""
        is_listed = self._is_listed(peer_id)
        self._streams[peer_id] += 1
        self._unlisted_stream_count += not is_listed
        try:
            yield self.refuse_peer(peer_id) or self._refuse_stream(peer_id, is_listed=is_listed)
        finally:
            self._unlisted_stream_count -= not is_listed
            self._streams[peer_id] -= 1
            if not self._streams[peer_id]:
                del self._streams[peer_id]

    def refuse_peer(self, peer_id: PeerId) -> Refusal | None:
        """Return why the peer is answered nothing at all, if so; asked at each request too, for rules change."""
        wait_seconds = self.standing.wait_seconds(peer_id, self._clock())
        if wait_seconds > 0:
            return Refusal("struck-out", "this peer broke the specification too often", int(1000 * wait_seconds) + 1)
        if self.rules is not None and not self.rules.admits(peer_id):
            return Refusal("not-admitted", "this run serves its members only", 0)
        return None

    def refuse_request(self, peer_id: PeerId, request: Message) -> Refusal | None:
        """Count a request; return why it is not answered now, if so."""
        rates = self._rates.pop(peer_id, None) or _Rates()
        self._rates[peer_id] = rates
        if len(self._rates) > PEERS_MAX:
            self._rates.popitem(last=False)
        now = self._clock()
        is_for_chunks = isinstance(request, GetChunks)
        if not (rates.chunks if is_for_chunks else rates.requests).take(now):
            return Refusal("busy", "too many requests of this peer", RETRY_MS)
        if not is_for_chunks and not self._is_listed(peer_id) and not self._unlisted_rate.take(now):
            return Refusal("busy", "too many requests of peers the run does not list", RETRY_MS)
        return None

    def open_account(self, peer_id: PeerId) -> Account:
        """Return where one stream's bytes are counted."""
        return Account(self, is_listed=self._is_listed(peer_id))

    def buffer(self, size_bytes: int, *, is_listed: bool) -> bool:
        """Count bytes that are held from now on (or, below 0, no more); ``False`` if there is no room for them."""
        if size_bytes > 0:
            no_room = self._buffered.total() + size_bytes > BUFFERED_SIZE_BYTES_MAX
            if no_room or (not is_listed and self._buffered[False] + size_bytes > UNLISTED_BUFFERED_SIZE_BYTES_MAX):
                return False
        self._buffered[is_listed] += size_bytes
        return True

    def _refuse_stream(self, peer_id: PeerId, *, is_listed: bool) -> Refusal | None:
        is_full = (
            self._streams[peer_id] > STREAMS_ACCEPTED_PER_PEER_MAX
            or self._streams.total() > STREAMS_ACCEPTED_MAX
            or (not is_listed and self._unlisted_stream_count > UNLISTED_STREAMS_ACCEPTED_MAX)
        )
        return Refusal("too-many-streams", "close some first", RETRY_MS) if is_full else None

    def _is_listed(self, peer_id: PeerId) -> bool:
        return self.rules is not None and self.rules.is_member(peer_id)


class Account:
    """The bytes that one stream holds; give them back with :meth:`close`."""

    __slots__ = ("_arriving", "_doorkeeper", "_is_listed", "_leaving")

    def __init__(self, doorkeeper: Doorkeeper, *, is_listed: bool) -> None:
        self._doorkeeper = doorkeeper
        self._is_listed = is_listed
        self._arriving = 0
        self._leaving = 0

    def note_arriving(self, size_bytes: int) -> bool:
        """So much of a frame is here that is not whole yet; ``False`` if there is no room for it."""
        if not self._doorkeeper.buffer(size_bytes - self._arriving, is_listed=self._is_listed):
            return False
        self._arriving = size_bytes
        return True

    def note_leaving(self, size_bytes: int) -> bool:
        """So much of a frame waits for the peer to read it; ``False`` if there is no room for it."""
        if not self._doorkeeper.buffer(size_bytes - self._leaving, is_listed=self._is_listed):
            return False
        self._leaving = size_bytes
        return True

    def close(self) -> None:
        """The stream is over."""
        self.note_arriving(0)
        self.note_leaving(0)
