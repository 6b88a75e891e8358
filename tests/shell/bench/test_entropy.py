"""The bounds are what a calculation by hand gives."""

from __future__ import annotations

from math import log2

import numpy as np
import pytest

from pulsenet.tensors.params import ParameterTable, TensorSpec, make_table
from pulsenetd.bench.entropy import Bounds, compute_bounds, compute_steps, position_bits


def binary(share: float) -> float:
    return -share * log2(share) - (1 - share) * log2(1 - share)


def regions(table: ParameterTable, old: list[int], new: list[int]) -> list[np.ndarray]:
    found = []
    for bits in (old, new):
        region = np.zeros(table.layout_size_bytes, np.uint8)
        table.view(region, 0)[:] = bits
        found.append(region)
    return found


def test_positions_cost_the_binary_entropy_of_the_density() -> None:
    assert position_bits(1000, 10) == pytest.approx(1000 * binary(0.01))
    assert position_bits(1000, 500) == pytest.approx(1000)
    assert position_bits(1000, 0) == position_bits(1000, 1000) == position_bits(0, 0) == 0


def test_steps_are_differences_of_ordered_integers_and_wrap() -> None:
    old = np.array([0x0000, 0x8000, 0x3F80, 0xBF80, 0x7FFF], np.uint16)
    new = np.array([0x8000, 0x0000, 0x3F81, 0xBF81, 0xFFFF], np.uint16)
    assert compute_steps(old, new, "BF16").tolist() == [0xFFFF, 1, 1, 0xFFFF, 1]
    assert compute_steps(np.array([255], np.uint8), np.array([0], np.uint8), "U8").tolist() == [1]


def test_knowing_the_exponents_separates_positions_and_steps() -> None:
    # Exponent 127: 2 of 8 changed, one up and one down. Exponent 126: 4 of 8 changed, all up.
    table = make_table([TensorSpec("w", "BF16", (16,))])
    old = [0x3F82] * 8 + [0x3F02] * 8
    new = [0x3F83, 0x3F81, *[0x3F82] * 6, *[0x3F03] * 4, *[0x3F02] * 4]
    bounds = compute_bounds(table, *regions(table, old, new))
    assert bounds.changed_count == 6
    assert bounds.density_bits == pytest.approx(16 * binary(6 / 16) + 6 * binary(1 / 6))
    assert bounds.exponent_bits == pytest.approx(8 * binary(2 / 8) + 8 * binary(4 / 8) + 2 * 1 + 4 * 0)
    assert bounds.per_change()["exponent"] == pytest.approx(bounds.exponent_bits / 6)


def test_dtypes_have_classes_of_their_own(mixed_table: ParameterTable) -> None:
    old = np.random.default_rng(2).integers(0, 256, mixed_table.layout_size_bytes).astype(np.uint8)
    new = old.copy()
    mixed_table.view(new, 0)[:9] ^= 1
    bounds = compute_bounds(mixed_table, old, new)
    assert bounds.changed_count == 9
    assert 0 < bounds.exponent_bits < bounds.density_bits


def test_without_changes_nothing_is_needed() -> None:
    table = make_table([TensorSpec("w", "BF16", (4,))])
    bounds = compute_bounds(table, *regions(table, [1, 2, 3, 4], [1, 2, 3, 4]))
    assert bounds == Bounds(0, 0.0, 0.0)
    assert bounds.per_change() == {"density": 0.0, "exponent": 0.0}


def test_bounds_of_several_pairs_add_up() -> None:
    assert Bounds(1, 2.0, 3.0) + Bounds(10, 20.0, 30.0) == Bounds(11, 22.0, 33.0)
