"""What a training process holds while a round is stepped: theta in host memory, and the blobs of the round on disk."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, overload

from pulsenet.errors import StorageError
from pulsenet.outer.floats import FP32s
from pulsenet.training.exchange import StateView

READ_SIZE_BYTES: Final = 4 << 20
"""Read from a spool at once."""

TENSORS_HELD_MAX: Final = 2
"""Tensors of theta that are held in host memory where theta lies elsewhere."""


class HostTheta(Sequence[FP32s]):
    """Theta in host memory, tensor by tensor: where it lies on an accelerator, the tensors read last are held.

    May be read from several threads.

    Args:
        state: Whose theta; it must not be stepped past a tensor before that tensor was read.
        tensor_count: Of the table.
    """

    def __init__(self, state: StateView, tensor_count: int) -> None:
        self._state = state
        self._tensor_count = tensor_count
        self._held: dict[int, FP32s] = {}
        self._mutex = threading.Lock()

    def __len__(self) -> int:
        return self._tensor_count

    @overload
    def __getitem__(self, index: int) -> FP32s: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[FP32s]: ...
    def __getitem__(self, index: int | slice) -> FP32s | Sequence[FP32s]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(self._tensor_count))]
        if not 0 <= index < self._tensor_count:
            raise IndexError(index)
        with self._mutex:
            found = self._held.pop(index, None)
            if found is None:
                found = self._state.theta(index)
            self._held[index] = found
            while len(self._held) > TENSORS_HELD_MAX:
                del self._held[next(iter(self._held))]
            return found


@dataclass(frozen=True, slots=True)
class SpooledBlob:
    """Where a blob lies in a spool."""

    start_bytes: int
    size_bytes: int


class BlobSpool:
    """The blobs of one round on disk, in a file without a name that is gone with the process.

    An outer step reads nothing else, so a daemon that goes away cannot break it off.

    Args:
        directory: Where the file is made; ``None`` for the system's place for temporary files.

    Raises:
        StorageError: it cannot be made there.
    """

    def __init__(self, directory: Path | None) -> None:
        try:
            self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise _describe(error, directory) from error
        self._directory = directory
        self._end_bytes = 0

    def add(self, pieces: Iterable[bytes | memoryview]) -> SpooledBlob:
        """Write a blob.

        Raises:
            StorageError: the disk is full (``enospc``) or fails.
        """
        start_bytes = self._end_bytes
        for piece in pieces:
            rest = memoryview(piece)
            while rest:
                try:
                    written = os.pwrite(self._file.fileno(), rest, self._end_bytes)
                except OSError as error:
                    raise _describe(error, self._directory) from error
                self._end_bytes += written
                rest = rest[written:]
        return SpooledBlob(start_bytes, self._end_bytes - start_bytes)

    def read(self, blob: SpooledBlob) -> Iterator[bytes]:
        """Yield a blob's bytes.

        Raises:
            StorageError: while iterating, the disk fails.
        """
        offset_bytes, end_bytes = blob.start_bytes, blob.start_bytes + blob.size_bytes
        while offset_bytes < end_bytes:
            try:
                data = os.pread(self._file.fileno(), min(READ_SIZE_BYTES, end_bytes - offset_bytes), offset_bytes)
            except OSError as error:
                raise _describe(error, self._directory) from error
            if not data:
                raise StorageError("a spool of the rounds was cut short", "damaged")
            offset_bytes += len(data)
            yield data

    def close(self) -> None:
        """Let the file go; a second call does nothing."""
        self._file.close()


def _describe(error: OSError, directory: Path | None) -> StorageError:
    where = tempfile.gettempdir() if directory is None else directory
    reason = "enospc" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "io"
    return StorageError(f"no room for the blobs of a round in {where}: {error.strerror or error}", reason)
