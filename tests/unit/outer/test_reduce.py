from itertools import permutations

import numpy as np
import pytest

from pulsenet import limits
from pulsenet.errors import LocalProtocolError
from pulsenet.outer.contribution import Entries
from pulsenet.outer.reduce import Counted, combine, compute_trim_count, divide, reduce_mean, reduce_trimmed
from pulsenet.outer.settings import Algorithm, Combination, OuterSettings


def sparse(indices: list[int], values: list[float], scale: float = 1.0) -> Counted:
    entries = Entries(2, np.array(indices, np.uint32), np.array(values, np.float32))
    return Counted(entries, np.float32(scale))


def dense(*values: float) -> Counted:
    return Counted(Entries(2, None, np.array(values, np.float32)))


def test_any_arrival_order_gives_the_same_bits() -> None:
    """A-LOC-5: as naive FP32 sums these give 0 or 1."""
    parts = {b"a": sparse([0], [1e8]), b"b": sparse([0], [1.0]), b"c": sparse([0], [-1e8])}
    found = {
        reduce_mean({key: parts[key] for key in order}, tensor_index=2, element_count=1).values.tobytes()
        for order in permutations(parts)
    }
    assert found == {np.zeros(1, np.float32).tobytes()}
    swapped = {b"a": parts[b"a"], b"b": parts[b"c"], b"c": parts[b"b"]}
    assert reduce_mean(swapped, tensor_index=2, element_count=1).values[0] == np.float32(1.0) / np.float32(3.0)


def test_the_mean_is_over_the_union_and_divides_by_all_contributions() -> None:
    parts = {b"x": sparse([1, 5], [3.0, 6.0]), b"y": sparse([5, 7], [3.0, -9.0]), b"z": sparse([], [])}
    mean = reduce_mean(parts, tensor_index=2, element_count=8)
    assert mean.tensor_index == 2
    assert mean.indices is not None
    assert mean.indices.tolist() == [1, 5, 7]
    assert mean.values.tolist() == [1.0, 3.0, -3.0]


def test_sparse_and_dense_contributions_combine_to_the_same_bits() -> None:
    generator = np.random.default_rng(6)
    listed, whole = {}, {}
    for key in (b"1", b"2", b"3"):
        values = generator.standard_normal(500).astype(np.float32)
        values[generator.random(500) < 0.9] = 0.0
        indices = np.flatnonzero(values)
        listed[key] = Counted(Entries(0, indices.astype(np.uint32), values[indices]), np.float32(0.3))
        whole[key] = Counted(Entries(0, None, values), np.float32(0.3))
    sparse_mean = reduce_mean(listed, tensor_index=0, element_count=500)
    scattered = np.zeros(500, np.float32)
    scattered[sparse_mean.indices] = sparse_mean.values
    mixed = reduce_mean({**listed, b"2": whole[b"2"]}, tensor_index=0, element_count=500)
    dense_mean = reduce_mean(whole, tensor_index=0, element_count=500)
    assert dense_mean.indices is None
    assert np.array_equal(scattered.view(np.uint32), dense_mean.values.view(np.uint32))
    assert mixed.same_as(dense_mean)


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {
        bytes([key]): sparse(list(range(key, 40, 3)), [0.1 * key + 1] * len(range(key, 40, 3))) for key in range(4)
    }
    whole = reduce_mean(parts, tensor_index=2, element_count=40)
    for block_elements in (1, 7, 39):
        monkeypatch.setattr(limits, "BLOCK_ELEMENTS", block_elements)
        assert reduce_mean(parts, tensor_index=2, element_count=40).same_as(whole)


def test_a_clipped_contribution_counts_scaled() -> None:
    mean = reduce_mean({b"a": sparse([0], [8.0], 0.25), b"b": sparse([0], [1.0])}, tensor_index=2, element_count=1)
    assert mean.values.tolist() == [1.5]


def test_division_is_true_division() -> None:
    """A multiplication by the reciprocal differs for a third of all values at N = 3."""
    sums = np.arange(1, 1000, dtype=np.float32)
    assert np.array_equal(divide(sums, 3), sums / np.full(999, 3, np.float32))
    assert not np.array_equal(divide(sums, 3), sums * np.float32(1 / 3))
    assert divide(np.array([np.inf, -np.nan], np.float32), 2).view(np.uint32).tolist() == [0x7F800000, 0x7FC00000]


def find_median(parts: dict[bytes, Counted], *, element_count: int) -> Entries:
    settings = OuterSettings(algorithm=Algorithm.DILOCO, combination=Combination.MEDIAN)
    return combine(parts, settings, tensor_index=2, element_count=element_count)


@pytest.mark.parametrize(
    ("combination", "trim_count", "trimmed", "found"),
    [
        (Combination.MEAN, 0, 0, [22.5, 0.0]),
        (Combination.MEDIAN, 0, 2, [3.0, 0.0]),
        (Combination.TRIMMED, 1, 1, [4.0, 0.0]),
        (Combination.TRIMMED, 3, 2, [3.0, 0.0]),
    ],
)
def test_a_round_is_combined_as_its_settings_say(
    combination: Combination, trim_count: int, trimmed: int, found: list[float]
) -> None:
    parts = {bytes([key]): dense(value, 0.0) for key, value in enumerate([3.0, 99.5, 7.0, 1.0, 2.0])}
    settings = OuterSettings(algorithm=Algorithm.DILOCO, combination=combination, trim_count=trim_count)
    assert compute_trim_count(settings, len(parts)) == trimmed
    combined = combine(parts, settings, tensor_index=2, element_count=2)
    assert combined.tensor_index == 2
    assert combined.values.tolist() == found


def test_a_mean_is_also_of_what_is_not_dense() -> None:
    parts = {b"a": sparse([1], [2.0]), b"b": sparse([0], [4.0])}
    assert combine(parts, OuterSettings(), tensor_index=2, element_count=2).values.tolist() == [2.0, 1.0]


def test_the_median_ignores_one_wild_trainer() -> None:
    odd = {b"a": dense(1.0, -1.0), b"b": dense(2.0, -0.0), b"c": dense(1e20, 1.0)}
    assert find_median(odd, element_count=2).values.tolist() == [2.0, 0.0]
    even = {**odd, b"d": dense(4.0, 2.0)}
    assert find_median(even, element_count=2).values.tolist() == [3.0, 0.5]
    assert find_median({b"a": dense(7.0, 8.0)}, element_count=2).values.tolist() == [7.0, 8.0]
    assert find_median({b"a": dense(7.0), b"b": dense(8.0)}, element_count=1).values.tolist() == [7.5]


def test_the_trimmed_mean_adds_what_is_left_in_order_of_value() -> None:
    parts = {bytes([key]): dense(value) for key, value in enumerate([1e30, 1e8, 1.0, -1e8, -1e30])}
    for order in permutations(parts):
        shuffled = {key: parts[key] for key in order}
        trimmed = reduce_trimmed(shuffled, tensor_index=2, element_count=1, trim_count=1)
        assert trimmed.values[0] == np.float32(((-1e8 + 1) + 1e8) / 3) or trimmed.values[0] == 0.0
        assert trimmed.same_as(reduce_trimmed(parts, tensor_index=2, element_count=1, trim_count=1))


def test_zeros_sign_does_not_depend_on_the_order_of_equals() -> None:
    for order in permutations([0.0, -0.0, -0.0]):
        parts = {bytes([key]): dense(value) for key, value in enumerate(order)}
        assert find_median(parts, element_count=1).values.view(np.uint32)[0] == 0


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "no aggregate"),
        ({b"a": Counted(Entries(1, None, np.zeros(4, np.float32)))}, "tensor 1 among"),
        ({b"a": dense(1.0)}, "do not fit"),
        ({b"a": sparse([4], [1.0])}, "do not fit"),
    ],
)
def test_what_does_not_belong_together_is_refused(parts: dict[bytes, Counted], message: str) -> None:
    with pytest.raises(LocalProtocolError, match=message):
        reduce_mean(parts, tensor_index=2, element_count=4)


def test_median_and_trimmed_mean_refuse_sparse_and_too_few() -> None:
    with pytest.raises(LocalProtocolError, match="dense"):
        find_median({b"a": sparse([0], [1.0])}, element_count=1)
    with pytest.raises(LocalProtocolError, match="trimmed on each side"):
        reduce_trimmed({b"a": dense(1.0), b"b": dense(2.0)}, tensor_index=2, element_count=1, trim_count=1)
