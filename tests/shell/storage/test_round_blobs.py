"""Blobs of rounds: put and read part by part, whole or absent, and kept only if somebody names them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from pulsenet.chain.records import StateAnchor
from pulsenet.chain.signing import seal
from pulsenet.errors import RemoteProtocolError, StorageError
from pulsenet.ids import Digest, PeerId, RunId
from pulsenet.local.shared_memory import Region
from pulsenet.wire.chunks import ChunkCutter
from pulsenetd.storage.disk import Data, Disk
from pulsenetd.storage.round_blobs import RoundBlobs
from pulsenetd.storage.store import Store

MEBIBYTE = 1 << 20
ROOM = 100 * MEBIBYTE


def noise(size_bytes: int, seed: int = 0) -> np.ndarray:  # type: ignore[type-arg]
    return np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8)


def put(blobs: RoundBlobs, data: np.ndarray, part_size_bytes: int = MEBIBYTE) -> Digest:  # type: ignore[type-arg]
    """Put a blob in parts; return its id."""
    blob_id = None
    for start in range(0, data.size, part_size_bytes):
        part = data[start : start + part_size_bytes]
        is_last = start + part.size == data.size
        blob_id, size_bytes = blobs.put_part(part, is_last=is_last, size_bytes_max=ROOM, is_first=start == 0)
        assert size_bytes == start + part.size
        assert (blob_id is None) != is_last
    assert blob_id is not None
    return blob_id


def read(blobs: RoundBlobs, blob_id: Digest, size_bytes_max: int) -> tuple[bytes, int]:
    """Read a blob in parts; return it and how many parts it took."""
    data, count, is_last = b"", 0, False
    while not is_last:
        part = blobs.read_part(blob_id, len(data), size_bytes_max)
        region = Region.open_snapshot(part.descriptor, part.size_bytes)
        assert part.size_bytes <= size_bytes_max
        data += region.bytes.tobytes()
        region.close()
        count, is_last = count + 1, part.is_last
    return data, count


@pytest.mark.parametrize("part_size_bytes", [70_001, MEBIBYTE, 4 * MEBIBYTE])
def test_a_blob_is_what_its_parts_were_however_it_is_cut(store: Store, part_size_bytes: int) -> None:
    data = noise(3 * MEBIBYTE + 17)
    cutter = ChunkCutter()
    cutter.feed(data.tobytes())
    cutter.finish()
    blobs = RoundBlobs(store)
    blob_id = put(blobs, data, part_size_bytes)
    assert blob_id == cutter.chunk_list.blob_id
    assert store.is_complete(blob_id)
    assert blobs.made_size_bytes(blob_id) == data.size
    assert blobs.made_size_bytes(Digest(bytes(32))) is None
    for size_bytes_max in (1_000_003, 64 * MEBIBYTE):
        found, count = read(blobs, blob_id, size_bytes_max)
        assert found == data.tobytes()
        assert count == -(-data.size // size_bytes_max)


def test_one_blob_after_another_is_put(store: Store) -> None:
    blobs = RoundBlobs(store)
    first, second = put(blobs, noise(1_000)), put(blobs, noise(2_000, 1))
    assert first != second
    assert read(blobs, first, 10_000)[0] == noise(1_000).tobytes()
    assert read(blobs, second, 10_000)[0] == noise(2_000, 1).tobytes()


def test_what_is_not_there_is_refused_by_its_reason(store: Store) -> None:
    blobs = RoundBlobs(store)
    blob_id = put(blobs, noise(1_000))
    for asked, offset, reason in (
        (Digest(bytes(32)), 0, "not-found"),
        (blob_id, 1_000, "range"),
        (blob_id, -1, "range"),
    ):
        with pytest.raises(StorageError) as caught:
            blobs.read_part(asked, offset, 10)
        assert caught.value.reason == reason


def test_damage_is_found_in_all_of_a_blob_and_no_memory_is_left_open(store: Store) -> None:
    """A-DSK-2: one fetch mends the blob, not one a chunk."""
    blobs = RoundBlobs(store)
    blob_id = put(blobs, noise(4 * MEBIBYTE))
    chunk_list = store.read_list(blob_id)
    assert chunk_list is not None
    for position in (1, 3):
        name = chunk_list.entries[position][1].hex()
        (store.directory / "chunks" / name[:2] / name).write_bytes(b"rotten")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(StorageError) as caught:
        read(blobs, blob_id, 64 * MEBIBYTE)
    assert caught.value.reason == "damaged"
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert [digest for _, digest in store.missing_chunks(blob_id)] == [chunk_list.entries[i][1] for i in (1, 3)]


def test_a_blob_that_outgrows_its_limit_leaves_nothing(store: Store) -> None:
    blobs = RoundBlobs(store)
    blobs.put_part(noise(MEBIBYTE), is_last=False, size_bytes_max=MEBIBYTE + 10)
    with pytest.raises(RemoteProtocolError) as caught:
        blobs.put_part(noise(11), is_last=True, size_bytes_max=MEBIBYTE + 10, is_first=False)
    assert caught.value.code == "handoff-size"
    assert len(store.chunk_digests()) == 0
    assert store.is_complete(put(blobs, noise(10)))


class FullDisk(Disk):
    """Refuses every file while it is full."""

    is_full = False

    def write(self, path: Path, data: Data) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(path, data)


def test_a_disk_that_fills_up_in_the_middle_keeps_nothing_and_takes_the_next(tmp_path: Path) -> None:
    disk = FullDisk()
    store = Store.open(tmp_path, disk=disk)
    blobs = RoundBlobs(store)
    kept = put(blobs, noise(MEBIBYTE, 1))
    blobs.put_part(noise(2 * MEBIBYTE), is_last=False, size_bytes_max=ROOM)
    disk.is_full = True
    with pytest.raises(StorageError) as caught:
        blobs.put_part(noise(2 * MEBIBYTE, 2), is_last=True, size_bytes_max=ROOM, is_first=False)
    assert caught.value.reason == "enospc"
    assert len(store.chunk_digests()) == 1
    disk.is_full = False
    again = put(blobs, noise(4 * MEBIBYTE))
    assert read(blobs, again, 64 * MEBIBYTE)[0] == noise(4 * MEBIBYTE).tobytes()
    assert store.is_complete(kept)
    store.close()


def test_a_blob_that_begins_gives_up_the_one_in_work(store: Store) -> None:
    blobs = RoundBlobs(store)
    blobs.put_part(noise(3 * MEBIBYTE), is_last=False, size_bytes_max=ROOM)
    again = put(blobs, noise(2 * MEBIBYTE, 1))
    assert read(blobs, again, ROOM)[0] == noise(2 * MEBIBYTE, 1).tobytes()
    with pytest.raises(RemoteProtocolError, match="a part of no blob"):
        blobs.put_part(noise(10), is_last=True, size_bytes_max=ROOM, is_first=False)


def test_a_blob_in_work_goes_with_its_process(store: Store) -> None:
    blobs = RoundBlobs(store)
    blobs.put_part(noise(MEBIBYTE), is_last=False, size_bytes_max=ROOM)
    blobs.close()
    blobs.close()
    assert len(store.chunk_digests()) == 0


def test_a_blob_that_nobody_names_goes_two_rounds_later(store: Store) -> None:
    blobs = RoundBlobs(store)
    named, moot = put(blobs, noise(1_000)), put(blobs, noise(1_000, 1))
    peer_id, zero = PeerId(bytes(32)), Digest(bytes(32))
    anchor = StateAnchor(RunId(zero), 0, 3, zero, zero, named, 1_000)
    store.put_record(seal(anchor, lambda message: bytes(64), peer_id))
    blobs.let_go()
    assert store.is_complete(moot), "its record may be on its way"
    newer = put(blobs, noise(1_000, 2))
    blobs.let_go()
    assert store.is_complete(named)
    assert not store.is_complete(moot)
    assert store.is_complete(newer)
    assert blobs.made_size_bytes(moot) is None


def test_what_a_process_left_goes_with_the_rounds_of_the_next(store: Store) -> None:
    left: set[Digest] = set()
    first = RoundBlobs(store, left)
    moot = put(first, noise(1_000, 1))
    first.let_go()
    first.close()
    assert left == {moot}
    second = RoundBlobs(store, left)
    second.let_go()
    second.close()
    assert store.is_complete(moot), "its record may be on its way"
    third = RoundBlobs(store, left)
    third.let_go()
    third.let_go()
    assert not store.is_complete(moot)
    assert left == set()
