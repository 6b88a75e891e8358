"""The map of who feeds whom, and the table that says the same."""

from __future__ import annotations

from scenes import peer

from pulsenetd.page.markup import render
from pulsenetd.page.peer_map import DRAWN_MAX, draw_map, draw_table_rows, short_name


def test_who_moved_nothing_is_in_the_table_only() -> None:
    quiet, feeder = peer(1), peer(2, received_bytes=5_000, received_bytes_per_second=900.0)
    drawn = render(draw_map([quiet, feeder]))
    assert short_name(feeder["peer_id"]) in drawn
    assert short_name(quiet["peer_id"]) not in drawn
    assert "1 more peer is connected and quiet." in drawn
    rows = render(draw_table_rows([quiet, feeder]))
    assert short_name(quiet["peer_id"]) in rows
    assert "900 B/s" in rows


def test_a_peer_that_feeds_and_is_fed_stands_on_both_sides() -> None:
    both = peer(1, received_bytes=5_000, sent_bytes=7_000, sent_bytes_per_second=2e6)
    drawn = render(draw_map([both]))
    assert drawn.count("edge received resting") == drawn.count("edge sent active") == 1
    assert f"Fed by {short_name(both['peer_id'])}; feeds {short_name(both['peer_id'])}." in drawn


def test_a_crowd_is_drawn_in_part_and_the_rest_counted() -> None:
    many = [peer(number, received_bytes=10, sent_bytes=10) for number in range(1, 20)]
    drawn = render(draw_map(many))
    assert drawn.count("edge received") == drawn.count("edge sent") == DRAWN_MAX
    assert f"{2 * (19 - DRAWN_MAX)} more are in the table." in drawn


def test_lines_grow_with_what_they_carry() -> None:
    widths = [
        render(draw_map([peer(1, received_bytes=1, received_bytes_per_second=rate)])).split('stroke-width="')[1]
        for rate in (10.0, 2e5, 2e6, 2e7, 2e8)
    ]
    assert [float(width.split('"')[0]) for width in widths] == [1.5, 2, 3, 4, 5]


def test_alone_nobody_is_drawn() -> None:
    assert "No chunk has moved" in render(draw_map([]))
    assert "nobody is connected" in render(draw_table_rows([]))


def test_a_peer_that_left_is_called_gone() -> None:
    assert "<td>gone</td>" in render(draw_table_rows([peer(1, is_connected=False)]))
