"""Reading a patch blob piece by piece: header, records, end (SPEC codec, "Patch blob").

Nothing longer than one record's body is ever held, and a body's size is checked against its block before it is
read. Pieces may be cut anywhere.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from pulsenet.codec.blocks import Block, BlockMap, check_codec, read_changed_count
from pulsenet.codec.varint import VarintParser
from pulsenet.errors import RemoteProtocolError
from pulsenet.ids import DIGEST_SIZE_BYTES, Digest
from pulsenet.tensors.params import ParameterTable

MAGIC: Final = b"PLSB"
FORMAT_VERSION: Final = 1
END_OF_RECORDS: Final = 0
"""Takes the place of a codec id after the last record."""

_HEADER: Final = struct.Struct(f"<4sBBH{DIGEST_SIZE_BYTES}s")
HEADER_SIZE_BYTES: Final = _HEADER.size

Piece = bytes | memoryview


class Form(IntEnum):
    """What a receiver needs to decode a patch."""

    RELATIVE = 0
    """Some records build on the old bits: exactly the base version is needed."""
    ABSOLUTE = 1
    """Every record holds the new bits themselves."""


@dataclass(frozen=True, slots=True)
class PatchHeader:
    """The start of a patch blob."""

    form: Form
    table_digest: Digest

    def encode(self) -> bytes:
        """Return the header's bytes."""
        return _HEADER.pack(MAGIC, FORMAT_VERSION, self.form, 0, self.table_digest)


@dataclass(frozen=True, slots=True)
class PatchRecord:
    """One record: which block, how it is encoded, and the encoding."""

    block: Block
    codec_id: int
    changed_count: int
    body: bytes


def peek_header(data: bytes | bytearray | memoryview) -> PatchHeader:
    """Return the header that ``data`` starts with.

    Raises:
        RemoteProtocolError: ``patch-truncated``, ``patch-magic``, ``patch-version`` or ``patch-form``.
    """
    if len(data) < HEADER_SIZE_BYTES:
        raise RemoteProtocolError("patch-truncated", f"a header of {len(data)} bytes")
    magic, version, form, reserved, table_digest = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise RemoteProtocolError("patch-magic", f"starts with {magic.hex()}")
    if version != FORMAT_VERSION:
        raise RemoteProtocolError("patch-version", f"format {version}, this is {FORMAT_VERSION}")
    if form not in (Form.RELATIVE, Form.ABSOLUTE) or reserved != 0:
        raise RemoteProtocolError("patch-form", f"form {form}, reserved {reserved}")
    return PatchHeader(Form(form), Digest(table_digest))


class PatchReader:
    """Takes a blob apart into records.

    Raises:
        RemoteProtocolError: as each method says; the first code found wins, and the reader is then of no more use.
    """

    def __init__(self, pieces: Iterable[Piece], table: ParameterTable) -> None:
        self._source = PieceSource(pieces)
        self._blocks = BlockMap(table)
        self.header = peek_header(self._source.take(HEADER_SIZE_BYTES))
        if self.header.table_digest != table.digest:
            raise RemoteProtocolError("patch-table", f"made for table {self.header.table_digest.hex()}")

    def read_records(self) -> Iterator[PatchRecord]:
        """Yield the records; ends after the end record agreed with them and nothing followed it."""
        record_count, changed_count, next_block = 0, 0, 0
        while (codec_id := self._source.take(1)[0]) != END_OF_RECORDS:
            block_index = next_block + self._source.take_varint()
            record = self._read_record(codec_id, block_index)
            next_block = block_index + 1
            record_count += 1
            changed_count += record.changed_count
            yield record
        stated = (self._source.take_varint(), self._source.take_varint())
        if stated != (record_count, changed_count):
            raise RemoteProtocolError("patch-count", f"{stated} stated, {(record_count, changed_count)} found")
        if not self._source.is_at_end():
            raise RemoteProtocolError("patch-trailing", "bytes after the end record")

    def _read_record(self, codec_id: int, block_index: int) -> PatchRecord:
        if block_index >= self._blocks.block_count:
            raise RemoteProtocolError("patch-block", f"block {block_index} of {self._blocks.block_count}")
        block = self._blocks.block(block_index)
        check_codec(block, codec_id, is_absolute=self.header.form is Form.ABSOLUTE)
        body_size_bytes = self._source.take_varint()
        if body_size_bytes > block.body_size_bytes_max:
            raise RemoteProtocolError("patch-size", f"a body of {body_size_bytes} bytes for {block.size_bytes}")
        body = self._source.take(body_size_bytes)
        changed_count = read_changed_count(codec_id, body)
        if not 0 < changed_count <= block.element_count:
            raise RemoteProtocolError("patch-count", f"{changed_count} changes among {block.element_count} elements")
        return PatchRecord(block, codec_id, changed_count, body)


class PieceSource:
    """Bytes from pieces of any size, which are only viewed.

    Args:
        pieces: In order.
        code: What running out of them is.
    """

    def __init__(self, pieces: Iterable[Piece], code: str = "patch-truncated") -> None:
        self._pieces = iter(pieces)
        self._piece = memoryview(b"")
        self._code = code
        self.taken_size_bytes = 0
        """Bytes taken so far."""

    def take_some(self, size_bytes_max: int) -> memoryview:
        """Return the next bytes without copying them: at least one, and at most so many."""
        if self.is_at_end():
            raise RemoteProtocolError(self._code, f"{self.taken_size_bytes} bytes, {size_bytes_max} more are due")
        part = self._piece[:size_bytes_max]
        self._piece = self._piece[len(part) :]
        self.taken_size_bytes += len(part)
        return part

    def take(self, size_bytes: int) -> bytes:
        """Return exactly ``size_bytes`` bytes."""
        taken = bytearray()
        while len(taken) < size_bytes:
            taken += self.take_some(size_bytes - len(taken))
        return bytes(taken)

    def take_varint(self) -> int:
        """Return the next number (``patch-varint``)."""
        parser = VarintParser()
        while True:
            value = parser.feed(self.take_some(1)[0])
            if value is not None:
                return value

    def is_at_end(self) -> bool:
        """Return whether every byte was taken."""
        while not self._piece:
            piece = next(self._pieces, None)
            if piece is None:
                return True
            self._piece = memoryview(piece).cast("B")
        return False
