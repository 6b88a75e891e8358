"""The node's private directory beside an engine, and an update's memory under a name in it."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from blake3 import blake3

from pulsenet.codec.changes import encode_changes
from pulsenet.errors import LocalProtocolError, StorageError
from pulsenet.ids import compute_digest
from pulsenet.local.shared_memory import create_memory, write_at
from pulsenet.serving.engine import EngineUpdate, FullUpdate, RecordsUpdate
from pulsenet.serving.vllm.exchange import LOCK_NAME, MEMORY_NAME, check_private, describe_refusal

LOCK_SECONDS_MAX: Final = 10.0
"""A watchdog holds the lock for an instant when it looks; another node, for good."""
LOCK_POLL_SECONDS: Final = 0.05
COPY_SIZE_BYTES: Final = 8 << 20


@contextmanager
def lend_memory(update: EngineUpdate, directory: Path, *, must_copy: bool) -> Iterator[tuple[int, str]]:
    """Put an update's memory where the ranks find it while the block runs; they map it and need it no longer.

    Args:
        update: Its descriptor is linked, not copied.
        directory: The private one.
        must_copy: Copy it into the directory after all.

    Yields:
        Its size in bytes, and for records its digest.

    Raises:
        LocalProtocolError: A full update without a descriptor.
        StorageError: The disk refused.
    """
    descriptor = update.descriptor
    owned = descriptor < 0
    if owned:
        if isinstance(update, FullUpdate):
            raise LocalProtocolError("a full update for an engine in other processes needs a descriptor")
        descriptor = _write_records(update)
    place = directory / MEMORY_NAME
    try:
        try:
            size_bytes = os.fstat(descriptor).st_size if isinstance(update, RecordsUpdate) else update.region.size
            digest = _hash_memory(descriptor, size_bytes) if isinstance(update, RecordsUpdate) else ""
            place.unlink(missing_ok=True)
            if must_copy:
                _copy_memory(descriptor, size_bytes, place)
            else:
                place.symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
        except OSError as error:
            raise describe_refusal(f"an update cannot be put into {directory}", error) from error
        yield size_bytes, digest
    finally:
        with suppress(OSError):  # what is left there is replaced by the next
            place.unlink(missing_ok=True)
        if owned:
            os.close(descriptor)


def _write_records(update: RecordsUpdate) -> int:
    """Return the descriptor of fresh shared memory that holds the records in spool form."""
    pieces = [encode_changes(changes) for changes in update.changes()]
    descriptor = create_memory("pulsenet-records", sum(map(len, pieces)))
    offset_bytes = 0
    try:
        for piece in pieces:
            write_at(descriptor, piece, offset_bytes)
            offset_bytes += len(piece)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _hash_memory(descriptor: int, size_bytes: int) -> str:
    if not size_bytes:
        return compute_digest(b"").hex()
    with mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ) as mapping:
        return blake3(mapping).hexdigest()


def _copy_memory(descriptor: int, size_bytes: int, place: Path) -> None:
    with place.open("xb") as file:
        offset_bytes = 0
        while offset_bytes < size_bytes:
            piece = os.pread(descriptor, min(COPY_SIZE_BYTES, size_bytes - offset_bytes), offset_bytes)
            if not piece:
                raise StorageError("an update's memory is shorter than announced", "damaged")
            file.write(piece)
            offset_bytes += len(piece)


def take_directory(directory: Path, monotonic: Callable[[], float], sleep: Callable[[float], None]) -> int:
    """Make the private directory and return the descriptor that holds its lock; the watchdogs look at that.

    Raises:
        StorageError: It cannot be used, or another node uses it (reason ``locked``).
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(directory)
        descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StorageError(f"{directory} cannot be used for the engine: {error.strerror}") from error
    give_up_at = monotonic() + LOCK_SECONDS_MAX
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError as error:
            if monotonic() >= give_up_at:
                os.close(descriptor)
                raise StorageError(f"another node uses {directory} for its engine", "locked") from error
            sleep(LOCK_POLL_SECONDS)
