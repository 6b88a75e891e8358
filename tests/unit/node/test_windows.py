"""Windows follow what a provider delivers."""

from __future__ import annotations

import pytest

from pulsenet.node.windows import PEAK_HALVES_SECONDS, WINDOW_CHUNKS_MAX, WINDOW_CHUNKS_START, Meter, Peak, Window


def deliver(window: Window, per_second: float, seconds: float, start: float = 0.0) -> float:
    window.begin(start)
    count = round(per_second * seconds)
    for index in range(1, count + 1):
        window.note_chunk(start + index / per_second)
    return start + seconds


def test_a_window_holds_what_comes_in_two_seconds() -> None:
    window = Window()
    assert window.chunks == WINDOW_CHUNKS_START
    deliver(window, 5.0, 4.0)
    assert window.chunks_per_second == pytest.approx(5.0)
    assert window.chunks == 11


def test_a_fast_provider_gets_the_largest_window_and_a_slow_one_the_smallest() -> None:
    fast, slow = Window(), Window()
    deliver(fast, 500.0, 2.0)
    deliver(slow, 0.1, 50.0)
    assert fast.chunks == WINDOW_CHUNKS_MAX
    assert slow.chunks == 1


def test_a_window_never_falls_below_what_its_owner_says() -> None:
    window = Window(3)
    deliver(window, 0.1, 50.0)
    window.shrink()
    assert window.chunks == 3


def test_a_slower_pace_counts_little_by_little() -> None:
    window = Window()
    now = deliver(window, 10.0, 4.0)
    deliver(window, 2.0, 0.5, now)
    assert 2.0 < window.chunks_per_second < 10.0
    deliver(window, 2.0, 60.0, now)
    assert window.chunks_per_second == pytest.approx(2.0, rel=0.01)


def test_chunks_that_come_together_measure_nothing() -> None:
    window = Window()
    window.note_chunk(1.0)
    window.begin(1.0)
    for _ in range(100):
        window.note_chunk(1.001)
    assert window.chunks_per_second == 0.0
    assert window.chunks == WINDOW_CHUNKS_START


def test_idle_time_is_no_slow_delivery() -> None:
    window = Window()
    now = deliver(window, 10.0, 2.0)
    deliver(window, 10.0, 2.0, now + 100.0)
    assert window.chunks_per_second == pytest.approx(10.0)


def test_a_failure_halves_what_is_asked() -> None:
    window = Window()
    deliver(window, 7.0, 4.0)
    window.shrink()
    assert window.chunks == 7
    assert window.chunks_per_second == pytest.approx(3.5)
    for _ in range(5):
        window.shrink()
    assert window.chunks == 1


def test_a_meter_follows_a_steady_pace_and_forgets() -> None:
    meter = Meter(5.0)
    for step in range(1, 601):
        meter.note(1.0, step / 10)
    assert meter.per_second(60.0) == pytest.approx(10.0, rel=0.05)
    for step in range(1, 601):
        meter.note(0.0, 60.0 + step / 10)
    assert meter.per_second(120.0) < 0.01


def test_a_peak_is_the_fastest_pace_and_is_forgotten_slowly() -> None:
    peak = Peak()
    assert peak.per_second(5.0) == 0.0
    peak.note(8.0, 10.0)
    peak.note(2.0, 10.0)
    assert peak.per_second(10.0) == 8.0
    assert peak.per_second(10.0 + PEAK_HALVES_SECONDS) == 4.0
    peak.note(5.0, 10.0 + PEAK_HALVES_SECONDS)
    assert peak.per_second(10.0 + PEAK_HALVES_SECONDS) == 5.0
