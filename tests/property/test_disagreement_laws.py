"""Laws of probes and of the subset that follows them, over all tables, scores and predictions."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pulsenet.ids import compute_digest
from pulsenet.outer.mixing.disagreement import choose_bins, encode_probe, fill_bins, mean_js_distance
from pulsenet.outer.mixing.probe import Answer, compare_answers, name_bins
from pulsenet.outer.mixing.subset import adapt_subset, measure_share
from pulsenet.tensors.params import ParameterTable, TensorSpec, make_table

law = settings(derandomize=True, deadline=None, max_examples=80)
BATCH = compute_digest(b"batch")
HALF_STEP = 2.0**-11
"""Of FP16, relative."""


@st.composite
def tables(draw: st.DrawFn) -> ParameterTable:
    counts = draw(st.lists(st.integers(1, 60), min_size=1, max_size=9))
    kinds = st.sampled_from(["embed", "layers.3.w", "layers.1.w", "norm", "lm_head"])
    return make_table(TensorSpec(f"{draw(kinds)}.{place}", "F32", (count,)) for place, count in enumerate(counts))


@law
@given(st.data(), tables(), st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.floats(0.01, 1.0))
def test_a_subset_moves_only_the_way_that_the_distance_says(
    data: st.DataObject, table: ParameterTable, distance: float, distance_max: float, ratio: float
) -> None:
    places = st.integers(0, len(table.tensors) - 1)
    subset = tuple(sorted(data.draw(st.sets(places, min_size=1))))
    scores = data.draw(st.dictionaries(places, st.floats(0.0, 1e30)))
    found = adapt_subset(table, subset, scores, distance=distance, distance_max=distance_max, ratio=ratio)
    assert found
    assert list(found) == sorted(set(found))
    if distance_max == 0.0:
        assert found == subset
    elif distance > distance_max:
        assert set(found) > set(subset) or len(subset) == len(table.tensors)
    elif found != subset:
        assert distance < distance_max / 2
        assert measure_share(table, found) < measure_share(table, subset)
        seen = [index for index in subset if index in scores and index in found]
        left = [index for index in subset if index in scores and index not in found]
        assert all(scores[kept] >= scores[gone] for kept in seen for gone in left), "what disagreed most stays"


@law
@given(st.integers(0, 1 << 30), st.integers(2, 5), st.integers(2, 40), st.integers(1, 12))
def test_what_a_probe_shows_is_no_more_than_there_is(seed: int, trainers: int, words: int, bin_count: int) -> None:
    draw = np.random.default_rng(seed)
    common = draw.dirichlet(np.full(words, 0.5), size=3)
    mine = [draw.dirichlet(np.full(words, 0.5), size=3) for _ in range(trainers)]
    bins = choose_bins(common, min(bin_count, words))
    answers = [Answer(BATCH, name_bins(bins), encode_probe(fill_bins(one, bins), round_index=1)) for one in mine]
    found = compare_answers(answers, 1)
    assert found.pair_count == trainers * (trainers - 1) // 2
    assert found.distance is not None
    # Rounding to FP16 moves a distance by the root of its relative error at most.
    assert 0.0 <= found.distance <= mean_js_distance(mine) + HALF_STEP**0.5
