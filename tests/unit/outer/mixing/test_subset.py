import pytest

from pulsenet.errors import LocalProtocolError
from pulsenet.outer.mixing.subset import (
    adapt_subset,
    choose_default_subset,
    choose_subset,
    measure_share,
    merge_scores,
    order_by_name,
    rank_tensors,
    update_score,
    widen_subset,
)
from pulsenet.tensors.params import ParameterTable, TensorSpec, make_table

NAMES = {
    "lm_head.weight": 10,
    "model.embed_tokens.weight": 10,
    "model.layers.0.mlp.weight": 20,
    "model.layers.1.mlp.weight": 20,
    "model.layers.10.mlp.weight": 20,
    "model.layers.2.mlp.weight": 20,
    "model.norm.weight": 0,
}


@pytest.fixture
def table() -> ParameterTable:
    return make_table(TensorSpec(name, "F32", (count,)) for name, count in NAMES.items())


def named(table: ParameterTable, indices: tuple[int, ...] | list[int]) -> list[str]:
    return [table.tensors[index].name for index in indices]


def test_embeddings_and_head_come_first_then_layers_by_their_number(table: ParameterTable) -> None:
    assert named(table, order_by_name(table)) == [
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.layers.0.mlp.weight",
        "model.layers.1.mlp.weight",
        "model.layers.2.mlp.weight",
        "model.layers.10.mlp.weight",
        "model.norm.weight",
    ]


def test_the_first_subset_is_ascending_and_as_near_to_its_share_as_tensors_allow(table: ParameterTable) -> None:
    chosen = choose_default_subset(table, 0.43)
    assert list(chosen) == sorted(chosen)
    assert set(named(table, chosen)) == {"lm_head.weight", "model.embed_tokens.weight", "model.layers.0.mlp.weight"}
    assert len(choose_default_subset(table, 1.0)) == len(NAMES)
    assert named(table, choose_default_subset(table, 0.001)) == ["lm_head.weight"]


@pytest.mark.parametrize("ratio", [0.0, 1.1, float("nan")])
def test_shares_that_are_none_are_refused(table: ParameterTable, ratio: float) -> None:
    with pytest.raises(LocalProtocolError):
        choose_default_subset(table, ratio)


def test_tensors_that_disagree_most_come_first_and_unseen_ones_last(table: ParameterTable) -> None:
    scores = {2: 1.0, 4: 3.0, 0: 1.0}
    assert rank_tensors(table, scores)[:4] == [4, 0, 2, 1]
    assert choose_subset(table, scores, 0.3) == (0, 4)


def test_widening_keeps_what_there_is_and_adds_at_least_one(table: ParameterTable) -> None:
    subset = choose_default_subset(table, 0.43)
    wider = widen_subset(table, subset, {}, 0.6)
    assert set(subset) < set(wider)
    assert "model.layers.1.mlp.weight" in named(table, wider)
    assert len(widen_subset(table, subset, {}, 0.01)) == len(subset) + 1
    everything = tuple(range(len(NAMES)))
    assert widen_subset(table, everything, {}, 1.0) == everything


def test_a_score_forgets() -> None:
    assert update_score(None, 4.0) == 4.0
    assert update_score(4.0, 0.0) == 3.0


def adapt(table: ParameterTable, subset: tuple[int, ...], distance: float, **changes: float) -> tuple[int, ...]:
    scores = {0: 1.0, 2: 5.0, 3: 0.5, 4: 3.0}
    return adapt_subset(
        table,
        subset,
        scores,
        distance=distance,
        **{"distance_max": 0.2, "ratio": 0.3, **changes},  # type: ignore[arg-type]
    )


def test_trainers_far_apart_widen_the_subset_and_near_ones_leave_it(table: ParameterTable) -> None:
    first = choose_default_subset(table, 0.3)
    wider = adapt(table, first, 0.21)
    assert set(wider) > set(first)
    assert measure_share(table, first) < measure_share(table, wider) <= 1.5 * measure_share(table, first) + 0.1
    for distance in (0.2, 0.15, 0.1):
        assert adapt(table, wider, distance) == wider, "no better, no worse: nothing changes"
    assert adapt(table, first, 0.01) == first, "it never falls below the run's first share"
    everything = tuple(range(len(NAMES)))
    assert adapt(table, everything, 0.9) == everything


def test_a_subset_that_shrinks_again_keeps_what_disagreed_most(table: ParameterTable) -> None:
    wider = (0, 2, 3, 4)
    narrower = adapt(table, wider, 0.05)
    assert narrower == (0, 2, 4), "what disagreed least is given up"
    assert measure_share(table, narrower) < measure_share(table, wider)


def test_a_run_without_a_limit_never_changes_its_subset(table: ParameterTable) -> None:
    first = choose_default_subset(table, 0.3)
    assert adapt(table, first, 1.0, distance_max=0.0) == first
    assert adapt(table, (), 1.0) == (), "all tensors are mixed anyway"
    assert measure_share(table, ()) == 1.0


def test_scores_are_the_upper_median_of_what_members_saw() -> None:
    merged = merge_scores({1: 4.0, 7: 1.0}, (1, 3), [[0.0, 2.0], [1e30, 3.0], [8.0, 9.0]])
    assert merged == {1: 0.75 * 4.0 + 0.25 * 8.0, 3: 3.0, 7: 1.0}
    assert merge_scores({1: 4.0}, (1, 3), []) == {1: 4.0}
