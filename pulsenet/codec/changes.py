"""Absolute records: which elements of one tensor changed, from which bits to which (SPEC codec, "Changes").

Applying a record twice is the same as applying it once, and it holds all that is needed to undo it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pulsenet.errors import LocalProtocolError, PatchMismatchError, RemoteProtocolError
from pulsenet.tensors.jit import compile_loop
from pulsenet.tensors.params import UNSIGNED, ParameterTable

Bits = npt.NDArray[Any]
"""Flat array of uint8, uint16, uint32 or uint64: bit patterns of a tensor's elements."""

Indices = npt.NDArray[Any]
"""Flat array of uint32, or uint64 for a tensor of 2^32 elements and more."""

_HEADER: Final = struct.Struct("<4sIBB6sQ")
_MAGIC: Final = b"PCHG"
_RESERVED: Final = bytes(6)
_ALIGNMENT_BYTES: Final = 8


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """Changed elements of one tensor, or of a part of it.

    Raises:
        LocalProtocolError: arrays of different lengths or of other dtypes than documented.
    """

    tensor_index: int
    """Position of the tensor in the table."""
    indices: Indices
    """Flat positions in the tensor, strictly ascending."""
    old_bits: Bits
    new_bits: Bits

    def __post_init__(self) -> None:
        if not self.indices.shape == self.old_bits.shape == self.new_bits.shape or self.indices.ndim != 1:
            raise LocalProtocolError(
                f"{self.indices.shape} indices, {self.old_bits.shape} old and {self.new_bits.shape} new bits"
            )
        if self.indices.dtype not in (np.dtype(np.uint32), np.dtype(np.uint64)):
            raise LocalProtocolError(f"indices are uint32 or uint64, not {self.indices.dtype}")
        if self.old_bits.dtype != self.new_bits.dtype or self.old_bits.dtype.kind != "u":
            raise LocalProtocolError(f"bits are unsigned, not {self.old_bits.dtype} and {self.new_bits.dtype}")

    def __len__(self) -> int:
        return int(self.indices.size)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Changes):
            return NotImplemented
        return self.tensor_index == other.tensor_index and all(
            mine.dtype == theirs.dtype and np.array_equal(mine, theirs)
            for mine, theirs in (
                (self.indices, other.indices),
                (self.old_bits, other.old_bits),
                (self.new_bits, other.new_bits),
            )
        )

    __hash__ = None  # type: ignore[assignment]


_FITS, _BAD_INDEX, _BAD_BITS = 0, 1, 2


@compile_loop
def _check_loop(view: Bits, indices: Indices, expected: Bits) -> tuple[int, int]:
    """Return (outcome, position): whether ``view`` holds ``expected`` at ascending ``indices`` inside it."""
    size = np.uint64(view.size)
    for i in range(indices.size):
        index = np.uint64(indices[i])
        if index >= size or (i > 0 and index <= np.uint64(indices[i - 1])):
            return 1, i
        if view[index] != expected[i]:
            return 2, i
    return 0, 0


def check_changes_twin(view: Bits, indices: Indices, expected: Bits) -> tuple[int, int]:
    """Define what :func:`apply_changes` checks, in numpy: the first fault by position, index before bits."""
    wide = indices.astype(np.uint64)
    bad_index = wide >= np.uint64(view.size)
    bad_index[1:] |= wide[1:] <= wide[:-1]
    bad_bits = np.zeros(wide.size, np.bool_)
    bad_bits[~bad_index] = view[wide[~bad_index].astype(np.int64)] != expected[~bad_index]
    faults = np.flatnonzero(bad_index | bad_bits)
    if faults.size == 0:
        return _FITS, 0
    first = int(faults[0])
    return (_BAD_INDEX if bad_index[first] else _BAD_BITS), first


@compile_loop
def _write_loop(view: Bits, indices: Indices, bits: Bits) -> None:
    for i in range(indices.size):
        view[indices[i]] = bits[i]


@compile_loop
def _apply_loop(view: Bits, indices: Indices, expected: Bits, bits: Bits) -> tuple[int, int]:
    """Write ``bits`` if :func:`_check_loop` finds nothing wrong; return what it found."""
    outcome, position = _check_loop(view, indices, expected)
    if outcome == 0:
        _write_loop(view, indices, bits)
    return outcome, position


def apply_changes(view: Bits, changes: Changes) -> None:
    """Overwrite the changed elements of one tensor's ``view`` in place (spec-codec 11).

    Args:
        view: The tensor's bits, flat and row-major: unsigned integers of its elements' width.
        changes: Records of that tensor.

    Raises:
        LocalProtocolError: an index outside the tensor, twice or out of order, or another element width.
        PatchMismatchError: an element does not hold its old bits.
        In both cases nothing was written.
    """
    _check_view(view, changes)
    outcome, position = _apply_loop(view, changes.indices, changes.old_bits, changes.new_bits)
    if outcome == _BAD_INDEX:
        raise _index_error(view, changes)
    if outcome == _BAD_BITS:
        index = int(changes.indices[position])
        raise PatchMismatchError(
            f"tensor {changes.tensor_index} holds {int(view[index]):#x} at {index}, "
            f"the patch expects {int(changes.old_bits[position]):#x}"
        )


def undo_changes(view: Bits, changes: Changes) -> None:
    """Put the old bits back, whatever stands there now; undoing twice is the same as once.

    Raises:
        LocalProtocolError: an index outside the tensor, twice or out of order, or another element width.
            Nothing was written.
    """
    _check_view(view, changes)
    indices = changes.indices
    if indices.size and (int(indices[-1]) >= view.size or not bool(np.all(indices[1:] > indices[:-1]))):
        raise _index_error(view, changes)
    _write_loop(view, indices, changes.old_bits)


def compose_changes(first: Changes, second: Changes) -> Changes:
    """Return the changes that have the effect of ``first`` and then ``second`` on the same tensor.

    Positions that came back to their old bits drop out.

    Raises:
        LocalProtocolError: different tensors or dtypes.
        PatchMismatchError: ``second`` does not start where ``first`` ended.
    """
    if first.tensor_index != second.tensor_index or first.old_bits.dtype != second.old_bits.dtype:
        raise LocalProtocolError("composed changes must be of one tensor")
    _, in_first, in_second = np.intersect1d(first.indices, second.indices, assume_unique=True, return_indices=True)
    if not np.array_equal(first.new_bits[in_first], second.old_bits[in_second]):
        raise PatchMismatchError(f"tensor {first.tensor_index}: the second changes start from other bits")
    old_bits = second.old_bits.copy()
    old_bits[in_second] = first.old_bits[in_first]
    only_first = np.ones(first.indices.size, np.bool_)
    only_first[in_first] = False
    indices = np.concatenate((first.indices[only_first], second.indices))
    order = np.argsort(indices, kind="stable")
    old_bits = np.concatenate((first.old_bits[only_first], old_bits))[order]
    new_bits = np.concatenate((first.new_bits[only_first], second.new_bits))[order]
    kept = old_bits != new_bits
    return Changes(first.tensor_index, indices[order][kept], old_bits[kept], new_bits[kept])


def encode_changes(changes: Changes) -> bytes:
    """Return the spool form of ``changes``: self-delimiting, a multiple of 8 bytes long."""
    index_size, element_size = changes.indices.dtype.itemsize, changes.old_bits.dtype.itemsize
    header = _HEADER.pack(_MAGIC, changes.tensor_index, index_size, element_size, _RESERVED, len(changes))
    arrays = (
        changes.indices.astype(UNSIGNED[index_size], copy=False),
        changes.old_bits.astype(UNSIGNED[element_size], copy=False),
        changes.new_bits.astype(UNSIGNED[element_size], copy=False),
    )
    pieces = [header]
    for array in arrays:
        pieces.append(array.tobytes())
        pieces.append(bytes(-array.nbytes % _ALIGNMENT_BYTES))
    return b"".join(pieces)


def decode_changes(data: bytes | bytearray | memoryview, table: ParameterTable) -> Iterator[Changes]:
    """Yield the records of a spool, in order; their arrays share the memory of ``data``.

    Every record is checked against ``table`` before it is yielded: widths, counts, padding, indices inside the
    tensor and strictly ascending.

    Raises:
        RemoteProtocolError: ``changes-header``, ``changes-truncated`` or ``changes-index``.
    """
    view = memoryview(data).cast("B") if not isinstance(data, memoryview) or data.format != "B" else data
    offset = 0
    while offset < len(view):
        if len(view) - offset < _HEADER.size:
            raise RemoteProtocolError("changes-truncated", f"{len(view) - offset} bytes of a header")
        magic, tensor_index, index_size, element_size, reserved, count = _HEADER.unpack_from(view, offset)
        if magic != _MAGIC or reserved != _RESERVED or tensor_index >= len(table.tensors):
            raise RemoteProtocolError("changes-header", f"tensor {tensor_index} of {len(table.tensors)}")
        spec = table.tensors[tensor_index]
        expected_sizes = (spec.index_dtype.itemsize, spec.element_size_bytes)
        if (index_size, element_size) != expected_sizes or count > spec.element_count:
            raise RemoteProtocolError("changes-header", f"{count} records of {index_size} + {element_size} bytes")
        offset += _HEADER.size
        arrays = []
        for dtype in (spec.index_dtype, spec.bits_dtype, spec.bits_dtype):
            array, offset = _take_array(view, offset, dtype, count)
            arrays.append(array)
        changes = Changes(tensor_index, *arrays)
        _check_indices(changes, spec.element_count)
        yield changes


def _take_array(view: memoryview, offset: int, dtype: np.dtype[Any], count: int) -> tuple[npt.NDArray[Any], int]:
    size_bytes = count * dtype.itemsize
    end = offset + size_bytes + -size_bytes % _ALIGNMENT_BYTES
    if end > len(view):
        raise RemoteProtocolError("changes-truncated", f"{count} items of {dtype}")
    if any(view[offset + size_bytes : end]):
        raise RemoteProtocolError("changes-header", "padding is not zero")
    return np.frombuffer(view[offset : offset + size_bytes], dtype), end


def _check_indices(changes: Changes, element_count: int) -> None:
    indices = changes.indices
    if indices.size == 0:
        return
    if int(indices[-1]) >= element_count or not bool(np.all(indices[1:] > indices[:-1])):
        raise RemoteProtocolError("changes-index", f"tensor {changes.tensor_index} of {element_count} elements")


def _check_view(view: Bits, changes: Changes) -> None:
    if view.ndim != 1 or view.dtype != changes.new_bits.dtype:
        raise LocalProtocolError(f"a flat view of {changes.new_bits.dtype} is needed, not {view.ndim}-d {view.dtype}")
    if not view.flags.writeable:
        raise LocalProtocolError("the view is read-only")


def _index_error(view: Bits, changes: Changes) -> LocalProtocolError:
    return LocalProtocolError(
        f"tensor {changes.tensor_index}: an index is outside {view.size} elements, twice or out of order"
    )
