"""State anchors as blobs: a whole outer state, dense, tensor by tensor (SPEC outer, "State anchor blob").

Beside theta a state has the outer momentum or, under ``ddp``, the inner optimizer's state as bytes: two formats.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, cast

import numpy as np

from pulsenet.codec.stream import Piece, PieceSource
from pulsenet.errors import RemoteProtocolError
from pulsenet.ids import DIGEST_SIZE_BYTES, Digest
from pulsenet.outer.floats import FP32s, check_flat
from pulsenet.outer.inner_state import StateBytes, compute_slots_size_max, decode_slots
from pulsenet.outer.state import compute_state_root
from pulsenet.tensors.digest import hash_tensor
from pulsenet.tensors.params import ParameterTable

MAGIC: Final = b"PLSO"
FORMAT_VERSION: Final = 1
"""With the outer momentum."""

FORMAT_VERSION_INNER: Final = 2
"""With the inner optimizer's state."""

_HEADER: Final = struct.Struct(f"<4sB3s{DIGEST_SIZE_BYTES}sQ")
HEADER_SIZE_BYTES: Final = _HEADER.size

PIECE_SIZE_BYTES_MAX: Final = 4 << 20
"""What is written at once."""

_FP32: Final = np.dtype("<f4")
_SIZE: Final = struct.Struct("<Q")

Beside = FP32s | StateBytes
"""Of one tensor: its outer momentum, or its inner optimizer's state."""


@dataclass(frozen=True, slots=True)
class StateHeader:
    """The start of a state anchor blob."""

    state_root: Digest
    round_index: int
    """Rounds stepped to reach the state."""
    has_inner_state: bool = False
    """Whether the inner optimizer's state stands in the momentum's place."""

    @property
    def format_version(self) -> int:
        """Which of the two formats it is."""
        return FORMAT_VERSION_INNER if self.has_inner_state else FORMAT_VERSION

    def encode(self) -> bytes:
        """Return the header's bytes."""
        return _HEADER.pack(MAGIC, self.format_version, bytes(3), self.state_root, self.round_index)


def compute_state_size_bytes(table: ParameterTable) -> int:
    """Return the size of every state anchor of these masters that holds momenta."""
    return HEADER_SIZE_BYTES + 2 * _FP32.itemsize * table.element_count


def encode_state(
    table: ParameterTable, header: StateHeader, read: Callable[[int], tuple[FP32s, Beside]]
) -> Iterator[memoryview]:
    """Yield the pieces of a state anchor blob, each to be used before the next is asked for.

    Args:
        table: FP32 masters.
        header: Names the state; the root is not computed again.
        read: Returns theta of a tensor and what lies beside it, flat; asked once for each, ascending.

    Raises:
        LocalProtocolError: while iterating, arrays that are not the table's.
    """
    yield memoryview(header.encode())
    for tensor_index, spec in enumerate(table.tensors):
        theta, beside = read(tensor_index)
        yield from _cut(_bytes_of(theta, spec.element_count))
        if header.has_inner_state:
            assert beside.dtype == np.dtype(np.uint8)
            yield memoryview(_SIZE.pack(beside.size))
            yield from _cut(beside.data)
        else:
            yield from _cut(_bytes_of(beside, spec.element_count))


def _bytes_of(values: Beside, element_count: int) -> memoryview:
    check_flat(cast(FP32s, values), element_count)
    return values.astype(_FP32, copy=False).view(np.uint8).data


def _cut(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), PIECE_SIZE_BYTES_MAX):
        yield data[start : start + PIECE_SIZE_BYTES_MAX]


def decode_state(
    pieces: Iterable[Piece], table: ParameterTable, expected: StateHeader
) -> Iterator[tuple[int, FP32s, Beside]]:
    """Yield (position, theta, momentum or inner state) of every tensor, in memory for one of them.

    What is yielded counts only once the iteration ended without an error and its root was computed; for both
    see :func:`hash_state`.

    Args:
        pieces: The blob, cut anywhere.
        table: FP32 masters.
        expected: What the anchor's record says.

    Raises:
        RemoteProtocolError: another header (``state-header``), one of another state than the record's (``mismatch``),
            too few or too many bytes (``state-truncated``, ``state-trailing``), an inner state that is none
            (``state-slots``).
    """
    source = PieceSource(pieces, "state-truncated")
    magic, version, zeros, state_root, round_index = _HEADER.unpack(source.take(HEADER_SIZE_BYTES))
    if (magic, version, zeros) != (MAGIC, expected.format_version, bytes(3)):
        raise RemoteProtocolError("state-header", f"starts with {magic.hex()}, format {version}")
    if (state_root, round_index) != (expected.state_root, expected.round_index):
        raise RemoteProtocolError(
            "mismatch", f"holds state {state_root.hex()} of round {round_index}, not the one its record names"
        )
    read_beside: Callable[[PieceSource, int], Beside] = _read_inner_state if expected.has_inner_state else _read_floats
    for tensor_index, spec in enumerate(table.tensors):
        theta = _read_floats(source, spec.element_count)
        yield tensor_index, theta, read_beside(source, spec.element_count)
    if not source.is_at_end():
        raise RemoteProtocolError("state-trailing", "bytes after the last tensor")


def hash_state(pieces: Iterable[Piece], table: ParameterTable, expected: StateHeader) -> Digest:
    """Return the root of the state in a blob, computed from all of its values.

    Raises:
        RemoteProtocolError: as :func:`decode_state`.
    """
    hashes = [(hash_tensor(theta), hash_tensor(beside)) for _, theta, beside in decode_state(pieces, table, expected)]
    return compute_state_root(table, round_index=expected.round_index, hashes=hashes)


def _read_floats(source: PieceSource, count: int) -> FP32s:
    return _read(source, _FP32.itemsize * count).view(_FP32).astype(np.float32, copy=False)


def _read_inner_state(source: PieceSource, element_count: int) -> StateBytes:
    """Return the inner state of a tensor, found to be one (``state-slots``)."""
    (size_bytes,) = _SIZE.unpack(source.take(_SIZE.size))
    if size_bytes > compute_slots_size_max(element_count):
        raise RemoteProtocolError("state-slots", f"{size_bytes} bytes for {element_count} elements")
    data = _read(source, size_bytes)
    decode_slots(data, element_count)
    return data


def _read(source: PieceSource, size_bytes: int) -> StateBytes:
    """Return so many bytes, copied once."""
    data = np.empty(size_bytes, np.uint8)
    filled = 0
    while filled < size_bytes:
        part = source.take_some(size_bytes - filled)
        data[filled : filled + len(part)] = part
        filled += len(part)
    return data


def check_state_size(table: ParameterTable, size_bytes: int, *, has_inner_state: bool = False) -> None:
    """Refuse an anchor whose announced size no state of these masters has, before anything of it is read.

    Raises:
        RemoteProtocolError: ``state-truncated`` or ``state-trailing``.
    """
    least = most = compute_state_size_bytes(table)
    if has_inner_state:
        thetas = HEADER_SIZE_BYTES + _FP32.itemsize * table.element_count + _SIZE.size * len(table.tensors)
        least = thetas + 2 * len(table.tensors)
        most = thetas + sum(compute_slots_size_max(spec.element_count) for spec in table.tensors)
    if not least <= size_bytes <= most:
        code = "state-truncated" if size_bytes < least else "state-trailing"
        raise RemoteProtocolError(code, f"{size_bytes} bytes, a state of these masters has {least} to {most}")
