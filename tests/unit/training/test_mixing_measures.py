"""Squares of one round, tensor by tensor, and what may be said of them."""

from __future__ import annotations

import numpy as np
import pytest

from pulsenet import limits
from pulsenet.outer.mixing.settings import MixingVariant
from pulsenet.tensors.params import TensorSpec, make_table
from pulsenet.training.mixer import NOTHING_MIXED, Mixed
from pulsenet.training.mixing_measures import RoundMeasures

TABLE = make_table([TensorSpec("a", "F32", (2,)), TensorSpec("b", "F32", (4,)), TensorSpec("c", "F32", (0,))])
SUBSET = MixingVariant.GLOBAL_M1_LOCAL_M2_SUBSET
PAIR, FOUR = Mixed((), 2), Mixed((), 4)


def make_measures(variant: MixingVariant, subset: tuple[int, ...] = (0, 1, 2)) -> RoundMeasures:
    measures = RoundMeasures(variant, TABLE, subset)
    for index, squares in enumerate([(1.0, 3.0, 2.0), (1.0, 6.0, 8.0), (0.0, 0.0, 0.0)]):
        measures.add(index, squares)
    return measures


def test_of_a_subset_its_own_tensors_count_and_of_z_all() -> None:
    measures = make_measures(SUBSET, (1,))
    assert (measures.delta_square, measures.distance_square) == (2.0, 9.0)
    assert measures.start_square(FOUR) == pytest.approx(9.0 * 8 / 3)
    assert measures.noise_square(PAIR) == 4 * 8.0
    assert measures.end_square(FOUR, PAIR) == pytest.approx(6.0 * 8 / 3 + 32.0)


def test_scores_are_of_an_element_so_that_large_tensors_are_not_worse() -> None:
    scores = np.frombuffer(make_measures(SUBSET).scores(PAIR), "<f4")
    assert scores.tolist() == [4 * 2.0 / 2, 4 * 8.0 / 4, 0.0]


@pytest.mark.parametrize("mix2", [NOTHING_MIXED, Mixed((), 1), Mixed((), 2, "lost"), Mixed(None, 2)])
def test_a_mean_that_is_not_whole_tells_nothing(mix2: Mixed) -> None:
    measures = make_measures(SUBSET)
    assert measures.noise_square(mix2) is None
    assert measures.end_square(FOUR, mix2) is None
    assert measures.scores(mix2) == b""
    assert measures.start_square(mix2) is None
    assert measures.end_square(mix2, PAIR) is None


def test_what_a_variant_does_not_exchange_is_not_known() -> None:
    assert make_measures(MixingVariant.GLOBAL_M1).end_square(FOUR, NOTHING_MIXED) is None
    assert make_measures(MixingVariant.GLOBAL_M1).start_square(FOUR) is not None
    assert make_measures(MixingVariant.DILOCO).start_square(FOUR) is None
    assert make_measures(MixingVariant.DILOCO).end_square(NOTHING_MIXED, FOUR) == pytest.approx(10.0 * 8 / 3)
    assert make_measures(MixingVariant.LOCAL_M1_M2).scores(PAIR) == b"", "all tensors are mixed anyway"


def test_more_tensors_than_a_record_has_room_for_have_no_scores() -> None:
    count = limits.PROBE_SCORES_MAX + 1
    table = make_table([TensorSpec(f"t{index:05}", "F32", (1,)) for index in range(count)])
    measures = RoundMeasures(SUBSET, table, range(count))
    for index in range(count):
        measures.add(index, (0.0, 0.0, 1e300 if index == 0 else 1.0))
    assert measures.scores(PAIR) == b""
    measures.subset = range(count - 1)
    scores = np.frombuffer(measures.scores(PAIR), "<f4")
    assert scores.size == limits.PROBE_SCORES_MAX
    assert np.isfinite(scores).all(), "what FP32 cannot hold is its largest value"
