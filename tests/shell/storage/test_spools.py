"""Spools on their own: routes, composing, damage."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pulsenet.codec.changes import Changes, decode_changes
from pulsenet.errors import StorageError
from pulsenet.ids import Digest, Version
from pulsenet.tensors.params import TensorSpec, make_table
from pulsenetd.storage.spools import Point, SpoolDirectory, compose_spools, write_unnamed

TABLE = make_table([TensorSpec("a", "BF16", (100,)), TensorSpec("b", "F32", (10,))])
UNLIMITED = 1 << 30


def point(number: int) -> Point:
    return Point(Version(0, number), Digest(bytes([number]) * 32))


def changes(tensor_index: int, *triples: tuple[int, int, int]) -> Changes:
    bits = np.dtype(np.uint16 if tensor_index == 0 else np.uint32)
    indices, old, new = zip(*triples, strict=True)
    return Changes(tensor_index, np.array(indices, np.uint32), np.array(old, bits), np.array(new, bits))


def keep(spools: SpoolDirectory, base: int, target: int, *items: Changes, size_bytes_max: int = UNLIMITED) -> Any:
    writer = spools.begin(TABLE)
    for item in items:
        writer.write(item)
    spool = writer.finish()
    spools.keep(point(base), point(target), spool, size_bytes_max=size_bytes_max)
    return spool


@pytest.fixture
def spools(tmp_path: Path) -> SpoolDirectory:
    return SpoolDirectory(tmp_path / "spools")


def test_blocks_of_a_tensor_read_as_one(spools: SpoolDirectory) -> None:
    spool = keep(spools, 1, 2, changes(0, (1, 5, 6)), changes(0, (70, 8, 9)), changes(1, (0, 1, 2)))
    assert spool.tensor_indices == [0, 1]
    assert spool.read_tensor(0) == changes(0, (1, 5, 6), (70, 8, 9))
    assert spool.read_tensor(1) == changes(1, (0, 1, 2))
    assert len(list(spool.read_blocks())) == 3


def test_an_unchanged_tensor_has_no_records(spools: SpoolDirectory) -> None:
    assert keep(spools, 1, 2, changes(1, (0, 1, 2))).read_tensor(0) is None
    empty = keep(spools, 2, 3)
    assert (empty.size_bytes, empty.tensor_indices, list(empty.read_blocks())) == (0, [], [])


def test_a_route_is_found_backwards_and_ends_at_a_gap(spools: SpoolDirectory) -> None:
    hops = [keep(spools, number, number + 1, changes(0, (number, 0, 1))) for number in (1, 2, 3)]
    assert spools.find_route(Version(0, 1), point(4)) == hops
    assert spools.find_route(Version(0, 3), point(4)) == hops[2:]
    assert spools.find_route(Version(0, 4), point(4)) == []
    assert spools.find_route(Version(0, 0), point(4)) is None
    assert spools.find_route(Version(0, 1), Point(Version(0, 4), Digest(bytes(32)))) is None
    spools.clear()
    assert spools.find_route(Version(0, 3), point(4)) is None


def test_a_circle_of_hops_ends(spools: SpoolDirectory) -> None:
    keep(spools, 1, 2, changes(0, (0, 0, 1)))
    keep(spools, 2, 1, changes(0, (0, 1, 0)))
    assert spools.find_route(Version(0, 9), point(2)) is None


def test_composing_drops_what_came_back(spools: SpoolDirectory) -> None:
    route = [
        keep(spools, 1, 2, changes(0, (1, 5, 6), (2, 7, 8)), changes(1, (3, 1, 2))),
        keep(spools, 2, 3, changes(0, (1, 6, 5), (2, 8, 9))),
        keep(spools, 3, 4, changes(1, (3, 2, 1))),
    ]
    assert list(compose_spools(route)) == [changes(0, (2, 7, 9))]
    assert list(compose_spools([])) == []


def test_the_oldest_spools_go_beyond_the_limit(spools: SpoolDirectory, tmp_path: Path) -> None:
    size_bytes = keep(spools, 1, 2, changes(0, (0, 0, 1))).size_bytes
    keep(spools, 2, 3, changes(0, (0, 1, 2)))
    keep(spools, 3, 4, changes(0, (0, 2, 3)), size_bytes_max=2 * size_bytes)
    assert spools.find_route(Version(0, 2), point(4)) is not None
    assert spools.find_route(Version(0, 1), point(4)) is None
    assert len(list((tmp_path / "spools").iterdir())) == 2
    keep(spools, 3, 4, changes(0, (0, 2, 3)), size_bytes_max=0)
    assert not list((tmp_path / "spools").iterdir())


def test_an_abandoned_spool_leaves_no_file(spools: SpoolDirectory, tmp_path: Path) -> None:
    writer = spools.begin(TABLE)
    writer.write(changes(0, (0, 0, 1)))
    writer.abandon()
    assert not list((tmp_path / "spools").iterdir())


def test_a_spool_that_cannot_be_deleted_fails_nothing(spools: SpoolDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by the fail points: a hop that was written and saved ended the node when its old spool would not go."""

    def fail(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "unlink", fail)
    keep(spools, 1, 2, changes(0, (0, 0, 1)))
    keep(spools, 2, 3, changes(0, (0, 1, 0)), size_bytes_max=0)
    spools.begin(TABLE).abandon()
    spools.clear()


def test_a_damaged_spool_is_a_storage_error(spools: SpoolDirectory, tmp_path: Path) -> None:
    spool = keep(spools, 1, 2, changes(0, (0, 0, 1)))
    spool.path.write_bytes(bytes(spool.size_bytes))
    with pytest.raises(StorageError, match="damaged") as caught:
        spool.read_tensor(0)
    assert caught.value.reason == "damaged"


class FullFile:
    """A file whose disk has no room left."""

    def write(self, _: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_named_at_every_step(spools: SpoolDirectory, tmp_path: Path) -> None:
    writer = spools.begin(TABLE)
    writer._file.close()
    writer._file = FullFile()  # type: ignore[assignment]
    for step in (lambda: writer.write(changes(0, (0, 0, 1))), writer.finish):
        with pytest.raises(StorageError, match="ENOSPC") as caught:
            step()
        assert caught.value.reason == "enospc"
    writer.abandon()
    assert not list((tmp_path / "spools").iterdir())
    (tmp_path / "spools").rmdir()
    with pytest.raises(StorageError, match="ENOENT"):
        spools.begin(TABLE)
    with pytest.raises(StorageError, match="ENOENT"):
        write_unnamed(tmp_path / "spools", iter([]), on_size=lambda _: None)


def test_a_hand_over_file_has_no_name_and_can_only_be_read(tmp_path: Path) -> None:
    items = [changes(0, (4, 1, 2)), changes(1, (5, 6, 7))]
    sizes: list[int] = []
    descriptor, size_bytes = write_unnamed(tmp_path, iter(items), on_size=sizes.append)
    assert sizes[-1] == size_bytes
    assert not list(tmp_path.iterdir())
    assert list(decode_changes(os.pread(descriptor, size_bytes, 0), TABLE)) == items
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(descriptor, b"x")
    os.close(descriptor)
