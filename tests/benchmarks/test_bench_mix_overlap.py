"""Which inner steps ``bench_mix_overlap.py`` counts as beside Mix1."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from bench_mix_overlap import Overlap, split_steps, summarise


def test_steps_are_beside_mix1_until_nothing_comes_any_more() -> None:
    # Handed over, fetched in three steps, then news between nodes alone.
    steps = [(1.0, 0), (2.0, 500), (3.0, 990), (4.0, 995), (5.0, 1000)]
    assert split_steps(steps) == ([1.0, 2.0, 3.0], [4.0, 5.0])


def test_a_mix1_that_lasts_as_long_as_the_steps_leaves_none_alone() -> None:
    assert split_steps([(1.0, 0), (2.0, 500), (3.0, 1000)]) == ([1.0, 2.0, 3.0], [])


def test_rounds_are_put_together_by_kind_and_compared_by_quantile() -> None:
    rounds = [[(2.0, 0), (4.0, 100), (1.0, 100)], [(3.0, 0), (5.0, 100), (2.0, 100)]]
    overlap = summarise(rounds)
    assert overlap == Overlap(beside=(2.0, 3.0, 4.0, 5.0), alone=(1.0, 2.0))
    assert overlap.ratio(1.0) == 2.5
