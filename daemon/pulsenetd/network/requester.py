"""The asking side of streams: pooled per peer, one request at a time on each."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Final

from pulsenet import limits
from pulsenet.errors import LocalProtocolError, RemoteProtocolError, UnavailableError
from pulsenet.ids import Digest, PeerId
from pulsenet.wire.messages import (
    FEATURE_HOLDINGS,
    FEATURE_PROBES,
    Ack,
    ChunkReply,
    GetChunks,
    GetHoldings,
    Hello,
    Message,
    PushProbe,
    Refusal,
)
from pulsenetd.network.dial import shorten
from pulsenetd.network.lanes import Lanes
from pulsenetd.network.p2pd import RawStream
from pulsenetd.network.pacing import FindKind, Gate, find_no_kind
from pulsenetd.network.provider import BULK_TYPES, REPLY_TYPES, check_hello
from pulsenetd.network.streams import (
    Deadlines,
    FramedStream,
    PeerRefusedError,
    PeerUnavailableError,
    Traffic,
    stall_deadline,
)

OpenRawStream = Callable[[PeerId, float], Awaitable[RawStream]]
"""Opens a raw stream to a peer within so many seconds; UnavailableError if it cannot."""

DropConnection = Callable[[PeerId], Awaitable[None]]
"""Ends the connection to a peer, with every stream on it, so that the next stream makes a new one."""

_BULK_STREAMS_PER_PEER: Final = limits.STREAMS_PER_PEER_MAX - 1
_SILENCE_RATIO: Final = 0.9
"""A stream that stalls began to wait a little after the last byte of another."""
_ROUND_TRIP_WEIGHT: Final = 0.25
_FEATURE_OF: Final[dict[type[Message], str]] = {GetHoldings: FEATURE_HOLDINGS, PushProbe: FEATURE_PROBES}


@dataclass(slots=True)
class _PeerPool:
    """Streams this node keeps to one peer."""

    peer_id: PeerId
    lanes: Lanes = field(default_factory=lambda: Lanes(limits.STREAMS_PER_PEER_MAX, _BULK_STREAMS_PER_PEER))
    idle: deque[FramedStream] = field(default_factory=deque)
    user_count: int = 0


class Requester:
    """Sends this node's requests.

    Args:
        hello: What this node says first on every stream.
        open_raw_stream: How to reach a peer.
        deadlines: Limits of single steps.
        traffic: Counters to add to.
        clock: Monotonic seconds.
        drop_connection: Called for a peer that has answered nothing for a read stall: the connection may be dead, as
            after a change of address, and libp2p notices only after about 50 s.
        gate: Keeps the cap on what is downloaded.
    """

    def __init__(
        self,
        hello: Hello,
        open_raw_stream: OpenRawStream,
        deadlines: Deadlines,
        traffic: Traffic,
        clock: Callable[[], float] = time.monotonic,
        drop_connection: DropConnection | None = None,
        gate: Gate | None = None,
    ) -> None:
        self._gate = gate or Gate(0, clock)
        self.find_kind: FindKind = find_no_kind
        """Says what kind of blob chunks are asked of, to account for them."""
        self._hello = hello
        self._open_raw_stream = open_raw_stream
        self._deadlines = deadlines
        self._traffic = traffic
        self._clock = clock
        self._is_open = False
        self._pools: dict[PeerId, _PeerPool] = {}
        self._round_trips: dict[PeerId, float] = {}
        self._drop_connection = drop_connection
        self._silent_since: dict[PeerId, float] = {}
        """Since when peers that were asked something have sent nothing."""
        self._unasked_since: dict[PeerId, float] = {}
        """Since when nothing is asked of those that were silent at last."""

    def open(self) -> None:
        """Keep streams for later requests from now on."""
        self._is_open = True

    def close(self) -> None:
        """Drop every idle stream; those in use end with the process behind them."""
        self._is_open = False
        for pool in self._pools.values():
            while pool.idle:
                pool.idle.popleft().abort()

    def get_round_trip(self, peer_id: PeerId) -> float | None:
        """Return the smoothed seconds from our Hello to theirs, if a stream was ever opened."""
        return self._round_trips.get(peer_id)

    def forget_others(self, peer_ids: Collection[PeerId]) -> None:
        """Drop what was measured of peers that are not among these."""
        self._round_trips = {peer: value for peer, value in self._round_trips.items() if peer in peer_ids}
        self._silent_since = {peer: since for peer, since in self._silent_since.items() if peer in peer_ids}
        self._unasked_since = {peer: at for peer, at in self._unasked_since.items() if peer in peer_ids}

    def close_unused(self) -> None:
        """Close streams that have not been used for a while, before the provider does."""
        used_since = self._clock() - self._deadlines.requester_idle_seconds
        for peer_id, pool in list(self._pools.items()):
            while pool.idle and (pool.idle[0].idle_since < used_since or not pool.idle[0].is_quiet):
                pool.idle.popleft().close()
            self._forget_empty(peer_id, pool)

    async def request(
        self,
        peer_id: PeerId,
        message: Message,
        timeout_seconds: float,
        on_reply: Callable[[Message], None] | None = None,
    ) -> list[Message]:
        """Send a request and return its replies: one, or for ``GetChunks`` one per digest in their order.

        Args:
            peer_id: Whom to ask; it must be connected or findable by libp2p.
            message: The request.
            timeout_seconds: Limit for everything, waiting for a free stream included.
            on_reply: Also told each reply as it arrives, so that chunks count before the last one is in.

        Raises:
            PeerUnavailableError: nobody answered in time (``timeout``, ``closed``, ``unreachable``).
            PeerRefusedError: the peer will not answer.
            RemoteProtocolError: the peer broke the specification; its stream is closed.
        """
        if type(message) not in REPLY_TYPES:
            raise LocalProtocolError(f"{type(message).__name__} is no request")
        pool = self._pools.setdefault(peer_id, _PeerPool(peer_id))
        pool.user_count += 1
        if self._unasked_since.pop(peer_id, float("inf")) < self._clock() - self._silence_seconds:
            del self._silent_since[peer_id]  # nobody asked, so it had nothing to say for so long
        self._silent_since.setdefault(peer_id, self._clock())
        is_silent = False
        try:
            async with stall_deadline(timeout_seconds, f"no answer to {type(message).__name__}"):
                return await self._request_over_lanes(peer_id, pool, message, on_reply)
        except RemoteProtocolError as error:
            self._traffic.rejected[error.code] += 1
            raise
        except PeerUnavailableError as error:
            is_silent = error.reason in ("timeout", "unreachable")
            if is_silent:
                await self._drop_if_silent(peer_id)
            raise
        finally:
            pool.user_count -= 1
            if not pool.user_count:
                if is_silent and peer_id in self._silent_since:
                    self._unasked_since[peer_id] = self._clock()
                else:
                    self._silent_since.pop(peer_id, None)
            self._forget_empty(peer_id, pool)

    async def _request_over_lanes(
        self, peer_id: PeerId, pool: _PeerPool, message: Message, on_reply: Callable[[Message], None] | None
    ) -> list[Message]:
        """Ask for chunks over all streams that are free: a single one is held up by its window, and behind losses.

        What one stream brings counts even if another fails.
        """

        async def ask(part: Message) -> list[Message]:
            async with pool.lanes.enter(bulk=isinstance(part, BULK_TYPES)):
                return await self._request_once_or_twice(peer_id, pool, part, on_reply)

        if not isinstance(message, GetChunks):
            return await ask(message)
        parts = split_chunks(message, pool.lanes.bulk_free)
        with self._traffic.meters["received"].moving():
            if len(parts) == 1:
                return await ask(message)
            outcomes = await asyncio.gather(*map(ask, parts), return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if errors:
            raise next((error for error in errors if isinstance(error, RemoteProtocolError)), errors[0])
        return [reply for outcome in outcomes if not isinstance(outcome, BaseException) for reply in outcome]

    async def _request_once_or_twice(
        self, peer_id: PeerId, pool: _PeerPool, message: Message, on_reply: Callable[[Message], None] | None
    ) -> list[Message]:
        while pool.idle:
            stream = pool.idle.pop()
            if not stream.is_quiet:
                stream.abort()
                continue
            replies: list[Message] = []
            try:
                return await self._exchange(pool, stream, message, replies, on_reply)
            except PeerUnavailableError as error:
                # the peer may have closed the idle stream a moment ago: that says nothing about the peer
                if error.reason != "closed" or replies:
                    raise
                break
        stream = await self._open_stream(peer_id)
        return await self._exchange(pool, stream, message, [], on_reply)

    async def _exchange(
        self,
        pool: _PeerPool,
        stream: FramedStream,
        message: Message,
        replies: list[Message],
        on_reply: Callable[[Message], None] | None,
    ) -> list[Message]:
        """Send one request over a stream; the stream goes back to the pool only if all went well."""

        def take(reply: Message) -> None:
            replies.append(reply)
            if on_reply is not None:
                on_reply(reply)

        done = False
        try:
            _check_feature(stream, message)
            await stream.send(message)
            if isinstance(message, GetChunks):
                for digest in message.digests:
                    take(await self._receive_chunk(pool.peer_id, stream, message, digest))
                await stream.send(Ack())
            else:
                take(await self._receive_reply(stream, message))
            done = True
        except PeerRefusedError:
            done = not replies
            raise
        finally:
            if done and self._is_open and stream.is_quiet:
                stream.idle_since = self._clock()
                pool.idle.append(stream)
            else:
                stream.abort()
        return replies

    async def _receive_chunk(
        self, peer_id: PeerId, stream: FramedStream, message: GetChunks, digest: Digest
    ) -> Message:
        # Not read, so not acknowledged by TCP for long: the sender slows down with us.
        async with self._gate.passing() as passage:
            reply = await self._receive_reply(stream, message)
            assert isinstance(reply, ChunkReply)
            if reply.digest != digest:
                raise RemoteProtocolError("unexpected-message", "a chunk that was not asked for")
            passage.size_bytes = len(reply.data or b"")
        self._traffic.note_chunk(peer_id, "received", await self.find_kind(message), passage.size_bytes)
        return reply

    async def _receive_reply(self, stream: FramedStream, request: Message) -> Message:
        reply = await stream.receive()
        if reply is None:
            raise PeerUnavailableError("closed", f"no answer to {type(request).__name__}")
        if isinstance(reply, Refusal):
            raise PeerRefusedError(reply)
        if not isinstance(reply, REPLY_TYPES[type(request)]):
            raise RemoteProtocolError("unexpected-message", f"{type(reply).__name__} to {type(request).__name__}")
        return reply

    async def _open_stream(self, peer_id: PeerId) -> FramedStream:
        open_seconds = self._deadlines.open_seconds
        try:
            reader, writer = await self._open_raw_stream(peer_id, open_seconds)
        except UnavailableError as error:
            raise PeerUnavailableError("unreachable", shorten(str(error))) from error
        self._traffic.streams_opened["outbound"] += 1
        stream = FramedStream(reader, writer, self._deadlines, self._traffic)
        stream.on_bytes = partial(self._note_bytes, peer_id)
        try:
            sent_at = self._clock()
            async with stall_deadline(open_seconds, "no Hello"):
                await stream.send(self._hello)
                theirs = await stream.receive(first_byte_seconds=open_seconds)
            if theirs is None:
                raise PeerUnavailableError("closed", "before its Hello")
            refusal = theirs if isinstance(theirs, Refusal) else check_hello(self._hello, theirs)
            if refusal is not None:
                raise PeerRefusedError(refusal)
            assert isinstance(theirs, Hello)
            stream.features = theirs.features
        except BaseException:
            stream.abort()
            raise
        self._learn_round_trip(peer_id, self._clock() - sent_at)
        return stream

    def _note_bytes(self, peer_id: PeerId) -> None:
        self._silent_since[peer_id] = self._clock()

    async def _drop_if_silent(self, peer_id: PeerId) -> None:
        since = self._silent_since.get(peer_id)
        if self._drop_connection is None or since is None or self._clock() - since < self._silence_seconds:
            return
        # One drop for all requests that fail of it: the next has to wait as long again.
        self._silent_since[peer_id] = self._clock()
        await self._drop_connection(peer_id)

    @property
    def _silence_seconds(self) -> float:
        return self._deadlines.read_stall_seconds * _SILENCE_RATIO

    def _learn_round_trip(self, peer_id: PeerId, seconds: float) -> None:
        known = self._round_trips.get(peer_id, seconds)
        self._round_trips[peer_id] = known + _ROUND_TRIP_WEIGHT * (seconds - known)

    def _forget_empty(self, peer_id: PeerId, pool: _PeerPool) -> None:
        if not pool.user_count and not pool.idle and self._pools.get(peer_id) is pool:
            del self._pools[peer_id]


def _check_feature(stream: FramedStream, message: Message) -> None:
    """Send nobody what their Hello does not say they know: they would close the stream and count it (SPEC section 3).

    Raises:
        PeerRefusedError: ``unexpected``, as a provider that knows the message and not its use would say.
    """
    feature = _FEATURE_OF.get(type(message))
    if feature is not None and feature not in stream.features:
        raise PeerRefusedError(Refusal("unexpected", f"the peer does not know {type(message).__name__}", 0))


def split_chunks(request: GetChunks, part_count: int) -> list[GetChunks]:
    """Return requests for the same chunks in the same order: as many as asked for, as long as each has a chunk."""
    count = max(1, min(part_count, len(request.digests)))
    cuts = [len(request.digests) * index // count for index in range(count + 1)]
    return [GetChunks(request.digests[start:end], request.blob_id) for start, end in pairwise(cuts)]
