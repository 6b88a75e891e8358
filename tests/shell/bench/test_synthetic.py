"""The synthetic step changes as recorded ones do."""

from __future__ import annotations

import numpy as np
import pytest

from pulsenetd.bench.entropy import compute_bounds, compute_steps
from pulsenetd.bench.synthetic import draw_step, make_model_table, make_synthetic_pair


def test_one_seed_gives_one_pair() -> None:
    first, again, other = (make_synthetic_pair(seed=seed, element_count=100_000) for seed in (1, 1, 2))
    assert np.array_equal(first.old, again.old)
    assert np.array_equal(first.new, again.new)
    assert not np.array_equal(first.old, other.old)


@pytest.mark.parametrize("element_count", [1_000_000, 16_000_000, 135_000_000])
def test_the_model_is_about_as_large_as_asked(element_count: int) -> None:
    assert make_model_table(element_count).element_count == pytest.approx(element_count, rel=0.1)


def test_the_chance_of_a_change_halves_with_each_binade() -> None:
    old, new = draw_step(np.random.default_rng(3), 4_000_000)
    exponents = (old >> 7) & 0xFF
    changed = old != new
    for exponent in range(127 - 8, 127 - 2):
        share = changed[exponents == exponent].mean()
        ulp = 2.0 ** (exponent - 127 - 7)
        assert share == pytest.approx(0.29 * 3e-6 / ulp, rel=0.1)


def test_density_steps_and_bounds_are_those_of_recorded_runs() -> None:
    """Recorded: 0.64 % of values, 91 % of them by one step, bounds 10.4 and 7.2 bits."""
    pair = make_synthetic_pair(seed=7, element_count=4_000_000)
    bounds = compute_bounds(pair.table, pair.old, pair.new)
    assert bounds.changed_count / pair.table.element_count == pytest.approx(0.006, rel=0.2)
    assert bounds.per_change()["density"] == pytest.approx(10.6, abs=0.4)
    assert bounds.per_change()["exponent"] == pytest.approx(7.3, abs=0.3)
    old, new = pair.old.view(np.uint16), pair.new.view(np.uint16)
    steps = compute_steps(old[old != new], new[old != new], "BF16").view(np.int16)
    assert (np.abs(steps) == 1).mean() == pytest.approx(0.9, abs=0.03)
