"""A connection over which nothing comes any more is replaced, not waited for."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from networks import HELLO, PEER, open_line

from pulsenet.errors import UnavailableError
from pulsenet.ids import PeerId
from pulsenet.wire.messages import GetHead, GetRounds, HeadReply, Message
from pulsenetd.network.p2pd import RawStream
from pulsenetd.network.provider import Provider
from pulsenetd.network.requester import Requester
from pulsenetd.network.streams import Deadlines, PeerRefusedError, PeerUnavailableError, Traffic

QUICK = Deadlines(open_seconds=5.0, read_stall_seconds=0.5, write_stall_seconds=5.0)


@contextlib.asynccontextmanager
async def connected(
    answer: Callable[[PeerId, Message], Awaitable[list[Message]]], clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[tuple[Requester, list[PeerId]]]:
    """A requester of a provider over loopback TCP, and the peers whose connection it dropped."""
    provider = Provider(HELLO, Deadlines(), Traffic())
    provider.handler = answer
    dropped: list[PeerId] = []

    async def drop(peer_id: PeerId) -> None:
        dropped.append(peer_id)

    make = partial(Requester, HELLO, deadlines=QUICK, traffic=Traffic(), clock=clock, drop_connection=drop)
    async with open_line(provider, make) as requester:
        yield requester, dropped


async def never(_peer: PeerId, _message: Message) -> list[Message]:
    await asyncio.Event().wait()
    raise AssertionError


async def test_the_connection_to_a_peer_that_sends_nothing_is_dropped_once() -> None:
    async with connected(never) as (requester, dropped):
        requests = [requester.request(PEER, GetHead(), 5) for _ in range(3)]
        for outcome in await asyncio.gather(*requests, return_exceptions=True):
            assert isinstance(outcome, PeerUnavailableError)
            assert outcome.reason == "timeout"
        assert dropped == [PEER]


async def test_a_peer_that_sends_on_another_stream_keeps_its_connection() -> None:
    async def answer(peer_id: PeerId, message: Message) -> list[Message]:
        return [HeadReply(None)] if isinstance(message, GetHead) else await never(peer_id, message)

    async with connected(answer) as (requester, dropped):
        stalled = asyncio.create_task(requester.request(PEER, GetRounds(0), 5))
        while not stalled.done():
            await requester.request(PEER, GetHead(), 5)
            await asyncio.sleep(0.01)  # stays below what one peer may ask in a second
        with pytest.raises(PeerUnavailableError, match="timeout"):
            await stalled
        assert dropped == []


async def test_a_request_that_was_given_little_time_drops_nothing() -> None:
    async with connected(never) as (requester, dropped):
        with pytest.raises(PeerUnavailableError, match="timeout"):
            await requester.request(PEER, GetHead(), 0.05)
        assert dropped == []


async def test_a_peer_that_refused_a_question_long_ago_was_not_silent_since() -> None:
    now = 0.0

    async def answer(peer_id: PeerId, message: Message) -> list[Message]:
        if isinstance(message, GetHead):
            raise UnavailableError("come back later")
        return await never(peer_id, message)

    async with connected(answer, clock=lambda: now) as (requester, dropped):
        with pytest.raises(PeerRefusedError):
            await requester.request(PEER, GetHead(), 5)
        now = 3_600.0
        with pytest.raises(PeerUnavailableError, match="timeout"):
            await requester.request(PEER, GetRounds(0), 0.05)
        assert dropped == []


async def test_a_peer_that_was_silent_once_long_ago_and_asked_nothing_since_is_not_judged_by_it() -> None:
    now = 0.0
    dropped: list[PeerId] = []

    async def refuse(_peer: PeerId, _seconds: float) -> RawStream:
        raise UnavailableError("p2pd is busy")

    async def drop(peer_id: PeerId) -> None:
        dropped.append(peer_id)

    requester = Requester(HELLO, refuse, QUICK, Traffic(), clock=lambda: now, drop_connection=drop)

    async def ask(at: float) -> None:
        nonlocal now
        now = at
        with pytest.raises(PeerUnavailableError, match="unreachable"):
            await requester.request(PEER, GetHead(), 5)

    await ask(0.0)
    await ask(3_600.0)
    assert dropped == []
    await ask(3_600.3)
    await ask(3_600.6)
    assert dropped == [PEER], "asked again and again, and silent all the time"
    requester.forget_others(())
    await ask(3_601.2)
    assert dropped == [PEER]


async def test_after_a_drop_the_next_request_makes_a_new_connection(make_node: Any) -> None:
    answers = 0

    async def answer(peer_id: PeerId, message: Message) -> list[Message]:
        nonlocal answers
        answers += 1
        return [HeadReply(None)] if answers > 1 else await never(peer_id, message)

    async with make_node("a", deadlines=QUICK) as a, make_node("b") as b:
        b.transport.serve(answer)
        await a.meet(b)
        dropped: list[PeerId] = []
        disconnect = a.transport.p2pd.disconnect

        async def note(peer_id: PeerId, timeout_seconds: float) -> None:
            dropped.append(peer_id)
            await disconnect(peer_id, timeout_seconds)
            assert await a.transport.connected_peers() == []

        a.transport.p2pd.disconnect = note
        with pytest.raises(PeerUnavailableError, match="timeout"):
            await a.transport.request(b.peer_id, GetHead(), 5)
        assert dropped == [b.peer_id]
        assert [link.peer_id for link in await a.transport.connected_peers()] == [b.peer_id]
        assert await a.transport.request(b.peer_id, GetHead(), 5) == [HeadReply(None)]
