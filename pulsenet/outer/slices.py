"""Sums of a round's contributions over one slice of the table, and the aggregate put together from all slices.

Whoever sums a slice writes the same blob, bit by bit (SPEC outer, "Slices"): the sums that
:mod:`pulsenet.outer.reduce` would divide. The division is left to the readers, because sums of values that are whole
places of their weights stay whole, and cost half of what a quotient costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pulsenet.codec.blocks import Block, BlockMap, EncodedBlock
from pulsenet.codec.contribution import (
    EncodedEntries,
    TensorEntries,
    decode_entries,
    encode_entries,
    read_contribution,
    view_weights,
)
from pulsenet.codec.patch import PatchTotals, RunBlocks, run_in_batches
from pulsenet.codec.sections import SectionMap
from pulsenet.codec.slices import SliceHeader, decode_slice, make_plane_encoder, write_slice
from pulsenet.errors import LocalProtocolError, RemoteProtocolError
from pulsenet.outer.contribution import Entries
from pulsenet.outer.floats import FP32s, settle_nans
from pulsenet.outer.reduce import compute_trim_count, divide, sum_part, sum_trimmed_part
from pulsenet.outer.residual import SCALE_ONE, split_scaled
from pulsenet.outer.settings import OuterSettings
from pulsenet.tensors.params import ParameterTable

UInt32s = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class SlicePart:
    """One contribution, as far as a slice needs it."""

    pieces: Iterable[bytes]
    """The blob's header and the sections of the slice."""
    scale: np.float32 = SCALE_ONE
    """Given by the receipt."""


def sum_slice(
    parts: Mapping[bytes, SlicePart],
    table: ParameterTable,
    theta: Sequence[npt.NDArray[Any]],
    *,
    header: SliceHeader,
    settings: OuterSettings,
    totals: PatchTotals | None = None,
    run_blocks: RunBlocks = map,
) -> Iterator[bytes]:
    """Return the pieces of a slice blob.

    Args:
        parts: All members' contributions by key, in any order.
        table: FP32 masters.
        theta: Of the state that the round leads on from, a flat array a tensor.
        header: Which slice of which round.
        settings: The run's.
        totals: Counts what was written.
        run_blocks: ``map``, or an executor's ``map`` to use several cores.

    Raises:
        LocalProtocolError: nothing to combine, or other weights than the table's.
        RemoteProtocolError: while iterating, a contribution that breaks the specification, or that leaves elements
            out where all are agreed (``shape``).
    """
    summer = _Summer(parts, table, theta, header, settings, run_blocks, header.sections(SectionMap(table)))
    return summer.write(header.slice_index, totals)


def sum_all_slices(
    parts: Mapping[bytes, SlicePart],
    table: ParameterTable,
    theta: Sequence[npt.NDArray[Any]],
    *,
    header: SliceHeader,
    settings: OuterSettings,
    run_blocks: RunBlocks = map,
) -> Iterator[tuple[int, Iterator[bytes]]]:
    """Yield the place and the pieces of every slice, reading each contribution once.

    A slice's pieces are used up before the next is asked for. Arguments and errors as of :func:`sum_slice`.

    Args:
        parts: Whole blobs.
        table: FP32 masters.
        theta: As there.
        header: Of any slice of the round.
        settings: The run's.
        run_blocks: As there.
    """
    summer = _Summer(parts, table, theta, header, settings, run_blocks, sections=None)
    for slice_index in range(header.slice_count):
        yield slice_index, summer.write(slice_index, None)


@dataclass(frozen=True, slots=True)
class _Job:
    block: Block
    block_index: int
    records: list[tuple[int, EncodedEntries]]
    """The place of each contribution in ascending order of keys, and its record of this block."""


class _Summer:
    """Walks all contributions together, block by block."""

    def __init__(
        self,
        parts: Mapping[bytes, SlicePart],
        table: ParameterTable,
        theta: Sequence[npt.NDArray[Any]],
        header: SliceHeader,
        settings: OuterSettings,
        run_blocks: RunBlocks,
        sections: range | None,
    ) -> None:
        if not parts:
            raise LocalProtocolError("a round without contributions has no aggregate")
        self._table = table
        self._weights = view_weights(table, theta)
        self._header = header
        self._settings = settings
        self._run_blocks = run_blocks
        self._blocks, self._section_map = BlockMap(table), SectionMap(table)
        keys = sorted(parts)
        self._scales = [parts[key].scale for key in keys]
        self._trim_count = compute_trim_count(settings, len(keys))
        self._encoder = make_plane_encoder()
        self._sources = [
            read_contribution(parts[key].pieces, table, state_root=header.state_root, sections=sections) for key in keys
        ]
        self._waiting: list[EncodedEntries | None] | None = None

    def write(self, slice_index: int, totals: PatchTotals | None) -> Iterator[bytes]:
        """Return the pieces of a slice; slices ascend."""
        header = replace(self._header, slice_index=slice_index)
        jobs = self._jobs(self._section_map.blocks_of(header.sections(self._section_map)).stop)
        records = run_in_batches(self._run_blocks, self._work, jobs, self._weigh)
        return write_slice(self._table, records, header, totals)

    def _jobs(self, stop_block: int) -> Iterator[_Job]:
        """Yield the blocks before ``stop_block``; with the last one every contribution was read to its end."""
        if self._waiting is None:
            self._waiting = [next(source, None) for source in self._sources]
        waiting = self._waiting
        while True:
            heads = [record.block_index for record in waiting if record is not None]
            block_index = min(heads, default=stop_block)
            if block_index >= stop_block:
                return
            found = []
            for place, record in enumerate(waiting):
                if record is not None and record.block_index == block_index:
                    found.append((place, record))
                    waiting[place] = next(self._sources[place], None)
            yield _Job(self._blocks.block(block_index), block_index, found)

    def _weigh(self, job: _Job) -> int:
        return job.block.size_bytes * (2 + len(job.records))

    def _work(self, job: _Job) -> tuple[int, EncodedBlock]:
        theta_bits = job.block.cut(self._weights[job.block.tensor_index])
        positions, sums = _sum_block(job, theta_bits, self._scales, self._trim_count, is_dense=self._settings.is_dense)
        return job.block_index, encode_entries(theta_bits, positions, sums.view(np.uint32), self._encoder)


def read_slices(
    blobs: Sequence[Iterable[bytes]],
    table: ParameterTable,
    theta: Sequence[npt.NDArray[Any]],
    *,
    header: SliceHeader,
    contributor_count: int,
    settings: OuterSettings,
    run_blocks: RunBlocks = map,
) -> Iterator[Entries]:
    """Yield the aggregate of a round from its slices, one :class:`Entries` a tensor, in table order.

    A tensor's theta may be stepped once its entries were yielded.

    Args:
        blobs: All slices in order, each cut anywhere.
        table: FP32 masters.
        theta: Of the state that the round leads on from, a flat array a tensor.
        header: Of any slice of the round.
        contributor_count: Members of the receipt.
        settings: The run's.
        run_blocks: ``map``, or an executor's ``map`` to use several cores.

    Raises:
        RemoteProtocolError: while iterating, a blob that is not the slice or breaks the specification.
    """
    kept_count = contributor_count - 2 * compute_trim_count(settings, contributor_count)
    blocks = _read_blocks(blobs, table, theta, header, run_blocks)
    waiting = next(blocks, None)
    for tensor_index, spec in enumerate(table.tensors):
        indices = [np.empty(0, spec.index_dtype)]
        values = [np.empty(0, np.float32)]
        while waiting is not None and waiting.tensor_index == tensor_index:
            indices.append(waiting.indices)
            values.append(divide(waiting.value_bits.view(np.float32), kept_count))
            waiting = next(blocks, None)
        found = np.concatenate(values)
        if settings.is_dense and found.size != spec.element_count:
            raise RemoteProtocolError("shape", f"{spec.name}: {found.size} of {spec.element_count}")
        yield Entries(tensor_index, None if settings.is_dense else np.concatenate(indices), found)


def _sum_block(
    job: _Job, theta: UInt32s, scales: Sequence[np.float32], trim_count: int, *, is_dense: bool
) -> tuple[UInt32s, FP32s]:
    parts: list[tuple[UInt32s | None, FP32s]] = []
    for place, record in job.records:
        positions, bits = decode_entries(record, theta)
        values, _ = split_scaled(bits.view(np.float32), scales[place])
        if is_dense and values.size != theta.size:
            raise RemoteProtocolError("shape", f"{job.block.spec.name}: {values.size} of {theta.size} in a block")
        parts.append((None if is_dense else positions, values))
    if is_dense and len(parts) != len(scales):
        raise RemoteProtocolError("shape", f"{job.block.spec.name}: {len(parts)} of {len(scales)} contributions")
    if trim_count:
        sums = sum_trimmed_part([values for _, values in parts], trim_count)
    else:
        sums, touched = sum_part(parts, start=0, element_count=theta.size)
    # Backends differ in the NaN they make, and the bits of a slice may not.
    settle_nans(sums)
    if is_dense:
        return np.arange(theta.size, dtype=np.uint32), sums
    found = np.flatnonzero(touched).astype(np.uint32)
    return found, sums[found]


def _read_blocks(
    blobs: Sequence[Iterable[bytes]],
    table: ParameterTable,
    theta: Sequence[npt.NDArray[Any]],
    header: SliceHeader,
    run_blocks: RunBlocks,
) -> Iterator[TensorEntries]:
    for slice_index, pieces in enumerate(blobs):
        own = SliceHeader(header.table_digest, header.state_root, header.round_index, slice_index, len(blobs))
        yield from decode_slice(pieces, table, theta, header=own, run_blocks=run_blocks)
