"""Durable steps, private directories, the lock on a data directory."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pulsenet.errors import StorageError
from pulsenetd.errors import DirectoryLockedError
from pulsenetd.storage.disk import (
    DirectoryLock,
    Disk,
    check_writable,
    describe_os_error,
    find_partials,
    free_size_bytes,
    make_directory,
    require_free_space,
    write_durably,
)


class FailingDisk(Disk):
    def __init__(self, step: str, number: int) -> None:
        self.step, self.number = step, number

    def fsync(self, path: Path) -> None:
        if self.step == "fsync":
            raise OSError(self.number, os.strerror(self.number))
        super().fsync(path)

    def sync_directory(self, path: Path) -> None:
        if self.step == "sync_directory":
            raise OSError(self.number, os.strerror(self.number))
        super().sync_directory(path)


def test_a_written_file_has_its_bytes_and_no_partial_stays(tmp_path: Path) -> None:
    write_durably(Disk(), tmp_path / "file", b"abc")
    write_durably(Disk(), tmp_path / "file", b"defg")
    assert (tmp_path / "file").read_bytes() == b"defg"
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_what_a_killed_process_of_the_same_id_left_is_in_nobodys_way(tmp_path: Path) -> None:
    for number in range(2_000):
        (tmp_path / f"file.{os.getpid()}-{number}.partial").touch()
    write_durably(Disk(), tmp_path / "file", b"abc")
    assert (tmp_path / "file").read_bytes() == b"abc"


@pytest.mark.parametrize(
    ("number", "reason"),
    [(errno.ENOSPC, "enospc"), (errno.EDQUOT, "enospc"), (errno.EROFS, "readonly"), (errno.EIO, "io")],
)
def test_a_refused_write_gives_its_space_back_and_names_path_and_errno(
    tmp_path: Path, number: int, reason: str
) -> None:
    with pytest.raises(StorageError, match=errno.errorcode[number]) as caught:
        write_durably(FailingDisk("fsync", number), tmp_path / "file", b"abc")
    assert caught.value.reason == reason
    assert str(tmp_path / "file") in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match=r"EEXIST|ENOTDIR"):
        make_directory(Disk(), tmp_path / "file" / "below")
    with pytest.raises(StorageError, match="EIO"):
        make_directory(FailingDisk("sync_directory", errno.EIO), tmp_path / "new")


def test_made_directories_are_private(tmp_path: Path) -> None:
    make_directory(Disk(), tmp_path / "a" / "b")
    make_directory(Disk(), tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_made_directories_are_private_up_to_those_that_were_there(tmp_path: Path) -> None:
    """With the umask of a group, others of it could put a run of theirs where the keys lie."""
    before = os.umask(0o002)
    try:
        make_directory(Disk(), tmp_path / "home" / "run" / "node")
    finally:
        os.umask(before)
    made = [tmp_path / "home", tmp_path / "home" / "run", tmp_path / "home" / "run" / "node"]
    assert [path.stat().st_mode & 0o777 for path in made] == [0o700] * 3


def test_every_directory_that_is_made_is_durable(tmp_path: Path) -> None:
    synced: list[Path] = []

    class NotingDisk(Disk):
        def sync_directory(self, path: Path) -> None:
            synced.append(path)
            super().sync_directory(path)

    make_directory(NotingDisk(), tmp_path / "a" / "b")
    assert synced == [tmp_path, tmp_path / "a"]


def test_a_directory_that_refuses_files_is_named_with_errno(tmp_path: Path) -> None:
    """A-DSK-4; works for root too, who may write where mode bits say no."""
    with pytest.raises(StorageError, match=r"proc.*ENOENT|proc.*EACCES"):
        check_writable(Path("/proc/self"))
    check_writable(tmp_path)
    assert os.listdir(tmp_path) == []


def test_free_space_is_refused_with_both_figures(tmp_path: Path) -> None:
    free = free_size_bytes(tmp_path)
    assert free > 0
    require_free_space(tmp_path, 1)
    with pytest.raises(StorageError, match=str(free * 4)) as caught:
        require_free_space(tmp_path, free * 4)
    assert caught.value.reason == "enospc"
    with pytest.raises(StorageError, match="ENOENT"):
        free_size_bytes(tmp_path / "absent")


def test_an_unknown_errno_is_described_too(tmp_path: Path) -> None:
    error = describe_os_error("read", tmp_path, OSError("odd"))
    assert "odd" in str(error)
    assert error.reason == "io"


def test_a_second_owner_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    """A-PROC-4, within one process and across two."""
    lock = DirectoryLock.acquire(tmp_path)
    with pytest.raises(DirectoryLockedError, match=f"process {os.getpid()}"):
        DirectoryLock.acquire(tmp_path)
    code = (
        "from pathlib import Path; from pulsenetd.storage.disk import DirectoryLock;"
        f"DirectoryLock.acquire(Path({str(tmp_path)!r}))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert other.returncode != 0
    assert f"in use by process {os.getpid()}" in other.stderr
    lock.release()
    lock.release()
    DirectoryLock.acquire(tmp_path).release()


def test_the_lock_of_a_killed_process_does_not_block(tmp_path: Path) -> None:
    """A-PROC-3."""
    code = (
        "import os, signal; from pathlib import Path; from pulsenetd.storage.disk import DirectoryLock;"
        f"DirectoryLock.acquire(Path({str(tmp_path)!r})); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert (tmp_path / "lock").read_text().strip().isdigit()
    DirectoryLock.acquire(tmp_path).release()


def test_a_lock_without_a_pid_still_refuses(tmp_path: Path) -> None:
    lock = DirectoryLock.acquire(tmp_path)
    (tmp_path / "lock").write_text("?")
    with pytest.raises(DirectoryLockedError, match="another process"):
        DirectoryLock.acquire(tmp_path)
    lock.release()


def test_a_lock_file_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="ENOENT"):
        DirectoryLock.acquire(tmp_path / "absent")


def test_a_lock_notices_that_its_directory_was_removed_or_replaced(tmp_path: Path) -> None:
    directory = tmp_path / "node"
    directory.mkdir()
    lock = DirectoryLock.acquire(directory)
    lock.check()
    for replace in (lambda: directory.rename(tmp_path / "moved"), directory.touch, directory.unlink, directory.mkdir):
        replace()
        with pytest.raises(StorageError, match=r"node was removed or replaced"):
            lock.check()
    other = DirectoryLock.acquire(directory)
    with pytest.raises(StorageError, match=r"node was removed or replaced"):
        lock.check()
    other.check()
    for held in (lock, other):
        held.release()


def test_a_probe_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    (tmp_path / "probe-1.partial").touch()
    check_writable(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_is_given_up_on_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int, size_bytes: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    lock = DirectoryLock.acquire(tmp_path)
    monkeypatch.setattr(os, "ftruncate", fail)
    lock.release()
    monkeypatch.undo()
    DirectoryLock.acquire(tmp_path).release()


def test_what_was_left_half_written_is_found_by_name_and_age(tmp_path: Path) -> None:
    ours = [tmp_path / f".identity.key.{'0a' * 8}.partial", tmp_path / f"run.json.{'1b' * 8}.partial"]
    for path in (*ours, tmp_path / "film.partial", tmp_path / "run.json"):
        path.touch()
    (tmp_path / f"pipe.{'2c' * 8}.partial").mkdir()
    assert sorted(find_partials(tmp_path)) == ours
    os.utime(ours[1], (1_000_000_000.0, 1_000_000_000.0))
    assert find_partials(tmp_path, seconds_min=3_600.0) == ours[1:]
    assert find_partials(tmp_path / "nowhere") == []
