"""Pools of streams; requests over real streams are tested with the transport."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from functools import partial

import pytest
from networks import HELLO, PEER, open_line

from pulsenet.errors import UnavailableError
from pulsenet.ids import Digest, PeerId
from pulsenet.node.rate import LATE_SECONDS
from pulsenet.wire.messages import (
    FEATURES,
    ChunkReply,
    GetChunks,
    GetHead,
    GetHoldings,
    HeadReply,
    Hello,
    HoldingsReply,
    Message,
    PushProbe,
    PushReply,
)
from pulsenetd.network.p2pd import RawStream
from pulsenetd.network.pacing import Gate
from pulsenetd.network.provider import Provider
from pulsenetd.network.requester import Requester
from pulsenetd.network.streams import Deadlines, PeerRefusedError, PeerUnavailableError, Traffic

BLOB = Digest(bytes(32))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@contextlib.asynccontextmanager
async def connected(clock: Clock, provider_hello: Hello = HELLO) -> AsyncIterator[tuple[Requester, Provider, Traffic]]:
    """A requester and a provider over loopback TCP instead of libp2p."""
    provider = Provider(provider_hello, Deadlines(), Traffic())

    async def answer(_peer: PeerId, message: Message) -> list[Message]:
        if isinstance(message, PushProbe):
            return [PushReply(True, "")]
        return [HoldingsReply(message.blob_id, b"", b"")] if isinstance(message, GetHoldings) else [HeadReply(None)]

    provider.handler = answer
    traffic = Traffic()
    make = partial(Requester, HELLO, deadlines=Deadlines(), traffic=traffic, clock=clock)
    async with open_line(provider, make) as requester:
        yield requester, provider, traffic


async def test_streams_unused_for_a_minute_are_closed_and_used_ones_kept() -> None:
    clock = Clock()
    async with connected(clock) as (requester, _, traffic):
        await requester.request(PEER, GetHead(), 5)
        clock.now = 59.0
        requester.close_unused()
        await requester.request(PEER, GetHead(), 5)
        assert traffic.streams_opened["outbound"] == 1
        clock.now = 120.0
        requester.close_unused()
        assert requester._pools == {}
        await requester.request(PEER, GetHead(), 5)
        assert traffic.streams_opened["outbound"] == 2


async def test_round_trips_are_smoothed_and_forgotten_with_the_peer() -> None:
    clock = Clock()
    async with connected(clock) as (requester, _, _):
        assert requester.get_round_trip(PEER) is None
        await requester.request(PEER, GetHead(), 5)
        assert requester.get_round_trip(PEER) == 0.0
        requester._learn_round_trip(PEER, 0.4)
        assert requester.get_round_trip(PEER) == pytest.approx(0.1)
        requester.forget_others([PEER])
        assert requester.get_round_trip(PEER) is not None
        requester.forget_others([])
        assert requester.get_round_trip(PEER) is None


async def test_a_pool_of_a_peer_that_was_never_reached_leaves_nothing_behind() -> None:
    async def fail(_peer: PeerId, _timeout_seconds: float) -> RawStream:
        raise UnavailableError("no\nroute")

    requester = Requester(HELLO, fail, Deadlines(), Traffic())
    with pytest.raises(PeerUnavailableError, match="unreachable: no route"):
        await requester.request(PEER, GetHead(), 5)
    assert requester._pools == {}


async def test_a_closed_requester_keeps_no_streams() -> None:
    async with connected(Clock()) as (requester, _, _):
        await requester.request(PEER, GetHead(), 5)
        requester.close()
        await requester.request(PEER, GetHead(), 5)
        assert all(not pool.idle for pool in requester._pools.values())


async def test_a_message_of_a_feature_goes_only_to_those_whose_hello_names_it() -> None:
    async with connected(Clock(), HELLO) as (requester, _, traffic):
        for _ in range(2):
            with pytest.raises(PeerRefusedError, match="unexpected"):
                await requester.request(PEER, GetHoldings(BLOB), 5)
            with pytest.raises(PeerRefusedError, match="unexpected"):
                await requester.request(PEER, PushProbe(b"probe"), 5)
        # An older node never saw it, so its stream still serves.
        assert await requester.request(PEER, GetHead(), 5) == [HeadReply(None)]
        assert traffic.streams_opened["outbound"] == 1
    async with connected(Clock(), dataclasses.replace(HELLO, features=FEATURES)) as (requester, _, _):
        assert await requester.request(PEER, GetHoldings(BLOB), 5) == [HoldingsReply(BLOB, b"", b"")]
        assert await requester.request(PEER, PushProbe(b"probe"), 5) == [PushReply(True, "")]


async def test_chunks_are_taken_no_faster_than_the_cap_and_counted_by_kind() -> None:
    """Between two chunks the requester reads nothing, so the sender has to wait as well."""
    waits: list[float] = []

    class Watched(Gate):
        async def take(self, size_bytes: int) -> None:
            waits.append(self._cap.wait_seconds(0.0))
            self._cap.note(size_bytes, 0.0)

    async def find_kind(_request: GetChunks) -> str:
        return "anchor"

    async with connected(Clock()) as (requester, provider, traffic):
        requester._gate = Watched(1_000, lambda: 0.0)
        requester.find_kind = find_kind
        digests = (BLOB, Digest(bytes([1]) * 32), Digest(bytes([2]) * 32))

        async def answer(_peer: PeerId, message: Message) -> list[Message]:
            assert isinstance(message, GetChunks)
            return [ChunkReply(digest, bytes(500)) for digest in message.digests]

        provider.handler = answer
        for digest in digests:  # in one request they would come over several streams
            assert len(await requester.request(PEER, GetChunks((digest,)), 5)) == 1
        assert waits == pytest.approx([0.0, 0.5 - LATE_SECONDS, 1.0 - LATE_SECONDS])
        assert traffic.blob_bytes == {("received", "anchor"): 1_500}
        assert traffic.peer_bytes == {PEER: {"received": 1_500}}
