"""The store: what is durable after a crash at any step, what is released and what is not."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pulsenet.chain.records import Contribution, Manifest, SignedRecord, StateAnchor
from pulsenet.chain.signing import encode_signed, record_digest, seal
from pulsenet.errors import IntegrityError, RemoteProtocolError, StorageError
from pulsenet.ids import Digest, PeerId, RunId, Version, compute_digest
from pulsenet.wire.chunks import ChunkList
from pulsenetd.errors import DirectoryLockedError
from pulsenetd.storage.disk import Data, Disk
from pulsenetd.storage.leases import RELEASED_SECONDS_MAX
from pulsenetd.storage.store import Store

MEBIBYTE = 1 << 20


def write_blob(store: Store, data: bytes) -> Digest:
    with store.writing_blob() as writer:
        writer.feed(data)
        return writer.finish().blob_id


def noise(size_bytes: int, seed: int = 0) -> bytes:
    return (seed.to_bytes(4, "little") + bytes(range(256)) * (size_bytes // 256 + 1))[:size_bytes]


def chunk_file(store: Store, digest: Digest) -> Path:
    return store.directory / "chunks" / digest.hex()[:2] / digest.hex()


# Records and state


def test_records_and_state_are_there_after_a_restart(tmp_path: Path, kit: Any) -> None:
    record = kit.sign_manifest(kit.make_manifest())
    store = Store.open(tmp_path)
    assert store.put_record(record) == record_digest(record)
    store.save_state("head", b"one")
    store.save_state("head", b"two")
    store.close()
    store.close()
    again = Store.open(tmp_path)
    assert again.record(record_digest(record)) == encode_signed(record)
    assert again.records_of_type(Manifest.TYPE) == [encode_signed(record)]
    assert again.manifests() == [(record_digest(record), kit.make_manifest())]
    assert again.state("head") == b"two"
    assert again.state("absent") is None
    assert again.record(Digest(bytes(32))) is None
    again.close()


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    store.close()
    with pytest.raises(StorageError, match="closed"):
        store.state("head")


def test_a_second_store_on_the_directory_is_refused_and_touches_nothing(tmp_path: Path) -> None:
    """A-PROC-4: two processes, one directory; another directory works."""
    store = Store.open(tmp_path / "a")
    blob_id = write_blob(store, b"x")
    before = sorted(path for path in (tmp_path / "a").rglob("*") if path.suffix != ".sqlite-shm")
    store_import = "from pathlib import Path; from pulsenetd.storage.store import Store"
    code = f"{store_import}; Store.open(Path({str(tmp_path / 'a')!r}))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"in use by process {os.getpid()}" in other.stderr
    assert sorted(path for path in (tmp_path / "a").rglob("*") if path.suffix != ".sqlite-shm") == before
    assert store.is_complete(blob_id)
    Store.open(tmp_path / "b").close()
    with pytest.raises(DirectoryLockedError):
        Store.open(tmp_path / "a")
    store.close()


def test_a_directory_that_cannot_be_written_is_refused_with_path_and_errno() -> None:
    """A-DSK-4: works for root too, whom mode bits do not stop."""
    with pytest.raises(StorageError, match=r"/proc/pulsenet.*\(E[A-Z]+\)"):
        Store.open(Path("/proc/pulsenet"))


@pytest.mark.skipif(os.getuid() == 0, reason="mode bits do not stop root")
def test_a_read_only_directory_is_refused_with_path_and_errno(tmp_path: Path) -> None:
    """A-DSK-4."""
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="EACCES") as caught:
        Store.open(tmp_path)
    assert caught.value.reason == "readonly"
    assert str(tmp_path) in str(caught.value)


def test_a_damaged_database_is_reported_and_the_lock_given_up(tmp_path: Path) -> None:
    Store.open(tmp_path).close()
    (tmp_path / "store.sqlite").write_bytes(b"rubbish!" * 1024)
    for _ in range(2):
        with pytest.raises(StorageError, match="not a database") as caught:
            Store.open(tmp_path)
        assert caught.value.reason == "damaged"


# Blobs


@pytest.mark.parametrize("size_bytes", [0, 1, MEBIBYTE - 1, MEBIBYTE, MEBIBYTE + 1, 3 * MEBIBYTE])
def test_blobs_of_every_size_come_back_whole(store: Store, size_bytes: int) -> None:
    """A-CHK-2: a blob of 0 bytes is an empty blob, not a missing one."""
    data = noise(size_bytes)
    blob_id = write_blob(store, data)
    assert store.is_complete(blob_id)
    assert store.missing_chunks(blob_id) == []
    assert b"".join(store.read_blob(blob_id)) == data


def test_a_boundary_starts_a_new_chunk(store: Store) -> None:
    with store.writing_blob() as writer:
        writer.feed(b"one")
        writer.boundary()
        writer.feed(b"two")
        chunk_list = writer.finish()
    assert chunk_list.entries == ((3, compute_digest(b"one")), (3, compute_digest(b"two")))


def test_an_unknown_blob_is_not_complete_and_cannot_be_read(store: Store) -> None:
    blob_id = compute_digest(b"unknown")
    assert store.read_list(blob_id) is None
    assert not store.is_complete(blob_id)
    with pytest.raises(StorageError, match="not held"):
        store.missing_chunks(blob_id)


def test_a_list_that_is_not_the_blobs_is_refused(store: Store) -> None:
    data = ChunkList(((3, compute_digest(b"one")),)).encode()
    with pytest.raises(IntegrityError):
        store.put_chunk_list(compute_digest(b"other"), data)
    with pytest.raises(RemoteProtocolError, match="chunk-list"):
        store.put_chunk_list(compute_digest(b"x"), b"x")


def test_a_damaged_chunk_is_found_on_reading_and_can_be_fetched_again(store: Store) -> None:
    """A-DSK-2: damage is caught by digest; the blob is then incomplete, not wrong."""
    data = noise(MEBIBYTE + 5)
    blob_id = write_blob(store, data)
    (_, first), _ = store.read_list(blob_id).entries  # type: ignore[union-attr]
    chunk_file(store, first).write_bytes(bytes(MEBIBYTE))
    with pytest.raises(StorageError, match="missing or damaged") as caught:
        list(store.read_blob(blob_id))
    assert caught.value.reason == "damaged"
    assert store.missing_chunks(blob_id) == [(MEBIBYTE, first)]
    assert store.usage().damaged_count == 1
    store.put_chunks({first: data[:MEBIBYTE]})
    assert b"".join(store.read_blob(blob_id)) == data


def test_damage_is_found_in_all_of_a_blob_at_once(store: Store) -> None:
    """A-DSK-2: else every further chunk would cost one more fetch and one more failed hop."""
    data = noise(3 * MEBIBYTE)
    blob_id = write_blob(store, data)
    entries = store.read_list(blob_id).entries  # type: ignore[union-attr]
    for read in (store.read_blob(blob_id), store.read_arriving_blob(blob_id, lambda: True)):
        for position in (0, 2):
            store.put_chunks({entries[position][1]: data[position * MEBIBYTE : (position + 1) * MEBIBYTE]})
            chunk_file(store, entries[position][1]).write_bytes(bytes(MEBIBYTE))
        with pytest.raises(StorageError, match="missing or damaged"):
            list(read)
        assert store.missing_chunks(blob_id) == [entries[0], entries[2]]


def test_a_failed_write_leaves_no_chunk_behind(store: Store) -> None:
    def fail() -> None:
        with store.writing_blob() as writer:
            writer.feed(noise(2 * MEBIBYTE))
            raise StorageError("full", "enospc")

    kept = write_blob(store, noise(MEBIBYTE))
    with pytest.raises(StorageError):
        fail()
    assert len(store.chunk_digests()) == 1
    assert store.is_complete(kept)


def test_space_is_checked_before_it_is_spent(store: Store) -> None:
    store.require_space(1)
    with pytest.raises(StorageError, match="free some") as caught:
        store.require_space(1 << 60)
    assert caught.value.reason == "enospc"


class FullDisk(Disk):
    """Has room for so many bytes of files."""

    def __init__(self, room_bytes: int) -> None:
        self.room_bytes = room_bytes

    def write(self, path: Path, data: Data) -> None:
        if len(data) > self.room_bytes:
            super().write(path, bytes(data)[: self.room_bytes])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(path, data)
        self.room_bytes -= len(data)


def test_a_full_disk_is_an_error_with_a_reason_and_work_goes_on_when_there_is_room(tmp_path: Path) -> None:
    disk = FullDisk(10)
    store = Store.open(tmp_path, disk=disk)
    with pytest.raises(StorageError, match="ENOSPC") as caught:
        write_blob(store, noise(MEBIBYTE))
    assert caught.value.reason == "enospc"
    assert not list(tmp_path.rglob("*.partial"))
    disk.room_bytes = 4 * MEBIBYTE
    assert store.is_complete(write_blob(store, noise(MEBIBYTE)))
    store.close()


# Release


def commit_manifest(store: Store, kit: Any, blob_id: Digest, number: int) -> Digest:
    record = kit.sign_manifest(kit.make_manifest(version=Version(0, number), blob_id=blob_id))
    return store.put_record(record)


def test_released_blobs_go_and_shared_chunks_stay(store: Store, kit: Any) -> None:
    shared, own = noise(MEBIBYTE), noise(100, seed=1)
    first, second = write_blob(store, shared + own), write_blob(store, shared)
    record = commit_manifest(store, kit, first, 1)
    store.release([first], [record], now=0.0)
    assert store.read_list(first) is None
    assert store.record(record) is None
    assert b"".join(store.read_blob(second)) == shared
    assert len(store.chunk_digests()) == 1
    store.release([second, compute_digest(b"unknown")], [], now=0.0)
    assert len(store.chunk_digests()) == 0
    assert len(store.blob_ids()) == 0


def test_what_members_of_a_round_named_takes_no_version_with_it(store: Store, kit: Any) -> None:
    """Whoever contributes chooses the name of its blob, and can choose that of a version that is served here."""
    version, being_made, own = (write_blob(store, noise(100, seed)) for seed in range(3))
    gone = commit_manifest(store, kit, own, 1)
    store.keep_blob(own)
    commit_manifest(store, kit, version, 2)
    store.release([version, being_made, own], [gone], now=0.0, spares_versions=True)
    assert store.record(gone) is None
    assert store.read_list(own) is None
    assert store.is_complete(version)
    assert store.is_complete(being_made)
    store.release([version], [], now=0.0)
    assert store.read_list(version) is None


def test_a_lease_on_the_blob_or_one_of_its_chunks_delays_the_release(store: Store) -> None:
    blob_id = write_blob(store, noise(MEBIBYTE + 1))
    (_, chunk), _ = store.read_list(blob_id).entries  # type: ignore[union-attr]
    store.lease(blob_id, until=10.0)
    store.lease(blob_id, until=5.0)
    store.lease(chunk, until=20.0)
    store.release([blob_id], [], now=0.0)
    assert store.sweep(now=9.0) == 0
    assert store.sweep(now=15.0) == 0
    assert store.is_complete(blob_id)
    assert store.sweep(now=25.0) == 1
    assert store.chunk(chunk) is None


def test_a_released_blob_is_not_kept_for_ever_by_who_comes_back_every_minute(store: Store) -> None:
    blob_id = write_blob(store, noise(100))
    ((_, chunk),) = store.read_list(blob_id).entries  # type: ignore[union-attr]
    store.lease(chunk, until=60.0)
    store.release([blob_id], [], now=0.0)
    now = 0.0
    while store.read_list(blob_id) is not None:
        now += 30.0
        store.lease(chunk, until=now + 60.0)
        store.sweep(now)
        assert now <= RELEASED_SECONDS_MAX
    assert now == RELEASED_SECONDS_MAX


def test_asking_what_a_released_blob_consists_of_protects_nothing(store: Store) -> None:
    blob_id = write_blob(store, noise(100))
    store.lease_kept(blob_id, until=60.0)
    store.release([blob_id], [], now=0.0)
    for now in (20.0, 40.0, 59.0):
        store.lease_kept(blob_id, until=now + 60.0)
        assert store.sweep(now) == 0
    assert store.sweep(60.0) == 1
    again = write_blob(store, noise(100))
    store.sweep(61.0)
    store.lease_kept(again, until=100.0)
    store.release([again], [], now=62.0)
    assert store.sweep(99.0) == 0


def test_a_release_that_a_lease_delayed_is_done_at_the_next_start(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    blob_id = write_blob(store, b"x")
    store.lease(blob_id, until=1e9)
    store.release([blob_id], [], now=0.0)
    store.close()
    again = Store.open(tmp_path)
    assert len(again.chunk_digests()) == 0
    again.close()


def test_a_blob_wanted_again_before_it_went_stays(store: Store) -> None:
    blob_id = write_blob(store, b"x")
    store.lease(blob_id, until=1.0)
    store.release([blob_id], [], now=0.0)
    write_blob(store, b"x")
    assert store.sweep(now=2.0) == 0
    store.release([blob_id], [], now=3.0)
    assert len(store.chunk_digests()) == 0


def round_records(blob_id: Digest) -> list[SignedRecord]:
    """What rounds name a blob by: a contribution, a state anchor."""
    peer_id, zero = PeerId(bytes(32)), Digest(bytes(32))
    contribution = Contribution(RunId(zero), 0, peer_id, 3, zero, blob_id, 8, 1, 10, 0, 1)
    anchor = StateAnchor(RunId(zero), 0, 3, zero, zero, blob_id, 8)
    return [seal(record, lambda message: bytes(64), peer_id) for record in (contribution, anchor)]


@pytest.mark.parametrize("which", [0, 1])
def test_blobs_of_rounds_outlive_a_restart_by_the_records_that_name_them(tmp_path: Path, which: int) -> None:
    store = Store.open(tmp_path)
    kept, orphan = write_blob(store, noise(MEBIBYTE)), write_blob(store, noise(MEBIBYTE, 1))
    record = round_records(kept)[which]
    store.put_record(record)
    store.discard_blob(kept)
    store.close()
    again = Store.open(tmp_path)
    assert again.is_complete(kept)
    assert not again.is_complete(orphan)
    again.release((kept,), (record_digest(record),), 0.0)
    again.close()
    last = Store.open(tmp_path)
    assert len(last.blob_ids()) == 0
    last.close()


def test_a_blob_that_somebody_elses_record_names_already_is_not_discarded(store: Store) -> None:
    """Authorities write the same state anchor each, and the record of the first may be here before the own blob."""
    blob_id = write_blob(store, noise(MEBIBYTE))
    store.discard_blob(blob_id)
    assert not store.is_complete(blob_id)
    store.put_record(round_records(blob_id)[1])
    assert write_blob(store, noise(MEBIBYTE)) == blob_id
    store.discard_blob(blob_id)
    assert store.is_complete(blob_id)


def test_only_a_blob_without_a_manifest_is_discarded(store: Store, kit: Any) -> None:
    kept, dropped = write_blob(store, b"kept"), write_blob(store, b"dropped")
    commit_manifest(store, kit, kept, 1)
    store.discard_blob(kept)
    store.discard_blob(dropped)
    assert store.is_complete(kept)
    assert store.read_list(dropped) is None


# Crashes


def test_what_was_encoded_but_never_committed_is_gone_at_the_next_start(tmp_path: Path, kit: Any) -> None:
    """A-PUB-1: orphans of a publish that died before its manifest go; what was committed and fetched stays."""
    store = Store.open(tmp_path)
    committed, orphan = write_blob(store, b"committed"), write_blob(store, b"orphan")
    commit_manifest(store, kit, committed, 1)
    fetched = ChunkList(((7, compute_digest(b"fetched")),))
    store.put_chunk_list(fetched.blob_id, fetched.encode())
    store.put_chunks({compute_digest(b"fetched"): b"fetched"})
    store.put_chunks({compute_digest(b"stray"): b"stray"})
    store.close()
    again = Store.open(tmp_path)
    assert again.is_complete(committed)
    assert again.is_complete(fetched.blob_id)
    assert again.read_list(orphan) is None
    assert len(again.chunk_digests()) == 2
    again.close()


def test_a_fetch_goes_on_where_it_was_and_its_chunks_are_checked_again(tmp_path: Path) -> None:
    """A-CHK-4: half of a blob survives kill -9; the chunk the crash damaged is fetched again, no other."""
    parts = [noise(MEBIBYTE, seed) for seed in range(8)]
    chunk_list = ChunkList(tuple((len(part), compute_digest(part)) for part in parts))
    store = Store.open(tmp_path)
    store.put_chunk_list(chunk_list.blob_id, chunk_list.encode())
    for part in parts[:4]:
        store.put_chunks({compute_digest(part): part})
    path = chunk_file(store, compute_digest(parts[2]))
    path.write_bytes(bytes(MEBIBYTE))
    store.close()
    again = Store.open(tmp_path)
    missing = [digest for _, digest in again.missing_chunks(chunk_list.blob_id)]
    assert missing == [compute_digest(parts[index]) for index in (2, 4, 5, 6, 7)]
    for digest in missing:
        again.put_chunks({digest: next(part for part in parts if compute_digest(part) == digest)})
    assert b"".join(again.read_blob(chunk_list.blob_id)) == b"".join(parts)
    again.close()


def test_a_short_chunk_of_a_whole_blob_is_found_at_the_start(tmp_path: Path) -> None:
    """A-DSK-2: sizes are compared at every start, without reading whole blobs."""
    chunk_list = ChunkList(((5, compute_digest(b"whole")),))
    store = Store.open(tmp_path)
    store.put_chunk_list(chunk_list.blob_id, chunk_list.encode())
    store.put_chunks({compute_digest(b"whole"): b"whole"})
    chunk_file(store, compute_digest(b"whole")).write_bytes(b"who")
    store.close()
    again = Store.open(tmp_path)
    assert again.missing_chunks(chunk_list.blob_id) == [(5, compute_digest(b"whole"))]
    again.close()


def publish_once(store: Store, kit: Any) -> None:
    """A blob of two chunks, its manifest and a state in one commit, then the release of the blob before."""
    data = noise(MEBIBYTE + 9)
    blob_id = write_blob(store, data)
    manifest = kit.make_manifest(version=Version(0, 2), blob_id=blob_id)
    store.commit([kit.sign_manifest(manifest)], [("version", b"2")])
    store.release([write_id for write_id in [old_blob_id()] if store.read_list(write_id)], [], now=0.0)


def old_blob_id() -> Digest:
    return ChunkList(((3, compute_digest(b"old")),)).blob_id


def prepare(directory: Path, kit: Any) -> None:
    store = Store.open(directory)
    blob_id = write_blob(store, b"old")
    assert blob_id == old_blob_id()
    store.commit([kit.sign_manifest(kit.make_manifest(blob_id=blob_id))], [("version", b"1")])
    store.close()


def count_steps(tmp_path: Path, kit: Any) -> int:
    prepare(tmp_path, kit)
    disk = kit.CuttingDisk()
    store = Store.open(tmp_path, disk=disk)
    started = len(disk.steps)
    publish_once(store, kit)
    store.close()
    names = {name for name, _ in disk.steps}
    assert names >= {"write", "fsync", "rename", "sync_directory", "before_commit", "after_commit", "remove"}
    assert started < len(disk.steps)
    return len(disk.steps)


@pytest.mark.parametrize("how", ["kept", "zeros", "unnamed"])
def test_a_power_cut_at_any_step_leaves_the_old_version_or_the_new(tmp_path: Path, kit: Any, how: str) -> None:
    """A-DSK-2, A-PUB-1: between write, fsync, rename, directory fsync and commit, everywhere."""
    step_count = count_steps(tmp_path / "dry", kit)
    seen = set()
    for cut_at in range(step_count):
        directory = tmp_path / f"{cut_at}"
        prepare(directory, kit)
        disk = kit.CuttingDisk(cut_at=cut_at)
        store = None
        try:
            store = Store.open(directory, disk=disk)
            publish_once(store, kit)
        except kit.PowerCut:
            pass
        if store is not None:
            store.close()
        disk.lose_unsynced(how)

        again = Store.open(directory)
        version = again.state("version")
        seen.add(version)
        named = {manifest.version.number: manifest.blob_id for _, manifest in again.manifests()}
        if version == b"1":
            assert b"".join(again.read_blob(named[1])) == b"old"
            assert 2 not in named
        else:
            assert version == b"2"
            assert b"".join(again.read_blob(named[2])) == noise(MEBIBYTE + 9)
        held = {digest for blob in named.values() for _, digest in (again.read_list(blob) or ChunkList(())).entries}
        assert len(again.chunk_digests()) == len(held), "orphans stayed"
        assert not list(directory.rglob("*.partial"))
        again.close()
    assert seen == {b"1", b"2"}


def test_committing_a_record_twice_is_harmless(store: Store, kit: Any) -> None:
    record = kit.sign_manifest(kit.make_manifest())
    assert store.commit([record, record], []) == (record_digest(record), record_digest(record))
    assert store.records_of_type(Manifest.TYPE) == [encode_signed(record)]
