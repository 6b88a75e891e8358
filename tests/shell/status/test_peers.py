"""Who feeds whom: bytes and rates by peer, without addresses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pulsenet.chain.records import Have
from pulsenet.ids import PeerId, RunId
from pulsenetd.network.transport import PeerLink
from pulsenetd.status.peers import PEERS_SHOWN_MAX, PeerMeter, list_peers

ONE, TWO, GONE = (PeerId(bytes([number]) * 32) for number in (1, 2, 3))


class FakeMesh:
    """A mesh that was told one have record."""

    neighbours = (TWO,)

    def have_of(self, peer_id: PeerId) -> Have | None:
        if peer_id != ONE:
            return None
        return Have(RunId(bytes(32)), "seed", 1, 4, 9, (), ("/ip4/198.51.100.4/tcp/1",), 5)


@pytest.fixture
def mesh() -> Any:
    return FakeMesh()


def link(peer_id: PeerId, *, outbound: bool = False) -> PeerLink:
    return PeerLink(peer_id, ("/ip4/198.51.100.4/tcp/1",), outbound, 0.02)


def test_rates_are_what_came_between_two_looks() -> None:
    meter = PeerMeter()
    assert meter.measure(10.0, {ONE: {"received": 500}}) == {}
    assert meter.measure(10.0, {ONE: {"received": 500}}) == {}
    assert meter.measure(12.0, {ONE: {"received": 700}, TWO: {"sent": 30}}) == {
        ONE: {"received": 100.0, "sent": 0.0},
        TWO: {"received": 0.0, "sent": 15.0},
    }
    # Forgotten by who counts, and counted anew.
    assert meter.measure(13.0, {ONE: {"received": 5}})[ONE]["received"] == 0.0


def test_peers_are_named_with_what_they_hold_and_move(mesh: Any) -> None:
    counted = {TWO: {"sent": 7}, GONE: {"received": 9}}
    listed = list_peers([link(ONE), link(TWO, outbound=True)], mesh, counted, {TWO: {"sent": 3.5, "received": 0.0}})
    by_number = dict(zip(("two", "gone", "one"), listed, strict=True))
    assert by_number["one"]["role"] == "seed"
    assert by_number["one"]["version"] == "1.9"
    assert by_number["two"]["is_neighbour"]
    assert by_number["two"]["is_outbound"]
    assert by_number["two"]["sent_bytes_per_second"] == 3.5
    assert by_number["two"]["version"] is None
    assert not by_number["gone"]["is_connected"]
    assert by_number["gone"]["received_bytes"] == 9
    assert "198.51.100.4" not in json.dumps(listed)


def test_the_busiest_are_listed_and_the_list_is_short(mesh: Any) -> None:
    many = [PeerId(number.to_bytes(32)) for number in range(300)]
    rates = {many[250]: {"received": 1e6}, many[260]: {"sent": 2e6}}
    listed = list_peers([link(peer) for peer in many], mesh, {peer: {"sent": 1} for peer in many}, rates)
    assert len(listed) == PEERS_SHOWN_MAX
    assert [peer["sent_bytes_per_second"] for peer in listed[:3]] == [2e6, None, None]
    assert listed[1]["received_bytes_per_second"] == 1e6
