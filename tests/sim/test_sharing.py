"""Readers on home lines feed one another: the publisher sends a version a few times, and little is sent twice."""

from __future__ import annotations

from statistics import median

import pytest

from pulsenet.testing.links import MEGABIT, Link
from pulsenet.testing.paper import PaperSizes
from pulsenet.testing.spread import PUBLISHER_LINK, PaperWorld, Spread, measure_spread

CHUNK_SIZE_BYTES = 4_000
SCALE = 250.0
"""A chunk is 1 MB on the wire."""


def spread_to_home_lines(seed: int, megabytes: int, reader_count: int = 50) -> Spread:
    """Readers with lines of 20 to 1,000 Mb/s down and 5 to 100 up, the publisher's 1,000."""
    payload_size_bytes = megabytes * CHUNK_SIZE_BYTES
    return measure_spread(
        seed, reader_count, payload_size_bytes=payload_size_bytes, chunk_size_bytes=CHUNK_SIZE_BYTES, scale=SCALE
    )


def test_the_publisher_sends_a_version_a_few_times_to_twenty_readers() -> None:
    """A-PEER-2: 20 MB in 20 chunks."""
    measured = spread_to_home_lines(1, megabytes=20, reader_count=20)
    assert 1.0 <= measured.publisher_payloads <= 3.5
    assert measured.received_payloads <= 1.25


@pytest.mark.nightly
@pytest.mark.parametrize(("seed", "megabytes"), [(1, 20), (2, 20), (3, 20), (4, 20), (1, 100), (2, 100)])
def test_the_publisher_sends_a_version_at_most_five_times_to_fifty_readers(seed: int, megabytes: int) -> None:
    """A-PEER-2."""
    measured = spread_to_home_lines(seed, megabytes)
    assert 1.0 <= measured.publisher_payloads <= 5.0
    assert measured.received_payloads <= 1.25


@pytest.mark.nightly
def test_over_many_draws_it_sends_as_few_in_the_mean() -> None:
    """A-PEER-2: it helps whoever would wait for long, in some draws many, for each knows but a dozen of the others."""
    payloads = [spread_to_home_lines(seed, megabytes=20).publisher_payloads for seed in range(1, 11)]
    assert sum(payloads) / len(payloads) <= 5.0
    assert max(payloads) <= 8.0


def follow_small_patches(reader_count: int, publisher: Link) -> tuple[float, float]:
    """Let readers follow patches of 4 MB; return seconds until all have one, and payloads that the publisher sends."""
    chunk_size_bytes, chunk_count, version_count = 100_000, 4, 10
    payload_size_bytes = chunk_count * chunk_size_bytes
    world = PaperWorld(1, PaperSizes(patch=payload_size_bytes, chunk=chunk_size_bytes), scale=10.0)
    trainer = world.add_node("trainer", "trainer", link=publisher)
    for index in range(reader_count):
        line = Link(up_rate=100 * MEGABIT, down_rate=300 * MEGABIT, delay_seconds=0.015)
        world.add_node(f"reader {index}", "inferencer", link=line)
    meter = world.links.meter_of(trainer.peer_id)
    seconds: list[float] = []
    sent: list[int] = []
    world.run_for(90.0)
    for _ in range(version_count):
        world.publish_and_wait()
        began, before = world.clock.now, meter.sent_content_size_bytes
        world.run_until(world.is_settled, 600.0)
        seconds.append(world.clock.now - began)
        sent.append(meter.sent_content_size_bytes - before)
        world.run_for(10.0)
    return median(seconds), median(sent) / payload_size_bytes


def test_a_few_readers_wait_for_no_turns_where_the_publisher_is_quick() -> None:
    """A small patch takes them hardly longer than one alone. Where the line is thin for it they divide it."""
    alone_seconds, _ = follow_small_patches(1, PUBLISHER_LINK)
    both_seconds, sent = follow_small_patches(2, PUBLISHER_LINK)
    assert both_seconds <= 1.4 * alone_seconds
    assert sent == 2.0
    _, sent = follow_small_patches(2, Link(up_rate=20 * MEGABIT, down_rate=100 * MEGABIT, delay_seconds=0.015))
    assert sent <= 1.25
    _, sent = follow_small_patches(8, PUBLISHER_LINK)
    assert sent <= 1.5


def test_where_uplinks_are_thin_the_publisher_gives_what_it_can_and_status_says_so() -> None:
    """20 MB to eight readers with 1 Mb/s up take minutes over their uplinks, and seconds over the publisher's."""
    measured = measure_spread(
        1,
        8,
        payload_size_bytes=20 * CHUNK_SIZE_BYTES,
        chunk_size_bytes=CHUNK_SIZE_BYTES,
        scale=SCALE,
        draw_link=lambda _: Link(up_rate=MEGABIT, down_rate=100 * MEGABIT, delay_seconds=0.01),
    )
    assert measured.all_seconds <= 20.0
    assert measured.received_payloads <= 1.25
    assert measured.told_count == 8
