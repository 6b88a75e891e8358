"""Parts and means as blobs: what a mixing sends (SPEC codec, "Mixing blob").

A job mixes one or two vectors over some tensors. They are laid out as one table, each tensor once for each vector, and
its blocks are written as those of a contribution. A slice is as large as the next one, to a block, so a blob holds a
vector whole (slice 0 of 1, between partners) or an owner's like share of it, however small the model is. Parts are read
block by block, in memory for one block of each, and no count in them is trusted.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from pulsenet.codec.blocks import Block, BlockMap, EncodedBlock, encode_absolute_block
from pulsenet.codec.compress import PlaneEncoder
from pulsenet.codec.contribution import (
    EncodedEntries,
    EntryCodec,
    TensorEntries,
    decode_entries,
    read_sections,
    write_sections,
)
from pulsenet.codec.patch import PatchTotals, RunBlocks, run_in_batches
from pulsenet.codec.sections import SectionMap
from pulsenet.codec.stream import PieceSource
from pulsenet.errors import LocalProtocolError, RemoteProtocolError
from pulsenet.ids import DIGEST_SIZE_BYTES, Digest
from pulsenet.outer.checks import ContentCheck, Expected
from pulsenet.outer.contribution import Entries, find_run
from pulsenet.outer.floats import FP32s
from pulsenet.outer.mixing.mean import mean_block, spread
from pulsenet.outer.mixing.settings import Job, MixingSettings, Vector
from pulsenet.tensors.params import ParameterTable, TensorSpec

UInt32s = npt.NDArray[np.uint32]
BlockRange = tuple[int, int, int]
"""Place of a tensor in the joint table, first element and end of a block."""

MAGIC: Final = b"PLSM"
FORMAT_VERSION: Final = 1
_HEADER: Final = struct.Struct(f"<4sBB2s{DIGEST_SIZE_BYTES}s{DIGEST_SIZE_BYTES}sQIII")
MIXING_HEADER_SIZE_BYTES: Final = _HEADER.size

NO_BASE: Final = Digest(bytes(DIGEST_SIZE_BYTES))
"""Base of what is not gated against a common mean."""


@dataclass(frozen=True, slots=True)
class JobTable:
    """The tensors of a job: those of the run that it mixes, once for each vector."""

    job: Job
    vectors: tuple[Vector, ...]
    tensor_indices: tuple[int, ...]
    """Tensors of the run's table, ascending."""
    gated: frozenset[Vector]
    """Vectors of which only entries that passed the gate travel in this round."""
    table: ParameterTable
    """The joint table: vectors ascending, the tensors in each."""
    digest: Digest = field(repr=False)
    """Of the joint table: it names the vectors and the tensors."""

    def source(self, place: int) -> tuple[Vector, int]:
        """Return which vector's which tensor of the run stands at a place of the joint table."""
        return self.vectors[place // len(self.tensor_indices)], self.tensor_indices[place % len(self.tensor_indices)]

    def place(self, vector: Vector, tensor_index: int) -> int:
        """Return the place of a vector's tensor.

        Raises:
            ValueError: the job does not mix it.
        """
        own = self.vectors.index(vector)
        return own * len(self.tensor_indices) + self.tensor_indices.index(tensor_index)

    def is_dense(self, place: int) -> bool:
        """Return whether every element of a tensor travels."""
        return self.source(place)[0] not in self.gated

    def blocks_of(self, slice_index: int, slice_count: int) -> range:
        """Return the numbers of a slice's blocks; there may be none where owners outnumber blocks.

        Raises:
            LocalProtocolError: no such slice.
        """
        if not 0 <= slice_index < slice_count:
            raise LocalProtocolError(f"slice {slice_index} of {slice_count}")
        return SectionMap(self.table, slice_count).blocks_of(range(slice_index, slice_index + 1))

    def list_blocks(self, slice_index: int, slice_count: int) -> list[BlockRange]:
        """Return (place, first element, end) of each block of a slice, ascending.

        Raises:
            LocalProtocolError: no such slice.
        """
        blocks = BlockMap(self.table)
        listed = [blocks.block(number) for number in self.blocks_of(slice_index, slice_count)]
        return [
            (block.tensor_index, block.element_start, block.element_start + block.element_count) for block in listed
        ]


def make_job_table(
    table: ParameterTable,
    settings: MixingSettings,
    job: Job,
    *,
    round_index: int,
    subset: Sequence[int] | None = None,
) -> JobTable | None:
    """Return the table of a job, ``None`` where the variant mixes nothing in it.

    Args:
        table: The run's FP32 masters.
        settings: The run's.
        job: Which of the two.
        round_index: Of the round.
        subset: Tensors of Mix2 that the roster names, ascending; needed where the variant mixes a subset.

    Raises:
        LocalProtocolError: a subset that is not ascending inside the table, or none where one is needed.
    """
    vectors = settings.vectors(job)
    if not vectors:
        return None
    chosen = tuple(range(len(table.tensors)))
    if job is Job.MIX2 and settings.variant.mixes_subset:
        chosen = tuple(subset or ())
        if not chosen or list(chosen) != sorted(set(chosen)) or not 0 <= chosen[0] <= chosen[-1] < len(table.tensors):
            raise LocalProtocolError(f"a subset of {len(chosen)} tensors that is not ascending in the run's table")
    specs = []
    for vector in vectors:
        for index in chosen:
            spec = table.tensors[index]
            if spec.dtype != "F32":
                raise LocalProtocolError(f"master {spec.name!r} is {spec.dtype}: masters are F32")
            specs.append(TensorSpec(f"{vector.value}/{spec.name}", spec.dtype, spec.shape))
    joint = ParameterTable(tuple(specs))
    gated = frozenset(vector for vector in vectors if settings.gates(vector, round_index))
    return JobTable(job, vectors, chosen, gated, joint, joint.digest)


@dataclass(frozen=True, slots=True)
class MixingHeader:
    """The start of a mixing blob."""

    table_digest: Digest
    """Of the job's joint table."""
    job: Job
    round_index: int
    base_root: Digest = NO_BASE
    """Root of the last common mean, where outer iterates are gated against it."""
    slice_index: int = 0
    slice_count: int = 1
    contributor_count: int = 1
    """Parts in a mean; 1 for a part."""

    def encode(self) -> bytes:
        """Return the header's bytes."""
        return _HEADER.pack(
            MAGIC,
            FORMAT_VERSION,
            self.job,
            bytes(2),
            self.table_digest,
            self.base_root,
            self.round_index,
            self.slice_index,
            self.slice_count,
            self.contributor_count,
        )


def peek_mixing_header(data: bytes | bytearray | memoryview) -> MixingHeader:
    """Return the header that ``data`` starts with.

    Raises:
        RemoteProtocolError: ``patch-truncated`` or ``mixing-header``.
    """
    if len(data) < MIXING_HEADER_SIZE_BYTES:
        raise RemoteProtocolError("patch-truncated", f"a header of {len(data)} bytes")
    magic, version, job, zeros, table_digest, base_root, round_index, index, count, contributors = _HEADER.unpack_from(
        data
    )
    if magic != MAGIC or version != FORMAT_VERSION or zeros != bytes(2):
        raise RemoteProtocolError("mixing-header", f"starts with {magic.hex()}, format {version}")
    if job not in tuple(Job) or not index < count or contributors < 1:
        raise RemoteProtocolError("mixing-header", f"job {job}, slice {index} of {count}, {contributors} contributors")
    return MixingHeader(Digest(table_digest), Job(job), round_index, Digest(base_root), index, count, contributors)


def encode_part(
    job_table: JobTable,
    entries: Sequence[Entries],
    *,
    header: MixingHeader,
    totals: PatchTotals | None = None,
    run_blocks: RunBlocks = map,
) -> Iterator[bytes]:
    """Return the pieces of the blob of one slice of a trainer's vectors.

    Args:
        job_table: Of the job.
        entries: One for each tensor of the joint table, whole, whatever the slice; dense where the vector is.
        header: Which slice of which round.
        totals: Counts what was written.
        run_blocks: ``map``, or an executor's ``map`` to use several cores.

    Raises:
        LocalProtocolError: another table, or entries that do not fit it.
    """
    _check_own(job_table, header)
    if len(entries) != len(job_table.table.tensors):
        raise LocalProtocolError(f"entries of {len(entries)} tensors, the job has {len(job_table.table.tensors)}")
    for place, (own, spec) in enumerate(zip(entries, job_table.table.tensors, strict=True)):
        if own.tensor_index != place or (own.indices is None) != job_table.is_dense(place):
            raise LocalProtocolError(f"{spec.name!r}: entries of tensor {own.tensor_index}, or not as dense as agreed")
        spread_fits = len(own) == spec.element_count if own.indices is None else _fits(own, spec.element_count)
        if not spread_fits:
            raise LocalProtocolError(f"{spec.name!r}: entries do not fit {spec.element_count} elements")
    blocks, encoder = BlockMap(job_table.table), PlaneEncoder()

    def encode(block_index: int) -> tuple[int, EncodedBlock]:
        block = blocks.block(block_index)
        return block_index, _encode_block(block, *_cut(entries[block.tensor_index], block), encoder)

    numbers = job_table.blocks_of(header.slice_index, header.slice_count)
    encoded = run_in_batches(run_blocks, encode, numbers, lambda number: 2 * blocks.block(number).size_bytes)
    records = (record for record in encoded if record[1].changed_count)
    return _write(job_table, records, header, totals)


def decode_part(
    pieces: Iterable[bytes], job_table: JobTable, *, header: MixingHeader, run_blocks: RunBlocks = map
) -> Iterator[TensorEntries]:
    """Yield the entries of a part or a mean, block by block, ascending by place and position.

    They count only once the iteration ended without an error.

    Args:
        pieces: The blob, cut anywhere.
        job_table: Of the job.
        header: What the blob must be.
        run_blocks: As in :func:`encode_part`.

    Raises:
        RemoteProtocolError: while iterating: another header (``mixing-header``), elements left out of a dense vector
            (``shape``), or the blob breaks the specification.
    """
    _check_own(job_table, header)
    records = _read_records(pieces, job_table, header)
    decoded = run_in_batches(run_blocks, _decode_record, records, lambda record: record.block.size_bytes)
    yield from _expect_all(decoded, job_table, header)


@dataclass(frozen=True, slots=True)
class PartContent:
    """What was found in a part."""

    reason: str
    """Empty if it may be mixed; else a stable code (SPEC, "Mixing")."""
    detail: str
    """For a person."""
    entry_count: int
    norm: float
    """Euclidean norm of the entries, each vector's squares added."""


def inspect_part(
    pieces: Iterable[bytes],
    job_table: JobTable,
    *,
    header: MixingHeader,
    norm_max: float,
    run_blocks: RunBlocks = map,
) -> PartContent:
    """Look into a part before anything is combined with it, in memory for a few blocks.

    Args:
        pieces: All of it.
        job_table: Of the job.
        header: What it must be.
        norm_max: Of the run.
        run_blocks: As in :func:`encode_part`.
    """
    expected = Expected(job_table.table, header.round_index, header.base_root, is_dense=False, norm_max=norm_max)
    check = ContentCheck(expected, round_index=header.round_index, state_root=header.base_root, inner_step_count=1)
    try:
        for part in decode_part(pieces, job_table, header=header, run_blocks=run_blocks):
            check.take(part.tensor_index, part.value_bits.view(np.float32))
    except RemoteProtocolError as error:
        return PartContent(error.code, str(error), check.entry_count, 0.0)
    fault = check.finish()
    if fault is not None:
        return PartContent(str(fault.code), fault.detail, check.entry_count, check.norm)
    return PartContent("", "", check.entry_count, check.norm)


def combine_parts(
    parts: Mapping[bytes, Iterable[bytes]],
    job_table: JobTable,
    *,
    header: MixingHeader,
    totals: PatchTotals | None = None,
    run_blocks: RunBlocks = map,
) -> Iterator[bytes]:
    """Return the pieces of the blob of a slice's mean, in memory for a few blocks of each part.

    Args:
        parts: All parts' blobs by sender's key, in any order; each was inspected.
        job_table: Of the job.
        header: What each part must be.
        totals: Counts what was written.
        run_blocks: As in :func:`encode_part`.

    Raises:
        LocalProtocolError: no parts.
        RemoteProtocolError: while iterating, a part that breaks the specification.
    """
    _check_own(job_table, header)
    if not parts:
        raise LocalProtocolError("a mean of no parts")
    sources = [_read_records(parts[key], job_table, header) for key in sorted(parts)]
    encoder = PlaneEncoder()

    def combine(meeting: _Meeting) -> tuple[int, EncodedBlock]:
        block = meeting.block
        is_dense = job_table.is_dense(block.tensor_index)
        found = [_decode_block(record, is_dense=is_dense) for record in meeting.records]
        found += [(np.empty(0, np.uint32), np.empty(0, np.float32))] * meeting.absent_count
        positions, values = mean_block(found, block.element_count)
        return meeting.block_index, _encode_block(block, positions, values, encoder)

    meetings = _meet(sources, job_table, header)
    weight = 2 + len(sources)
    records = run_in_batches(run_blocks, combine, meetings, lambda meeting: weight * meeting.block.size_bytes)
    return _write(job_table, records, replace(header, contributor_count=len(parts)), totals)


def write_slice_values(
    values: Sequence[FP32s], parts: Iterable[TensorEntries], job_table: JobTable, *, slice_index: int, slice_count: int
) -> None:
    """Overwrite a slice of the own vectors with a mean, in place; other slices stay: a lost slice keeps own values.

    Args:
        values: For each tensor of the joint table every element, flat. Of a gated vector what the own part spreads to.
        parts: As :func:`decode_part` yields them; nothing may be used if that raises.
        job_table: Of the job.
        slice_index: Of the slice.
        slice_count: Slices of the job.

    Raises:
        RemoteProtocolError: as :func:`decode_part`.
    """
    for place, start, end in job_table.list_blocks(slice_index, slice_count):
        if not job_table.is_dense(place):
            values[place][start:end] = 0.0
    for part in parts:
        values[part.tensor_index][part.indices] = part.value_bits.view(np.float32)


def spread_all(job_table: JobTable, entries: Sequence[Entries]) -> list[FP32s]:
    """Return copies of the entries of a job as every element of each tensor, zero where there is none.

    Raises:
        LocalProtocolError: entries that do not fit the joint table.
    """
    return [spread(own, spec.element_count).copy() for own, spec in zip(entries, job_table.table.tensors, strict=True)]


def _check_own(job_table: JobTable, header: MixingHeader) -> None:
    if header.table_digest != job_table.digest or header.job is not job_table.job:
        raise LocalProtocolError("the header names another job or table")


def _fits(entries: Entries, element_count: int) -> bool:
    indices = entries.indices
    assert indices is not None
    return not indices.size or (int(indices[-1]) < element_count and bool(np.all(indices[1:] > indices[:-1])))


def _cut(entries: Entries, block: Block) -> tuple[UInt32s | None, FP32s]:
    """Return the entries of one block: positions in it, ``None`` for all, and values."""
    start, end = block.element_start, block.element_start + block.element_count
    if entries.indices is None:
        return None, entries.values[start:end]
    low, high = find_run(entries.indices, start, end)
    positions = entries.indices[low:high] - entries.indices.dtype.type(start)
    return positions.astype(np.uint32), entries.values[low:high]


def _encode_block(block: Block, positions: UInt32s | None, values: FP32s, encoder: PlaneEncoder) -> EncodedBlock:
    bits = values.view(np.uint32)
    if positions is None or positions.size == block.element_count:
        return EncodedBlock(EntryCodec.FULL, block.element_count, encoder.encode_integers(bits))
    body = encode_absolute_block(positions, bits, encoder).body
    return EncodedBlock(EntryCodec.LISTED, positions.size, body)


def _write(
    job_table: JobTable,
    records: Iterator[tuple[int, EncodedBlock]],
    header: MixingHeader,
    totals: PatchTotals | None,
) -> Iterator[bytes]:
    # A slice is one section: its blob is fetched and read whole.
    section_map, sections = SectionMap(job_table.table, header.slice_count), _section_of(header)
    return write_sections(header.encode(), records, section_map, sections, PatchTotals() if totals is None else totals)


def _section_of(header: MixingHeader) -> range:
    return range(header.slice_index, header.slice_index + 1)


def _read_records(pieces: Iterable[bytes], job_table: JobTable, header: MixingHeader) -> Iterator[EncodedEntries]:
    """Yield the records of a blob, not decoded."""
    source = PieceSource(pieces)
    found = source.take(MIXING_HEADER_SIZE_BYTES)
    if found != header.encode():
        raise RemoteProtocolError("mixing-header", f"not {header}, but {peek_mixing_header(found)}")
    section_map = SectionMap(job_table.table, header.slice_count)
    yield from read_sections(source, BlockMap(job_table.table), section_map, _section_of(header))


@dataclass(frozen=True, slots=True)
class _Meeting:
    """What all parts have of one block."""

    block: Block
    block_index: int
    records: list[EncodedEntries]
    """In ascending order of the senders' keys, of those that have any."""
    absent_count: int
    """Parts without entries there."""


def _meet(sources: Sequence[Iterator[EncodedEntries]], job_table: JobTable, header: MixingHeader) -> Iterator[_Meeting]:
    """Walk all parts together, block by block, each to its end: only then its records count."""
    blocks, waiting = BlockMap(job_table.table), [next(source, None) for source in sources]
    for block_index in job_table.blocks_of(header.slice_index, header.slice_count):
        block, records = blocks.block(block_index), []
        for place, record in enumerate(waiting):
            if record is not None and record.block_index == block_index:
                records.append(record)
                waiting[place] = next(sources[place], None)
        absent_count = len(sources) - len(records)
        if absent_count and job_table.is_dense(block.tensor_index):
            raise RemoteProtocolError("shape", f"{block.spec.name}: a block that {absent_count} parts leave out")
        if records:
            yield _Meeting(block, block_index, records, absent_count)
    assert all(record is None for record in waiting)


def _decode_block(record: EncodedEntries, *, is_dense: bool) -> tuple[UInt32s | None, FP32s]:
    """Return positions in the block, ``None`` for all, and values.

    Trainers of one job share no weights, which *gated* records would need.
    """
    if record.codec_id == EntryCodec.GATED:
        raise RemoteProtocolError("codec-unknown", f"codec {record.codec_id} in a mixing blob")
    positions, bits = decode_entries(record, np.empty(0, np.uint32))
    if is_dense and positions.size != record.block.element_count:
        raise RemoteProtocolError("shape", f"{record.block.spec.name}: {positions.size} entries in a block")
    is_full = positions.size == record.block.element_count
    return None if is_full else positions, bits.astype(np.uint32, copy=False).view(np.float32)


def _decode_record(record: EncodedEntries) -> TensorEntries:
    positions, values = _decode_block(record, is_dense=False)
    block = record.block
    if positions is None:
        positions = np.arange(block.element_count, dtype=np.uint32)
    indices = positions.astype(block.spec.index_dtype)
    indices += block.spec.index_dtype.type(block.element_start)
    return TensorEntries(block.tensor_index, indices, values.view(np.uint32))


def _expect_all(parts: Iterable[TensorEntries], job_table: JobTable, header: MixingHeader) -> Iterator[TensorEntries]:
    """Pass the parts on; refuse where a dense vector's block is missing or not whole."""
    missing = {
        (place, start): end - start
        for place, start, end in job_table.list_blocks(header.slice_index, header.slice_count)
        if job_table.is_dense(place)
    }
    for part in parts:
        if job_table.is_dense(part.tensor_index):
            count = missing.pop((part.tensor_index, int(part.indices[0])), 0)
            if count != part.indices.size:
                raise RemoteProtocolError("shape", f"tensor {part.tensor_index}: {part.indices.size} in a block")
        yield part
    if missing:
        raise RemoteProtocolError("shape", f"{len(missing)} blocks of dense vectors are left out")
