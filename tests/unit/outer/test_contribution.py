import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pulsenet.errors import LocalProtocolError
from pulsenet.outer.contribution import Contribution, Entries, find_run


@pytest.mark.parametrize(
    ("indices", "values"),
    [
        (None, np.zeros(2)),
        (None, np.zeros((2, 1), np.float32)),
        (np.zeros(2, np.int64), np.zeros(2, np.float32)),
        (np.zeros((2, 1), np.uint32), np.zeros(2, np.float32)),
        (np.zeros(3, np.uint32), np.zeros(2, np.float32)),
    ],
)
def test_arrays_of_another_kind_are_refused(indices: np.ndarray | None, values: np.ndarray) -> None:
    with pytest.raises(LocalProtocolError):
        Entries(0, indices, values)


def test_equality_is_of_bits() -> None:
    zero, minus = np.zeros(1, np.float32), np.array([-0.0], np.float32)
    nan = np.array([np.nan], np.float32)
    at, elsewhere = np.array([3], np.uint32), np.array([4], np.uint32)
    assert Entries(0, at, nan).same_as(Entries(0, at.copy(), nan.copy()))
    assert not Entries(0, at, zero).same_as(Entries(0, at, minus))
    assert Entries(0, at, zero).same_as(Entries(0, elsewhere, zero)) is False
    assert Entries(0, at, zero).same_as(Entries(1, at, zero)) is False
    assert not Entries(0, None, zero).same_as(Entries(0, at, zero))
    assert Entries(0, None, zero).same_as(Entries(0, None, zero))


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_a_run_of_positions_is_found_without_a_copy_of_them(dtype: type[np.unsignedinteger[Any]]) -> None:
    """A tensor of many runs would be copied as often."""
    indices = np.arange(0, 3_000_000, 3, dtype=dtype)
    tracemalloc.start()
    found = [find_run(indices, start, end) for start, end in ((0, 0), (1, 7), (2_999_000, 3_000_000), (0, 4_000_000))]
    _, peak_size_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == [(0, 0), (1, 3), (999_667, 1_000_000), (0, 1_000_000)]
    assert peak_size_bytes < 100_000


def test_a_contribution_counts_its_entries_and_compares_all_of_it(
    make_contribution: Callable[..., Contribution],
) -> None:
    one = make_contribution()
    assert one.sent_count == 3
    assert one.same_as(make_contribution())
    assert not one.same_as(make_contribution(round_index=6))
    assert not one.same_as(make_contribution(entries=one.entries[:1]))
    changed = Entries(1, np.array([0], np.uint32), np.array([4.0], np.float32))
    assert not one.same_as(make_contribution(entries=(one.entries[0], changed)))
