"""How a table is cut into parts."""

from __future__ import annotations

import os

import numpy as np
import pytest

from pulsenet.errors import LocalProtocolError
from pulsenet.local.parts import PART_SIZE_BYTES_MIN, PartLayout, SealedPart, cut_parts
from pulsenet.tensors.params import TensorSpec, make_table

TABLE = make_table(
    [
        TensorSpec("a", "BF16", (3,)),
        TensorSpec("b", "U8", (0,)),
        TensorSpec("c", "F32", (2,)),
        TensorSpec("d", "I64", ()),
    ]
)


@pytest.mark.parametrize("first", range(5))
@pytest.mark.parametrize("count", range(5))
def test_a_part_is_a_window_of_the_dense_layout(first: int, count: int) -> None:
    if first + count > len(TABLE.tensors):
        with pytest.raises(LocalProtocolError, match="make no part"):
            PartLayout(TABLE, first, count)
        return
    whole = np.arange(TABLE.layout_size_bytes, dtype=np.uint8)
    layout = PartLayout(TABLE, first, count)
    start = TABLE.offsets[first] if count else 0
    memory = whole[start : start + layout.size_bytes]
    assert memory.size == layout.size_bytes
    for index in layout.tensor_indices:
        assert layout.view(memory, index).dtype == TABLE.tensors[index].bits_dtype
        assert layout.view(memory, index).tobytes() == TABLE.view(whole, index).tobytes()


def test_the_whole_table_is_the_dense_layout() -> None:
    layout = PartLayout(TABLE, 0, len(TABLE.tensors))
    assert layout.size_bytes == TABLE.layout_size_bytes
    assert [layout.offset_of(index) for index in layout.tensor_indices] == list(TABLE.offsets)


def test_small_tensors_share_a_part_and_none_is_larger_than_the_largest_tensor() -> None:
    largest = 3 * PART_SIZE_BYTES_MIN
    sizes = [100, PART_SIZE_BYTES_MIN, largest, 0, largest - 63, 70, largest // 2, largest // 2, 1]
    table = make_table([TensorSpec(f"{index}", "U8", (size,)) for index, size in enumerate(sizes)])
    parts = list(cut_parts(table))
    assert [index for part in parts for index in part.tensor_indices] == list(range(len(sizes)))
    assert [part.count for part in parts] == [2, 2, 1, 2, 2]
    assert max(part.size_bytes for part in parts) == largest


def test_a_small_table_is_one_part_and_an_empty_one_is_none() -> None:
    assert list(cut_parts(TABLE)) == [PartLayout(TABLE, 0, 4)]
    assert list(cut_parts(make_table([]))) == []


def test_a_sealed_part_owns_its_descriptor() -> None:
    first, second = os.pipe()
    os.close(second)
    part = SealedPart(PartLayout(TABLE, 0, 1), first)
    part.close()
    part.close()
    assert part.descriptor == -1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(first)
