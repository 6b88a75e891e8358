"""Durable effects are durable when their handler returns, and a disk that refuses is told, not fatal."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pulsenet.chain.signing import encode_signed, record_digest
from pulsenet.errors import StorageError
from pulsenet.ids import Digest, compute_digest
from pulsenet.node.effects import Release, SaveState, StoreChunk, StoreChunkList, StoreRecord
from pulsenet.node.events import ChunkStored, StoreFailed
from pulsenet.wire.chunks import ChunkList
from pulsenetd.handlers.store import LEASE_SECONDS, StoreHandlers
from pulsenetd.storage.disk import Data, Disk
from pulsenetd.storage.store import Store

DATA = b"weights" * 100
DIGEST = compute_digest(DATA)
LIST = ChunkList(((len(DATA), DIGEST),))


class FullDisk(Disk):
    """A disk that can run out of room."""

    is_full = False

    def write(self, path: Path, data: Data) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(path, data)

    def before_commit(self) -> None:
        if self.is_full:
            raise StorageError("database or disk is full", "enospc")
        super().before_commit()


class Scene:
    def __init__(self, directory: Path, hands: Any) -> None:
        self.disk = FullDisk()
        self.store = Store.open(directory, disk=self.disk)
        self.now = 100.0
        self.thread = ThreadPoolExecutor(1)
        self.hands = hands
        self.table = StoreHandlers(self.store, self.thread, lambda: self.now).table()

    def execute(self, *effects: Any) -> list[Any]:
        return [event for effect in effects for event in self.hands.execute(self.table, effect)]

    def close(self) -> None:
        self.thread.shutdown()
        self.store.close()


@pytest.fixture
def scene(tmp_path: Path, hands: Any) -> Iterator[Scene]:
    made = Scene(tmp_path / "node", hands)
    yield made
    made.close()


def test_everything_ordered_is_there_after_a_restart(scene: Scene, run: Any) -> None:
    manifest = run.news(1).manifest
    posted = scene.execute(
        StoreRecord(manifest),
        StoreChunkList(LIST.blob_id, LIST.encode()),
        StoreChunk(DIGEST, DATA),
        SaveState("trust", b"beliefs"),
    )
    assert posted == [ChunkStored(DIGEST)]
    directory = scene.store.directory
    scene.store.close()
    scene.store = Store.open(directory)
    assert scene.store.record(record_digest(manifest)) == encode_signed(manifest)
    assert scene.store.is_complete(LIST.blob_id)
    assert scene.store.chunk(DIGEST) == DATA
    assert scene.store.state("trust") == b"beliefs"


def test_a_chunk_the_disk_refuses_is_named_and_stops_nothing_else(scene: Scene) -> None:
    """A-DSK-1"""
    scene.disk.is_full = True
    assert scene.execute(StoreChunk(DIGEST, DATA)) == [StoreFailed(DIGEST, "enospc")]
    assert not scene.store.has_chunk(DIGEST)
    scene.disk.is_full = False
    assert scene.execute(StoreChunk(DIGEST, DATA)) == [ChunkStored(DIGEST)]


async def test_chunks_that_come_together_are_kept_together_and_each_is_answered(scene: Scene) -> None:
    parts = {compute_digest(bytes([value])): bytes([value]) for value in range(9)}
    refused = compute_digest(b"refused")
    posted: list[Any] = []
    calls: list[int] = []
    keep = scene.store.put_chunks

    def put_chunks(chunks: Mapping[Digest, bytes]) -> dict[Digest, StorageError]:
        calls.append(len(chunks))
        failed = keep({digest: data for digest, data in chunks.items() if digest != refused})
        return failed | {digest: StorageError("full", "enospc") for digest in chunks if digest == refused}

    scene.store.put_chunks = put_chunks  # type: ignore[method-assign]

    store = scene.table[StoreChunk]
    chunks = [StoreChunk(digest, data) for digest, data in {**parts, refused: b"refused"}.items()]
    async with asyncio.TaskGroup() as tasks:
        for chunk in chunks:
            tasks.create_task(store(chunk, posted.append))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        # Ordered when the chunks are not written yet, and done after them.
        tasks.create_task(scene.table[Release]((Release((LIST.blob_id,), ())), posted.append))  # type: ignore[arg-type]
    assert calls == [1, 9]  # what comes while one is written waits for it and then goes together
    assert posted == [*(ChunkStored(digest) for digest in parts), StoreFailed(refused, "enospc")]
    assert all(scene.store.chunk(digest) == data for digest, data in parts.items())


def test_a_record_or_state_the_disk_refuses_is_the_drivers_to_handle(scene: Scene, run: Any) -> None:
    """A-DSK-1: the driver gives up the rest of the call, so that nothing is announced that is not stored."""
    scene.disk.is_full = True
    for effect in (StoreRecord(run.news(1).manifest), SaveState("trust", b"beliefs")):
        with pytest.raises(StorageError) as caught:
            scene.execute(effect)
        assert caught.value.reason == "enospc"


def test_a_released_blob_goes_when_its_readers_are_through(scene: Scene) -> None:
    scene.execute(StoreChunkList(LIST.blob_id, LIST.encode()), StoreChunk(DIGEST, DATA))
    scene.store.lease(DIGEST, scene.now + LEASE_SECONDS)
    release = Release((LIST.blob_id,), ())
    scene.execute(release)
    assert scene.store.is_complete(LIST.blob_id)
    scene.now += LEASE_SECONDS + 1
    scene.execute(release)
    assert not scene.store.has_chunk(DIGEST)


def test_what_rounds_let_go_of_takes_no_version_with_it(scene: Scene, run: Any) -> None:
    manifest = run.sign(run.manifest(1, blob_id=LIST.blob_id), run.publisher)
    scene.execute(StoreRecord(manifest), StoreChunkList(LIST.blob_id, LIST.encode()), StoreChunk(DIGEST, DATA))
    scene.execute(Release((LIST.blob_id,), (), spares_versions=True))
    assert scene.store.is_complete(LIST.blob_id)
    scene.execute(Release((LIST.blob_id,), ()))
    assert not scene.store.has_chunk(DIGEST)


def test_released_records_go_at_once(scene: Scene, run: Any) -> None:
    manifest = run.news(1).manifest
    scene.execute(StoreRecord(manifest), Release((), (record_digest(manifest),)))
    assert scene.store.record(record_digest(manifest)) is None


def test_a_release_on_a_full_disk_does_not_end_the_node(
    scene: Scene, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A-DSK-1: a release runs as a task of the driver, where an error would end everything."""
    manifest = run.news(1).manifest
    scene.execute(StoreRecord(manifest))
    scene.disk.is_full = True
    scene.execute(Release((), (record_digest(manifest),)))
    assert "disk is full" in caplog.text
    assert scene.store.record(record_digest(manifest)) is not None
    scene.disk.is_full = False
    scene.execute(Release((), (record_digest(manifest),)))
    assert scene.store.record(record_digest(manifest)) is None
