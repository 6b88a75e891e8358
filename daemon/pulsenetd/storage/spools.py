"""Spools: absolute records of one hop each, kept in files until nobody needs them.

A spool is the undo of its hop, what an engine is handed, and what skip patches are composed from. It is a
cache: not synced, deleted at start, and everything that wants one can do without it.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from pulsenet.codec.changes import Changes, compose_changes, decode_changes, encode_changes
from pulsenet.errors import RemoteProtocolError, StorageError
from pulsenet.ids import Digest, Version
from pulsenet.tensors.params import ParameterTable
from pulsenetd.storage.disk import Disk, describe_os_error, make_directory

SPOOL_SUFFIX = ".spool"


@dataclass(frozen=True, slots=True)
class Point:
    """A version and its root: one end of a hop."""

    version: Version
    root: Digest


@dataclass(frozen=True, slots=True)
class _Place:
    tensor_index: int
    offset_bytes: int
    size_bytes: int


class Spool:
    """Finished records of one tensor after another, readable in any order and from several threads."""

    def __init__(self, path: Path, table: ParameterTable, places: tuple[_Place, ...]) -> None:
        self.path = path
        self.table = table
        self.size_bytes = sum(place.size_bytes for place in places)
        self._places = places
        self._data = _map_file(path) if self.size_bytes else memoryview(b"")

    @property
    def tensor_indices(self) -> list[int]:
        """Tensors that changed, ascending."""
        return sorted({place.tensor_index for place in self._places})

    def read_blocks(self) -> Iterator[Changes]:
        """Yield the records as they were written, ascending by tensor and index."""
        for place in self._places:
            yield from self._decode(place)

    def read_tensor(self, tensor_index: int) -> Changes | None:
        """Return all records of one tensor as one, or ``None`` if it did not change."""
        parts = [part for place in self._places if place.tensor_index == tensor_index for part in self._decode(place)]
        if len(parts) <= 1:
            return parts[0] if parts else None
        return Changes(
            tensor_index,
            np.concatenate([part.indices for part in parts]),
            np.concatenate([part.old_bits for part in parts]),
            np.concatenate([part.new_bits for part in parts]),
        )

    def remove(self) -> None:
        """Delete the file; records already read stay valid."""
        _remove(self.path)

    def _decode(self, place: _Place) -> Iterator[Changes]:
        data = self._data[place.offset_bytes : place.offset_bytes + place.size_bytes]
        try:
            yield from decode_changes(data, self.table)
        except RemoteProtocolError as error:
            raise StorageError(f"spool {self.path} is damaged: {error}", "damaged") from error


class SpoolWriter:
    """Writes one spool; leave it by :meth:`finish` or :meth:`abandon`."""

    def __init__(self, path: Path, table: ParameterTable) -> None:
        self._path = path
        self._table = table
        self._places: list[_Place] = []
        self._end_bytes = 0
        try:
            self._file: BinaryIO = path.open("xb", buffering=1 << 20)
        except OSError as error:
            raise describe_os_error("create", path, error) from error

    @property
    def size_bytes(self) -> int:
        """Bytes written so far."""
        return self._end_bytes

    def write(self, changes: Changes) -> None:
        """Append records; tensors ascending.

        Raises:
            StorageError: The disk refused.
        """
        data = encode_changes(changes)
        try:
            self._file.write(data)
        except OSError as error:
            raise describe_os_error("write", self._path, error) from error
        self._places.append(_Place(changes.tensor_index, self._end_bytes, len(data)))
        self._end_bytes += len(data)

    def finish(self) -> Spool:
        """Close the file and return it for reading.

        Raises:
            StorageError: The disk refused the last bytes.
        """
        try:
            self._file.close()
        except OSError as error:
            raise describe_os_error("write", self._path, error) from error
        return Spool(self._path, self._table, tuple(self._places))

    def abandon(self) -> None:
        """Delete what was written."""
        # Closing flushes, which a full disk refuses: the file goes either way.
        try:
            self._file.close()
        except OSError:
            pass
        finally:
            _remove(self._path)


class SpoolDirectory:
    """The spools of one node: at most one per version it hopped to, oldest dropped beyond a size."""

    def __init__(self, directory: Path) -> None:
        """Open the directory and delete what an earlier process left.

        Raises:
            StorageError: It cannot be made or emptied.
        """
        self._directory = directory
        self._mutex = threading.Lock()
        self._numbers = itertools.count()
        self._hops: dict[Point, tuple[Point, Spool]] = {}
        """By the end of the hop, in the order they were made."""
        make_directory(Disk(), directory)
        try:
            for path in directory.glob(f"*{SPOOL_SUFFIX}"):
                path.unlink()
        except OSError as error:
            raise describe_os_error("empty", directory, error) from error

    def begin(self, table: ParameterTable) -> SpoolWriter:
        """Start a spool that is not yet part of any route."""
        return SpoolWriter(self._directory / f"{next(self._numbers)}{SPOOL_SUFFIX}", table)

    def keep(self, base: Point, target: Point, spool: Spool, *, size_bytes_max: int) -> None:
        """Make a finished spool part of routes, and drop the oldest ones beyond ``size_bytes_max`` together."""
        with self._mutex:
            replaced = self._hops.pop(target, None)
            self._hops[target] = (base, spool)
            dropped = [] if replaced is None else [replaced[1]]
            total = sum(kept.size_bytes for _, kept in self._hops.values())
            for point in list(self._hops):
                if total <= size_bytes_max:
                    break
                _, oldest = self._hops.pop(point)
                total -= oldest.size_bytes
                dropped.append(oldest)
        for old in dropped:
            old.remove()

    def find_route(self, base: Version, target: Point, *, base_root: Digest | None = None) -> list[Spool] | None:
        """Return the spools that lead from ``base`` to ``target``, in order; ``None`` if one is missing.

        Args:
            base: Where they start.
            target: Where they end.
            base_root: What the root of ``base`` must be, if it is known.
        """
        route: list[Spool] = []
        with self._mutex:
            point = target
            while point.version != base:
                hop = self._hops.get(point)
                if hop is None or len(route) > len(self._hops):
                    return None
                point, spool = hop
                route.append(spool)
        return route[::-1] if base_root in (None, point.root) else None

    def clear(self) -> None:
        """Drop every spool: the weights they belong to are gone."""
        with self._mutex:
            dropped, self._hops = [spool for _, spool in self._hops.values()], {}
        for spool in dropped:
            spool.remove()


def compose_spools(spools: Sequence[Spool]) -> Iterator[Changes]:
    """Yield, per changed tensor in order, the effect of all hops together; memory: two tensors' records.

    Positions that came back to their old bits drop out.

    Raises:
        PatchMismatchError: A hop does not start where the one before ended.
        StorageError: A spool is damaged.
    """
    for tensor_index in sorted({index for spool in spools for index in spool.tensor_indices}):
        total: Changes | None = None
        for spool in spools:
            part = spool.read_tensor(tensor_index)
            if part is not None:
                total = part if total is None else compose_changes(total, part)
        if total is not None and len(total):
            yield total


def write_unnamed(directory: Path, changes: Iterator[Changes], *, on_size: Callable[[int], None]) -> tuple[int, int]:
    """Write records into a file without a name; return a read-only descriptor and the size in bytes.

    Args:
        directory: Where the disk space comes from.
        changes: The records.
        on_size: Told the size after each record, so that the caller may stop by an exception.

    Raises:
        StorageError: The disk refused.
    """
    path = directory / f"handover-{os.getpid()}-{threading.get_ident()}{SPOOL_SUFFIX}"
    size_bytes = 0
    try:
        with path.open("xb", buffering=1 << 20) as file:
            for item in changes:
                size_bytes += file.write(encode_changes(item))
                on_size(size_bytes)
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC), size_bytes
    except OSError as error:
        raise describe_os_error("write", path, error) from error
    finally:
        _remove(path)


def _remove(path: Path) -> None:
    """Delete a spool; what the disk will not let go is deleted at the next start, and no hop fails of it."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _map_file(path: Path) -> memoryview:
    try:
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ))
    except OSError as error:
        raise describe_os_error("map", path, error) from error
