"""The clock's offset from peers."""

from __future__ import annotations

import pytest

from pulsenet.ids import PeerId
from pulsenetd.network.clock_offset import ROUND_TRIP_SECONDS_MAX, SAMPLES_MAX, ClockOffset


def peer(number: int) -> PeerId:
    return PeerId(bytes([number]) * 32)


def measured(*ahead_seconds: float) -> ClockOffset:
    offset = ClockOffset()
    for number, value in enumerate(ahead_seconds):
        offset.add(peer(number), ahead_seconds=value, round_trip_seconds=0.1)
    return offset


def test_nothing_is_known_before_a_measurement() -> None:
    offset = ClockOffset()
    assert offset.ahead_seconds is None
    assert offset.correction_seconds == 0.0
    assert offset.warning is None


def test_a_small_offset_is_neither_corrected_nor_warned_of() -> None:
    offset = measured(2.9, 2.8, -1.0)
    assert offset.ahead_seconds == 2.8
    assert offset.correction_seconds == 0.0
    assert offset.warning is None


def test_three_peers_correct_the_clock_and_one_liar_moves_nothing() -> None:
    """A-DHT-2: the figure in seconds and what to do are named."""
    offset = measured(600.0, 601.0, -100_000.0)
    assert offset.correction_seconds == 600.0
    assert offset.warning is not None
    assert "600.0 s ahead of its peers" in offset.warning
    assert "timedatectl" in offset.warning
    assert "corrected" in offset.warning


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_liar_whose_time_is_no_number_moves_nothing(value: float) -> None:
    """No order holds among numbers of which one is NaN, so no median does."""
    for place in range(4):
        told = [600.0, 601.0, 602.0]
        told.insert(place, value)
        offset = measured(*told)
        assert offset.ahead_seconds == offset.correction_seconds == 601.0
        assert "601.0 s ahead" in (offset.warning or "")
    assert measured(value).ahead_seconds is None


def test_one_or_two_peers_only_cause_a_warning() -> None:
    offset = measured(-600.0, -600.0)
    assert offset.correction_seconds == 0.0
    assert offset.warning is not None
    assert "600.0 s behind its peers (2 asked)" in offset.warning


def test_of_two_peers_that_differ_the_one_that_agrees_counts() -> None:
    """A-DHT-2: the peer of a node whose clock is off must not doubt its own."""
    offset = measured(-600.0, 0.1)
    assert offset.warning is None
    assert offset.ahead_seconds == 0.1


def test_slow_answers_do_not_count_and_the_newest_of_a_peer_does() -> None:
    offset = ClockOffset()
    offset.add(peer(1), ahead_seconds=9.0, round_trip_seconds=ROUND_TRIP_SECONDS_MAX + 0.1)
    assert offset.ahead_seconds is None
    offset.add(peer(1), ahead_seconds=9.0, round_trip_seconds=0.1)
    offset.add(peer(1), ahead_seconds=5.0, round_trip_seconds=0.1)
    assert offset.ahead_seconds == 5.0
    offset.clear()
    assert offset.ahead_seconds is None


def test_only_the_newest_peers_are_remembered() -> None:
    offset = measured(*[1_000.0] * 10, *[0.0] * SAMPLES_MAX)
    assert offset.ahead_seconds == pytest.approx(0.0)
