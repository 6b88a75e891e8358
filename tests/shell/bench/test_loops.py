"""Each loop does what one line of numpy does."""

from __future__ import annotations

import numpy as np
import pytest

from pulsenetd.bench.loops import count_classes, join_gaps, read_both, write_values


def test_reading_both_ors_all_differences() -> None:
    old, new = np.random.default_rng(1).integers(0, 1 << 63, (2, 1001)).astype(np.uint64)
    assert read_both(old, new) == np.bitwise_or.reduce(old ^ new)
    assert read_both(old, old) == 0


@pytest.mark.parametrize(
    ("width", "shift", "mask"), [(1, 3, 0xF), (2, 7, 0xFF), (4, 23, 0xFF), (8, 52, 0x7FF), (8, 0, 0)]
)
def test_classes_are_counted_on_top_of_what_was_there(width: int, shift: int, mask: int) -> None:
    bits = np.frombuffer(np.random.default_rng(width).bytes(width * 999), f"<u{width}")
    counts = np.ones(mask + 1, np.int64)
    count_classes(bits, shift, mask, counts)
    classes = (bits.astype(np.uint64) >> np.uint64(shift)) & np.uint64(mask)
    assert np.array_equal(counts, 1 + np.bincount(classes.astype(np.int64), minlength=mask + 1))


def test_values_are_written_where_the_indices_say() -> None:
    view = np.zeros(9, np.uint16)
    write_values(view, np.array([0, 3, 8], np.uint32), np.array([5, 6, 7], np.uint16))
    assert view.tolist() == [5, 0, 0, 6, 0, 0, 0, 0, 7]


def test_gaps_lead_to_positions() -> None:
    positions = np.array([0, 1, 5, 300, 301, 70_000], np.uint32)
    gaps = np.diff(positions.astype(np.int64), prepend=-1) - 1
    found = np.empty(positions.size, np.uint32)
    join_gaps(gaps.astype(np.uint32), found)
    assert np.array_equal(found, positions)
