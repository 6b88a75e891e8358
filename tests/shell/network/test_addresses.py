"""Multiaddresses as operators type them."""

from __future__ import annotations

import pytest

from pulsenet import limits
from pulsenet.errors import UsageError
from pulsenet.ids import PeerId
from pulsenetd.identity import to_libp2p_text
from pulsenetd.network import addresses

PEER = PeerId(bytes(range(32)))


def test_an_address_with_its_peer_splits_and_joins() -> None:
    text = "/ip4/203.0.113.7/tcp/4001/p2p/" + to_libp2p_text(PEER)
    assert addresses.split_address(text) == ("/ip4/203.0.113.7/tcp/4001", PEER)
    assert addresses.join_address("/ip4/203.0.113.7/tcp/4001", PEER) == text


@pytest.mark.parametrize(
    "text",
    [
        "/ip4/1.2.3.4/tcp/1",
        "/ip4/1.2.3.4/tcp/1/p2p/",
        "/ip4/1.2.3.4/tcp/1/p2p/Qmx",
        "x/p2p/" + to_libp2p_text(PEER),
        "",
    ],
)
def test_a_bootstrap_without_a_usable_peer_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        addresses.split_address(text)


@pytest.mark.parametrize(
    "text",
    [
        "/ip4/1.2.3.4/tcp/4001",
        "/ip4/0.0.0.0/tcp/0",
        "/ip6/::1/udp/4001/quic-v1",
        "/dns4/seed.example.org/tcp/4001",
        "/dns/seed.example.org/tcp/443/ws",
    ],
)
def test_usable_addresses_pass(text: str) -> None:
    addresses.check_address(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1.2.3.4:4001",
        "/ip4/1.2.3.4",
        "/ip4/1.2.3.4/tcp/",
        "/ip4/1.2.3/tcp/1",
        "/ip4/::1/tcp/1",
        "/ip6/1.2.3.4/tcp/1",
        "/ip4/1.2.3.4/tcp/65536",
        "/ip4/1.2.3.4/tcp/-1",
        "/ip4/1.2.3.4/sctp/1",
        "/unix/tmp/x/tcp/1",
        "/ip4/1.2.3.4/tcp/1,/ip4/1.2.3.5/tcp/1",
        "/dns4/sé/tcp/1",
        "/dns4/" + "x" * limits.ADDRESS_SIZE_BYTES_MAX + "/tcp/1",
    ],
)
def test_other_text_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        addresses.check_address(text)


@pytest.mark.parametrize("text", ["/ip4/1.2.3.4/tcp/0", "/ip4/0.0.0.0/tcp/4001", "/ip6/::/tcp/4001"])
def test_what_nobody_can_dial_is_not_announced(text: str) -> None:
    """A-NET-4."""
    with pytest.raises(UsageError, match="cannot announce"):
        addresses.check_announced(text)


def test_a_containers_addresses_stay_out_of_a_public_swarm() -> None:
    """A-NET-6: 172.17.x and 10.x are left out unless asked for, and then come last."""
    found = ["/ip4/172.17.0.2/tcp/1", "/ip4/8.8.8.8/tcp/1", "/ip4/10.0.0.5/tcp/1", "/ip4/8.8.8.8/tcp/1"]
    assert addresses.select_announced(found, private_too=False) == ("/ip4/8.8.8.8/tcp/1",)
    assert addresses.select_announced(found, private_too=True) == (
        "/ip4/8.8.8.8/tcp/1",
        "/ip4/172.17.0.2/tcp/1",
        "/ip4/10.0.0.5/tcp/1",
    )
    many = [f"/ip4/8.8.8.8/tcp/{port}" for port in range(1, 50)]
    assert len(addresses.select_announced(many, private_too=False)) == limits.ADDRESSES_MAX


def test_names_count_as_public_and_ports_can_be_replaced() -> None:
    assert not addresses.is_private("/dns4/seed.example.org/tcp/1")
    assert addresses.is_private("/ip4/127.0.0.1/tcp/1")
    assert addresses.with_port("/ip4/1.2.3.4/udp/0/quic-v1", 7) == "/ip4/1.2.3.4/udp/7/quic-v1"


def test_loopback_is_told_from_other_private_addresses() -> None:
    assert addresses.is_loopback("/ip4/127.0.0.1/tcp/1")
    assert addresses.is_loopback("/ip6/::1/tcp/1")
    assert not addresses.is_loopback("/ip4/10.0.0.1/tcp/1")
    assert not addresses.is_loopback("/dns4/localhost.example/tcp/1")


def test_an_address_through_a_relay_is_refused_with_advice() -> None:
    """A-NET-3: nothing is tried over a circuit, so no budget of a relay is ever met."""
    relay = to_libp2p_text(PeerId(bytes(32)))
    circuit = f"/ip4/203.0.113.7/tcp/4001/p2p/{relay}/p2p-circuit"
    for refused in (
        lambda: addresses.check_announced(circuit),
        lambda: addresses.split_address(f"{circuit}/p2p/{relay}"),
    ):
        with pytest.raises(UsageError, match=r"leads through a relay.*give an address peers can dial"):
            refused()
