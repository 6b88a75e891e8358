from collections.abc import Callable

import numpy as np
import pytest

from pulsenet.errors import LocalProtocolError
from pulsenet.outer.contribution import Contribution, Entries


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
    assert not Entries(0, at, zero).same_as(Entries(0, elsewhere, zero))
    assert not Entries(0, at, zero).same_as(Entries(1, at, zero))
    assert not Entries(0, None, zero).same_as(Entries(0, at, zero))
    assert Entries(0, None, zero).same_as(Entries(0, None, zero))


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
