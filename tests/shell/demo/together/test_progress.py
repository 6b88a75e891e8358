"""The table of rounds."""

import dataclasses

from pulsenetd.demo.reports import RoundDone
from pulsenetd.demo.together import progress
from pulsenetd.demo.together.progress import RoundRow, format_line, ring_size_bytes

DONE = RoundDone(
    round_index=4,
    next_round_index=5,
    outcome="counted",
    contributor_count=2,
    sent_count=10,
    element_count=1000,
    payload_size_bytes=40,
    residual_norm=0.5,
    loss=2.0,
    state_root="ab",
    seconds=1.0,
)


def test_a_round_shows_what_was_counted() -> None:
    row = RoundRow(4)
    row.done = {
        "b": DONE,
        "a": dataclasses.replace(DONE, sent_count=30, payload_size_bytes=60, loss=4.0),
        "c": dataclasses.replace(DONE, outcome="missed", sent_count=999, payload_size_bytes=999, loss=3.0),
    }
    row.received_size_bytes = {"a": 100, "b": 300, "c": 200}
    assert row.contributors == ("a", "b")
    assert (row.density, row.payload, row.received, row.loss, row.residual_norm) == (0.02, 50, 200, 3.0, 0.5)
    assert row.cells(1000) == ("4", "2", "2.00%", "50 B", "200 B", "4.0 kB", "32.0 kB", "0.5000", "3.0000")


def test_a_round_nobody_reported_is_empty() -> None:
    assert RoundRow(0).cells(1000) == ("0", "0", "0.00%", "0 B", "0 B", "0 B", "0 B", "0.0000", "0.0000")


def test_a_ring_costs_each_member_less_than_twice_the_model() -> None:
    assert [ring_size_bytes(1000, count) for count in (1, 2, 4)] == [0, 4000, 6000]


def test_a_line_fits_a_terminal() -> None:
    assert len(format_line(progress.COLUMNS)) <= 80
