"""Bursts pass, floods do not, and the wait that is named is long enough."""

from __future__ import annotations

import pytest

from pulsenet.node.rate import LATE_SECONDS, ByteCap, RateCap


def test_a_burst_passes_and_the_next_one_waits() -> None:
    cap = RateCap(per_second=2.0, burst=3)
    assert [cap.take(10.0) for _ in range(4)] == [True, True, True, False]


def test_the_named_time_is_the_first_at_which_one_more_passes() -> None:
    cap = RateCap(per_second=3.0, burst=1)
    assert cap.take(100.1)
    allowed_at = cap.next_at(100.1)
    assert not cap.take(allowed_at - 1e-3)
    assert cap.take(allowed_at)


def test_one_that_may_pass_at_once_is_named_now() -> None:
    assert RateCap(per_second=1.0, burst=1).next_at(5.0) == 5.0


def test_silence_never_saves_up_more_than_a_burst() -> None:
    cap = RateCap(per_second=100.0, burst=2)
    cap.take(0.0)
    assert [cap.take(1e6) for _ in range(3)] == [True, True, False]


def test_a_time_that_stands_still_gives_nothing() -> None:
    cap = RateCap(per_second=1.0, burst=1)
    assert cap.take(1.0)
    assert not cap.take(1.0)
    assert not cap.take(0.5)


def move_all(cap: ByteCap, sizes: list[int], now: float = 0.0) -> float:
    """Move pieces one after another as fast as the cap allows; return when the last could go."""
    for size_bytes in sizes:
        now += cap.wait_seconds(now)
        cap.note(size_bytes, now)
    return now + cap.wait_seconds(now)


def test_a_byte_cap_is_kept_within_a_piece() -> None:
    sizes = [1 << 20] * 50 + [100] * 50
    seconds = move_all(ByteCap(1_000_000), sizes)
    assert sum(sizes) / (seconds + LATE_SECONDS) == pytest.approx(1_000_000)


def test_idle_time_earns_no_burst() -> None:
    cap = ByteCap(1_000)
    cap.note(1_000, 0.0)
    assert cap.wait_seconds(0.25) == pytest.approx(0.75 - LATE_SECONDS)
    assert move_all(cap, [1_000, 1_000], now=100.0) == pytest.approx(102.0 - LATE_SECONDS)


def test_who_wakes_late_each_time_still_gets_the_whole_rate() -> None:
    cap, now = ByteCap(1_000), 0.0
    for _ in range(100):
        now += cap.wait_seconds(now) + 0.05
        cap.note(1_000, now)
    assert 99_000 / now == pytest.approx(1_000, rel=0.01)


def test_without_a_cap_nothing_waits() -> None:
    cap = ByteCap(0)
    cap.note(1 << 40, 0.0)
    assert cap.wait_seconds(0.0) == 0.0
