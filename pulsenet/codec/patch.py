"""Encode and decode patch blobs (SPEC codec, "Patch blob").

Both hold a few blocks in memory, whatever the model's size. Blocks are independent: with an executor's ``map`` as
``run_blocks`` several cores share the work, and the bytes stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, Final, TypeVar

import numpy as np

from pulsenet.codec.blocks import (
    RELATIVE_CODECS,
    BlockMap,
    Codec,
    EncodedBlock,
    decode_block,
    encode_absolute_block,
    encode_block,
    split_by_block,
)
from pulsenet.codec.changes import Bits, Changes
from pulsenet.codec.stream import END_OF_RECORDS, Form, PatchHeader, PatchReader, PatchRecord, peek_header
from pulsenet.codec.varint import encode_varint
from pulsenet.errors import LocalProtocolError
from pulsenet.tensors.params import ParameterTable, Region

__all__ = [
    "CODEC_CHOICES",
    "PatchTotals",
    "RunBlocks",
    "decode_patch",
    "encode_absolute",
    "encode_parts",
    "encode_patch",
    "is_beyond_budget",
    "list_records",
    "peek_header",
    "resolve_codec",
]

CODEC_CHOICES: Final[dict[str, frozenset[Codec]]] = {
    "auto": frozenset(Codec),
    "tight": frozenset(Codec),
    "plain": frozenset({Codec.ABSOLUTE, Codec.PLAIN, Codec.DENSE}),
    "absolute": frozenset({Codec.ABSOLUTE, Codec.DENSE}),
    "dense": frozenset({Codec.DENSE}),
}
"""Codecs each block may choose from, by the name an operator gives. See :func:`resolve_codec` for *auto*."""

TIGHT_SECONDS_PER_ELEMENT: Final = 0.5e-9
"""Processor time of *tight* on one core, compare included: 0.4 ns measured, and something to spare."""

BATCH_SIZE_BYTES: Final = 64 << 20
"""Blocks go to ``run_blocks`` together up to what these bytes can hold: all cores stay busy, memory stays small."""

BATCH_BLOCKS_MAX: Final = 64
"""And no more than this many, so that changes come soon after their bytes."""

TASK_SIZE_BYTES: Final = 4 << 20
"""Blocks of so many bytes are one call of what ``run_blocks`` gets: small ones do not cost a hand-over each."""

Item = TypeVar("Item")
Result = TypeVar("Result")
RunBlocks = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
"""``map`` or an executor's ``map``: calls the function on each item, results in order."""

TensorPair = tuple[int, Bits, Bits]
"""A tensor's position in the table, its old bits and its new bits, both flat and whole."""


@dataclass(slots=True)
class PatchTotals:
    """Filled in while a patch is encoded; final once its last piece was taken."""

    changed_count: int = 0
    record_count: int = 0
    encoded_size_bytes: int = 0
    codec_id: int = 0
    """Highest codec id used: what a receiver must know. 0 for a patch without changes."""


def is_beyond_budget(element_count: int, cpu_seconds_max: float) -> bool:
    """Return whether *tight* is expected to take more processor time than this to encode a version, all cores together.

    An estimate from the size alone, so that the same budget gives the same bytes on every machine.
    """
    return element_count * TIGHT_SECONDS_PER_ELEMENT > cpu_seconds_max


def resolve_codec(codec: str, *, is_cpu_scarce: bool) -> str:
    """Return the name to encode with: *auto* is *tight*, or *plain* where the caller says that CPU is scarce.

    Beside *plain*, *tight* takes about 0.1 ns an element more to encode and 0.2 ns more to decode on one core, and
    saves a third of the bytes (measured at 0.6 % density). That pays on links below about 130 Mbit/s for each core
    that decodes; a publisher shares its link among its readers. Whatever was chosen, each block still falls back to
    whatever is shorter.

    Raises:
        LocalProtocolError: an unknown codec.
    """
    if codec not in CODEC_CHOICES:
        raise LocalProtocolError(f"codec {codec!r} is none of {', '.join(CODEC_CHOICES)}")
    if codec != "auto":
        return codec
    return "plain" if is_cpu_scarce else "tight"


def encode_patch(
    table: ParameterTable,
    old_region: Region,
    new_region: Region,
    *,
    codec: str = "auto",
    totals: PatchTotals | None = None,
    run_blocks: RunBlocks = map,
) -> Iterator[bytes]:
    """Return the pieces of the patch that turns ``old_region`` into ``new_region``.

    Args:
        codec: A key of :data:`CODEC_CHOICES`; per block the shortest of those wins.
        totals: Counts what was written.
        run_blocks: ``map``, or an executor's ``map`` to use several cores. The regions must not change meanwhile.

    Raises:
        LocalProtocolError: an unknown codec, or a region smaller than the table's layout.
    """
    _check_region(table, old_region)
    _check_region(table, new_region)
    indices = range(len(table.tensors))
    pairs = [(index, table.view(old_region, index), table.view(new_region, index)) for index in indices]
    return encode_parts(table, [pairs], codec=codec, totals=totals, run_blocks=run_blocks)


def encode_parts(
    table: ParameterTable,
    parts: Iterable[Iterable[TensorPair]],
    *,
    codec: str = "auto",
    totals: PatchTotals | None = None,
    run_blocks: RunBlocks = map,
    on_changes: Callable[[Changes], None] | None = None,
) -> Iterator[bytes]:
    """Return the pieces of the patch of weights that come part by part; the bytes are those of :func:`encode_patch`.

    A part is encoded whole before the next one is asked for, and nothing of it is kept.

    Args:
        parts: Tensors ascending; those left out stay as they are.
        codec: As :func:`encode_patch`; so are ``totals`` and ``run_blocks``.
        on_changes: Given the changes of each block, decoded from its encoding as a receiver will, before its piece.

    Raises:
        LocalProtocolError: an unknown codec.
        RemoteProtocolError: while iterating with ``on_changes``, an encoding that does not decode.
    """
    allowed = CODEC_CHOICES[resolve_codec(codec, is_cpu_scarce=False)]
    form = Form.RELATIVE if allowed & RELATIVE_CODECS else Form.ABSOLUTE
    records = _encode_pairs(table, parts, allowed, run_blocks, on_changes)
    return write_records(PatchHeader(form, table.digest).encode(), records, totals)


def _encode_pairs(
    table: ParameterTable,
    parts: Iterable[Iterable[TensorPair]],
    allowed: frozenset[Codec],
    run_blocks: RunBlocks,
    on_changes: Callable[[Changes], None] | None,
) -> Iterator[tuple[int, EncodedBlock]]:
    blocks = BlockMap(table)

    def cut(pairs: Iterable[TensorPair]) -> Iterator[tuple[int, Bits, Bits]]:
        for tensor_index, old, new in pairs:
            for block_index in blocks.indices_of(tensor_index):
                block = blocks.block(block_index)
                yield block_index, block.cut(old), block.cut(new)

    def weigh(item: tuple[int, Bits, Bits]) -> int:
        # Decoded changes of a block that changed throughout are several times its size.
        size_bytes = blocks.block(item[0]).size_bytes
        return size_bytes if on_changes is None else 2 * size_bytes

    def encode(item: tuple[int, Bits, Bits]) -> tuple[int, EncodedBlock, Changes | None] | None:
        block_index, old, new = item
        block = blocks.block(block_index)
        encoded = encode_block(block, old, new, allowed)
        if encoded is None:
            return None
        changes = None if on_changes is None else decode_block(block, encoded.codec, encoded.body, old)
        return block_index, encoded, changes

    for pairs in parts:
        for record in run_in_batches(run_blocks, encode, cut(pairs), weigh, looks_ahead=True):
            if record is not None:
                block_index, encoded, changes = record
                if on_changes is not None and changes is not None:
                    on_changes(changes)
                yield block_index, encoded
        # Let go of the part's memory before waiting for the next.
        del pairs


def encode_absolute(
    table: ParameterTable, changes: Iterable[Changes], *, totals: PatchTotals | None = None
) -> Iterator[bytes]:
    """Return the pieces of an absolute patch that makes these changes.

    Args:
        changes: Ascending by tensor and index; a tensor may be spread over several.

    Raises:
        LocalProtocolError: while iterating, when changes are out of order, outside their tensor or of another
            element width.
    """
    header = PatchHeader(Form.ABSOLUTE, table.digest).encode()
    return write_records(header, _encode_changes(table, changes), totals)


def decode_patch(
    pieces: Iterable[bytes],
    table: ParameterTable,
    old_region: Region,
    *,
    run_blocks: RunBlocks = map,
    batch_blocks_max: int = BATCH_BLOCKS_MAX,
) -> Iterator[Changes]:
    """Yield the changes of a patch, block by block, ascending by tensor and index.

    Changes come before the end of the blob has been seen: they count only once the iteration ended without an
    error. Each may be applied to ``old_region`` at once, because no block is read again after it was yielded.

    Args:
        pieces: The blob, cut anywhere.
        table: The tensors.
        old_region: The base version; read block by block.
        run_blocks: ``map``, or an executor's ``map``.
        batch_blocks_max: Blocks decoded together. Fewer give the first changes sooner where pieces come slowly.

    Raises:
        RemoteProtocolError: the blob breaks the specification; the code says where (``patch-...``, ``codec-...``).
        PatchMismatchError: ``old_region`` contradicts the patch.
        LocalProtocolError: a region smaller than the table's layout.
    """
    _check_region(table, old_region)
    reader = PatchReader(pieces, table)

    def weigh(record: PatchRecord) -> int:
        spec = record.block.spec
        change_size_bytes = spec.index_dtype.itemsize + 2 * spec.element_size_bytes
        return len(record.body) + record.changed_count * change_size_bytes

    def decode(record: PatchRecord) -> Changes:
        old = record.block.cut(table.view(old_region, record.block.tensor_index))
        return decode_block(record.block, record.codec_id, record.body, old)

    def measure(record: PatchRecord) -> int:
        return record.block.size_bytes

    return run_in_batches(run_blocks, decode, reader.read_records(), weigh, batch_blocks_max, measure)


def list_records(pieces: Iterable[bytes], table: ParameterTable) -> Iterator[PatchRecord]:
    """Yield a patch's records without decoding their bodies: what each block costs, for people to look at.

    Raises:
        RemoteProtocolError: as :func:`decode_patch`, bodies excepted.
    """
    return PatchReader(pieces, table).read_records()


def run_in_batches(
    run_blocks: Callable[[Callable[[list[Item]], list[Result]], Iterable[list[Item]]], Iterable[list[Result]]],
    function: Callable[[Item], Result],
    items: Iterable[Item],
    weigh: Callable[[Item], int],
    batch_blocks_max: int = BATCH_BLOCKS_MAX,
    measure: Callable[[Item], int] | None = None,
    *,
    looks_ahead: bool = False,
) -> Iterator[Result]:
    """Yield the results in order; the items in work together weigh what one batch may, in bytes.

    Args:
        run_blocks: ``map``, or an executor's ``map``.
        function: What is done with each item.
        items: Taken batch by batch.
        weigh: Bytes of memory that an item and its result take.
        batch_blocks_max: Items of one batch at most.
        measure: Bytes that are gone through for an item; as many as it weighs by default.
        looks_ahead: Whether half a batch is handed over before the results of the half before it are taken, so that no
            core waits for the last task of a batch. Not for items that are waited for: results would wait too.
    """
    measure = weigh if measure is None else measure
    weight_max = BATCH_SIZE_BYTES // 2 if looks_ahead else BATCH_SIZE_BYTES

    def run_task(task: list[Item]) -> list[Result]:
        return [function(item) for item in task]

    begun: Iterable[list[Result]] = ()
    tasks: list[list[Item]] = [[]]
    weight = work = count = 0
    for item in items:
        if work >= TASK_SIZE_BYTES:
            tasks.append([])
            work = 0
        tasks[-1].append(item)
        work, weight, count = work + measure(item), weight + weigh(item), count + 1
        if weight >= weight_max or count == batch_blocks_max:
            begun, results = run_blocks(run_task, tasks), begun
            yield from chain.from_iterable(results if looks_ahead else begun)
            begun = begun if looks_ahead else ()
            tasks = [[]]
            weight = work = count = 0
    last = run_blocks(run_task, tasks if count else [])
    yield from chain.from_iterable(begun)
    yield from chain.from_iterable(last)


def write_records(
    header: bytes, records: Iterator[tuple[int, EncodedBlock]], totals: PatchTotals | None
) -> Iterator[bytes]:
    """Yield a blob's pieces: the header, the records (block number, content) and the end."""
    totals = PatchTotals() if totals is None else totals
    next_block = 0
    totals.encoded_size_bytes += len(header)
    yield header
    for block_index, encoded in records:
        head = bytes([encoded.codec]) + encode_varint(block_index - next_block) + encode_varint(len(encoded.body))
        next_block = block_index + 1
        totals.record_count += 1
        totals.changed_count += encoded.changed_count
        totals.codec_id = max(totals.codec_id, int(encoded.codec))
        totals.encoded_size_bytes += len(head) + len(encoded.body)
        yield head + encoded.body
    end = bytes([END_OF_RECORDS]) + encode_varint(totals.record_count) + encode_varint(totals.changed_count)
    totals.encoded_size_bytes += len(end)
    yield end


def _encode_changes(table: ParameterTable, changes: Iterable[Changes]) -> Iterator[tuple[int, EncodedBlock]]:
    """Gather the parts that fall into one block, then encode them."""
    for block_index, parts in groupby(split_by_block(table, changes), key=itemgetter(0)):
        positions, new_bits = [], []
        for _, item, part, own in parts:
            spec = table.tensors[item.tensor_index]
            if item.new_bits.dtype.itemsize != spec.element_size_bytes:
                raise LocalProtocolError(f"changes of tensor {spec.name!r} do not fit {spec.dtype}")
            if bool(np.any(item.old_bits[part] == item.new_bits[part])):
                raise LocalProtocolError(f"changes of tensor {spec.name!r} hold elements that stay the same")
            positions.append(own)
            new_bits.append(item.new_bits[part])
        yield block_index, encode_absolute_block(np.concatenate(positions), np.concatenate(new_bits))


def _check_region(table: ParameterTable, region: Region) -> None:
    size_bytes = np.frombuffer(region, np.uint8).size
    if size_bytes < table.layout_size_bytes:
        raise LocalProtocolError(f"a region of {size_bytes} bytes for a layout of {table.layout_size_bytes}")
