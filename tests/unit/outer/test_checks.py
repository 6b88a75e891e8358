from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from pulsenet.errors import LocalProtocolError, RemoteProtocolError
from pulsenet.ids import Digest
from pulsenet.outer.checks import (
    Expected,
    FaultCode,
    _sum_squares,
    check_contribution,
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
    check_contribution(make_contribution(), expected)


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
    with pytest.raises(RemoteProtocolError) as caught:
        check_contribution(make_contribution(**changes), expected)
    assert caught.value.code == code


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
    assert compute_scales([], clip_norm_ratio=2.0) == []
    with pytest.raises(LocalProtocolError):
        compute_scales([1.0], clip_norm_ratio=0.5)
