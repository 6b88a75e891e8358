"""Content-addressed files."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from pulsenet import limits
from pulsenet.errors import StorageError
from pulsenet.ids import compute_digest
from pulsenetd.storage.chunk_files import ChunkFiles
from pulsenetd.storage.disk import Disk

DATA = b"some chunk"
DIGEST = compute_digest(DATA)


def open_chunks(root: Path, disk: Disk | None = None) -> ChunkFiles:
    chunks = ChunkFiles(root, disk or Disk())
    chunks.scan()
    return chunks


def path_of(root: Path) -> Path:
    return root / DIGEST.hex()[:2] / DIGEST.hex()


def test_a_chunk_survives_a_restart(tmp_path: Path) -> None:
    open_chunks(tmp_path).write(DIGEST, DATA)
    again = open_chunks(tmp_path)
    assert DIGEST in again
    assert again.get(DIGEST) == DATA
    assert list(again) == [DIGEST]
    assert (len(again), again.total_size_bytes, again.size_bytes(DIGEST)) == (1, len(DATA), len(DATA))


def test_an_absent_chunk_is_none_and_deleting_it_is_no_error(tmp_path: Path) -> None:
    chunks = open_chunks(tmp_path)
    assert chunks.get(DIGEST) is None
    assert chunks.size_bytes(DIGEST) is None
    chunks.remove(DIGEST)


@pytest.mark.parametrize("damage", [b"", b"some chunc", bytes(len(DATA)), DATA + b"x"])
def test_damaged_bytes_are_deleted_never_served(tmp_path: Path, damage: bytes) -> None:
    """A-DSK-2: short, zero-filled and flipped files are caught by their digest."""
    chunks = open_chunks(tmp_path)
    chunks.write(DIGEST, DATA)
    path_of(tmp_path).write_bytes(damage)
    assert chunks.get(DIGEST) is None
    assert DIGEST not in chunks
    assert chunks.damaged_count == 1
    assert not path_of(tmp_path).exists()
    chunks.write(DIGEST, DATA)
    assert chunks.get(DIGEST) == DATA


def test_putting_a_chunk_again_repairs_a_damaged_file(tmp_path: Path) -> None:
    chunks = open_chunks(tmp_path)
    chunks.write(DIGEST, DATA)
    path_of(tmp_path).write_bytes(bytes(len(DATA)))
    chunks.write(DIGEST, DATA)
    assert chunks.get(DIGEST) == DATA


def test_a_file_deleted_behind_our_back_is_absent(tmp_path: Path) -> None:
    chunks = open_chunks(tmp_path)
    chunks.write(DIGEST, DATA)
    path_of(tmp_path).unlink()
    assert chunks.get(DIGEST) is None
    assert DIGEST not in chunks


def test_an_unreadable_file_is_a_storage_error(tmp_path: Path) -> None:
    chunks = open_chunks(tmp_path)
    chunks.write(DIGEST, DATA)
    path_of(tmp_path).unlink()
    path_of(tmp_path).mkdir()
    with pytest.raises(StorageError, match="EISDIR"):
        chunks.get(DIGEST)
    with pytest.raises(StorageError, match="cannot delete"):
        chunks.remove(DIGEST)


def test_scanning_deletes_partials_and_giants_and_ignores_strangers(tmp_path: Path) -> None:
    """A-DSK-3: .partial leftovers are removed at start."""
    folder = tmp_path / "ab"
    folder.mkdir()
    (folder / "x.partial").write_bytes(b"half")
    (folder / "readme").write_bytes(b"stranger")
    giant = folder / ("ab" * 32)
    with giant.open("wb") as file:
        file.truncate(limits.CHUNK_SIZE_BYTES_MAX + 1)
    chunks = open_chunks(tmp_path)
    assert len(chunks) == 0
    assert [path.name for path in folder.iterdir()] == ["readme"]
    assert chunks.damaged_count == 1


def test_a_file_that_a_power_cut_left_empty_is_no_chunk_after_a_restart(tmp_path: Path) -> None:
    open_chunks(tmp_path).write(DIGEST, DATA)
    path_of(tmp_path).write_bytes(b"")
    again = open_chunks(tmp_path)
    assert (DIGEST in again, again.damaged_count) == (False, 1)
    assert not path_of(tmp_path).exists()


def test_what_became_no_chunk_file_is_never_read_to_its_end(tmp_path: Path) -> None:
    chunks = open_chunks(tmp_path)
    chunks.write(DIGEST, DATA)
    path_of(tmp_path).unlink()
    path_of(tmp_path).symlink_to("/dev/zero")
    assert chunks.get(DIGEST) is None
    assert not path_of(tmp_path).is_symlink()
    path_of(tmp_path).symlink_to("/dev/zero")
    again = open_chunks(tmp_path)
    assert (DIGEST in again, again.damaged_count) == (False, 1)
    assert not path_of(tmp_path).is_symlink()


class CountingDisk(Disk):
    """Says what was made durable, and refuses to where told."""

    def __init__(self) -> None:
        self.synced: list[str] = []
        self.refused: set[str] = set()

    def fsync(self, path: Path) -> None:
        if path.name in self.refused:
            raise OSError(errno.EIO, "refused")
        self.synced.append(path.name)

    def sync_directory(self, path: Path) -> None:
        if path.name in self.refused:
            raise OSError(errno.EIO, "refused")
        self.synced.append(path.name)


def test_chunks_are_made_durable_together_and_once(tmp_path: Path) -> None:
    disk = CountingDisk()
    chunks = open_chunks(tmp_path, disk)
    disk.synced.clear()
    items = {compute_digest(bytes([value])): bytes([value]) for value in range(20)}
    for digest, data in items.items():
        chunks.write(digest, data)
    assert disk.synced == []
    chunks.sync(items)
    assert sorted(disk.synced) == sorted({*(d.hex() for d in items), *(d.hex()[:2] for d in items)})
    chunks.sync(items)
    assert len(disk.synced) == len(items) + len({digest.hex()[:2] for digest in items})
    assert len(open_chunks(tmp_path)) == 20


@pytest.mark.parametrize("refused", ["file", "folder"])
def test_of_chunks_that_cannot_be_made_durable_nothing_stays(tmp_path: Path, refused: str) -> None:
    disk = CountingDisk()
    chunks = open_chunks(tmp_path, disk)
    kept, lost = compute_digest(b"kept"), compute_digest(b"lost")
    chunks.write(kept, b"kept")
    chunks.sync([kept])
    chunks.write(lost, b"lost")
    disk.refused = {lost.hex() if refused == "file" else lost.hex()[:2]}
    with pytest.raises(StorageError, match="EIO"):
        chunks.sync([kept, lost])
    assert (chunks.get(kept), chunks.get(lost)) == (b"kept", None)
    disk.refused.clear()
    chunks.write(lost, b"lost")
    chunks.sync([lost])
    assert chunks.get(lost) == b"lost"


def test_who_waits_for_a_chunk_is_told_when_it_is_kept_or_given_up(tmp_path: Path) -> None:
    chunks = open_chunks(tmp_path)
    gives_up = threading.Event()
    outcomes: list[bool] = []
    waiting = [
        threading.Thread(target=lambda: outcomes.append(chunks.wait_for(DIGEST, gives_up.is_set))) for _ in range(2)
    ]
    waiting[0].start()
    waiting[0].join(0.05)
    assert waiting[0].is_alive()
    chunks.wake()
    chunks.write(DIGEST, DATA)
    waiting[0].join(10)
    assert outcomes == [True]
    chunks.remove(DIGEST)
    waiting[1].start()
    gives_up.set()
    chunks.wake()
    waiting[1].join(10)
    assert outcomes == [True, False]
