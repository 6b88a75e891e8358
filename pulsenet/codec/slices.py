"""Slice blobs: sums of a round's contributions over a run of sections, the same bytes whoever makes them (SPEC codec).

Written like the sections of a contribution, with every choice fixed and no frame of zstandard, so that the blob's id
can be signed by one node and the blob be served by another.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy.typing as npt

from pulsenet.codec.blocks import BlockMap, EncodedBlock
from pulsenet.codec.compress import PlaneEncoder
from pulsenet.codec.contribution import (
    TensorEntries,
    decode_records,
    read_sections,
    view_weights,
    write_sections,
)
from pulsenet.codec.patch import PatchTotals, RunBlocks
from pulsenet.codec.sections import SectionMap, find_slice_sections
from pulsenet.codec.stream import PieceSource
from pulsenet.errors import RemoteProtocolError
from pulsenet.ids import DIGEST_SIZE_BYTES, Digest
from pulsenet.tensors.params import ParameterTable

MAGIC: Final = b"PLSS"
FORMAT_VERSION: Final = 1
_HEADER: Final = struct.Struct(f"<4sB3s{DIGEST_SIZE_BYTES}s{DIGEST_SIZE_BYTES}sQII")
SLICE_HEADER_SIZE_BYTES: Final = _HEADER.size


@dataclass(frozen=True, slots=True)
class SliceHeader:
    """The start of a slice blob."""

    table_digest: Digest
    """Of the table of FP32 masters."""
    state_root: Digest
    """Root of the state that the round leads on from."""
    round_index: int
    slice_index: int
    slice_count: int

    def encode(self) -> bytes:
        """Return the header's bytes."""
        return _HEADER.pack(
            MAGIC,
            FORMAT_VERSION,
            bytes(3),
            self.table_digest,
            self.state_root,
            self.round_index,
            self.slice_index,
            self.slice_count,
        )

    def sections(self, section_map: SectionMap) -> range:
        """Return the sections of this slice."""
        return find_slice_sections(section_map.section_count, self.slice_index, self.slice_count)


def make_plane_encoder() -> PlaneEncoder:
    """Return the only encoder of planes that slices may use."""
    return PlaneEncoder(compresses=False)


def write_slice(
    table: ParameterTable,
    records: Iterator[tuple[int, EncodedBlock]],
    header: SliceHeader,
    totals: PatchTotals | None = None,
) -> Iterator[bytes]:
    """Return the pieces of a slice blob.

    Args:
        table: FP32 masters.
        records: (block number, content) of each block of the slice with entries, ascending; content as of
            :func:`pulsenet.codec.contribution.encode_entries` with :func:`make_plane_encoder`.
        header: Of the slice.
        totals: Counts what was written.
    """
    section_map = SectionMap(table)
    return write_sections(
        header.encode(),
        records,
        section_map,
        header.sections(section_map),
        PatchTotals() if totals is None else totals,
    )


def decode_slice(
    pieces: Iterable[bytes],
    table: ParameterTable,
    theta: Sequence[npt.NDArray[Any]],
    *,
    header: SliceHeader,
    run_blocks: RunBlocks = map,
) -> Iterator[TensorEntries]:
    """Yield the sums of a slice, block by block, ascending by tensor and index.

    Args:
        pieces: The blob.
        table: FP32 masters.
        theta: For each tensor the flat weights of the state that ``header`` names, as FP32 or its bits.
        header: What the blob must be.
        run_blocks: ``map``, or an executor's ``map`` to use several cores.

    Raises:
        RemoteProtocolError: another header (``slice-header``), or the blob breaks the specification.
        LocalProtocolError: weights that are not the table's.
    """
    weights = view_weights(table, theta)
    source = PieceSource(pieces)
    if source.take(SLICE_HEADER_SIZE_BYTES) != header.encode():
        raise RemoteProtocolError("slice-header", f"not slice {header.slice_index} of {header.slice_count}")
    section_map = SectionMap(table)
    records = read_sections(source, BlockMap(table), section_map, header.sections(section_map))
    return decode_records(records, weights, run_blocks)
