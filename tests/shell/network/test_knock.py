"""Whether anybody listens at an address, told without libp2p."""

from __future__ import annotations

import socket

import pytest

from pulsenetd.network.knock import CLOSED, knock


@pytest.mark.parametrize("host", ["ip4/127.0.0.1", "dns4/localhost", "dns/localhost"])
async def test_a_listener_opens_and_a_closed_port_refuses(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert await knock(f"/{host}/tcp/{port}", 5) is None
    assert await knock(f"/{host}/tcp/{port}", 5) == "refused"


async def test_a_name_nobody_has_and_an_address_without_a_route_have_their_own_reasons() -> None:
    assert await knock("/dns4/nobody.invalid/tcp/1", 10) == "unresolved"
    assert await knock("/ip4/255.255.255.255/tcp/1", 10) == "unreachable"


@pytest.mark.parametrize("name", ["a..b", ".a", "..", "a" * 64 + ".b"])
async def test_a_name_that_is_none_does_not_resolve(name: str) -> None:
    """Peers announce addresses; p2pd's own check passes these."""
    assert await knock(f"/dns4/{name}/tcp/1", 10) == "unresolved"


async def test_a_black_hole_times_out() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        target = listener.getsockname()
        held = [socket.socket() for _ in range(3)]  # the queue is full: the kernel drops what comes now
        for one in held:
            one.setblocking(False)
            one.connect_ex(target)
        assert await knock(f"/ip4/127.0.0.1/tcp/{target[1]}", 0.3) == "timed-out"
        for one in held:
            one.close()


async def test_of_an_address_without_tcp_nothing_is_known() -> None:
    assert await knock("/ip4/127.0.0.1/udp/1/quic-v1", 5) is None


def test_every_reason_has_words() -> None:
    assert {"refused", "timed-out", "unreachable", "unresolved"} == CLOSED.keys()
