import numpy as np
import pytest
from numba import config as numba_config

from pulsenet.codec.values import (
    join_steps,
    join_steps_twin,
    measure_steps,
    measure_steps_twin,
    split_steps,
    split_steps_twin,
    take_steps,
    take_steps_twin,
)
from pulsenet.tensors.floats import from_ordered, to_ordered

ALL_8 = np.arange(1 << 8, dtype=np.uint32).astype(np.uint8)
ALL_16 = np.arange(0, 1 << 16, 31 if numba_config.DISABLE_JIT else 1, np.uint32).astype(np.uint16)
ALL_16 = ALL_16[: ALL_16.size & ~7]
"""Without numba every 31st, as many as fill bytes of bits."""
SOME_32 = (ALL_16.astype(np.uint32) << np.uint32(16)) | np.uint32(0xFFFF)


def u16(*values: int) -> np.ndarray:
    return np.array(values, np.uint16)


def test_neighbours_are_one_bit_and_the_rest_exceptions() -> None:
    old = u16(0x3F80, 0x3F80, 0x0000, 0x8000, 0x3F80, 0xBF80, 0x7F80)
    new = u16(0x3F81, 0x3F7F, 0x8000, 0x0000, 0x4080, 0xBF81, 0x7F81)
    for split in (split_steps, split_steps_twin):
        ups, exceptions = split(old, new)
        assert ups.tolist() == [0b1001001]  # up, down, down (+0 to -0), up, exception, down (more negative), up
        assert exceptions.tolist() == [4]


def test_steps_wrap_between_the_largest_and_the_smallest_pattern() -> None:
    for split in (split_steps, split_steps_twin):
        ups, exceptions = split(u16(0x7FFF, 0xFFFF), u16(0xFFFF, 0x7FFF))
        assert (ups.tolist(), exceptions.size) == ([0b01], 0)


@pytest.mark.parametrize("patterns", [ALL_8, ALL_16, SOME_32], ids=["8", "16", "32"])
def test_every_pattern_steps_both_ways_and_back(patterns: np.ndarray) -> None:
    for fill in (0x00, 0xFF):
        ups = np.full(patterns.size // 8, fill, np.uint8)
        stepped = join_steps(patterns, ups)
        assert stepped.dtype == patterns.dtype
        assert np.array_equal(stepped, join_steps_twin(patterns, ups))
        for split in (split_steps, split_steps_twin):
            found, exceptions = split(patterns, stepped)
            assert np.array_equal(found, ups)
            assert exceptions.size == 0
        assert np.array_equal(join_steps(stepped, ~ups), patterns)


@pytest.mark.parametrize("patterns", [ALL_8, ALL_16, SOME_32], ids=["8", "16", "32"])
def test_steps_of_every_size_are_measured_and_taken_back(patterns: np.ndarray) -> None:
    half = 1 << (patterns.dtype.itemsize * 8 - 1)
    order = np.random.default_rng(1).permutation(patterns.size).astype(np.uint32)
    sources = np.argsort(order).astype(np.uint32)
    for step in (1, 2, 3, half - 1, half, half + 1, 2 * half - 1):
        new = from_ordered(to_ordered(patterns) + patterns.dtype.type(step))
        for measure in (measure_steps, measure_steps_twin):
            ups, extras = measure(patterns, new, order)
            assert set(ups.tolist()) == {int(step <= half)}
            assert set(extras.tolist()) == {min(step, 2 * half - step) - 1}
        for take in (take_steps, take_steps_twin):
            assert np.array_equal(take(patterns, ups, extras, sources), new)


def test_half_the_width_is_the_same_up_and_down() -> None:
    old, extras = u16(0x0000, 0x0000), np.array([0x7FFF, 0x7FFF], np.uint32)
    for take in (take_steps, take_steps_twin):
        new = take(old, np.array([1, 0], np.uint8), extras, np.array([0, 1], np.uint32))
        assert new[0] == new[1] != 0


def test_each_change_keeps_its_own_step_in_any_order() -> None:
    old, new = u16(0x3F80, 0x3F80, 0x3F80), u16(0x3F81, 0x3F7E, 0x3F83)
    order = np.array([2, 0, 1], np.uint32)
    for measure in (measure_steps, measure_steps_twin):
        ups, extras = measure(old, new, order)
        assert ups.tolist() == [1, 1, 0]
        assert extras.tolist() == [2, 0, 1]
    for take in (take_steps, take_steps_twin):
        assert np.array_equal(take(old, ups, extras, np.array([1, 2, 0], np.uint32)), new)


def test_nothing_splits_and_joins_to_nothing() -> None:
    ups, exceptions = split_steps(u16(), u16())
    assert (ups.size, exceptions.size, join_steps(u16(), ups).size) == (0, 0, 0)
