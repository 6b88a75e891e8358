import numpy as np
import pytest
from numba import config as numba_config

from pulsenet.codec.cells import (
    REACH_MAX,
    classify_reach,
    measure_reach,
    measure_reach_twin,
    measure_values,
    measure_values_twin,
    restore_values,
    restore_values_twin,
)
from pulsenet.codec.classes import CLASS_COUNT

GENERATOR = np.random.default_rng(11)
LOWS = np.arange(0, 1 << 16, 31 if numba_config.DISABLE_JIT else 1, np.uint32)
MIXED = np.concatenate(
    (
        LOWS | np.uint32(0x3C000000),
        LOWS << np.uint32(16) | np.uint32(0x1234),
        GENERATOR.integers(0, 1 << 32, 5000, np.uint32),
        np.array([0, 1 << 31, 1, 0x7F800000, 0xFF800000, 0x7FC00001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF], np.uint32),
    )
)


def bits(*values: float) -> np.ndarray:
    return np.array(values, np.float32).view(np.uint32)


def test_reach_counts_half_octaves_of_the_distance_to_the_edge() -> None:
    one = 0x3F800000
    lows = [0x8000, 0x8001, 0x7FFF, 0x8002, 0x8003, 0x8004, 0x8006, 0x0000, 0xFFFF]
    expected = [0, 2, 2, 4, 5, 6, 7, 32, 31]
    theta = np.array([one | low for low in lows], np.uint32)
    for measure in (measure_reach, measure_reach_twin):
        assert (measure(theta) - 2 * 127).tolist() == expected


def test_reach_is_that_of_the_distance_whatever_the_exponent() -> None:
    # 64 places at 1.0 are as far as 128 places one binade lower.
    theta = np.array([0x3F800000 | (0x8000 - 64), 0x3F000000 | (0x8000 - 128)], np.uint32)
    assert len(set(measure_reach(theta).tolist())) == 1


def test_reach_loop_equals_its_twin_on_every_pattern_of_either_half() -> None:
    reaches = measure_reach(MIXED)
    assert np.array_equal(reaches, measure_reach_twin(MIXED))
    assert int(reaches.max()) == REACH_MAX


def test_classes_go_down_from_the_top_and_are_clamped() -> None:
    reaches = np.array([0, 80, 81, 99, 100, 101, REACH_MAX], np.uint16)
    assert classify_reach(reaches, 100).tolist() == [19, 19, 19, 1, 0, 0, 0]
    assert classify_reach(reaches, 0).tolist() == [0] * 7
    assert int(classify_reach(reaches, REACH_MAX).max()) == CLASS_COUNT - 1


def test_number_is_how_far_a_value_goes_beyond_the_edge() -> None:
    # The weight is 1 + 0x7FF0 places; its cell ends at 0x8000 above and at -0x8000 below.
    theta = np.full(5, 0x3F807FF0, np.uint32)
    place = 2.0**-23
    values = bits(-0x10 * place, -0x13 * place, 0xFFF0 * place, 0x10000 * place, -0x0F * place)
    for measure in (measure_values, measure_values_twin):
        numbers, aways, escapes = measure(theta, values)
        assert numbers[:4].tolist() == [0, 3, 0, 0x10]
        assert aways[:4].tolist() == [0, 0, 1, 1]
        assert escapes.tolist() == [4]


@pytest.mark.parametrize(
    ("theta", "value"),
    [
        (0x3F800000, 0x7F800000),  # infinity
        (0x3F800000, 0xFFC00001),  # NaN
        (0x3F800000, 0x00000001),  # far below a last place
        (0x3F800000, 0x3F800001 - (1 << 23)),  # half a place too much
        (0x00000000, 0x3F800000),  # more than 2^32 places
        (0x3F800000, 0x7F000000),
        (0x3F808000 + 1, 0x80000000),  # nothing at all, though the edge is a place away
    ],
)
def test_value_that_is_no_number_of_places_beyond_the_edge_escapes(theta: int, value: int) -> None:
    for measure in (measure_values, measure_values_twin):
        _, _, escapes = measure(np.array([theta], np.uint32), np.array([value], np.uint32))
        assert escapes.tolist() == [0]


def test_every_value_comes_back_or_escapes() -> None:
    for scale in (1.0, 0.01, 1e-4, 1e-7, 1e-12):
        theta = MIXED
        with np.errstate(all="ignore"):
            moved = theta.view(np.float32) * np.float32(1 - scale) + GENERATOR.standard_normal(theta.size).astype(
                np.float32
            ) * np.float32(scale * 0.01)
            values = (theta.view(np.float32) - moved).view(np.uint32)
        numbers, aways, escapes = measure_values(theta, values)
        twin = measure_values_twin(theta, values)
        assert np.array_equal(escapes, twin[2])
        regular = np.setdiff1d(np.arange(theta.size), escapes)
        assert np.array_equal(numbers[regular], twin[0][regular])
        assert np.array_equal(aways[regular], twin[1][regular])
        for restore in (restore_values, restore_values_twin):
            restored = restore(theta[regular], numbers[regular], aways[regular])
            assert restored is not None
            assert np.array_equal(restored, values[regular])


def test_number_without_an_fp32_value_is_noticed() -> None:
    for theta, number in (
        (0x3F800000, (1 << 24) + 1 - 0x8000),  # 25 bits
        (0x7F7F8000, 1 << 24),  # beyond the largest
        (0x7FFF8000, 1 << 30),
    ):
        for restore in (restore_values, restore_values_twin):
            found = restore(np.array([theta], np.uint32), np.array([number], np.uint32), np.array([0], np.uint8))
            assert found is None


def test_zero_keeps_its_sign_and_subnormals_their_bits() -> None:
    theta = np.array([0x3F808000, 0x3F808000, 0x00008000, 0x00008000], np.uint32)
    values = np.array([0x00000000, 0x80000000, 0x00000001, 0x0000FFFF], np.uint32)
    numbers, aways, escapes = measure_values(theta, values)
    assert escapes.tolist() == [1]  # away from the edge that it stands on, so not far enough
    for restore in (restore_values, restore_values_twin):
        restored = restore(theta, numbers, aways)
        assert restored is not None
        assert restored[[0, 2, 3]].tolist() == values[[0, 2, 3]].tolist()
