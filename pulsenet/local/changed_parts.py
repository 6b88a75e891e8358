"""Changed parts: tensors handed over by what changed, to a daemon that holds an earlier version of them.

The memory starts with one u64 for each tensor of the part: how many elements are listed, or ``WHOLE``. Then come the
tensors in table order, each array at the next multiple of 64 bytes. A listed tensor is its indices (u32, or u64 for
2^32 elements and more; strictly ascending) and the elements' new bits; a whole one is its row-major bytes. All
integers are little-endian, padding has no meaning.

A list names every element that may differ from the daemon's version, so it may hold elements that do not: what it
leaves out is as it was. It is never longer than the tensor itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pulsenet.codec.changes import Bits, Indices
from pulsenet.errors import LocalProtocolError, RemoteProtocolError
from pulsenet.local.parts import PartLayout
from pulsenet.local.shared_memory import Bytes, create_memory, require_memory, seal_snapshot, write_at
from pulsenet.tensors.params import TENSOR_ALIGNMENT_BYTES, TensorSpec

WHOLE: Final = (1 << 64) - 1
"""In the place of a count: all of the tensor follows."""

LISTED_RATIO_MAX: Final = 0.75
"""Listed where this saves at least a quarter of the tensor's bytes: up to 25 % of changed BF16 elements."""

CHECKED_SIZE_BYTES_MIN: Final = 1 << 20
"""What needs less is written without asking how much memory is left, which takes longer than writing it."""

_COUNT: Final = np.dtype("<u8")


def compute_listed_max(spec: TensorSpec) -> int:
    """Return how many elements of a tensor are listed at most; with more, all of it is handed over."""
    entry_size_bytes = spec.index_dtype.itemsize + spec.element_size_bytes
    return int(spec.size_bytes * LISTED_RATIO_MAX) // entry_size_bytes


@dataclass(frozen=True, slots=True, eq=False)
class TensorContent:
    """One tensor of a changed part."""

    tensor_index: int
    indices: Indices | None
    """Flat positions of the listed elements, not yet checked; ``None`` if the tensor is whole."""
    bits: Bits
    """New bits of the listed elements, or all of the tensor's."""


class ChangedPartWriter:
    """Fills the memory of one changed part, tensor by tensor in table order, then seals it.

    Raises:
        StorageError: No memory (reason ``memory``); its methods too.
    """

    def __init__(self, layout: PartLayout) -> None:
        self._layout = layout
        self._counts: list[int] = []
        self._end = layout.count * _COUNT.itemsize
        self._descriptor = create_memory("pulsenet-changes", self._end)

    def write_listed(self, tensor_index: int, indices: Indices, bits: Bits) -> None:
        """Store the next tensor as the elements that may have changed.

        Raises:
            LocalProtocolError: Another tensor is next, or the arrays are not those of its elements.
        """
        spec = self._begin(tensor_index, indices.size)
        if indices.dtype != spec.index_dtype or bits.dtype != spec.bits_dtype or bits.shape != indices.shape:
            raise LocalProtocolError(
                f"tensor {spec.name}: {indices.shape} {indices.dtype} indices and {bits.shape} {bits.dtype} bits"
            )
        if indices.nbytes + bits.nbytes >= CHECKED_SIZE_BYTES_MIN:
            require_memory(indices.nbytes + bits.nbytes)
        for array in (indices, bits):
            self._write(array.view(np.uint8))

    def write_whole(self, tensor_index: int, blocks: Iterable[Bytes]) -> None:
        """Store all of the next tensor; ``blocks`` are its row-major bytes.

        Raises:
            LocalProtocolError: Another tensor is next, or there are not as many bytes as it has.
        """
        spec = self._begin(tensor_index, WHOLE)
        if spec.size_bytes >= CHECKED_SIZE_BYTES_MIN:
            require_memory(spec.size_bytes)
        start = self._align()
        for data in blocks:
            write_at(self._descriptor, data, self._end)
            self._end += data.size
        if self._end - start != spec.size_bytes:
            raise LocalProtocolError(f"tensor {spec.name} has {self._end - start} of {spec.size_bytes} bytes")

    def seal(self) -> tuple[int, int]:
        """Make the part immutable and return its descriptor, which the caller now owns, and its size in bytes.

        Raises:
            LocalProtocolError: Tensors are missing.
        """
        if len(self._counts) != self._layout.count:
            raise LocalProtocolError(f"{len(self._counts)} of {self._layout.count} tensors were written")
        write_at(self._descriptor, np.array(self._counts, _COUNT).view(np.uint8), 0)
        # An empty last array may start beyond what was written.
        os.ftruncate(self._descriptor, self._end)
        seal_snapshot(self._descriptor)
        descriptor, self._descriptor = self._descriptor, -1
        return descriptor, self._end

    def close(self) -> None:
        """Give up an unsealed part; does nothing after ``seal``."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _begin(self, tensor_index: int, count: int) -> TensorSpec:
        expected = self._layout.first + len(self._counts)
        if tensor_index != expected or expected >= self._layout.end:
            raise LocalProtocolError(f"tensor {tensor_index} of part {self._layout.tensor_indices} after {expected}")
        self._counts.append(count)
        return self._layout.table.tensors[tensor_index]

    def _write(self, data: Bytes) -> None:
        write_at(self._descriptor, data, self._align())
        self._end += data.size

    def _align(self) -> int:
        self._end = _align(self._end)
        return self._end


def read_changed_part(layout: PartLayout, memory: npt.NDArray[np.uint8]) -> Iterator[TensorContent]:
    """Yield the tensors of a changed part; their arrays share ``memory``.

    Every count is checked before it is used. The order of indices is not looked at, as they are many.

    Raises:
        RemoteProtocolError: ``handoff-changes``: the memory's size is not that of what it says it holds, or a list is
            longer than its tensor.
    """
    header_size_bytes = layout.count * _COUNT.itemsize
    if memory.size < header_size_bytes:
        raise RemoteProtocolError("handoff-changes", f"{memory.size} bytes for {layout.count} counts")
    counts = memory[:header_size_bytes].view(_COUNT).tolist()
    end = header_size_bytes

    def take(dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
        nonlocal end
        start = _align(end)
        end = start + count * dtype.itemsize
        if end > memory.size:
            raise RemoteProtocolError("handoff-changes", f"{memory.size} bytes, {end} and more are described")
        return memory[start:end].view(dtype)

    for tensor_index, count in zip(layout.tensor_indices, counts, strict=True):
        spec = layout.table.tensors[tensor_index]
        if count == WHOLE:
            yield TensorContent(tensor_index, None, take(spec.bits_dtype, spec.element_count))
            continue
        if count > compute_listed_max(spec):
            raise RemoteProtocolError(
                "handoff-changes", f"{count} of {spec.element_count} elements of {spec.name} are listed: send it whole"
            )
        indices = take(spec.index_dtype, count)
        yield TensorContent(tensor_index, indices, take(spec.bits_dtype, count))
    if end != memory.size:
        raise RemoteProtocolError("handoff-changes", f"{memory.size} bytes, {end} are described")


def compute_size_bytes_max(layout: PartLayout) -> int:
    """Return the largest size of a changed part: every tensor whole."""
    end = layout.count * _COUNT.itemsize
    for tensor_index in layout.tensor_indices:
        # Two arrays each, so two paddings; a listed tensor is shorter than a whole one.
        end += layout.table.tensors[tensor_index].size_bytes + 2 * TENSOR_ALIGNMENT_BYTES
    return end


def _align(offset_bytes: int) -> int:
    return -(-offset_bytes // TENSOR_ALIGNMENT_BYTES) * TENSOR_ALIGNMENT_BYTES
