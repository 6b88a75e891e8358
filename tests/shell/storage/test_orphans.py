"""What nothing refers to goes when a node's machines are built, and nothing else does."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from pulsenet.chain.records import Catalogue, Manifest
from pulsenet.errors import StorageError
from pulsenet.ids import Digest, compute_digest
from pulsenet.wire.chunks import ChunkList
from pulsenetd.storage.database import Database
from pulsenetd.storage.orphans import Needs, release_orphans
from pulsenetd.storage.store import Store


def fetch(store: Store, data: bytes) -> Digest:
    """Keep a blob as one that came from a peer."""
    digest = compute_digest(data)
    chunk_list = ChunkList(((len(data), digest),))
    store.put_chunk_list(chunk_list.blob_id, chunk_list.encode())
    store.put_chunks({digest: data})
    return chunk_list.blob_id


def name(store: Store, kit: Any, blob_id: Digest, number: int) -> Digest:
    version = kit.make_manifest(blob_id=blob_id, trainer_step=number)
    return store.put_record(kit.sign_manifest(version))


def test_a_record_that_is_not_needed_goes_and_its_blob_unless_another_names_it(store: Store, kit: Any) -> None:
    shared, own = fetch(store, b"shared"), fetch(store, b"own")
    kept = name(store, kit, shared, 1)
    gone = [name(store, kit, shared, 2), name(store, kit, own, 3)]
    release_orphans(store, [Needs((Manifest,), frozenset([kept])), Needs((Catalogue,))], 0.0)
    assert store.record(kept) is not None
    assert [store.record(digest) for digest in gone] == [None, None]
    assert store.blob_ids() == [shared]
    assert store.chunk_digests() == [compute_digest(b"shared")]


def test_kinds_of_which_nobody_says_what_is_needed_stay_with_their_blobs(store: Store, kit: Any) -> None:
    blob_id = fetch(store, b"of a version")
    digest = name(store, kit, blob_id, 1)
    release_orphans(store, [Needs((Catalogue,)), Needs()], 0.0)
    assert store.record(digest) is not None
    assert store.blob_ids() == [blob_id]


def test_a_blob_without_a_record_stays_for_whoever_needs_it(store: Store) -> None:
    kept, gone = fetch(store, b"kept"), fetch(store, b"gone")
    release_orphans(store, [Needs(blob_ids=frozenset([kept])), Needs()], 0.0)
    assert store.blob_ids() == [kept]
    assert not store.is_complete(gone)


def test_what_a_process_made_and_no_record_names_yet_is_its_own(store: Store) -> None:
    """Machines are built anew in the middle of a life, too."""
    with store.writing_blob() as writer:
        writer.feed(b"in work")
        blob_id = writer.finish().blob_id
    release_orphans(store, [Needs()], 0.0)
    assert store.blob_ids() == [blob_id]


def test_a_blob_that_somebody_reads_goes_when_they_are_done(store: Store) -> None:
    blob_id = fetch(store, b"read")
    store.lease(blob_id, until=10.0)
    release_orphans(store, [Needs()], 5.0)
    assert store.is_complete(blob_id)
    store.sweep(11.0)
    assert not store.is_complete(blob_id)


def test_it_is_said_what_went_and_nothing_is_written_where_nothing_goes(
    store: Store, kit: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    name(store, kit, fetch(store, b"one"), 1)
    with caplog.at_level(logging.INFO):
        release_orphans(store, [Needs((Manifest,))], 0.0)
        assert "1 records and 1 blobs" in caplog.text
        caplog.clear()
        monkeypatch.setattr(Database, "transaction", None)
        release_orphans(store, [Needs((Manifest,))], 0.0)
    assert caplog.text == ""


def test_a_crash_between_the_records_and_their_blobs_is_made_up_for(tmp_path: Path, kit: Any) -> None:
    """A-DSK-3: whoever names them goes first."""
    disk = kit.CuttingDisk()
    store = Store.open(tmp_path, disk=disk)
    blob_id = fetch(store, b"of a version")
    digest = name(store, kit, blob_id, 1)
    begun = len(disk.steps)
    release_orphans(store, [Needs((Manifest,))], 0.0)
    step_count = len(disk.steps) - begun
    store.close()
    assert step_count > 2
    for step in range(step_count):
        disk = kit.CuttingDisk()
        store = Store.open(tmp_path, disk=disk)
        fetch(store, b"of a version")
        name(store, kit, blob_id, 1)
        disk.cut_at = len(disk.steps) + step
        with pytest.raises(kit.PowerCut):
            release_orphans(store, [Needs((Manifest,))], 0.0)
        store.close()
        again = Store.open(tmp_path)
        release_orphans(again, [Needs((Manifest,))], 0.0)
        assert again.record(digest) is None
        assert again.blob_ids() == []
        assert again.chunk_digests() == []
        again.close()


def test_a_disk_that_refuses_keeps_no_node_from_its_start(
    tmp_path: Path, kit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    disk = kit.CuttingDisk()
    store = Store.open(tmp_path, disk=disk)
    digest = name(store, kit, fetch(store, b"of a version"), 1)

    def refuse() -> None:
        raise StorageError("the disk is full", "enospc")

    disk.before_commit = refuse
    release_orphans(store, [Needs((Manifest,))], 0.0)
    assert "could not be deleted: the disk is full" in caplog.text
    assert store.record(digest) is not None
    store.close()
