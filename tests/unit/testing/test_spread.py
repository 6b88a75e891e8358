"""Spreading on paper: everybody gets every byte, no faster than the lines allow, and somebody pays for it."""

from __future__ import annotations

import pytest

from pulsenet.testing.checkers import SimulationError
from pulsenet.testing.links import MEGABIT, Link
from pulsenet.testing.spread import Spread, compute_bound_seconds, measure_spread

SIZES = {"payload_size_bytes": 20 * 4_000, "chunk_size_bytes": 4_000, "scale": 250.0}
"""20 MB in 20 chunks."""


def spread(seed: int, reader_count: int, **options: object) -> Spread:
    return measure_spread(seed, reader_count, **SIZES, **options)  # type: ignore[arg-type]


def test_a_version_reaches_every_reader_within_what_the_lines_allow() -> None:
    measured = spread(1, 6)
    assert measured.payload_size_bytes == 20_000_000
    assert measured.bound_seconds <= measured.all_seconds < 10 * measured.bound_seconds
    assert 0 < measured.half_seconds <= measured.all_seconds
    assert 1 <= measured.publisher_payloads <= 6.5
    assert 1 <= measured.received_payloads < 1.5


@pytest.mark.parametrize("size_bytes", [27_000, 700_000])
def test_two_readers_of_a_small_patch_wait_for_nothing_but_each_other(size_bytes: int) -> None:
    """Each of them may be done at any time, between any two things that it tells the other."""
    line = Link(up_rate=5_000 * MEGABIT, down_rate=5_000 * MEGABIT, delay_seconds=0.0005)
    for seed in range(12):
        measured = measure_spread(
            seed, 2, payload_size_bytes=size_bytes, chunk_size_bytes=262_144, publisher=line, draw_link=lambda _: line
        )
        assert measured.all_seconds < 1.5, f"seed {seed}"


def test_one_reader_costs_one_payload() -> None:
    assert spread(1, 1).publisher_payloads == pytest.approx(1.0)


def test_the_same_seed_measures_the_same() -> None:
    assert spread(2, 4) == spread(2, 4)
    assert spread(2, 4) != spread(3, 4)


def test_a_spread_that_takes_too_long_has_failed() -> None:
    with pytest.raises(SimulationError, match="not done after"):
        spread(1, 2, limit_seconds=1.0)


def test_the_bound_is_the_tightest_of_three() -> None:
    thin = Link(up_rate=1.0, down_rate=2.0)
    fat = Link(up_rate=100.0, down_rate=1_000.0)
    assert compute_bound_seconds(100, Link(up_rate=4.0), [fat]) == 25  # it leaves the publisher
    assert compute_bound_seconds(100, fat, [thin, fat]) == 50  # it enters the slowest reader
    assert compute_bound_seconds(1_000, Link(up_rate=100.0), [Link(up_rate=0.0, down_rate=1e9)] * 10) == 100


def test_a_busy_publisher_sends_readers_elsewhere_and_they_come_back() -> None:
    """Six readers with little upload and one thin publisher: slots run out, and everybody still arrives."""
    thin = Link(up_rate=8 * MEGABIT, down_rate=100 * MEGABIT)
    measured = spread(4, 8, publisher=thin, draw_link=lambda _: Link(up_rate=1 * MEGABIT, down_rate=100 * MEGABIT))
    assert measured.all_seconds >= measured.bound_seconds
