"""The anchor blob: a parameter table and every tensor's bytes (SPEC codec, "Anchor blob").

An anchor blob is 12 bytes of header, the magic ``PLSA``, the u8 format version 1, three zero bytes and the
u32 size of the encoded table (little-endian); then the table; then each tensor's dense bytes in table order,
without padding. Its chunks start anew after the table and at every tensor, so that two anchors share the
chunks of what did not change; a reader does not depend on where chunks begin.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy.typing as npt

from pulsenet import limits
from pulsenet.codec.stream import Piece, PieceSource
from pulsenet.errors import RemoteProtocolError
from pulsenet.tensors.params import ParameterTable, Region

MAGIC: Final = b"PLSA"
FORMAT_VERSION: Final = 1
CODEC_ID: Final = 0
"""What a manifest states as the codec of an anchor."""

_HEADER: Final = struct.Struct("<4sB3sI")
_PIECE_SIZE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class AnchorPiece:
    """Some bytes of the blob, in order."""

    data: memoryview
    starts_chunk: bool
    """Whether a new chunk begins here."""


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """Some bytes of one tensor."""

    tensor_index: int
    offset_bytes: int
    """From the start of the tensor."""
    data: memoryview


def compute_anchor_size_bytes(table: ParameterTable) -> int:
    """Return the size of the blob that holds a version of this table."""
    return _HEADER.size + len(table.encode()) + table.size_bytes


def encode_anchor(table: ParameterTable, region: Region) -> Iterator[AnchorPiece]:
    """Yield the blob of the weights in ``region``, piece by piece, without copying them.

    Raises:
        LocalProtocolError: The region is smaller than the table's layout.
    """
    yield encode_anchor_start(table)
    for tensor_index in range(len(table.tensors)):
        yield from encode_anchor_tensor(table.view(region, tensor_index))


def encode_anchor_start(table: ParameterTable) -> AnchorPiece:
    """Return the blob's first piece; the tensors follow in table order."""
    encoded = table.encode()
    return AnchorPiece(memoryview(_HEADER.pack(MAGIC, FORMAT_VERSION, bytes(3), len(encoded)) + encoded), True)


def encode_anchor_tensor(view: npt.NDArray[Any]) -> Iterator[AnchorPiece]:
    """Yield the pieces of one tensor, flat and whole, without copying it; an empty one has none."""
    if view.size == 0:
        return
    data = view.data.cast("B")
    for start in range(0, len(data), _PIECE_SIZE_BYTES):
        yield AnchorPiece(data[start : start + _PIECE_SIZE_BYTES], start == 0)


class AnchorReader:
    """Takes an anchor blob apart; pieces may be cut anywhere.

    Raises:
        RemoteProtocolError: ``anchor-header``, ``anchor-truncated``, or a code of ``ParameterTable.decode``.
    """

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._source = PieceSource(pieces, "anchor-truncated")
        magic, version, zeros, table_size_bytes = _HEADER.unpack(self._source.take(_HEADER.size))
        if magic != MAGIC or version != FORMAT_VERSION or zeros != bytes(3):
            raise RemoteProtocolError("anchor-header", f"starts with {magic.hex()}, format {version}")
        if table_size_bytes > limits.TABLE_SIZE_BYTES_MAX:
            raise RemoteProtocolError("anchor-header", f"a table of {table_size_bytes} bytes declared")
        self.table = ParameterTable.decode(self._source.take(table_size_bytes))
        """Decoded and valid, but not yet compared with any digest."""

    def read_tensors(self) -> Iterator[TensorPiece]:
        """Yield the tensors' bytes in table order; an empty tensor yields nothing.

        Raises:
            RemoteProtocolError: ``anchor-truncated`` or ``anchor-trailing``.
        """
        for tensor_index, spec in enumerate(self.table.tensors):
            offset_bytes = 0
            while offset_bytes < spec.size_bytes:
                data = self._source.take_some(spec.size_bytes - offset_bytes)
                yield TensorPiece(tensor_index, offset_bytes, data)
                offset_bytes += len(data)
        if not self._source.is_at_end():
            raise RemoteProtocolError("anchor-trailing", "bytes after the last tensor")
