"""Whether others can dial this node, and what follows from it."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from networks import bootstrap_address, make_network, wait_alone

from pulsenet.ids import RunId
from pulsenetd.network.dial_back import AGAIN_SECONDS, DialBackReply
from pulsenetd.network.reachability import DOUBT_SECONDS, KNOWN_SECONDS, UNKNOWN, Finding, Reachability, judge
from pulsenetd.network.stack import Network

RUN_ID = RunId(bytes(range(32)))
PUBLIC = "8.8.8.8"


def test_one_peer_that_got_through_is_enough() -> None:
    replies = [DialBackReply(PUBLIC, ("timed-out",)), DialBackReply(PUBLIC, ("open",))]
    assert judge(replies, (4001,), (), is_public=True) == Finding(True, PUBLIC, (4001,), "open")


def test_nobody_got_through_or_nobody_answered() -> None:
    assert judge([DialBackReply(PUBLIC, ("timed-out",))], (4001,), (), is_public=True) == Finding(
        False, PUBLIC, (4001,), "timed-out"
    )
    assert judge([], (4001,), (), is_public=True) == UNKNOWN
    assert judge([DialBackReply(PUBLIC, ())], (4001,), (), is_public=True) == UNKNOWN


def test_a_neighbour_of_the_same_network_proves_little_to_a_public_run() -> None:
    near, far = DialBackReply("192.168.1.7", ("open",)), DialBackReply(PUBLIC, ("timed-out",))
    assert judge([near, far], (4001,), (), is_public=True).is_reachable is False
    assert judge([near, far], (4001,), (), is_public=False).is_reachable is True
    assert judge([near], (4001,), (), is_public=True).is_reachable is True


def test_an_announced_address_that_peers_do_not_see_cannot_be_checked() -> None:
    replies = [DialBackReply(PUBLIC, ("refused",))]
    assert judge(replies, (4001,), ("/ip4/9.9.9.9/tcp/4001",), is_public=True) == UNKNOWN
    assert judge(replies, (4001,), (f"/ip4/{PUBLIC}/tcp/4001",), is_public=True).is_reachable is False


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def watch(network: Network, clock: Clock, *announced: str) -> Reachability:
    return Reachability(
        network, run_id=RUN_ID, announced=announced, is_public=lambda: False, draw=lambda: 0.0, clock=clock
    )


def hurry(network: Network) -> None:
    """Let the peer dial back again at once."""
    network._dial_back._clock = lambda at=[0.0]: at.__setitem__(0, at[0] + AGAIN_SECONDS) or at[0]  # type: ignore[misc, assignment]


async def test_a_node_peers_can_dial_is_told_so_and_asked_again_later(tmp_path: Path) -> None:
    first, second = make_network(tmp_path, "first"), make_network(tmp_path, "second")
    clock = Clock()
    await first.open([])
    try:
        reachability = watch(second, clock)
        await second.open([await bootstrap_address(tmp_path, "first", first)])
        await reachability.look()
        assert reachability.is_reachable is True
        assert reachability.describe().startswith("peers can dial this node at 127.0.0.1 port ")
        assert "--announce" not in reachability.describe()
        await first.close()
        await wait_alone(second)
        clock.now = KNOWN_SECONDS - 1
        await reachability.look()
        clock.now = KNOWN_SECONDS
        await reachability.look()
        assert reachability.is_reachable is True  # nobody could tell: what was known stays
        assert reachability.status()["reachable"] is True
    finally:
        await second.close()
        await first.close()


async def test_a_node_nobody_can_dial_becomes_a_client_is_told_the_flags_and_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Outbound only: it stores nothing for others, and still finds and announces."""
    caplog.set_level("WARNING")
    reserved = socket.socket()
    reserved.bind(("127.0.0.1", 0))  # refuses as long as nobody listens on it
    closed = reserved.getsockname()[1]
    first = make_network(tmp_path, "first")
    second = make_network(tmp_path, "second", announce_addresses=(f"/ip4/127.0.0.1/tcp/{closed}",))
    clock = Clock()
    await first.open([])
    hurry(first)
    try:
        reachability = watch(second, clock, f"/ip4/127.0.0.1/tcp/{closed}")
        await second.open([await bootstrap_address(tmp_path, "first", first)])
        await reachability.look()
        assert reachability.is_reachable is None  # one no is not believed
        clock.now = DOUBT_SECONDS
        await reachability.look()
        assert reachability.is_reachable is False
        assert second.directory._node.protocol.client_mode
        assert await second.mend()  # it still asks others
        text = reachability.describe()
        assert f"--listen /ip4/0.0.0.0/tcp/{closed} --announce /ip4/127.0.0.1/tcp/{closed}" in text
        assert "connection refused" in text
        await second._restart()
        assert second.directory._node.protocol.client_mode, "a new p2pd changes nothing about it"

        async def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"\x13/multistream/1.0.0\n")
            await writer.drain()
            writer.close()

        forwarded = await asyncio.start_server(greet, sock=reserved)
        async with forwarded:
            clock.now += KNOWN_SECONDS
            await reachability.look()
        assert reachability.is_reachable is True
        assert not second.directory._node.protocol.client_mode
        assert await first.mend()  # it answers in the directory again
    finally:
        await second.close()
        await first.close()
    assert len([line for line in caplog.messages if line.startswith("peers cannot dial this node")]) == 1


def test_the_flag_that_is_missing_is_printed(tmp_path: Path) -> None:
    """Behind a router that forwards the port, listening on a private address."""
    reachability = watch(make_network(tmp_path, "node"), Clock())
    reachability.finding = Finding(True, PUBLIC, (4001,), "open")
    assert reachability.describe().endswith(f"add --announce /ip4/{PUBLIC}/tcp/4001")
    reachability.finding = UNKNOWN
    assert "no peer could tell" in reachability.describe()
    reachability.finding = Finding(False, "2001:db8::1", (4001,), "timed-out")
    assert "--listen /ip6/::/tcp/4001 --announce /ip6/2001:db8::1/tcp/4001" in reachability.describe()
