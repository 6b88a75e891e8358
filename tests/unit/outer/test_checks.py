from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from pulsenet.errors import LocalProtocolError
from pulsenet.ids import Digest
from pulsenet.outer.checks import (
    ContentCheck,
    Expected,
    FaultCode,
    _sum_squares,
    compute_norm,
    compute_scales,
    find_fault,
    sum_squares_twin,
)
from pulsenet.outer.contribution import Contribution, Entries

Make = Callable[..., Contribution]


def entries(index: int, positions: list[int] | None, values: list[float]) -> Entries:
    indices = None if positions is None else np.array(positions, np.uint32)
    return Entries(index, indices, np.array(values, np.float32))


def test_a_sound_contribution_has_no_fault(make_contribution: Make, expected: Expected) -> None:
    assert find_fault(make_contribution(), expected) is None


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"round_index": 4}, FaultCode.ROUND),
        ({"state_root": Digest(bytes(32))}, FaultCode.BASE),
        ({"inner_step_count": 0}, FaultCode.SHAPE),
        ({"entries": ()}, FaultCode.SHAPE),
        ({"entries": (entries(1, [], []), entries(0, [], []))}, FaultCode.SHAPE),
        ({"entries": (entries(0, [6], [1.0]), entries(1, [], []))}, FaultCode.SHAPE),
        ({"entries": (entries(0, [3, 3], [1.0, 1.0]), entries(1, [], []))}, FaultCode.SHAPE),
        ({"entries": (entries(0, [3, 2], [1.0, 1.0]), entries(1, [], []))}, FaultCode.SHAPE),
        ({"entries": (entries(0, None, [0.0] * 6), entries(1, [], []))}, FaultCode.SHAPE),
        ({"entries": (entries(0, [3], [np.nan]), entries(1, [], []))}, FaultCode.FINITE),
        ({"entries": (entries(0, [], []), entries(1, [0], [-np.inf]))}, FaultCode.FINITE),
        ({"entries": (entries(0, [0, 1], [4.0, 3.0]), entries(1, [0], [0.01]))}, FaultCode.NORM),
    ],
)
def test_every_fault_has_its_code(
    make_contribution: Make, expected: Expected, changes: dict[str, object], code: FaultCode
) -> None:
    """A-LOC-6 for NaN and Inf."""
    fault = find_fault(make_contribution(**changes), expected)
    assert fault is not None
    assert fault.code is code


def check_by_parts(contribution: Contribution, expected: Expected) -> ContentCheck:
    check = ContentCheck(
        expected,
        round_index=contribution.round_index,
        state_root=contribution.state_root,
        inner_step_count=contribution.inner_step_count,
    )
    for given in contribution.entries:
        for value in given.values:
            check.take(given.tensor_index, np.array([value], np.float32))
    return check


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"round_index": 4},
        {"state_root": Digest(bytes(32)), "inner_step_count": 0},
        {"inner_step_count": 0},
        {"entries": (entries(0, [3], [np.nan]), entries(1, [0], [np.inf]))},
        {"entries": (entries(0, [], []), entries(1, [0], [-np.inf]))},
        {"entries": (entries(0, [0, 1], [4.0, 3.0]), entries(1, [0], [0.01]))},
    ],
)
def test_checking_part_by_part_says_the_same(
    make_contribution: Make, expected: Expected, changes: dict[str, object]
) -> None:
    contribution = make_contribution(**changes)
    check = check_by_parts(contribution, expected)
    fault, whole = check.finish(), find_fault(contribution, expected)
    assert (fault and fault.code) == (whole and whole.code)
    assert check.entry_count == contribution.sent_count
    assert check.norm == compute_norm(contribution) or fault is not None


def test_a_dense_contribution_read_by_parts_leaves_nothing_out(make_contribution: Make, expected: Expected) -> None:
    dense = replace(expected, is_dense=True)
    whole = make_contribution(entries=(entries(0, None, [0.5] * 6), entries(1, None, [1.0])))
    assert check_by_parts(whole, dense).finish() is None
    short = make_contribution(entries=(entries(0, None, [np.nan] * 5), entries(1, None, [1.0])))
    fault = check_by_parts(short, dense).finish()
    assert fault is not None
    assert (fault.code, fault.detail) == (FaultCode.SHAPE, "a: 5 values for 6 elements")


def test_dense_contributions_hold_everything(make_contribution: Make, expected: Expected) -> None:
    dense = replace(expected, is_dense=True)
    whole = (entries(0, None, [0.5] * 6), entries(1, None, [1.0]))
    assert find_fault(make_contribution(entries=whole), dense) is None
    sparse = find_fault(make_contribution(), dense)
    assert sparse is not None
    assert "sparse where dense" in sparse.detail
    short = find_fault(make_contribution(entries=(entries(0, None, [0.5] * 5), whole[1])), dense)
    assert short is not None
    assert short.code is FaultCode.SHAPE


def test_the_norm_is_over_all_tensors(make_contribution: Make) -> None:
    assert compute_norm(make_contribution()) == 5.0


def test_the_norms_sum_is_in_order_and_independent_of_blocks() -> None:
    values = np.random.default_rng(9).standard_normal(3001).astype(np.float32)
    whole = sum_squares_twin(values, 0.25)
    assert _sum_squares(values, 0.25) == whole
    assert _sum_squares(values[1700:], _sum_squares(values[:1700], 0.25)) == whole


def test_norms_are_clipped_to_a_multiple_of_the_median() -> None:
    assert compute_scales([1.0, 2.0, 3.0, 100.0], clip_norm_ratio=2.0) == [1.0, 1.0, 1.0, np.float32(0.05)]
    assert compute_scales([4.0, 1.0, 2.0], clip_norm_ratio=1.0) == [0.5, 1.0, 1.0]
    assert compute_scales([4.0, 1.0], clip_norm_ratio=0.0) == [1.0, 1.0]
    assert compute_scales([0.0, 0.0, 4.0], clip_norm_ratio=2.0) == [1.0, 1.0, 1.0]
    assert compute_scales([1e-30, 1e-30, 1e18], clip_norm_ratio=1.0)[2] == np.float32(2.0**-149)
    assert compute_scales([], clip_norm_ratio=2.0) == []
    with pytest.raises(LocalProtocolError):
        compute_scales([1.0], clip_norm_ratio=0.5)
