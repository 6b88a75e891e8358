"""Durable changes to files, one named step at a time, and the lock on a data directory.

Everything the node must not lose goes through :class:`Disk`: write a temporary file, fsync it, rename it,
fsync its directory. Tests hand in a ``Disk`` that stops before any one of these steps, as a power cut does.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import re
import secrets
import stat
import time
from contextlib import suppress
from pathlib import Path

from pulsenet.errors import StorageError
from pulsenetd.errors import DirectoryLockedError

PARTIAL_SUFFIX = ".partial"
"""Ends the name of every file that is not whole yet; start-up deletes what a crash left."""

PROBE_PREFIX = "probe-"
"""Begins the name of the file by which a directory is found to be writable."""

_PARTIAL_NAME = re.compile(rf"(.+\.[0-9a-f]{{16}}|{PROBE_PREFIX}[0-9]+){re.escape(PARTIAL_SUFFIX)}", re.DOTALL)

LOCK_NAME = "lock"

Data = bytes | bytearray | memoryview

_REASONS = {
    errno.ENOSPC: "enospc",
    errno.EDQUOT: "enospc",
    errno.EROFS: "readonly",
    errno.EACCES: "readonly",
    errno.EPERM: "readonly",
    errno.ENOMEM: "memory",
}


def describe_os_error(action: str, path: Path, error: OSError) -> StorageError:
    """Wrap a system error so that a person reads what failed, where, and the errno."""
    name = errno.errorcode.get(error.errno or 0, "unknown errno")
    text = f"cannot {action} {path}: {error.strerror or error} ({name})"
    return StorageError(text, _REASONS.get(error.errno or 0, "io"))


class IrregularFileError(OSError):
    """A pipe, device or directory has a file's name."""


def open_regular(path: Path, flags: int, mode: int = 0o600) -> int:
    """Open a file and return its descriptor; never a pipe, device or directory, for which others wait or never end.

    A link is followed for reading only: one in a data directory must not lead a writer to somebody's file.

    Raises:
        IrregularFileError: It is no regular file.
        OSError: It cannot be opened.
    """
    is_written = bool(flags & (os.O_WRONLY | os.O_RDWR))
    no_follow = os.O_NOFOLLOW if is_written else 0
    descriptor = os.open(path, flags | no_follow | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    mode_found = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode_found):
        os.close(descriptor)
        number = errno.EISDIR if stat.S_ISDIR(mode_found) else errno.EINVAL
        raise IrregularFileError(number, "it is no regular file; move it away")
    return descriptor


def read_regular(path: Path, size_bytes_max: int) -> bytes:
    """Return a regular file's bytes; one more than ``size_bytes_max`` at most, so that a longer file shows.

    Raises:
        OSError: see :func:`open_regular`.
    """
    with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
        return file.read(size_bytes_max + 1)


class Disk:
    """Does the steps of a durable write; a subclass may stop before any of them."""

    def write(self, path: Path, data: Data) -> None:
        """Step 1: create ``path`` (which must not exist) with these bytes, not yet durable."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        finally:
            os.close(descriptor)

    def fsync(self, path: Path) -> None:
        """Step 2: make the file's bytes durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Step 3: put the file under its name, replacing what was there."""
        os.replace(source, target)

    def sync_directory(self, path: Path) -> None:
        """Step 4: make the names in a directory durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        """Delete a file; an absent one is no error."""
        path.unlink(missing_ok=True)

    def before_commit(self) -> None:
        """Called before a database transaction becomes durable."""

    def after_commit(self) -> None:
        """Called once a database transaction is durable."""


def write_durably(disk: Disk, path: Path, data: Data) -> None:
    """Put ``data`` at ``path`` so that after a crash it is whole or absent.

    Args:
        disk: Does the steps.
        path: Final name; its directory exists.
        data: The whole content.

    Raises:
        StorageError: The system refused a step; no temporary file stays behind.
    """
    _write(disk, path, data, is_durable=True)
    try:
        disk.sync_directory(path.parent)
    except OSError as error:
        raise describe_os_error("write", path, error) from error


def write_whole(disk: Disk, path: Path, data: Data) -> None:
    """Put ``data`` at ``path``, whole for whoever reads it, but not durable: after a power cut it may be anything.

    Raises:
        StorageError: As :func:`write_durably`.
    """
    _write(disk, path, data, is_durable=False)


def _write(disk: Disk, path: Path, data: Data, *, is_durable: bool) -> None:
    # By chance, not by number: one that was killed may have had this process id, as in containers all have.
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}{PARTIAL_SUFFIX}")
    try:
        try:
            disk.write(partial, data)
            if is_durable:
                disk.fsync(partial)
            disk.rename(partial, path)
        except OSError:
            # A full disk must get its space back: the next try may be smaller.
            disk.remove(partial)
            raise
    except OSError as error:
        raise describe_os_error("write", path, error) from error


def remove_durably(disk: Disk, path: Path) -> None:
    """Delete a file so that it does not come back after a crash; an absent one is no error.

    Raises:
        StorageError: The system refused a step.
    """
    try:
        disk.remove(path)
        disk.sync_directory(path.parent)
    except OSError as error:
        raise describe_os_error("delete", path, error) from error


def find_partials(directory: Path, *, seconds_min: float = 0.0) -> list[Path]:
    """Return files of a directory that a process of ours began to write and left.

    Args:
        directory: Where to look; it need not exist.
        seconds_min: How long they were not touched; 0 where a lock says that nobody writes there.

    Raises:
        OSError: The directory cannot be read.
    """
    found = []
    for path in directory.glob(f"*{PARTIAL_SUFFIX}"):
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue  # finished meanwhile
        is_left = not seconds_min or time.time() - status.st_mtime >= seconds_min
        # By the whole name: other programs have partial files too, and --data-dir may be any directory.
        if is_left and stat.S_ISREG(status.st_mode) and _PARTIAL_NAME.fullmatch(path.name):
            found.append(path)
    return found


def make_directory(disk: Disk, path: Path) -> None:
    """Create a private directory (0700), and those that lead there, durably; an existing one is left as it is.

    Raises:
        StorageError: The system refused, or something else has this name.
    """
    if path.is_dir():
        return
    try:
        # Whoever may write in one of them can put another in the place of what lies below.
        missing = [path, *itertools.takewhile(lambda one: not one.exists(), path.parents)]
        for one in reversed(missing):
            one.mkdir(mode=0o700, exist_ok=True)
            disk.sync_directory(one.parent)
    except OSError as error:
        raise describe_os_error("create directory", path, error) from error


def check_writable(path: Path) -> None:
    """Prove that files can be made in a directory, before anything depends on it.

    Raises:
        StorageError: Names the directory and the errno.
    """
    probe = path / f"{PROBE_PREFIX}{os.getpid()}{PARTIAL_SUFFIX}"
    try:
        for left in path.glob(f"{PROBE_PREFIX}*{PARTIAL_SUFFIX}"):
            left.unlink(missing_ok=True)  # of a process that died between the two lines below
        probe.touch(mode=0o600)
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise describe_os_error("write in", path, error) from error


def free_size_bytes(path: Path) -> int:
    """Return how many bytes an ordinary user may still write on the file system of ``path``."""
    try:
        found = os.statvfs(path)
    except OSError as error:
        raise describe_os_error("read free space of", path, error) from error
    return found.f_bavail * found.f_frsize


def require_free_space(path: Path, size_bytes: int) -> None:
    """Refuse early what the disk cannot hold.

    Raises:
        StorageError: Reason ``enospc``; names both figures.
    """
    free = free_size_bytes(path)
    if free < size_bytes:
        raise StorageError(
            f"{path} has {free} bytes free and {size_bytes} are needed: free some, or use another --data-dir",
            "enospc",
        )


class DirectoryLock:
    """A data directory held by this process until ``release`` or its death.

    The kernel drops the lock with the process, so a lock file left by a crash never blocks a start.
    """

    def __init__(self, directory: Path, descriptor: int) -> None:
        self.directory = directory
        self._descriptor: int | None = descriptor

    @classmethod
    def acquire(cls, directory: Path, *, wait: bool = False) -> DirectoryLock:
        """Take the lock of an existing directory and write our process id into it.

        Args:
            directory: What is locked.
            wait: Block until its holder is through, for locks held for moments.

        Raises:
            DirectoryLockedError: Another process has it; names its process id.
            StorageError: The lock file cannot be made.
        """
        path = directory / LOCK_NAME
        try:
            descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise describe_os_error("open lock file", path, error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError as error:
            owner = _read_owner(descriptor)
            os.close(descriptor)
            who = f"process {owner}" if owner is not None else "another process"
            text = f"{directory} is in use by {who}: stop it, or use another --data-dir"
            raise DirectoryLockedError(text, "locked") from error
        except OSError as error:
            os.close(descriptor)
            raise describe_os_error("lock", path, error) from error
        return cls(directory, descriptor)

    def check(self) -> None:
        """Return if the directory is still the one that was locked.

        Raises:
            StorageError: It was removed or replaced: another process may hold its name by now.
        """
        assert self._descriptor is not None
        try:
            here = os.stat(self.directory / LOCK_NAME)
        except (FileNotFoundError, NotADirectoryError):
            here = None
        except OSError:
            return  # a disk that does not answer has not lost the directory
        if here is None or not os.path.samestat(here, os.fstat(self._descriptor)):
            raise StorageError(f"{self.directory} was removed or replaced under the running node: start it again")

    def release(self) -> None:
        """Give the directory up; a second call does nothing."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            try:
                # The file stays: deleting it would let two processes lock two different files of one name.
                with suppress(OSError):  # a failing disk keeps our number: the next owner replaces it
                    os.ftruncate(descriptor, 0)
            finally:
                os.close(descriptor)


def _read_owner(descriptor: int) -> int | None:
    text = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
    return int(text) if text.isdecimal() else None
