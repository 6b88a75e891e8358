"""Weights in shared memory: sealed snapshots from a training process, and regions the daemon lends.

A *region* holds the tensors of one :class:`pulsenet.tensors.params.ParameterTable` in its dense layout.
A *snapshot* is a memfd its maker filled with ``pwrite`` and then sealed for good: nobody, its maker
included, can change, shrink or grow it, so the reader uses it in place, without a copy. A *lent* region
is one its owner still changes through a mapping made before sealing; all others can only read it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pulsenet.errors import LocalProtocolError, RemoteProtocolError, StorageError
from pulsenet.local.parts import PartLayout, SealedPart, cut_parts
from pulsenet.tensors.params import ParameterTable

Bytes = npt.NDArray[np.uint8]
Buffer = bytes | bytearray | memoryview | Bytes

_F_SEAL_FUTURE_WRITE = 0x10
"""Linux 5.1 and newer: mappings made before stay writable, nothing else does. Not named by ``fcntl`` yet."""

SNAPSHOT_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
LENT_SEALS = _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_READ_ONLY_SEALS = fcntl.F_SEAL_WRITE | _F_SEAL_FUTURE_WRITE

_CACHED = ("active_file", "inactive_file")
"""Pages of files, in a container's statistics; those of shared memory are counted elsewhere."""


def create_memory(name: str, size_bytes: int) -> int:
    """Return the descriptor of a fresh memfd of this size, zero-filled, not yet sealed.

    Raises:
        StorageError: The system has no memory for it, or no memfds (reason ``memory``).
    """
    if not hasattr(os, "memfd_create"):
        raise StorageError("shared memory needs memfd_create, which this system does not have (Linux only)", "memory")
    require_memory(size_bytes)
    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise StorageError(f"cannot create shared memory: {error.strerror}", "memory") from error
    try:
        os.ftruncate(descriptor, size_bytes)
    except OSError as error:
        os.close(descriptor)
        raise StorageError(f"cannot reserve {size_bytes} bytes of shared memory: {error.strerror}", "memory") from error
    return descriptor


def require_memory(size_bytes: int) -> None:
    """Refuse to begin what needs more shared memory than there is.

    The kernel promises any size and ends the process later, when the pages are used.

    Raises:
        StorageError: Less than ``size_bytes`` are available (reason ``memory``).
    """
    available = read_available_memory_bytes()
    if size_bytes > available:
        raise StorageError(f"{size_bytes} bytes of shared memory are needed and {available} are available", "memory")


def read_available_memory_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how much memory a new region may take: of the machine, or of the container's limit if that is less.

    Args:
        proc: Where the kernel tells of the machine.
        cgroup: Where it tells of the container that this process runs in.
    """
    available = 1 << 63
    with suppress(OSError), open(proc / "meminfo", encoding="ascii") as lines:
        found = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
        available = available if found is None else int(found) * 1024
    room = read_container_room_bytes(cgroup)
    return available if room is None else min(available, room)


def read_container_room_bytes(cgroup: Path) -> int | None:
    """Return how much memory is left within a container's limit; ``None`` if it has none.

    Files that were read, such as training data, count as used there; their pages go when memory is asked for.
    """
    # "max" is no number, so no limit.
    with suppress(OSError, ValueError):
        limit, used = (int((cgroup / f"memory.{name}").read_text()) for name in ("max", "current"))
        cached = 0
        with suppress(OSError):
            fields = (line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
            cached = sum(int(value) for name, value in fields if name in _CACHED)
        return max(0, limit - used + cached)
    return None


def write_at(descriptor: int, data: Buffer, offset: int) -> None:
    """Write all of ``data`` at ``offset`` with ``pwrite``.

    Raises:
        StorageError: Memory ran out (reason ``memory``).
    """
    rest = _as_view(data)
    while rest:
        try:
            written = os.pwrite(descriptor, rest, offset)
        except OSError as error:
            raise StorageError(f"cannot write shared memory: {error.strerror}", "memory") from error
        offset += written
        rest = rest[written:]


def _as_view(data: Buffer) -> memoryview:
    return (data.data if isinstance(data, np.ndarray) else memoryview(data)).cast("B")


def seal_snapshot(descriptor: int) -> None:
    """Make a filled memfd immutable for everybody; needs every writable mapping of it gone.

    Raises:
        LocalProtocolError: A writable mapping is still open, or it was sealed before.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SNAPSHOT_SEALS)
    except OSError as error:
        raise LocalProtocolError(f"cannot seal the snapshot: {error.strerror}") from error


def check_snapshot(descriptor: int, size_bytes: int) -> None:
    """Refuse a descriptor received from another process unless it is an immutable memfd of this size.

    Raises:
        RemoteProtocolError: ``handoff-unsealed`` or ``handoff-size``.
    """
    seals = _get_seals(descriptor)
    if seals & SNAPSHOT_SEALS != SNAPSHOT_SEALS:
        raise RemoteProtocolError("handoff-unsealed", f"seals are {seals:#x}, {SNAPSHOT_SEALS:#x} needed")
    _check_size(descriptor, size_bytes)


def check_lent(descriptor: int, size_bytes: int) -> None:
    """Refuse a descriptor received from the daemon unless it cannot change size under its reader.

    Raises:
        RemoteProtocolError: ``handoff-unsealed`` or ``handoff-size``.
    """
    seals = _get_seals(descriptor)
    fixed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    if seals & fixed != fixed or not seals & _READ_ONLY_SEALS:
        raise RemoteProtocolError("handoff-unsealed", f"seals are {seals:#x}")
    _check_size(descriptor, size_bytes)


def _get_seals(descriptor: int) -> int:
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise RemoteProtocolError("handoff-unsealed", "not a memfd") from error


def _check_size(descriptor: int, size_bytes: int) -> None:
    found = os.fstat(descriptor).st_size
    if found != size_bytes:
        raise RemoteProtocolError("handoff-size", f"{found} bytes, the table needs {size_bytes}")


class Region:
    """One mapped memfd with its bytes as a numpy array; closing is safe to repeat.

    The descriptor belongs to the region. Arrays taken from ``bytes`` keep the memory alive until they
    are gone, so ``close`` drops the region's own reference and the memory follows the last view.
    """

    def __init__(self, descriptor: int, mapping: mmap.mmap | None, *, writable: bool) -> None:
        self._descriptor = descriptor
        self._bytes: Bytes = np.frombuffer(mapping if mapping is not None else bytearray(), dtype=np.uint8)
        self.writable = writable

    @classmethod
    def create(cls, name: str, size_bytes: int) -> Region:
        """Make a zero-filled region that this process may write and all others may only read.

        Raises:
            StorageError: No memory for it (reason ``memory``).
        """
        descriptor = create_memory(name, size_bytes)
        try:
            mapping = mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED) if size_bytes else None
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, LENT_SEALS)
        except OSError as error:
            os.close(descriptor)
            raise StorageError(f"cannot map {size_bytes} bytes of shared memory: {error.strerror}", "memory") from error
        return cls(descriptor, mapping, writable=True)

    @classmethod
    def open_snapshot(cls, descriptor: int, size_bytes: int) -> Region:
        """Map a received snapshot for reading; takes the descriptor over, and closes it on refusal.

        Raises:
            RemoteProtocolError: ``handoff-unsealed`` or ``handoff-size``.
        """
        # Private: kernels before 6.7 refuse shared mappings of a write-sealed memfd. No page is copied.
        return cls._open(descriptor, size_bytes, check_snapshot, mmap.MAP_PRIVATE)

    @classmethod
    def open_lent(cls, descriptor: int, size_bytes: int) -> Region:
        """Map a received region for reading; takes the descriptor over, and closes it on refusal.

        Raises:
            RemoteProtocolError: ``handoff-unsealed`` or ``handoff-size``.
        """
        return cls._open(descriptor, size_bytes, check_lent, mmap.MAP_SHARED)

    @classmethod
    def _open(cls, descriptor: int, size_bytes: int, check: Callable[[int, int], None], flags: int) -> Region:
        try:
            check(descriptor, size_bytes)
            mapping = mmap.mmap(descriptor, size_bytes, flags, mmap.PROT_READ) if size_bytes else None
        except OSError as error:
            os.close(descriptor)
            raise StorageError(f"cannot map {size_bytes} bytes of shared memory: {error.strerror}", "memory") from error
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor, mapping, writable=False)

    @property
    def bytes(self) -> Bytes:
        """The region as flat uint8, read-only unless ``writable``."""
        return self._bytes

    @property
    def size_bytes(self) -> int:
        """Length of the region in bytes."""
        return int(self._bytes.size)

    def reopen_for_reading(self) -> int:
        """Return a new read-only descriptor of the same memory, to be passed on; the caller closes it."""
        return os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the descriptor and let go of the memory."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._bytes = np.zeros(0, dtype=np.uint8)


class SnapshotWriter:
    """Fills a snapshot, or one part of it, block by block in bounded memory, then seals it."""

    def __init__(self, table: ParameterTable, layout: PartLayout | None = None) -> None:
        """
        Args:
            table: The version's tensors.
            layout: The part to fill; ``None`` for the whole.

        Raises:
            StorageError: No memory for it (reason ``memory``).
        """
        self._layout = PartLayout(table, 0, len(table.tensors)) if layout is None else layout
        self._table = table
        self._written_size_bytes = dict.fromkeys(self._layout.tensor_indices, 0)
        self._descriptor = create_memory("pulsenet-snapshot", self._layout.size_bytes)

    def write_block(self, tensor_index: int, offset_bytes: int, data: Buffer) -> None:
        """Store the next bytes of one tensor (row-major, little-endian); blocks of a tensor come in order.

        Raises:
            LocalProtocolError: Out of order, beyond the tensor's end, or of another part.
            StorageError: Memory ran out.
        """
        view = _as_view(data)
        spec = self._table.tensors[tensor_index]
        expected = self._written_size_bytes.get(tensor_index)
        if expected is None:
            raise LocalProtocolError(f"tensor {spec.name} belongs to another part")
        if offset_bytes != expected:
            raise LocalProtocolError(f"tensor {spec.name}: block at byte {offset_bytes}, the next is {expected}")
        if offset_bytes + len(view) > spec.size_bytes:
            raise LocalProtocolError(
                f"tensor {spec.name}: block ends at byte {offset_bytes + len(view)} of {spec.size_bytes}"
            )
        write_at(self._descriptor, view, self._layout.offset_of(tensor_index) + offset_bytes)
        self._written_size_bytes[tensor_index] = offset_bytes + len(view)

    def seal(self) -> int:
        """Make the snapshot immutable and return its descriptor, which the caller now owns.

        Raises:
            LocalProtocolError: A tensor is not whole.
        """
        for tensor_index, written in self._written_size_bytes.items():
            spec = self._table.tensors[tensor_index]
            if written != spec.size_bytes:
                raise LocalProtocolError(f"tensor {spec.name} has {written} of {spec.size_bytes} bytes")
        seal_snapshot(self._descriptor)
        descriptor, self._descriptor = self._descriptor, -1
        return descriptor

    def close(self) -> None:
        """Give up an unsealed snapshot; does nothing after ``seal``."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def write_snapshot(table: ParameterTable, blocks: Iterable[tuple[int, int, Buffer]]) -> int:
    """Copy a version into a sealed snapshot and return its descriptor, owned by the caller.

    Args:
        table: The version's tensors.
        blocks: ``(tensor_index, offset_bytes, data)``, in order within each tensor.

    Raises:
        LocalProtocolError: A tensor is not whole, or its blocks are out of order.
        StorageError: Memory ran out.
    """
    writer = SnapshotWriter(table)
    try:
        for tensor_index, offset_bytes, data in blocks:
            writer.write_block(tensor_index, offset_bytes, data)
        return writer.seal()
    finally:
        writer.close()


def write_parts(
    table: ParameterTable,
    blocks: Iterator[tuple[int, int, Buffer]],
    on_tensor: Callable[[int], None] | None = None,
) -> Generator[SealedPart]:
    """Copy a version into sealed parts, one at a time: the next is begun, and the last let go, when it is asked for.

    Args:
        table: The version's tensors.
        blocks: ``(tensor_index, offset_bytes, data)``, ascending and without gaps; read no further than needed.
        on_tensor: Told the position of each tensor once it is copied.

    Raises:
        LocalProtocolError: While iterating: a tensor is not whole, or its blocks are out of order.
        StorageError: While iterating: memory ran out.
    """
    for layout in cut_parts(table):
        writer = SnapshotWriter(table, layout)
        try:
            for tensor_index in layout.tensor_indices:
                missing_size_bytes = table.tensors[tensor_index].size_bytes
                while missing_size_bytes > 0 and (block := next(blocks, None)) is not None:
                    writer.write_block(*block)
                    missing_size_bytes -= len(_as_view(block[2]))
                if on_tensor is not None and missing_size_bytes == 0:
                    on_tensor(tensor_index)
            part = SealedPart(layout, writer.seal())
        finally:
            writer.close()
        try:
            yield part
        finally:
            part.close()
