import numpy as np
import pytest
from numba import config as numba_config
from numba import njit

from pulsenet.tensors.lanes import (
    KIND_COUNT,
    LANE_COUNT,
    SPAN,
    WORD_COUNT,
    count_ones,
    find_differences,
    find_lowest,
    split_span,
)


# Not cached: each run builds the vector code anew. Without a compiler both sides are the plain bodies.
@njit
def find_compiled(old: np.ndarray, new: np.ndarray, start: int) -> int:
    return find_differences(old, new, start)


@njit
def count_compiled(word: np.uint64) -> tuple[int, int]:
    return count_ones(word), find_lowest(word)


@njit
def split_compiled(values: np.ndarray, start: int, masks: np.ndarray, counts: np.ndarray) -> None:
    split_span(values, start, masks, counts)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("step", [1, 2])
def test_a_mask_tells_which_of_64_elements_differ(dtype: type, step: int) -> None:
    generator = np.random.default_rng(step)
    old = generator.integers(0, 255, 3 * SPAN).astype(dtype)[1::step]
    new = old.copy()[::1]
    changed = [3, 40, 41, 66, 67, 103]
    new[changed] ^= dtype(1) << dtype(8 * np.dtype(dtype).itemsize - 1)
    for find in (find_differences, find_compiled):
        mask = int(find(old, new, 3))
        assert [lane + 3 for lane in range(LANE_COUNT) if mask >> lane & 1] == [3, 40, 41, 66]
        assert int(find(old, ~old, 64)) == (1 << 64) - 1
        assert int(find(old, old, 0)) == 0


@pytest.mark.parametrize("word", [1, 1 << 63, 0xFFFFFFFFFFFFFFFF, 0xF0F0, 6 << 60])
def test_bits_are_counted_and_the_lowest_is_found(word: int) -> None:
    expected = (bin(word).count("1"), next(bit for bit in range(64) if word >> bit & 1))
    assert count_compiled(np.uint64(word)) == expected
    assert (count_ones(np.uint64(word)), find_lowest(np.uint64(word))) == expected


def split_with(split: object, span: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    masks, counts = np.full((KIND_COUNT, WORD_COUNT), 7, np.uint64), np.full(KIND_COUNT, 7, np.int64)
    split(np.concatenate(([1, 2, 3], span)).astype(np.uint8), 3, masks, counts)  # type: ignore[operator]
    return masks, counts


@pytest.mark.parametrize("seed", range(20 if numba_config.DISABLE_JIT else 100))
def test_a_span_is_split_by_value(seed: int) -> None:
    generator = np.random.default_rng(seed)
    span = generator.choice([*range(KIND_COUNT), 0xFF, 31, 20], SPAN).astype(np.uint8)
    masks, counts = split_with(split_compiled, span)
    for kind in range(KIND_COUNT):
        found = np.unpackbits(masks[kind].astype("<u8").view(np.uint8), bitorder="little")
        assert np.array_equal(found, span == kind)
        by_word = np.array([counts[kind]], "<i8").view(np.uint8)
        assert np.array_equal(by_word, (span == kind).reshape(WORD_COUNT, LANE_COUNT).sum(axis=1))
    assert all(map(np.array_equal, (masks, counts), split_with(split_span, span)))


@pytest.mark.parametrize("kind", [0, 19])
def test_a_span_of_one_value_fills_every_mask(kind: int) -> None:
    for split in (split_compiled, split_span):
        masks, counts = split_with(split, np.full(SPAN, kind, np.uint8))
        assert np.array_equal(masks[kind], np.full(WORD_COUNT, (1 << 64) - 1, np.uint64))
        assert counts[kind] == 0x4040404040404040
        assert masks.sum(axis=1).astype(bool).sum() == 1
        assert np.count_nonzero(counts) == 1
