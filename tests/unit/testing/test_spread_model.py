"""The reduced model keeps to what the lines allow, and to the real machines where both can be run."""

from __future__ import annotations

import pytest

from pulsenet.testing.fakes import Chance
from pulsenet.testing.links import MEGABIT, Link, draw_home_link
from pulsenet.testing.spread import PUBLISHER_LINK, Spread, measure_spread
from pulsenet.testing.spread_model import PUBLISHER_COPIES, SpreadModel


def home_lines(count: int, seed: int = 1) -> list[Link]:
    chance = Chance(seed)
    return [draw_home_link(chance) for _ in range(count)]


def model(lines: list[Link], seed: int = 1, publisher: Link = PUBLISHER_LINK, piece_count: int = 50) -> Spread:
    return SpreadModel(seed, publisher, lines, payload_size_bytes=50e6, piece_count=piece_count).run()


@pytest.mark.parametrize("count", [1, 2, 10, 100])
def test_everybody_gets_it_and_nobody_faster_than_the_lines_allow(count: int) -> None:
    spread = model(home_lines(count))
    # The publisher gives two copies only, so the readers' uplinks carry the rest.
    carried_seconds = 50e6 * count / sum(line.up_rate for line in home_lines(count))
    assert spread.bound_seconds <= spread.all_seconds < 3 * max(spread.bound_seconds, carried_seconds)
    assert spread.publisher_payloads <= min(count, PUBLISHER_COPIES)


def test_the_same_seed_gives_the_same_run() -> None:
    assert model(home_lines(20)) == model(home_lines(20))
    assert model(home_lines(20)) != model(home_lines(20), seed=2)


def test_time_hardly_grows_with_the_number_of_readers() -> None:
    lines = [Link(up_rate=50 * MEGABIT, down_rate=100 * MEGABIT, delay_seconds=0.02)] * 500
    few, many = model(lines[:20]), model(lines)
    assert many.all_seconds < 2 * few.all_seconds


def test_where_uploads_do_not_cover_the_readers_time_is_what_they_carry() -> None:
    lines = [Link(up_rate=2 * MEGABIT, down_rate=100 * MEGABIT)] * 40
    publisher = Link(up_rate=20 * MEGABIT)
    spread = model(lines, publisher=publisher)
    assert spread.bound_seconds == pytest.approx(50e6 * 40 / (100 * MEGABIT))
    assert spread.all_seconds >= spread.bound_seconds


def test_readers_behind_nat_are_reached_by_those_they_dial() -> None:
    lines = [Link(up_rate=20 * MEGABIT, down_rate=100 * MEGABIT, is_dialable=index % 3 == 0) for index in range(30)]
    carried_seconds = 50e6 / (20 * MEGABIT)
    assert model(lines).all_seconds < 3 * carried_seconds


def test_the_model_is_near_the_real_machines() -> None:
    lines = home_lines(8, seed=3)
    supply = iter(lines)
    real = measure_spread(
        3,
        len(lines),
        payload_size_bytes=40 * 4_000,
        chunk_size_bytes=4_000,
        scale=250.0,
        draw_link=lambda _: next(supply),
    )
    reduced = SpreadModel(3, PUBLISHER_LINK, lines, payload_size_bytes=40e6, piece_count=40).run()
    assert real.bound_seconds == pytest.approx(reduced.bound_seconds)
    assert 0.4 < reduced.all_seconds / real.all_seconds < 1.6
