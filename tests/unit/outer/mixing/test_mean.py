from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pulsenet.errors import LocalProtocolError
from pulsenet.ids import PeerId, compute_digest
from pulsenet.outer.contribution import Entries
from pulsenet.outer.mixing.mean import add_debt, compute_debt, mean_block, mean_entries, spread
from pulsenet.outer.mixing.pairing import match_members
from pulsenet.outer.mixing.settings import Job

law = settings(derandomize=True, deadline=None, max_examples=60)


def dense(*values: float) -> Entries:
    return Entries(0, None, np.array(values, np.float32))


def sparse(positions: list[int], values: list[float]) -> Entries:
    return Entries(0, np.array(positions, np.uint32), np.array(values, np.float32))


def mean(parts: dict[bytes, Entries], element_count: int) -> Entries:
    return mean_entries(parts, tensor_index=0, element_count=element_count)


def test_a_mean_is_one_sum_in_order_of_keys_and_one_division() -> None:
    """1e8 swallows what is added to it before its opposite comes: the order decides."""
    parts = {b"c": dense(-1e8), b"a": dense(1e8), b"b": dense(3.0)}
    assert mean(parts, 1).values.tolist() == [0.0]
    assert mean({b"a": parts[b"a"], b"b": parts[b"c"], b"c": parts[b"b"]}, 1).values.tolist() == [1.0]


def test_what_is_absent_from_a_gated_part_counts_as_zero() -> None:
    found = mean({b"a": sparse([0, 2], [4.0, 1.0]), b"b": sparse([2, 3], [3.0, 8.0])}, 5)
    assert found.indices is not None
    assert (found.indices.tolist(), found.values.tolist()) == ([0, 2, 3], [2.0, 2.0, 4.0])


@law
@given(st.lists(st.lists(st.integers(0, (1 << 32) - 1), min_size=3, max_size=3), min_size=1, max_size=5))
def test_the_order_of_arrival_does_not_matter(rows: list[list[int]]) -> None:
    parts = {
        bytes([place]): Entries(0, None, np.array(row, np.uint32).view(np.float32)) for place, row in enumerate(rows)
    }
    found = {mean(dict(order), 3).values.tobytes() for order in permutations(parts.items())}
    assert len(found) == 1


@law
@given(st.integers(2, 6), st.integers(0, 1 << 32))
def test_the_mean_of_all_is_conserved_to_rounding(count: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    vectors = [generator.normal(size=50).astype(np.float32) for _ in range(count)]
    parts = {bytes([place]): Entries(0, None, vector) for place, vector in enumerate(vectors)}
    exact = np.mean(np.stack(vectors).astype(np.float64), axis=0)
    # At most count roundings of sums no larger than count times the largest.
    slack = count * 2.0**-24 * (np.abs(np.stack(vectors)).sum(axis=0) + 1e-30)
    assert (np.abs(mean(parts, 50).values - exact) <= slack).all()


@pytest.mark.parametrize("count", [8, 7])
def test_pairs_alone_bring_all_members_together_and_keep_their_mean(count: int) -> None:
    """200 rounds of random pairs: spread within 2 ulp, mean within 1e-6 of where it was."""
    generator = np.random.default_rng(5)
    keys = sorted(PeerId(compute_digest(bytes([number]))) for number in range(count))
    vectors = dict(zip(keys, 1.0 + generator.normal(size=(count, 1_000)).astype(np.float32) / 4, strict=True))
    before = np.mean(np.stack(list(vectors.values())).astype(np.float64), axis=0)
    for round_index in range(200):
        for group in match_members(b"seed", round_index, Job.MIX1, keys):
            found = mean({key: Entries(0, None, vectors[key]) for key in group}, 1_000).values
            vectors.update(dict.fromkeys(group, found))
    stacked = np.stack(list(vectors.values()))
    ulps = np.ptp(stacked.view(np.int32), axis=0)
    assert ulps.max() <= 2
    after = np.mean(stacked.astype(np.float64), axis=0)
    assert (np.abs(after - before) <= 1e-6 * np.abs(before)).all()


def test_a_debt_restores_the_sum_that_a_lost_last_message_broke() -> None:
    own, partner = dense(1.0, -2.0, 0.5), dense(3.0, 5.0, 0.25)
    agreed = mean({b"a": own, b"b": partner}, 3)
    debt = compute_debt(agreed, own, element_count=3)
    kept = own.values.copy()
    assert (kept + agreed.values != own.values + partner.values).any()
    add_debt(kept, debt)
    assert (kept + agreed.values).tolist() == (own.values + partner.values).tolist()


def test_a_debt_of_gated_parts_is_where_either_has_an_entry() -> None:
    agreed, own = sparse([1, 3], [2.0, 4.0]), sparse([3, 5], [1.0, 6.0])
    debt = compute_debt(agreed, own, element_count=8)
    assert debt.indices is not None
    assert (debt.indices.tolist(), debt.values.tolist()) == ([1, 3, 5], [2.0, 3.0, -6.0])
    values = np.zeros(8, np.float32)
    add_debt(values, debt)
    assert values.tolist() == [0.0, 2.0, 0.0, 3.0, 0.0, -6.0, 0.0, 0.0]
    assert compute_debt(dense(1.0, 1.0), sparse([0], [1.0]), element_count=2).indices is None


def test_debts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(LocalProtocolError, match="tensors"):
        compute_debt(dense(1.0), Entries(1, None, np.zeros(1, np.float32)), element_count=1)
    with pytest.raises(LocalProtocolError, match="2 elements"):
        add_debt(np.zeros(3, np.float32), dense(1.0, 2.0))
    with pytest.raises(LocalProtocolError, match="at 3"):
        add_debt(np.zeros(3, np.float32), sparse([3], [1.0]))


def test_spread_entries_are_zero_elsewhere() -> None:
    assert spread(sparse([1], [2.0]), 3).tolist() == [0.0, 2.0, 0.0]
    assert spread(dense(1.0, 2.0), 2).tolist() == [1.0, 2.0]
    with pytest.raises(LocalProtocolError):
        spread(dense(1.0), 2)
    with pytest.raises(LocalProtocolError):
        spread(sparse([2], [1.0]), 2)


def test_means_of_runs_have_the_bits_of_whole_tensors() -> None:
    generator = np.random.default_rng(1)
    vectors = {bytes([place]): generator.normal(size=10).astype(np.float32) for place in range(3)}
    whole = mean({key: Entries(0, None, values) for key, values in vectors.items()}, 10)
    found = [
        mean_block([(None, vectors[key][start:end]) for key in sorted(vectors)], end - start)
        for start, end in ((0, 4), (4, 8), (8, 10))
    ]
    assert [positions for positions, _ in found] == [None] * 3
    assert np.concatenate([values for _, values in found]).tobytes() == whole.values.tobytes()


def test_gated_means_of_runs_hold_the_union_and_count_who_sent_nothing() -> None:
    empty = (np.empty(0, np.uint32), np.empty(0, np.float32))
    one = (np.array([1, 5], np.uint32), np.array([2.0, 4.0], np.float32))
    other = (np.array([5], np.uint32), np.array([2.0], np.float32))
    positions, values = mean_block([one, other, empty, empty], 6)
    assert positions is not None
    assert (positions.tolist(), values.tolist()) == ([1, 5], [0.5, 1.5])
    everything = mean_block([one, (None, np.ones(6, np.float32))], 6)
    assert everything[0] is None
    assert everything[1].tolist() == [0.5, 1.5, 0.5, 0.5, 0.5, 2.5]
