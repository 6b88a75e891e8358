"""What a link carries of its nominal speed."""

from __future__ import annotations

import pytest

from pulsenet.outer.plan_link import Congestion, Link


def test_a_link_without_loss_and_delay_carries_its_speed() -> None:
    for congestion in Congestion:
        assert Link(100, 100, congestion=congestion).goodput_mbps(100, 1) == 100.0


@pytest.mark.parametrize(
    ("congestion", "loss", "rtt", "goodput"),
    [
        ("bbr", 0.05, 0.0, 69.0),
        ("bbr", 0.10, 0.0, 25.0),
        ("bbr", 0.0, 0.1, 83.0),
        ("bbr", 0.01, 0.1, 75.0),
        ("bbr", 0.05, 0.1, 58.0),
        ("cubic", 0.05, 0.0, 22.0),
        ("cubic", 0.10, 0.0, 1.7),
        ("cubic", 0.0, 0.1, 86.0),
        ("cubic", 0.01, 0.1, 1.2),
        ("cubic", 0.05, 0.1, 0.4),
    ],
)
def test_what_was_measured_comes_out(congestion: str, loss: float, rtt: float, goodput: float) -> None:
    link = Link(100, 100, loss, rtt, Congestion(congestion))
    assert link.goodput_mbps(100, 1) == pytest.approx(goodput)


def test_between_the_measurements_values_lie_between() -> None:
    assert Link(100, 100, 0.025, 0.0, Congestion.BBR).goodput_mbps(100, 1) == pytest.approx(84.5)
    assert 22.0 < Link(100, 100, 0.02, 0.0).goodput_mbps(100, 1) < 100.0
    assert 58.0 < Link(100, 100, 0.05, 0.05, Congestion.BBR).goodput_mbps(100, 1) < 69.0


def test_with_cubic_the_loss_and_not_the_link_sets_the_speed_of_a_connection() -> None:
    link = Link(1000, 1000, 0.05)
    assert link.goodput_mbps(1000, 1) == pytest.approx(22.0)
    assert link.goodput_mbps(10, 1) == 10.0
    assert link.goodput_mbps(1000, 3) == pytest.approx(66.0)
    assert link.goodput_mbps(1000, 9) == link.goodput_mbps(1000, 4)


def test_the_slower_direction_and_the_round_trips_count() -> None:
    link = Link(100, 20, rtt_seconds=0.1, congestion=Congestion.BBR)
    seconds = link.transfer_seconds(received_bytes=1e6, sent_bytes=1e6, connection_count=1, round_trips=3)
    assert seconds == pytest.approx(8 / (20 * 0.83) + 0.3)
    down_alone = link.transfer_seconds(received_bytes=1e6, sent_bytes=0, connection_count=1, round_trips=0)
    assert down_alone == pytest.approx(8 / 83)


def test_nothing_to_move_takes_no_time() -> None:
    link = Link(1, 1, rtt_seconds=1)
    assert link.transfer_seconds(received_bytes=0, sent_bytes=0, connection_count=1, round_trips=4) == 0.0


def test_another_speed_keeps_the_proportions() -> None:
    assert Link(100, 20, 0.01, 0.05, Congestion.BBR).with_down(50) == Link(50, 10, 0.01, 0.05, Congestion.BBR)
