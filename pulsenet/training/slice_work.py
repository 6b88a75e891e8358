"""Slices of a round in the training process: summing them, and reading the aggregate that they make up.

Contributions are spooled as far as a slice needs them, so a daemon that goes away breaks nothing off in the middle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from pulsenet.codec.contribution import HEADER_SIZE_BYTES
from pulsenet.codec.patch import RunBlocks
from pulsenet.codec.slices import SliceHeader
from pulsenet.errors import LocalProtocolError, RemoteProtocolError
from pulsenet.ids import Digest
from pulsenet.local import rounds_protocol as local
from pulsenet.local.rounds_client import RoundsConnection
from pulsenet.outer.contribution import Entries
from pulsenet.outer.floats import FP32s, fp32_from_bits
from pulsenet.outer.settings import OuterSettings
from pulsenet.outer.slices import SlicePart, read_slices, sum_all_slices, sum_slice
from pulsenet.tensors.params import ParameterTable
from pulsenet.training.round_blobs import BlobSpool, SpooledBlob
from pulsenet.wire.chunks import ChunkCutter


def is_content_fault(code: str) -> bool:
    """Say whether an error is about what a blob holds, and not about the connection that brought it."""
    return code.startswith(("contribution-", "patch-", "codec-", "slice-")) or code in ("shape", "scale")


class SlicedAggregate:
    """The aggregate of a round as its slices hold it, read once in table order.

    Args:
        entries: Of each tensor in table order.
        contributor_count: Contributions combined.
    """

    def __init__(self, entries: Iterator[Entries], contributor_count: int) -> None:
        self._entries = entries
        self._next_index = 0
        self.contributor_count = contributor_count

    def entries(self, tensor_index: int) -> Entries:
        """Return what the round moves a tensor by.

        Raises:
            LocalProtocolError: out of order.
        """
        if tensor_index != self._next_index:
            raise LocalProtocolError(f"tensor {tensor_index} is asked for, the next is {self._next_index}")
        self._next_index += 1
        return next(self._entries)


class SliceWork:
    """Sums slices and reads them.

    Args:
        table: FP32 masters.
        settings: Of the run.
        spool_directory: Where blobs lie meanwhile.
        run_blocks: ``map``, or an executor's ``map`` to use several cores.
    """

    def __init__(
        self, table: ParameterTable, settings: OuterSettings, *, spool_directory: Path | None, run_blocks: RunBlocks
    ) -> None:
        self._table = table
        self._settings = settings
        self._spool_directory = spool_directory
        self._run_blocks = run_blocks

    def sum(
        self, connection: RoundsConnection, order: local.SumOrder, root: Digest, theta: Sequence[FP32s]
    ) -> Iterator[local.SliceBlob]:
        """Yield the blob of each slice of an order.

        Args:
            connection: Where blobs come from and go to.
            order: Of the round that ``root`` leads on to.
            root: Of the state that is held.
            theta: Of that state.

        Raises:
            RemoteProtocolError: a contribution that breaks its specification.
            StorageError: a blob cannot be read or is not taken.
        """
        header = SliceHeader(self._table.digest, root, order.round_index, 0, len(order.members))
        is_all = all(not wanted.ranges for wanted in order.slices)
        spool = BlobSpool(self._spool_directory)
        try:
            if is_all:
                yield from self._sum_all(connection, order, header, spool, theta)
                return
            for wanted in order.slices:
                own = SliceHeader(self._table.digest, root, order.round_index, wanted.slice_index, len(order.members))
                parts = self._fetch_parts(connection, order, wanted, spool)
                pieces = sum_slice(
                    parts, self._table, theta, header=own, settings=self._settings, run_blocks=self._run_blocks
                )
                yield _name(connection, wanted, pieces)
        finally:
            spool.close()

    def _sum_all(
        self,
        connection: RoundsConnection,
        order: local.SumOrder,
        header: SliceHeader,
        spool: BlobSpool,
        theta: Sequence[FP32s],
    ) -> Iterator[local.SliceBlob]:
        if len(order.slices) != len(order.members):
            raise RemoteProtocolError("shape", f"{len(order.slices)} of {len(order.members)} slices without ranges")
        parts = {}
        for member in order.members:
            spooled = spool.add(connection.fetch_blob(member.blob_id, member.encoded_size_bytes))
            parts[bytes(member.peer_id)] = SlicePart(spool.read(spooled), _read_scale(member))
        slices = sum_all_slices(
            parts, self._table, theta, header=header, settings=self._settings, run_blocks=self._run_blocks
        )
        for place, pieces in slices:
            yield _name(connection, order.slices[place], pieces)

    def _fetch_parts(
        self,
        connection: RoundsConnection,
        order: local.SumOrder,
        wanted: local.WantedSlice,
        spool: BlobSpool,
    ) -> dict[bytes, SlicePart]:
        parts = {}
        for member, part in zip(order.members, wanted.ranges, strict=True):
            size_bytes = member.encoded_size_bytes
            head = spool.add(connection.fetch_range(member.blob_id, size_bytes, 0, HEADER_SIZE_BYTES))
            body = spool.add(connection.fetch_range(member.blob_id, size_bytes, part.offset_bytes, part.size_bytes))
            both = SpooledBlob(head.start_bytes, head.size_bytes + body.size_bytes)
            parts[bytes(member.peer_id)] = SlicePart(spool.read(both), _read_scale(member))
        return parts

    def open(
        self,
        connection: RoundsConnection,
        spool: BlobSpool,
        order: local.StepOrder,
        root: Digest,
        theta: Sequence[FP32s],
    ) -> SlicedAggregate:
        """Bring all slices of a round to this process, and look into them before anything moves.

        Raises:
            RemoteProtocolError: ``slices``: they are not what they should be, or hold a value that is not finite.
            StorageError: a blob cannot be read.
        """
        count = len(order.members)
        if [each.slice_index for each in order.slices] != list(range(count)):
            raise RemoteProtocolError("slices", f"{len(order.slices)} slices for {count} members")
        blobs = [spool.add(connection.fetch_blob(each.blob_id, each.encoded_size_bytes)) for each in order.slices]
        header = SliceHeader(self._table.digest, root, order.round_index, 0, count)

        def read() -> Iterator[Entries]:
            return read_slices(
                [spool.read(blob) for blob in blobs],
                self._table,
                theta,
                header=header,
                contributor_count=count,
                settings=self._settings,
                run_blocks=self._run_blocks,
            )

        try:
            for entries in read():
                if not bool(np.isfinite(entries.values).all()):
                    raise RemoteProtocolError("slices", "a sum that is not finite")
        except RemoteProtocolError as error:
            raise RemoteProtocolError("slices", str(error)) from error
        return SlicedAggregate(read(), count)


def _name(connection: RoundsConnection, wanted: local.WantedSlice, pieces: Iterator[bytes]) -> local.SliceBlob:
    """Put a slice, or only find out what it is called."""
    if wanted.is_stored:
        stored = connection.put_blob(pieces)
        return local.SliceBlob(wanted.slice_index, stored.blob_id, stored.size_bytes)
    cutter = ChunkCutter()
    for piece in pieces:
        cutter.feed(piece)
    cutter.finish()
    chunk_list = cutter.chunk_list
    return local.SliceBlob(wanted.slice_index, chunk_list.blob_id, chunk_list.size_bytes)


def _read_scale(member: local.CountedMember) -> np.float32:
    scale = fp32_from_bits(member.scale_bits & 0xFFFF_FFFF)
    if not 0.0 < scale <= 1.0:
        raise RemoteProtocolError("scale", f"{scale}")
    return scale
