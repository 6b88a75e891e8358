import numpy as np
import pytest

from pulsenet import limits
from pulsenet.codec.compare import find_changes, find_changes_twin, list_changes, list_changes_twin
from pulsenet.errors import LocalProtocolError


def u16(*values: int) -> np.ndarray:
    return np.array(values, np.uint16)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (u16(0x0000, 0x3F80), u16(0x8000, 0x3F80), [0]),  # A-ENC-1: signed zero
        (u16(0x7FC0, 0x7F81), u16(0x7FC0, 0x7F81), []),  # A-ENC-2: equal NaNs
        (u16(0x7FC0), u16(0x7FC1), [0]),  # A-ENC-2: another payload
        (u16(0x3F80, 0x3F80), u16(0x4080, 0xBF80), [0, 1]),  # A-ENC-3: the high byte only
        (u16(), u16(), []),
    ],
)
def test_changes_are_found_by_bits(old: np.ndarray, new: np.ndarray, expected: list[int]) -> None:
    assert find_changes(old, new).tolist() == expected


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("size", [1, 7, 63, 64, 65, 1000, 2047, 2048, 2049, 2112, 4097])
def test_every_single_position_is_found_at_every_width_and_tail(dtype: type, size: int) -> None:
    old = np.arange(size).astype(dtype)
    for position in {0, 1, size // 2, size - 2, size - 1} & set(range(size)):
        for bit in (0, np.dtype(dtype).itemsize * 8 - 1):
            new = old.copy()
            new[position] ^= dtype(1) << dtype(bit)
            found = find_changes(old, new)
            assert found.tolist() == [position]
            assert found.dtype == np.uint32
            listed = list_changes(old, new)
            assert [array.tolist() for array in listed] == [[position], [old[position]], [new[position]]]
            assert [array.dtype for array in listed] == [np.uint32, dtype, dtype]


def test_all_elements_may_differ() -> None:
    old = np.arange(1001, dtype=np.uint8)
    assert find_changes(old, ~old).tolist() == list(range(1001))
    assert all(map(np.array_equal, list_changes(old, ~old), (np.arange(1001), old, ~old)))


def test_nothing_that_differs_is_listed_as_nothing() -> None:
    for size in (0, 1, 64, 5000):
        old = np.zeros(size, np.uint16)
        assert [array.tolist() for array in list_changes(old, old)] == [[], [], []]


@pytest.mark.parametrize("size", [(1 << 14) - 1, 1 << 14, (1 << 14) + 2113, 70_000])
def test_more_changes_than_one_call_finds_are_all_listed(size: int) -> None:
    old = np.zeros(size, np.uint16)
    new = old + np.uint16(1)
    new[[5, 2000]] = 0
    assert np.array_equal(find_changes(old, new), find_changes_twin(old, new))
    assert all(map(np.array_equal, list_changes(old, new), list_changes_twin(old, new)))


def test_views_longer_than_a_block_count_from_the_start_of_the_tensor() -> None:
    old = np.zeros(2 * limits.BLOCK_ELEMENTS + 3, np.uint8)
    new = old.copy()
    positions = [0, limits.BLOCK_ELEMENTS - 1, limits.BLOCK_ELEMENTS, 2 * limits.BLOCK_ELEMENTS + 2]
    new[positions] = 1
    assert find_changes(old, new).tolist() == positions


@pytest.mark.parametrize("offset", [1, 3, 4, 7])
def test_unaligned_and_strided_memory_gives_the_same_positions(offset: int) -> None:
    raw = np.zeros(4 * 200 + 8, np.uint8)
    unaligned = raw[offset : offset + 800].view(np.uint32)
    new = unaligned.copy()
    new[[0, 50, 199]] = 9
    assert find_changes(unaligned, new).tolist() == [0, 50, 199]
    assert find_changes(new, unaligned).tolist() == [0, 50, 199]
    assert find_changes(new[::2], unaligned[::2]).tolist() == [0, 25]
    assert [array.tolist() for array in list_changes(unaligned[::2], new[::2])] == [[0, 25], [0, 0], [9, 9]]


def test_twin_agrees_on_read_only_views() -> None:
    old = np.frombuffer(bytes(range(200)), np.uint8)
    new = old.copy()
    new[[3, 99, 198]] += 1
    new.setflags(write=False)
    assert np.array_equal(find_changes(old, new), find_changes_twin(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (np.zeros(2, np.uint16), np.zeros(3, np.uint16)),
        (np.zeros(2, np.uint16), np.zeros(2, np.uint32)),
        (np.zeros((2, 2), np.uint16), np.zeros((2, 2), np.uint16)),
        (np.zeros(2, np.float32), np.zeros(2, np.float32)),
        (np.zeros(2, np.int16), np.zeros(2, np.int16)),
    ],
)
def test_views_that_cannot_be_compared_by_bits_are_refused(old: np.ndarray, new: np.ndarray) -> None:
    for find in (find_changes, list_changes):
        with pytest.raises(LocalProtocolError):
            find(old, new)
