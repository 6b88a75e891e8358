"""The publisher's pipeline on real weights, stores and patches."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pulsenet.chain.records import Kind
from pulsenet.codec.blocks import Codec
from pulsenet.codec.patch import decode_patch, encode_parts
from pulsenet.errors import StorageError
from pulsenet.ids import Version
from pulsenet.node.effects import Commit, EncodeSkip, EncodeSnapshot, StoreAnchor
from pulsenet.node.events import EncodeFailed, ExtraFailed
from pulsenet.tensors.digest import compute_region_root
from pulsenet.tensors.params import TensorSpec, make_table
from pulsenetd.storage import publishing
from pulsenetd.storage.parts import PartQueue
from pulsenetd.storage.rebuild import rebuild
from pulsenetd.storage.spools import SpoolDirectory


def test_the_first_version_is_an_anchor_and_the_next_a_small_patch(node: Any, kit: Any) -> None:
    model = kit.Model()
    first = node.publish(model)
    assert first.root == compute_region_root(model.table, model.bytes)
    assert first.encoded_size_bytes > model.table.size_bytes
    model.step()
    second = node.publish(model)
    assert second.root == compute_region_root(model.table, model.bytes)
    assert 0 < second.changed_count < model.table.element_count // 20
    assert second.encoded_size_bytes < model.table.size_bytes // 10
    assert node.version == Version(0, 2)


@pytest.mark.parametrize(("cpu_seconds_max", "codec"), [(1e-9, Codec.PLAIN), (60.0, Codec.TIGHT)])
def test_auto_leaves_tight_where_it_would_take_more_cpu_than_was_stated(
    cpu_seconds_max: float, codec: Codec, node: Any, kit: Any, tmp_path: Path
) -> None:
    node.publisher = publishing.Publisher(node.store, tmp_path / "own-spools", cpu_seconds_max=cpu_seconds_max)
    model = kit.Model()
    node.publish(model)
    view = model.table.view(model.bytes, 0)
    # Enough changes that what *tight* writes about its classes is made up for.
    view[np.random.default_rng(1).random(view.size) < 0.1] ^= 1
    assert node.publish(model).codec_id == codec


def test_an_anchor_starts_a_chunk_at_every_tensor_so_that_anchors_share_chunks(node: Any, kit: Any) -> None:
    model = kit.Model()
    first = node.publish(model)
    model.table.view(model.bytes, 0)[0] ^= 1
    second = node.publish(model, Kind.ANCHOR)
    old = set(node.store.read_list(first.blob_id).digests)
    new = set(node.store.read_list(second.blob_id).digests)
    assert len(new - old) == 1


def test_a_step_that_changes_nothing_still_makes_a_version(node: Any, kit: Any) -> None:
    """A-ENC-6."""
    model = kit.Model()
    first = node.publish(model)
    second, third = node.publish(model), node.publish(model)
    assert (second.changed_count, second.root) == (0, first.root)
    assert third.blob_id == second.blob_id
    assert node.version == Version(0, 3)


def test_the_baseline_moves_only_at_the_commit(node: Any, kit: Any) -> None:
    """A-PUB-3: what a failed publish held is in the next patch."""
    model = kit.Model()
    first = node.publish(model)
    before = model.bytes.copy()
    for _ in range(2):
        model.step()
        lost = node.encode(model)
        node.publisher.drop(lost.generation)
    model.step()
    second = node.publish(model)
    assert second.base_version == first.version
    pieces = node.store.read_blob(second.blob_id)
    for changes in decode_patch(pieces, model.table, before):
        model.table.view(before, changes.tensor_index)[changes.indices] = changes.new_bits
    assert np.array_equal(before, model.bytes)


def test_after_a_restart_the_next_patch_is_against_the_committed_version(tmp_path: Path, kit: Any) -> None:
    """A-PUB-1: the process dies after encoding, before the commit."""
    model = kit.Model()
    node = kit.Node(tmp_path)
    node.publish(model)
    for _ in range(3):
        model.step()
        last = node.publish(model)
    model.step()
    orphan = node.encode(model)
    node.close()

    node = kit.Node(tmp_path)
    assert node.store.read_list(orphan.blob_id) is None
    assert node.version is None
    assert node.publisher.restore() == last.version
    assert node.publisher.committed.root == last.root
    model.step()
    manifest = node.publish(model)
    assert manifest.base_version == last.version
    assert manifest.root == compute_region_root(model.table, model.bytes)
    target = node.publisher.committed
    assert np.array_equal(rebuild(node.store, target, name="test").region.bytes, model.bytes)
    node.close()


def test_nothing_is_restored_from_an_empty_store_or_a_broken_chain(tmp_path: Path, kit: Any) -> None:
    node = kit.Node(tmp_path)
    assert node.publisher.restore() is None
    model = kit.Model()
    first = node.publish(model)
    model.step()
    node.publish(model)
    node.store.release([first.blob_id], [], now=0.0)
    node.close()
    node = kit.Node(tmp_path)
    assert node.publisher.restore() is None
    node.generation = 10
    node.publisher.offer(10, model.parts())
    assert node.publisher.encode_snapshot(EncodeSnapshot(10, Kind.PATCH)) == EncodeFailed(10, "no_baseline")
    node.close()


def test_an_anchor_beside_the_committed_version_leaves_the_baseline(node: Any, kit: Any) -> None:
    model = kit.Model()
    node.publish(model)
    model.step()
    second = node.publish(model)
    anchor = node.add_anchor()
    assert (anchor.root, anchor.version) == (second.root, second.version)
    assert node.publisher.committed.version == second.version
    assert node.publisher.store_anchor(StoreAnchor(Version(0, 9))) == ExtraFailed(Version(0, 9), "no_baseline")


@pytest.mark.parametrize("restarted", [False, True])
def test_a_skip_spans_versions_and_drops_what_came_back(tmp_path: Path, kit: Any, restarted: bool) -> None:
    """From spools, or after a restart by comparing with the rebuilt base: the same blob."""
    model = kit.Model()
    node = kit.Node(tmp_path)
    base = node.publish(model)
    old = model.bytes.copy()
    embed = model.table.view(model.bytes, 0)
    embed[5] ^= 1
    node.publish(model)
    embed[5] ^= 1
    model.step()
    node.publish(model)
    if restarted:
        node.close()
        node = kit.Node(tmp_path)
        node.publisher.restore()
    skip = node.add_skip(base)
    expected = sum(
        int(np.count_nonzero(model.table.view(old, index) != model.table.view(model.bytes, index)))
        for index in range(len(model.table.tensors))
    )
    assert skip.changed_count == expected
    for changes in decode_patch(node.store.read_blob(skip.blob_id), model.table, old):
        model.table.view(old, changes.tensor_index)[changes.indices] = changes.new_bits
    assert np.array_equal(old, model.bytes)
    node.close()


@pytest.mark.parametrize("share", [0.01, 0.9])
def test_a_version_that_leaves_numbers_out_moves_the_baseline_too(tmp_path: Path, kit: Any, share: float) -> None:
    """A standby that missed a round goes on by a skip: from its spool, or read again where that grew too large."""
    model = kit.Model()
    node = kit.Node(tmp_path)
    base = node.publish(model)
    model.step(share=share)
    event = node.encode(model)
    leap = kit.make_manifest(
        kind=Kind.SKIP,
        base_version=base.version,
        base_root=base.root,
        version=Version(0, 4),
        root=event.root,
        table_digest=model.table.digest,
        blob_id=event.blob_id,
    )
    node.commit(leap, event.generation)
    assert np.array_equal(baseline_bytes(node), model.bytes)
    model.step()
    last = node.publish(model)
    assert last.base_version == Version(0, 4)
    node.close()
    node = kit.Node(tmp_path)
    assert node.publisher.restore() == last.version
    assert np.array_equal(baseline_bytes(node), model.bytes)
    node.close()


def test_a_skip_from_an_unknown_version_is_given_up(node: Any, kit: Any) -> None:
    model = kit.Model()
    node.publish(model)
    answer = node.publisher.encode_skip(EncodeSkip(Version(0, 0), Version(0, 1)))
    assert answer == ExtraFailed(Version(0, 1), "no_base")
    answer = node.publisher.encode_skip(EncodeSkip(Version(0, 0), Version(0, 5)))
    assert answer == ExtraFailed(Version(0, 5), "no_baseline")


def test_another_table_needs_an_anchor(node: Any, kit: Any) -> None:
    node.publish(kit.Model())
    other = kit.Model(table=make_table([TensorSpec("w", "BF16", (10,))]))
    node.generation = 50
    node.publisher.offer(50, other.parts())
    assert node.publisher.encode_snapshot(EncodeSnapshot(50, Kind.PATCH)) == EncodeFailed(50, "structure")
    manifest = node.publish(other, Kind.ANCHOR)
    assert manifest.root == compute_region_root(other.table, other.bytes)
    other.step(share=0.5)
    node.publish(other)


def test_an_unknown_generation_is_given_up(node: Any) -> None:
    assert node.publisher.encode_snapshot(EncodeSnapshot(7, Kind.ANCHOR)) == EncodeFailed(7, "no_snapshot")
    answer = node.publisher.commit(Commit(7, Version(0, 1), bytes(32), (), ()))
    assert answer == EncodeFailed(7, "no_snapshot")
    node.publisher.drop(7)


def test_a_patch_may_become_an_anchor_before_the_commit(node: Any, kit: Any) -> None:
    model = kit.Model()
    node.publish(model)
    model.step()
    patch = node.encode(model)
    anchor = node.publisher.encode_snapshot(EncodeSnapshot(patch.generation, Kind.ANCHOR))
    assert anchor.root == patch.root
    node.store.discard_blob(patch.blob_id)
    manifest = kit.make_manifest(version=Version(0, 2), root=anchor.root, blob_id=anchor.blob_id)
    node.commit(manifest, patch.generation)
    assert node.version == Version(0, 2)


def test_nothing_is_committed_that_cannot_be_served(node: Any, kit: Any) -> None:
    """A-PUB-2."""
    model = kit.Model()
    first = node.publish(model)
    model.step()
    event = node.encode(model)
    node.store.discard_blob(event.blob_id)
    manifest = kit.make_manifest(version=Version(0, 2), root=event.root, blob_id=event.blob_id)
    commit = Commit(event.generation, manifest.version, manifest.root, (kit.sign_manifest(manifest),), ())
    assert node.publisher.commit(commit) == EncodeFailed(event.generation, "damaged")
    assert node.version == first.version
    extra = Commit(None, first.version, first.root, (kit.sign_manifest(manifest),), ())
    assert node.publisher.commit(extra) == ExtraFailed(first.version, "damaged")


def test_a_commit_stores_the_machines_state_with_it(node: Any, kit: Any) -> None:
    model = kit.Model()
    event = node.encode(model)
    manifest = kit.make_manifest(root=event.root, blob_id=event.blob_id)
    state = (("publisher", b"state"), ("head", b"head"))
    commit = Commit(event.generation, manifest.version, manifest.root, (kit.sign_manifest(manifest),), state)
    node.publisher.commit(commit)
    assert (node.store.state("publisher"), node.store.state("head")) == (b"state", b"head")


def test_a_patch_that_does_not_give_the_snapshot_is_never_signed(node: Any, kit: Any, monkeypatch: Any) -> None:
    """What a faulty encoder makes is read back as a receiver would, and given up with nothing left behind."""
    model = kit.Model()
    first = node.publish(model)
    before = len(node.store.chunk_digests())

    def encode_other_weights(table: Any, parts: Any, **options: Any) -> Iterator[bytes]:
        def spoil() -> Iterator[Any]:
            for pairs in parts:
                yield [(index, old, new ^ new.dtype.type(index == 0)) for index, old, new in pairs]

        return encode_parts(table, spoil(), **options)

    monkeypatch.setattr(publishing, "encode_parts", encode_other_weights)
    model.step()
    node.publisher.offer(70, model.parts())
    assert node.publisher.encode_snapshot(EncodeSnapshot(70, Kind.PATCH)) == EncodeFailed(70, "encode")
    monkeypatch.undo()
    assert len(node.store.chunk_digests()) == before
    assert node.version == first.version
    assert node.publish(model).base_version == first.version


def test_spools_are_dropped_beyond_their_share(node: Any, kit: Any, tmp_path: Path) -> None:
    model = kit.Model()
    base = node.publish(model)
    for _ in range(6):
        model.step(share=0.2)
        node.publish(model)
    kept = sum(path.stat().st_size for path in (tmp_path / "publisher" / "spools").iterdir())
    assert kept <= model.table.size_bytes
    assert node.add_skip(base).version == node.version


def test_a_full_disk_fails_the_publish_and_leaves_no_chunk(node: Any, kit: Any, monkeypatch: Any) -> None:
    model = kit.Model()
    first = node.publish(model)
    before = len(node.store.chunk_digests())
    monkeypatch.setattr("pulsenetd.storage.disk.free_size_bytes", lambda _: 0)
    node.publisher.offer(90, model.parts())
    assert node.publisher.encode_snapshot(EncodeSnapshot(90, Kind.ANCHOR)) == EncodeFailed(90, "enospc")
    assert len(node.store.chunk_digests()) == before
    assert node.version == first.version


@pytest.mark.parametrize("how", ["kept", "zeros", "unnamed"])
def test_a_crash_anywhere_in_writing_an_anchor_leaves_a_way_in(tmp_path: Path, kit: Any, how: str) -> None:
    """A-PUB-4: one anchor kept; at every step of the next anchor and of the release a whole version can be rebuilt."""

    def run(directory: Path, cut_at: int | None) -> tuple[Any, int, int]:
        disk = kit.CuttingDisk()
        node = kit.Node(directory, disk)
        model = kit.Model()
        first = node.publish(model)
        model.step()
        node.publish(model)
        started = len(disk.steps)
        disk.cut_at = None if cut_at is None else started + cut_at
        try:
            anchor = node.add_anchor()
            old = [first.blob_id]
            node.store.release(old, [], now=0.0)
            assert node.store.is_complete(anchor.blob_id)
        except kit.PowerCut:
            pass
        committed = node.publisher.committed
        node.close()
        disk.lose_unsynced(how)
        return committed, len(disk.steps) - started, started

    _, step_count, _ = run(tmp_path / "dry", None)
    assert step_count >= 20
    for cut_at in range(step_count):
        committed, _, _ = run(tmp_path / str(cut_at), cut_at)
        node = kit.Node(tmp_path / str(cut_at))
        assert node.publisher.restore() == committed.version
        assert node.publisher.committed.root == committed.root
        node.close()


def test_spool_directories_are_emptied_at_start(tmp_path: Path) -> None:
    (tmp_path / "spools").mkdir()
    (tmp_path / "spools" / "9.spool").write_bytes(b"old")
    SpoolDirectory(tmp_path / "spools")
    assert not list((tmp_path / "spools").iterdir())


# Parts


def baseline_bytes(node: Any) -> Any:
    return node.publisher._baseline.region.bytes


def files_of(node: Any) -> list[Path]:
    """Spools and chunks on disk."""
    directory = node.store.directory
    return sorted(path for folder in ("spools", "chunks") for path in (directory / folder).rglob("*") if path.is_file())


@pytest.mark.parametrize("share", [0.0, 0.01, 0.4, 1.0])
def test_the_baseline_is_the_committed_weights_bit_for_bit(node: Any, kit: Any, share: float) -> None:
    """Mixed dtypes, a scalar and an empty tensor; few changes move it by the spool, many from the stored patch."""
    model = kit.Model()
    node.publish(model)
    for kind in (None, None, Kind.ANCHOR, None):
        assert np.array_equal(baseline_bytes(node), model.bytes)
        model.step(share=share)
        manifest = node.publish(model, kind)
        assert manifest.root == compute_region_root(model.table, model.bytes)
        held = rebuild(node.store, node.publisher.committed, name="test")
        assert np.array_equal(held.region.bytes, model.bytes)
    assert np.array_equal(baseline_bytes(node), model.bytes)


def test_parts_are_encoded_as_they_come(node: Any, kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = kit.Model()
    node.publish(model)
    model.bytes[:] ^= 1
    encodings: queue.Queue[int] = queue.Queue()
    take = publishing.CheckedSpool.take

    def note(spooling: Any, changes: Any) -> None:
        take(spooling, changes)
        encodings.put(changes.tensor_index)

    monkeypatch.setattr(publishing.CheckedSpool, "take", note)
    taken: queue.Queue[None] = queue.Queue()
    parts = PartQueue(model.table, lambda: taken.put(None))
    node.publisher.offer(30, parts)
    with ThreadPoolExecutor(1) as thread:
        work = thread.submit(node.publisher.encode_snapshot, EncodeSnapshot(30, Kind.PATCH))
        for index in range(len(model.table.tensors)):
            assert encodings.empty()
            model.put_part(parts, index)
            taken.get(timeout=10)
            if model.table.tensors[index].element_count:
                assert encodings.get(timeout=10) == index
        event = work.result(10)
    assert event.root == compute_region_root(model.table, model.bytes)
    assert node.publisher.waited_seconds > 0


@pytest.mark.parametrize("count", [0, 1, 3, 5])
@pytest.mark.parametrize("kind", ["first anchor", "patch", "later anchor"])
def test_a_training_process_that_dies_half_way_changes_nothing(node: Any, kit: Any, kind: str, count: int) -> None:
    model = kit.Model()
    if kind != "first anchor":
        node.publish(model)
    before, committed = files_of(node), node.publisher.committed
    model.step(share=0.3)
    parts = PartQueue(model.table)
    node.publisher.offer(40, parts)
    for index in range(count):
        model.put_part(parts, index)
    with ThreadPoolExecutor(1) as thread:
        work = thread.submit(
            node.publisher.encode_snapshot, EncodeSnapshot(40, Kind.PATCH if kind == "patch" else Kind.ANCHOR)
        )
        parts.cut("cut_short")
        assert work.result(10) == EncodeFailed(40, "cut_short")
    assert files_of(node) == before
    assert node.publisher.committed == committed
    manifest = node.publish(model)
    assert manifest.root == compute_region_root(model.table, model.bytes)
    assert np.array_equal(baseline_bytes(node), model.bytes)


@pytest.mark.parametrize("at", ["begin", "write", "finish"])
def test_a_disk_that_is_full_while_spooling_changes_nothing(
    node: Any, kit: Any, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = kit.Model()
    node.publish(model)
    before, old = files_of(node), model.bytes.copy()
    model.step()

    def refuse(*_: object) -> None:
        raise StorageError("no space left", "enospc")

    target = (
        "pulsenetd.storage.spools.SpoolDirectory.begin"
        if at == "begin"
        else f"pulsenetd.storage.spools.SpoolWriter.{at}"
    )
    with monkeypatch.context() as patch:
        patch.setattr(target, refuse)
        node.publisher.offer(60, model.parts())
        assert node.publisher.encode_snapshot(EncodeSnapshot(60, Kind.PATCH)) == EncodeFailed(60, "enospc")
    assert files_of(node) == before
    assert np.array_equal(baseline_bytes(node), old)
    assert node.publish(model).base_version == Version(0, 1)
    assert np.array_equal(baseline_bytes(node), model.bytes)


def test_a_power_cut_anywhere_in_a_publish_leaves_the_old_version_or_the_new(tmp_path: Path, kit: Any) -> None:
    """A-PUB-1: before the commit is durable the old one, after it the new one, whole."""

    def run(directory: Path, cut_at: int | None) -> tuple[Any, list[Any], int]:
        disk = kit.CuttingDisk()
        node = kit.Node(directory, disk)
        model = kit.Model()
        versions = [node.publish(model).root]
        model.step(share=0.3)
        versions.append(compute_region_root(model.table, model.bytes))
        started = len(disk.steps)
        disk.cut_at = None if cut_at is None else started + cut_at
        with contextlib.suppress(kit.PowerCut):
            node.publish(model)
        node.close()
        disk.lose_unsynced("zeros")
        return model, versions, len(disk.steps) - started

    _, _, step_count = run(tmp_path / "dry", None)
    assert step_count >= 4
    found = []
    for cut_at in range(step_count + 1):
        model, roots, _ = run(tmp_path / str(cut_at), cut_at)
        node = kit.Node(tmp_path / str(cut_at))
        version = node.publisher.restore()
        assert version is not None
        assert node.publisher.committed.root == roots[version.number - 1]
        assert compute_region_root(model.table, baseline_bytes(node)) == roots[version.number - 1]
        model.step()
        assert node.publish(model).base_version == version
        assert np.array_equal(baseline_bytes(node), model.bytes)
        node.close()
        found.append(version.number)
    assert found == sorted(found)
    assert set(found) == {1, 2}


def test_a_patch_with_too_many_changes_to_keep_cannot_become_an_anchor(node: Any, kit: Any) -> None:
    """Its parts are gone, and so is the way back to them; the training process publishes again."""
    model = kit.Model()
    node.publish(model)
    model.step(share=1.0)
    patch = node.encode(model)
    answer = node.publisher.encode_snapshot(EncodeSnapshot(patch.generation, Kind.ANCHOR))
    assert answer == EncodeFailed(patch.generation, "no_snapshot")
    assert node.version == Version(0, 1)


def test_damage_to_the_baseline_shows_before_it_is_written_out_and_heals(node: Any, kit: Any) -> None:
    model = kit.Model()
    node.publish(model)
    model.table.view(baseline_bytes(node), 0)[7] ^= 1
    assert node.publisher.store_anchor(StoreAnchor(Version(0, 1))) == ExtraFailed(Version(0, 1), "no_baseline")
    node.publisher.offer(80, model.parts())
    assert node.publisher.encode_snapshot(EncodeSnapshot(80, Kind.PATCH)) == EncodeFailed(80, "no_baseline")
    assert node.publish(model, Kind.ANCHOR).root == compute_region_root(model.table, model.bytes)
    assert np.array_equal(baseline_bytes(node), model.bytes)


def test_a_baseline_that_cannot_follow_its_commit_is_given_up_but_the_commit_stands(node: Any, kit: Any) -> None:
    """The stored patch is damaged between the commit and the move."""
    model = kit.Model()
    node.publish(model)
    model.step(share=1.0)
    event = node.encode(model)
    manifest = kit.make_manifest(
        kind=Kind.PATCH,
        base_version=Version(0, 1),
        base_root=node.publisher.committed.root,
        version=Version(0, 2),
        root=event.root,
        table_digest=model.table.digest,
        blob_id=event.blob_id,
    )
    digest = node.store.read_list(event.blob_id).digests[0]
    node.store._chunks._path(digest).write_bytes(b"damaged")
    node.commit(manifest, event.generation)
    assert node.version is None
    node.publisher.offer(81, model.parts())
    assert node.publisher.encode_snapshot(EncodeSnapshot(81, Kind.PATCH)) == EncodeFailed(81, "no_baseline")
