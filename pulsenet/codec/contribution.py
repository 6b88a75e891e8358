"""Encode and decode contribution blobs: gated pseudo-gradients in FP32 (SPEC codec, "Contribution blob").

Both sides hold the same FP32 weights, named by the state root. Like a patch, a blob is worked on block by block, in
memory for a few blocks, by as many cores as ``run_blocks`` uses; any FP32 bits come back as they were. Its sections
(``codec/sections.py``) can be decoded alone, and slices of an aggregate are written in the same way
(``codec/slices.py``).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, overload

import numpy as np
import numpy.typing as npt

from pulsenet.codec.blocks import (
    Block,
    BlockMap,
    Codec,
    EncodedBlock,
    decode_listed,
    encode_absolute_block,
    split_by_block,
)
from pulsenet.codec.changes import Indices
from pulsenet.codec.compress import PlaneEncoder, PlaneReader
from pulsenet.codec.gated import decode_gated, encode_gated
from pulsenet.codec.patch import PatchTotals, RunBlocks, run_in_batches
from pulsenet.codec.sections import SectionMap, count_pad_bytes
from pulsenet.codec.stream import END_OF_RECORDS, Piece, PieceSource
from pulsenet.codec.varint import BodyReader, encode_varint
from pulsenet.errors import LocalProtocolError, RemoteProtocolError
from pulsenet.ids import DIGEST_SIZE_BYTES, Digest
from pulsenet.tensors.params import ParameterTable

UInt32s = npt.NDArray[np.uint32]

MAGIC: Final = b"PLSC"
FORMAT_VERSION: Final = 1
_HEADER: Final = struct.Struct(f"<4sB3s{DIGEST_SIZE_BYTES}s{DIGEST_SIZE_BYTES}sQI")
HEADER_SIZE_BYTES: Final = _HEADER.size


class EntryCodec(IntEnum):
    """Ids of the codecs of a contribution's blocks."""

    LISTED = int(Codec.ABSOLUTE)
    """Gaps and the values' byte planes."""
    GATED = 2
    """Counted from the edges of the weights' rounding cells."""
    FULL = 3
    """The values of all elements of the block."""


BlockEntries = tuple[int, UInt32s, UInt32s]
"""A block's number, positions in it, ascending, and the bits of their values."""


@dataclass(frozen=True, slots=True)
class EncodedEntries:
    """One record of a contribution."""

    block: Block
    block_index: int
    codec_id: int
    body: bytes


@dataclass(frozen=True, slots=True)
class ContributionHeader:
    """The start of a contribution blob."""

    table_digest: Digest
    """Of the table of FP32 masters."""
    state_root: Digest
    """Root of the state that it starts from."""
    round_index: int
    inner_step_count: int

    def encode(self) -> bytes:
        """Return the header's bytes."""
        return _HEADER.pack(
            MAGIC,
            FORMAT_VERSION,
            bytes(3),
            self.table_digest,
            self.state_root,
            self.round_index,
            self.inner_step_count,
        )


@dataclass(frozen=True, slots=True, eq=False)
class TensorEntries:
    """Entries of one FP32 tensor, or of a part of it.

    Raises:
        LocalProtocolError: arrays of other dtypes, dimensions or lengths than documented.
    """

    tensor_index: int
    """Position of the tensor in the table."""
    indices: Indices
    """Flat positions in the tensor, strictly ascending."""
    value_bits: UInt32s
    """FP32 bits of what is to be subtracted from the weights."""

    def __post_init__(self) -> None:
        if self.indices.shape != self.value_bits.shape or self.indices.ndim != 1:
            raise LocalProtocolError(f"{self.indices.shape} indices and {self.value_bits.shape} values")
        if self.indices.dtype not in (np.dtype(np.uint32), np.dtype(np.uint64)):
            raise LocalProtocolError(f"indices are uint32 or uint64, not {self.indices.dtype}")
        if self.value_bits.dtype != np.dtype(np.uint32):
            raise LocalProtocolError(f"values are the bits of FP32 as uint32, not {self.value_bits.dtype}")


def peek_contribution_header(data: bytes | bytearray | memoryview) -> ContributionHeader:
    """Return the header that ``data`` starts with.

    Raises:
        RemoteProtocolError: ``patch-truncated`` or ``contribution-header``.
    """
    if len(data) < HEADER_SIZE_BYTES:
        raise RemoteProtocolError("patch-truncated", f"a header of {len(data)} bytes")
    magic, version, zeros, table_digest, state_root, round_index, steps = _HEADER.unpack_from(data)
    if magic != MAGIC or version != FORMAT_VERSION or zeros != bytes(3):
        raise RemoteProtocolError("contribution-header", f"starts with {magic.hex()}, format {version}")
    return ContributionHeader(Digest(table_digest), Digest(state_root), round_index, steps)


def encode_contribution(
    table: ParameterTable,
    theta: Sequence[npt.NDArray[Any]],
    entries: Iterable[TensorEntries],
    *,
    header: ContributionHeader,
    totals: PatchTotals | None = None,
    run_blocks: RunBlocks = map,
) -> Iterator[bytes]:
    """Return the pieces of a contribution blob.

    Args:
        table: FP32 masters.
        theta: For each tensor the flat weights of the state that ``header`` names, as FP32 or its bits.
        entries: Ascending by tensor and index; a tensor may be spread over several.
        totals: Counts what was written.
        run_blocks: ``map``, or an executor's ``map`` to use several cores.

    Raises:
        LocalProtocolError: another table or ``theta``; while iterating, entries out of order or outside their tensor.
    """
    if header.table_digest != table.digest:
        raise LocalProtocolError("the header names another table")
    weights = view_weights(table, theta)
    blocks, encoder = BlockMap(table), PlaneEncoder()

    def weigh(item: BlockEntries) -> int:
        return blocks.block(item[0]).size_bytes

    def encode(item: BlockEntries) -> tuple[int, EncodedBlock]:
        block = blocks.block(item[0])
        return item[0], encode_entries(block.cut(weights[block.tensor_index]), *item[1:], encoder)

    records = run_in_batches(run_blocks, encode, _gather_by_block(table, entries), weigh)
    sections = SectionMap(table)
    return write_sections(
        header.encode(), records, sections, range(sections.section_count), PatchTotals() if totals is None else totals
    )


def write_sections(
    header: bytes,
    records: Iterator[tuple[int, EncodedBlock]],
    section_map: SectionMap,
    sections: range,
    totals: PatchTotals,
) -> Iterator[bytes]:
    """Yield a blob's pieces: the header, then each section's records and its end."""
    totals.encoded_size_bytes += len(header)
    yield header
    waiting = next(records, None)
    for section in sections:
        blocks = section_map.blocks_of(range(section, section + 1))
        next_block, size_bytes, record_count, entry_count = blocks.start, 0, 0, 0
        while waiting is not None and waiting[0] in blocks:
            block_index, encoded = waiting
            head = bytes([encoded.codec]) + encode_varint(block_index - next_block) + encode_varint(len(encoded.body))
            next_block = block_index + 1
            record_count += 1
            entry_count += encoded.changed_count
            size_bytes += len(head) + len(encoded.body)
            totals.codec_id = max(totals.codec_id, int(encoded.codec))
            yield head + encoded.body
            waiting = next(records, None)
        end = bytes([END_OF_RECORDS]) + encode_varint(record_count) + encode_varint(entry_count)
        end += bytes(count_pad_bytes(size_bytes + len(end)))
        totals.record_count += record_count
        totals.changed_count += entry_count
        totals.encoded_size_bytes += size_bytes + len(end)
        yield end
    assert waiting is None


def decode_contribution(
    pieces: Iterable[Piece],
    table: ParameterTable,
    theta: Sequence[npt.NDArray[Any]],
    *,
    state_root: Digest,
    run_blocks: RunBlocks = map,
) -> Iterator[TensorEntries]:
    """Yield the entries of a contribution, block by block, ascending by tensor and index.

    They count only once the iteration ended without an error: the end of the blob agrees with what came before.

    Args:
        pieces: The blob.
        table: FP32 masters.
        theta: As in :func:`encode_contribution`.
        state_root: Root of the state that ``theta`` belongs to.
        run_blocks: As in :func:`encode_contribution`.

    Raises:
        RemoteProtocolError: the blob breaks the specification, or starts from another state (``contribution-base``);
            the code says where (``contribution-...``, ``patch-...``, ``codec-unknown``).
        LocalProtocolError: weights that are not the table's.
    """
    weights = view_weights(table, theta)
    records = read_contribution(pieces, table, state_root=state_root)
    return decode_records(records, weights, run_blocks)


def read_contribution(
    pieces: Iterable[Piece], table: ParameterTable, *, state_root: Digest, sections: range | None = None
) -> Iterator[EncodedEntries]:
    """Return the records of a contribution, not decoded; errors as of :func:`decode_contribution`.

    Args:
        pieces: The blob; with ``sections`` its header and those sections.
        table: FP32 masters.
        state_root: Root of the state that it has to start from.
        sections: A run of the blob's sections; ``None`` for all.
    """
    source = PieceSource(pieces)
    header = peek_contribution_header(source.take(HEADER_SIZE_BYTES))
    if header.table_digest != table.digest:
        raise RemoteProtocolError("contribution-table", f"made for table {header.table_digest.hex()}")
    if header.state_root != state_root:
        raise RemoteProtocolError("contribution-base", f"starts from state {header.state_root.hex()}")
    section_map = SectionMap(table)
    return read_sections(
        source, BlockMap(table), section_map, range(section_map.section_count) if sections is None else sections
    )


def decode_records(
    records: Iterator[EncodedEntries], weights: Sequence[UInt32s], run_blocks: RunBlocks
) -> Iterator[TensorEntries]:
    """Yield the entries of records; ``weights`` are those of :func:`view_weights`."""

    def weigh(record: EncodedEntries) -> int:
        return record.block.size_bytes

    def decode(record: EncodedEntries) -> TensorEntries:
        block = record.block
        positions, values = decode_entries(record, block.cut(weights[block.tensor_index]))
        indices = positions.astype(block.spec.index_dtype)
        indices += block.spec.index_dtype.type(block.element_start)
        return TensorEntries(block.tensor_index, indices, values.astype(np.uint32, copy=False))

    return run_in_batches(run_blocks, decode, records, weigh)


def collect_entries(table: ParameterTable, parts: Iterable[TensorEntries]) -> list[TensorEntries]:
    """Return one :class:`TensorEntries` for each tensor of the table, empty where nothing came."""
    found: list[list[TensorEntries]] = [[] for _ in table.tensors]
    for part in parts:
        found[part.tensor_index].append(part)
    return [
        TensorEntries(
            index,
            np.concatenate([np.empty(0, spec.index_dtype), *(part.indices for part in found[index])]),
            np.concatenate([np.empty(0, np.uint32), *(part.value_bits for part in found[index])]),
        )
        for index, spec in enumerate(table.tensors)
    ]


def encode_entries(theta: UInt32s, positions: UInt32s, values: UInt32s, encoder: PlaneEncoder) -> EncodedBlock:
    """Return the shortest encoding of the entries of one block, of equal ones the lowest id.

    Args:
        theta: FP32 bits of all weights of the block.
        positions: Ascending positions in the block, at least one.
        values: FP32 bits.
        encoder: Writes the planes.
    """
    tried = [EncodedBlock(EntryCodec.LISTED, positions.size, encode_absolute_block(positions, values, encoder).body)]
    tried.append(EncodedBlock(EntryCodec.GATED, positions.size, encode_gated(theta, positions, values, encoder)))
    if positions.size == theta.size:
        tried.append(EncodedBlock(EntryCodec.FULL, positions.size, encoder.encode_integers(values)))
    return min(tried, key=lambda encoded: (len(encoded.body), encoded.codec))


def decode_entries(record: EncodedEntries, theta: UInt32s) -> tuple[UInt32s, UInt32s]:
    """Return the positions in the block and the bits of the values of one record.

    Raises:
        RemoteProtocolError: the body breaks the specification.
    """
    block, reader = record.block, PlaneReader(record.body)
    if record.codec_id == EntryCodec.GATED:
        return decode_gated(reader, theta)
    if record.codec_id == EntryCodec.LISTED:
        return decode_listed(block, reader)
    values = reader.read_integers(size_bytes=block.spec.element_size_bytes, count=block.element_count)
    reader.expect_end()
    return np.arange(block.element_count, dtype=np.uint32), values


def _gather_by_block(table: ParameterTable, entries: Iterable[TensorEntries]) -> Iterator[BlockEntries]:
    """Join the parts that fall into one block."""
    for block_index, group in groupby(split_by_block(table, entries), key=itemgetter(0)):
        parts = list(group)
        values = [item.value_bits[part] for _, item, part, _ in parts]
        yield block_index, np.concatenate([positions for *_, positions in parts]), np.concatenate(values)


def read_sections(
    source: PieceSource, blocks: BlockMap, section_map: SectionMap, sections: range
) -> Iterator[EncodedEntries]:
    """Yield the records of sections; ends after every section's end agreed with it and nothing followed the last.

    Args:
        source: Stands after the header.
        blocks: Of the table.
        section_map: Of the table.
        sections: A run of them.

    Raises:
        RemoteProtocolError: ``patch-...`` or ``codec-unknown``.
    """
    for section in sections:
        own = section_map.blocks_of(range(section, section + 1))
        start_bytes = source.taken_size_bytes
        record_count, entry_count, next_block = 0, 0, own.start
        while (codec_id := source.take(1)[0]) != END_OF_RECORDS:
            block_index = next_block + source.take_varint()
            if block_index >= own.stop:
                raise RemoteProtocolError("patch-block", f"block {block_index} in a section that ends at {own.stop}")
            block = blocks.block(block_index)
            body, count = _read_record(source, block, codec_id)
            record_count += 1
            entry_count += count
            next_block = block_index + 1
            yield EncodedEntries(block, block_index, codec_id, body)
        stated = (source.take_varint(), source.take_varint())
        if stated != (record_count, entry_count):
            raise RemoteProtocolError("patch-count", f"{stated} stated, {(record_count, entry_count)} found")
        if any(source.take(count_pad_bytes(source.taken_size_bytes - start_bytes))):
            raise RemoteProtocolError("patch-trailing", "a byte that fills up a section is not zero")
    if not source.is_at_end():
        raise RemoteProtocolError("patch-trailing", "bytes after the last section")


def _read_record(source: PieceSource, block: Block, codec_id: int) -> tuple[bytes, int]:
    """Return a record's body and how many entries that says it holds."""
    if codec_id not in tuple(EntryCodec):
        raise RemoteProtocolError("codec-unknown", f"codec {codec_id}")
    size_bytes = source.take_varint()
    if size_bytes > block.body_size_bytes_max:
        raise RemoteProtocolError("patch-size", f"a body of {size_bytes} bytes for {block.size_bytes}")
    body = source.take(size_bytes)
    count = block.element_count
    if codec_id != EntryCodec.FULL:
        count = BodyReader(body).read_varint() >> (codec_id == EntryCodec.LISTED)
    if not 0 < count <= block.element_count:
        raise RemoteProtocolError("patch-count", f"{count} entries among {block.element_count} elements")
    return body, count


def view_weights(table: ParameterTable, theta: Sequence[npt.NDArray[Any]]) -> Sequence[UInt32s]:
    """Return the weights as bits; each tensor is taken from ``theta`` when it is asked for, and checked.

    What is in a list or tuple is checked at once.

    Raises:
        LocalProtocolError: they are not the table's; also while they are read.
    """
    if len(theta) != len(table.tensors):
        raise LocalProtocolError(f"weights of {len(theta)} tensors, the table has {len(table.tensors)}")
    for spec in table.tensors:
        if spec.dtype != "F32":
            raise LocalProtocolError(f"master {spec.name!r} is {spec.dtype}: masters are F32")
    weights = _Weights(table, theta)
    return list(weights) if isinstance(theta, list | tuple) else weights


class _Weights(Sequence[UInt32s]):
    """The bits of tensors that may lie elsewhere until they are needed."""

    def __init__(self, table: ParameterTable, theta: Sequence[npt.NDArray[Any]]) -> None:
        self._table = table
        self._theta = theta

    def __len__(self) -> int:
        return len(self._theta)

    @overload
    def __getitem__(self, index: int) -> UInt32s: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[UInt32s]: ...
    def __getitem__(self, index: int | slice) -> UInt32s | Sequence[UInt32s]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        spec, own = self._table.tensors[index], self._theta[index]
        if own.dtype not in (np.dtype(np.float32), np.dtype(np.uint32)) or own.shape != (spec.element_count,):
            raise LocalProtocolError(f"weights {spec.name!r} are {own.dtype} {own.shape}, not flat FP32")
        return own.view(np.uint32)
