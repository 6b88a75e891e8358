"""The form in which changes cross to the daemon, and what of it is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsenet.errors import LocalProtocolError, RemoteProtocolError, StorageError
from pulsenet.local import changed_parts, shared_memory
from pulsenet.local.changed_parts import (
    WHOLE,
    ChangedPartWriter,
    compute_listed_max,
    compute_size_bytes_max,
    read_changed_part,
)
from pulsenet.local.parts import PartLayout
from pulsenet.local.shared_memory import Region
from pulsenet.tensors.params import TensorSpec, make_table

TABLE = make_table(
    [
        TensorSpec("a", "BF16", (100,)),
        TensorSpec("b", "F32", (7, 3)),
        TensorSpec("c", "F8_E4M3", (33,)),
        TensorSpec("d", "I64", ()),
        TensorSpec("e", "BF16", (0, 4)),
        TensorSpec("f", "F64", (50,)),
    ]
)
LAYOUT = PartLayout(TABLE, 1, 5)
"""All but the first: positions count from the table's start."""


def draw_bits(index: int, count: int, seed: int = 0) -> Any:
    dtype = TABLE.tensors[index].bits_dtype
    return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, count, dtype=dtype, endpoint=True)


def pick(index: int, count: int, seed: int = 0) -> Any:
    spec = TABLE.tensors[index]
    chosen = np.random.default_rng(seed).choice(spec.element_count, count, replace=False)
    return np.sort(chosen).astype(spec.index_dtype)


def write(counts: dict[int, int], layout: PartLayout = LAYOUT) -> tuple[int, int]:
    """Write a part whose tensors are listed with so many elements, the others whole."""
    writer = ChangedPartWriter(layout)
    for index in layout.tensor_indices:
        if index in counts:
            writer.write_listed(index, pick(index, counts[index]), draw_bits(index, counts[index]))
        else:
            data = draw_bits(index, TABLE.tensors[index].element_count).view(np.uint8)
            writer.write_whole(index, [data[: data.size // 3], data[data.size // 3 :]])
    return writer.seal()


def open_part(part: tuple[int, int]) -> Region:
    return Region.open_snapshot(*part)


@pytest.mark.parametrize(
    ("dtype", "shape", "count"),
    [("BF16", (100,), 25), ("F32", (100,), 37), ("F8_E5M2", (100,), 15), ("I64", (), 0), ("BF16", (0,), 0)],
)
def test_a_list_saves_a_quarter_of_the_tensor_or_is_not_used(dtype: str, shape: tuple[int, ...], count: int) -> None:
    assert compute_listed_max(TensorSpec("w", dtype, shape)) == count


def test_wide_indices_cost_more() -> None:
    assert compute_listed_max(TensorSpec("w", "BF16", (1 << 33,))) == (3 << 32) // 10


@given(
    st.fixed_dictionaries(
        {},
        optional={index: st.integers(0, compute_listed_max(TABLE.tensors[index])) for index in LAYOUT.tensor_indices},
    )
)
def test_what_is_written_is_read(counts: dict[int, int]) -> None:
    region = open_part(write(counts))
    contents = list(read_changed_part(LAYOUT, region.bytes))
    assert [content.tensor_index for content in contents] == list(LAYOUT.tensor_indices)
    for content in contents:
        index = content.tensor_index
        if index in counts:
            assert content.indices is not None
            assert content.indices.dtype == TABLE.tensors[index].index_dtype
            assert np.array_equal(content.indices, pick(index, counts[index]))
            assert np.array_equal(content.bits, draw_bits(index, counts[index]))
        else:
            assert content.indices is None
            assert np.array_equal(content.bits, draw_bits(index, TABLE.tensors[index].element_count))
    assert region.size_bytes <= compute_size_bytes_max(LAYOUT)
    region.close()


def test_the_memory_is_sealed_and_as_small_as_its_content() -> None:
    descriptor, size_bytes = write(dict.fromkeys(LAYOUT.tensor_indices, 0))
    assert size_bytes == os.fstat(descriptor).st_size == 64
    with pytest.raises(OSError, match="Operation not permitted"):
        os.pwrite(descriptor, b"1", 0)
    os.close(descriptor)


@pytest.fixture
def writer() -> Iterator[ChangedPartWriter]:
    made = ChangedPartWriter(LAYOUT)
    yield made
    made.close()


def test_tensors_come_in_order_whole_and_as_what_they_are(writer: ChangedPartWriter) -> None:
    with pytest.raises(LocalProtocolError, match="tensor 2 of part"):
        writer.write_listed(2, pick(2, 1), draw_bits(2, 1))
    with pytest.raises(LocalProtocolError, match="0 of 5 tensors"):
        writer.seal()
    with pytest.raises(LocalProtocolError, match=r"tensor b: .* uint64 indices"):
        writer.write_listed(1, pick(1, 1).astype(np.uint64), draw_bits(1, 1))
    with pytest.raises(LocalProtocolError, match="tensor c has 5 of 33 bytes"):
        writer.write_whole(2, [np.zeros(5, np.uint8)])
    for index in range(3, 6):
        writer.write_listed(index, pick(index, 0), draw_bits(index, 0))
    with pytest.raises(LocalProtocolError, match="tensor 6 of part"):
        writer.write_listed(6, pick(5, 0), draw_bits(5, 0))


@pytest.mark.parametrize("is_listed", [False, True])
def test_no_memory_is_said_before_it_is_used(
    writer: ChangedPartWriter, is_listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changed_parts, "CHECKED_SIZE_BYTES_MIN", 30)
    monkeypatch.setattr(shared_memory, "read_available_memory_bytes", lambda: 10)
    blocks = [draw_bits(1, 21).view(np.uint8)]
    with pytest.raises(StorageError, match="10 are available"):
        writer.write_listed(1, pick(1, 5), draw_bits(1, 5)) if is_listed else writer.write_whole(1, blocks)


def spoil(change: str) -> tuple[PartLayout, Any]:
    """Return the memory of a part that breaks one rule."""
    region = open_part(write({1: 2, 2: 0, 5: 1}))
    memory = region.bytes.copy()
    region.close()
    counts = memory[: 8 * LAYOUT.count].view("<u8")
    match change:
        case "no header":
            return LAYOUT, memory[:39]
        case "truncated":
            return LAYOUT, memory[:-1]
        case "longer":
            return LAYOUT, np.concatenate([memory, np.zeros(1, np.uint8)])
        case "one more":
            counts[4] += 1
        case "more than listed":
            counts[0] = compute_listed_max(TABLE.tensors[1]) + 1
        case "nearly whole":
            counts[0] = WHOLE - 1
        case "whole after all":
            counts[4] = WHOLE
    return LAYOUT, memory


@pytest.mark.parametrize(
    "change", ["no header", "truncated", "longer", "one more", "more than listed", "nearly whole", "whole after all"]
)
def test_memory_that_is_not_what_it_says_is_refused(change: str) -> None:
    with pytest.raises(RemoteProtocolError, match="handoff-changes"):
        list(read_changed_part(*spoil(change)))
