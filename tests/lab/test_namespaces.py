"""The lab itself: its links lose, delay, limit and break as they are told."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import suppress

import plain_tcp
import pytest
from namespaces import Lab, Link, list_congestion_controls

pytestmark = [pytest.mark.lab, pytest.mark.timeout(60)]

DATAGRAM_COUNT = 2_000
BATCH_COUNT = 200
"""What a socket's buffer holds."""
SILENCE_SECONDS = 0.3


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Lend two nodes, the second behind a cable."""
    with Lab([Link(), Link(delay_ms=20)]) as opened:
        yield opened


def send_datagrams(lab: Lab, sender: int, reader: int, count: int) -> int:
    """Return how many of so many datagrams arrive; silence for a while ends each batch."""
    with lab.at(reader):
        target = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with lab.at(sender):
        source = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with target, source:
        target.bind((lab.address(reader), 0))
        target.settimeout(SILENCE_SECONDS)
        arrived = 0
        for start in range(0, count, BATCH_COUNT):
            batch = min(BATCH_COUNT, count - start)
            for _ in range(batch):
                source.sendto(bytes(100), target.getsockname())
            with suppress(TimeoutError):
                for _ in range(batch):
                    target.recv(200)
                    arrived += 1
        return arrived


def test_a_link_loses_what_it_is_told_to_lose_and_only_that_way(lab: Lab) -> None:
    lab.change(1, loss_down=0.1)
    assert 0.86 < send_datagrams(lab, 0, 1, DATAGRAM_COUNT) / DATAGRAM_COUNT < 0.94
    assert send_datagrams(lab, 1, 0, 100) == 100
    lab.change(1, loss_down=0.0)
    assert send_datagrams(lab, 0, 1, 100) == 100


def test_a_round_trip_takes_the_delay_of_both_ways(lab: Lab) -> None:
    with lab.listen(0) as listener:
        started = time.monotonic()
        lab.connect(1, (lab.address(0), listener.getsockname()[1])).close()
        assert time.monotonic() - started >= 0.04


def test_a_link_passes_no_more_than_its_rate(lab: Lab) -> None:
    lab.change(1, down_mbps=8)
    moved = plain_tcp.measure(lab, 0, 1, 500_000)
    assert moved.size_bytes == 500_000
    assert moved.mbps <= 8.0
    lab.change(1, down_mbps=0)


def test_a_cut_cable_carries_nothing_until_it_is_mended(lab: Lab) -> None:
    lab.cut(1)
    assert send_datagrams(lab, 0, 1, 50) == 0
    lab.mend(1)
    assert plain_tcp.measure(lab, 0, 1, 10_000).size_bytes == 10_000


def test_congestion_control_is_the_one_of_the_route(lab: Lab) -> None:
    for name in list_congestion_controls():
        lab.change(0, congestion=name)
        assert plain_tcp.measure(lab, 0, 1, 1_000).congestion == name


def test_a_moved_node_is_found_at_its_new_address_only(lab: Lab) -> None:
    old = lab.address(1)
    lab.move(1)
    assert plain_tcp.measure(lab, 1, 0, 1_000).size_bytes == 1_000
    with pytest.raises(OSError, match=r"timed out|No route to host"):
        lab.connect(0, (old, 1), seconds=1.0)


def test_broken_connections_end_at_both_ends(lab: Lab) -> None:
    with lab.listen(0) as listener, lab.connect(1, listener.getsockname()) as near:
        far, _ = listener.accept()
        with far:
            assert lab.count_connections(1) == 1
            lab.break_connections(1)
            assert lab.count_connections(1) == 0
            for end in (near, far):
                with pytest.raises(OSError, match=r"abort|reset"):
                    end.recv(1)


def test_what_crossed_a_link_is_counted(lab: Lab) -> None:
    sent, received = lab.sent_size_bytes(0), lab.received_size_bytes(1)
    plain_tcp.measure(lab, 0, 1, 200_000)
    assert lab.sent_size_bytes(0) - sent >= 200_000
    assert lab.received_size_bytes(1) - received >= 200_000
