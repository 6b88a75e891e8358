import pytest

from pulsenet.outer.mixing.bound import bound_measured, contraction, distance_ratio, pair_contraction
from pulsenet.outer.mixing.settings import MixingKind, MixingVariant

BY_VARIANT = [
    (MixingVariant.DILOCO, 1.0, 1.0),
    (MixingVariant.GLOBAL_M1, 2.0, 1.49),
    (MixingVariant.GLOBAL_M1_LOCAL_M2, 1.43, 1.21),
    (MixingVariant.LOCAL_M1_M2, 1.75, 1.37),
]


@pytest.mark.parametrize(("variant", "at_1", "at_07"), BY_VARIANT)
def test_ratios_of_eight_trainers_are_those_of_the_design(variant: MixingVariant, at_1: float, at_07: float) -> None:
    assert distance_ratio(variant, 8, outer_learning_rate=1.0) == pytest.approx(at_1, abs=0.005)
    assert distance_ratio(variant, 8, outer_learning_rate=0.7) == pytest.approx(at_07, abs=0.005)


def test_a_pair_contracts_what_it_is_of_all_pairs() -> None:
    assert [pair_contraction(count) for count in (1, 2, 3, 4, 7, 8)] == [0.0, 0.0, 0.5, 1 / 3, 0.5, 3 / 7]
    assert contraction(MixingKind.NONE, 1) == 0.0
    assert contraction(MixingKind.NONE, 2) == 1.0
    assert contraction(MixingKind.GLOBAL, 9) == 0.0


def test_what_a_subset_leaves_out_is_not_contracted() -> None:
    subset = MixingVariant.GLOBAL_M1_LOCAL_M2_SUBSET
    whole, none = (
        distance_ratio(v, 8, outer_learning_rate=1.0)
        for v in (MixingVariant.GLOBAL_M1_LOCAL_M2, MixingVariant.GLOBAL_M1)
    )
    assert distance_ratio(subset, 8, outer_learning_rate=1.0) == whole
    half = distance_ratio(subset, 8, outer_learning_rate=1.0, subset_ratio=0.5)
    assert half == pytest.approx((whole + none) / 2)


def test_two_trainers_that_always_meet_are_as_close_as_under_diloco() -> None:
    assert distance_ratio(MixingVariant.LOCAL_M1_M2, 2, outer_learning_rate=0.7) == 1.0


def test_the_bound_is_what_inner_steps_did_times_the_ratio() -> None:
    assert bound_measured(MixingVariant.GLOBAL_M1, 8, 0.24, outer_learning_rate=1.0) == pytest.approx(0.48)
