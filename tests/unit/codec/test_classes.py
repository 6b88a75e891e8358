import numpy as np
import pytest

from pulsenet.codec.classes import (
    CLASS_COUNT,
    classify,
    classify_twin,
    count_float_gaps,
    count_gaps,
    count_gaps_twin,
    find_float_members,
    find_members,
    find_members_twin,
)
from pulsenet.tensors.floats import FLOAT_FORMATS
from pulsenet.tensors.params import ELEMENT_SIZES_BYTES


def u8(*values: int) -> np.ndarray:
    return np.array(values, np.uint8)


def u32(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def starts(classes: np.ndarray, positions: np.ndarray) -> np.ndarray:
    counts = np.bincount(classes[positions], minlength=CLASS_COUNT)
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int64)


@pytest.mark.parametrize(
    ("dtype", "bits", "expected"),
    [
        ("BF16", [0x3F80, 0xBF80, 0x4000, 0x7F80, 0xFFFF], [0, 0, 0, 0, 0]),  # 1, -1, 2, infinity, NaN
        ("BF16", [0x3F7F, 0x3F00, 0xBEFF, 0x0000, 0x8001], [1, 1, 2, 19, 19]),
        ("BF16", [(127 - 18) << 7, (127 - 19) << 7, (127 - 20) << 7], [18, 19, 19]),
        ("F16", [0x3C00, 0x3BFF, 0x0400, 0x0001, 0x7C00], [0, 1, 14, 15, 0]),
        # From the format's top: 448 and NaN, 224; 1 is far below. E5M2 has more binades than there are classes.
        ("F8_E4M3", [0x7E, 0xFF, 0x77, 0x38, 0x37, 0x08, 0x01, 0x80], [0, 0, 1, 8, 9, 14, 15, 15]),
        ("F8_E5M2", [0x7C, 0xFB, 0x3C, 0x30, 0xAF, 0x01, 0x00], [0, 1, 16, 19, 19, 19, 19]),
        ("F32", [0x3F800000, 0x3F7FFFFF, 0x80000001, 0xFF800000], [0, 1, 19, 0]),
    ],
)
def test_class_is_how_many_binades_the_magnitude_lies_below_the_top(
    dtype: str, bits: list[int], expected: list[int]
) -> None:
    array = np.array(bits, f"<u{ELEMENT_SIZES_BYTES[dtype]}")
    for function in (classify, classify_twin):
        assert function(array, FLOAT_FORMATS[dtype]).tolist() == expected


@pytest.mark.parametrize("dtype", sorted(FLOAT_FORMATS))
def test_loop_and_twin_agree_on_every_pattern(dtype: str) -> None:
    size = ELEMENT_SIZES_BYTES[dtype]
    patterns = np.arange(1 << min(8 * size, 16), dtype=np.uint32).astype(f"<u{size}")
    if size == 4:
        patterns <<= np.uint32(16)
    found = classify(patterns, FLOAT_FORMATS[dtype])
    assert np.array_equal(found, classify_twin(patterns, FLOAT_FORMATS[dtype]))
    assert found.max() < CLASS_COUNT


def test_gap_counts_unchanged_elements_of_the_same_class_only() -> None:
    classes = u8(3, 5, 3, 3, 5, 5, 3, 5, 3, 3)
    positions = u32(2, 3, 5, 9)
    for count in (count_gaps, count_gaps_twin):
        gaps, order, offsets = count(classes, positions)
        assert gaps.tolist() == [1, 0, 2, 2]
        assert order.tolist() == [0, 1, 3, 2]  # three changes of class 3, then that of class 5
        assert np.array_equal(offsets, starts(classes, positions))


def test_members_come_back_in_order_whatever_their_class() -> None:
    classes = u8(3, 5, 3, 3, 5, 5, 3, 5, 3, 3)
    positions = u32(2, 3, 5, 9)
    for find in (find_members, find_members_twin):
        found = find(classes, u32(1, 0, 2, 2), starts(classes, positions))
        assert found is not None
        assert found[0].tolist() == [2, 3, 5, 9]
        assert found[1].tolist() == [0, 1, 3, 2]  # class 3 owns the gaps 0, 1, 2; class 5 the last


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 511, 512, 513, 1001, 4096, 4097])
@pytest.mark.parametrize("density", [0.01, 0.5, 1.0])
@pytest.mark.parametrize("rarest", [13, 14, 19])
def test_any_positions_in_any_classes_come_back(size: int, density: float, rarest: int) -> None:
    generator = np.random.default_rng(size)
    classes = generator.choice([0, 1, 7, rarest], size, p=[0.1, 0.2, 0.6, 0.1]).astype(np.uint8)
    positions = np.flatnonzero(generator.random(size) < density).astype(np.uint32)
    positions = positions if positions.size else u32(size - 1)
    gaps, order, offsets = count_gaps(classes, positions)
    assert all(map(np.array_equal, (gaps, order, offsets), count_gaps_twin(classes, positions)))
    for find in (find_members, find_members_twin):
        found = find(classes, gaps, offsets)
        assert found is not None
        assert np.array_equal(found[0], positions)
        assert np.array_equal(order[found[1]], np.arange(positions.size))


@pytest.mark.parametrize("row", [0, 13, 14, 19])
def test_elements_all_of_one_class_are_counted_whole(row: int) -> None:
    classes = np.full(8192, row, np.uint8)
    positions = u32(0, 511, 512, 8191)
    gaps, _, offsets = count_gaps(classes, positions)
    assert gaps.tolist() == [0, 510, 0, 7678]
    found = find_members(classes, gaps, offsets)
    assert found is not None
    assert found[0].tolist() == positions.tolist()


@pytest.mark.parametrize("first", [0, 60, 250, 4070])
def test_crowded_changes_of_a_sparse_block_come_back_in_order(first: int) -> None:
    classes = np.random.default_rng(first).choice([3, 4, 5, 15], 4100).astype(np.uint8)
    positions = u32(*range(first, first + 20), 4099)
    gaps, order, offsets = count_gaps(classes, positions)
    found = find_members(classes, gaps, offsets)
    assert found is not None
    assert np.array_equal(found[0], positions)
    assert np.array_equal(order[found[1]], np.arange(positions.size))
    gaps[-1] += 5000
    assert find_members(classes, gaps, offsets) is None


def test_class_with_too_few_elements_is_noticed() -> None:
    classes = u8(1, 1, 2, 1)
    offsets = np.array([0, 0, 2] + [2] * (CLASS_COUNT - 2), np.int64)
    for find in (find_members, find_members_twin):
        assert find(classes, u32(0, 1), offsets) is not None
        assert find(classes, u32(0, 2), offsets) is None
        assert find(u8(0, 0, 0, 0), u32(0, 1), offsets) is None


@pytest.mark.parametrize("dtype", sorted(FLOAT_FORMATS))
@pytest.mark.parametrize(("size", "density"), [(1, 1.0), (513, 0.01), (4097, 0.3), (9000, 0.005), (20_000, 0.001)])
def test_floats_are_counted_by_the_classes_they_have(dtype: str, size: int, density: float) -> None:
    generator = np.random.default_rng(size)
    number_format = FLOAT_FORMATS[dtype]
    patterns = generator.integers(0, 1 << 32, size, dtype=np.uint32)
    old = (patterns >> np.uint32(32 - number_format.element_bits)).astype(f"<u{ELEMENT_SIZES_BYTES[dtype]}")
    positions = np.flatnonzero(generator.random(size) < density).astype(np.uint32)
    positions = positions if positions.size else u32(size - 1)
    gaps, order, offsets = count_float_gaps(old, number_format, positions, old[positions])
    classes = classify_twin(old, number_format)
    assert all(map(np.array_equal, (gaps, order, offsets), count_gaps_twin(classes, positions)))
    found, expected = find_float_members(old, number_format, gaps, offsets), find_members_twin(classes, gaps, offsets)
    assert found is not None
    assert expected is not None
    assert all(map(np.array_equal, found, expected))
    gaps[-1] += size
    assert find_float_members(old, number_format, gaps, offsets) is None
