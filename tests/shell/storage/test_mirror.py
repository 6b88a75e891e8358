"""The mirror: every hop all or nothing, rebuilt after a crash, lent to engines."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pulsenet.chain.records import Kind
from pulsenet.codec.changes import apply_changes, decode_changes
from pulsenet.errors import StorageError
from pulsenet.ids import Digest, Version
from pulsenet.local.protocol import UpdateKind
from pulsenet.local.shared_memory import Region
from pulsenet.node.events import HopApplied, HopFailed
from pulsenet.tensors.params import TensorSpec, make_table
from pulsenetd.storage import mirror as mirror_module
from pulsenetd.storage import staging
from pulsenetd.storage.mirror import Mirror
from pulsenetd.storage.store import Store


class Inferencer:
    """A store filled from a publisher's, and a mirror on it."""

    def __init__(self, directory: Path, kit: Any, node: Any) -> None:
        self.directory, self.kit, self.node = directory, kit, node
        self.open()

    def open(self) -> None:
        self.store = Store.open(self.directory)
        self.mirror = Mirror(self.store, self.directory / "spools")

    def restart(self) -> Version | None:
        self.close()
        self.open()
        return self.mirror.restore()

    def hop(self, manifest: Any) -> HopApplied | HopFailed:
        self.kit.copy_blob(self.node.store, self.store, manifest)
        return self.mirror.apply_hop(manifest)

    @property
    def bytes(self) -> Any:
        weights = self.mirror._weights
        assert weights is not None
        return weights.region.bytes

    def close(self) -> None:
        self.mirror.close()
        self.store.close()


@pytest.fixture
def reader(tmp_path: Path, kit: Any, node: Any) -> Iterator[Inferencer]:
    made = Inferencer(tmp_path / "inferencer", kit, node)
    yield made
    made.close()


def publish(node: Any, model: Any, count: int) -> list[Any]:
    manifests = []
    for _ in range(count):
        manifests.append(node.publish(model))
        model.step()
    return manifests


def follow(reader: Inferencer, manifests: list[Any]) -> None:
    for manifest in manifests:
        assert reader.hop(manifest) == HopApplied(manifest.version, manifest.root)


# Hops


def test_a_mirror_follows_a_publisher_bit_by_bit(node: Any, kit: Any, reader: Inferencer) -> None:
    model = kit.Model()
    assert reader.mirror.held is None
    for _ in range(5):
        follow(reader, [node.publish(model)])
        assert np.array_equal(reader.bytes, model.bytes)
        assert reader.mirror.held.version == node.version
        model.step()
    assert reader.mirror.verify()


def arrive(reader: Inferencer, node: Any, kit: Any, manifest: Any) -> None:
    """Prepare a hop, then let its chunks in."""
    reader.store.put_record(kit.sign_manifest(manifest))
    reader.store.put_chunk_list(manifest.blob_id, node.store.chunk_list(manifest.blob_id))
    reader.mirror.prepare(manifest)
    for _, digest in reader.store.missing_chunks(manifest.blob_id):
        reader.store.put_chunks({digest: node.store.chunk(digest)})


def spool_count(reader: Inferencer) -> int:
    return len(list((reader.directory / "spools").iterdir()))


def wait_for_spools(reader: Inferencer, count: int) -> None:
    """A preparation opens its spool in a thread of its own."""
    deadline = time.monotonic() + 10
    while spool_count(reader) != count:
        assert time.monotonic() < deadline, "it never happened"
        threading.Event().wait(0.005)


def test_a_hop_prepared_while_it_arrived_ends_bit_by_bit_the_same(node: Any, kit: Any, reader: Inferencer) -> None:
    model = kit.Model()
    follow(reader, [node.publish(model)])
    for count in range(1, 5):
        model.step()
        manifest = node.publish(model)
        before = reader.bytes.copy()
        arrive(reader, node, kit, manifest)
        assert np.array_equal(reader.bytes, before)
        assert reader.mirror.apply_hop(manifest) == HopApplied(manifest.version, manifest.root)
        assert np.array_equal(reader.bytes, model.bytes)
        assert reader.mirror.prepared_count == count
    # What was prepared serves an engine as what was not does.
    staged = reader.mirror.stage(Version(0, 4))
    assert staged is not None
    assert staged.kind is UpdateKind.RECORDS
    staged.close()


def test_hops_that_do_not_start_here_are_not_prepared(node: Any, kit: Any, reader: Inferencer) -> None:
    manifests = publish(node, kit.Model(), 3)
    reader.mirror.prepare(manifests[1])
    follow(reader, manifests[:1])
    reader.mirror.prepare(manifests[0])
    reader.mirror.prepare(manifests[2])
    assert reader.mirror._preparation is None
    assert spool_count(reader) == 0
    follow(reader, manifests[1:])
    assert reader.mirror.prepared_count == 0


def test_a_preparation_is_dropped_by_another_hop_an_order_a_restart_and_the_end(
    node: Any, kit: Any, reader: Inferencer
) -> None:
    model = kit.Model()
    first, second = publish(node, model, 2)
    skip_target = node.publish(model)
    skip = node.add_skip(first)
    follow(reader, [first])
    arrive(reader, node, kit, second)
    wait_for_spools(reader, 1)
    follow(reader, [skip])
    assert (reader.mirror.prepared_count, spool_count(reader)) == (0, 1)
    assert np.array_equal(reader.bytes, model.bytes)
    model.step()
    last = node.publish(model)
    assert last.base_version == skip_target.version
    arrive(reader, node, kit, last)
    reader.mirror.drop_preparation()
    reader.mirror.drop_preparation()
    assert spool_count(reader) == 1
    arrive(reader, node, kit, last)
    arrive(reader, node, kit, last)
    wait_for_spools(reader, 2)
    reader.mirror.restore()
    assert reader.mirror._preparation is None
    arrive(reader, node, kit, last)
    reader.restart()
    assert spool_count(reader) == 0
    follow(reader, [last])
    arrive(reader, node, kit, node.publish(model))


def test_a_preparation_that_failed_costs_nothing_but_time(
    node: Any, kit: Any, reader: Inferencer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was full while the patch arrived, and is not any more."""
    model = kit.Model()
    follow(reader, [node.publish(model)])
    model.step()
    manifest = node.publish(model)
    with monkeypatch.context() as patch:

        def refuse(*_: object) -> None:
            raise StorageError("no space left", "enospc")

        patch.setattr("pulsenetd.storage.spools.SpoolWriter.write", refuse)
        arrive(reader, node, kit, manifest)
        assert reader.mirror.apply_hop(manifest) == HopFailed(manifest.version, "enospc", Version(0, 1))
        arrive(reader, node, kit, manifest)
    assert reader.mirror.apply_hop(manifest) == HopApplied(manifest.version, manifest.root)
    assert np.array_equal(reader.bytes, model.bytes)


def test_a_prepared_patch_with_a_false_root_is_undone(node: Any, kit: Any, reader: Inferencer) -> None:
    model = kit.Model()
    follow(reader, [node.publish(model)])
    before = reader.bytes.copy()
    model.step()
    false = replace(node.publish(model), root=Digest(bytes(32)))
    arrive(reader, node, kit, false)
    assert reader.mirror.apply_hop(false) == HopFailed(false.version, "root_mismatch", Version(0, 1))
    assert np.array_equal(reader.bytes, before)
    assert reader.mirror.held.version == Version(0, 1)


def test_skips_and_empty_patches_are_hops_like_others(node: Any, kit: Any, reader: Inferencer) -> None:
    model = kit.Model()
    first, *_, last = publish(node, model, 5)
    skip = node.add_skip(first)
    assert (skip.version, skip.root) == (last.version, last.root)
    follow(reader, [first, skip])
    model.bytes[:] = reader.bytes
    follow(reader, [node.publish(model)])
    assert np.array_equal(reader.bytes, model.bytes)


def test_a_hop_from_another_base_is_refused_and_changes_nothing(node: Any, kit: Any, reader: Inferencer) -> None:
    """A-CHAIN-2, A-CHAIN-3: v4 is never applied to v2, nor to nothing."""
    manifests = publish(node, kit.Model(), 4)
    assert reader.hop(manifests[1]) == HopFailed(Version(0, 2), "base_mismatch", None)
    follow(reader, manifests[:2])
    before = reader.bytes.copy()
    assert reader.hop(manifests[3]) == HopFailed(Version(0, 4), "base_mismatch", Version(0, 2))
    other_root = replace(manifests[2], base_root=Digest(bytes(32)))
    assert reader.hop(other_root) == HopFailed(Version(0, 3), "base_mismatch", Version(0, 2))
    assert np.array_equal(reader.bytes, before)
    follow(reader, manifests[2:])


def test_a_wrong_root_is_undone(node: Any, kit: Any, reader: Inferencer) -> None:
    first, second = publish(node, kit.Model(), 2)
    follow(reader, [first])
    before = reader.bytes.copy()
    lying = replace(second, root=Digest(bytes(32)))
    assert reader.hop(lying) == HopFailed(Version(0, 2), "root_mismatch", Version(0, 1))
    assert np.array_equal(reader.bytes, before)
    assert reader.mirror.verify()
    assert not list((reader.directory / "spools").iterdir())
    follow(reader, [second])


def test_an_exception_half_way_is_undone(node: Any, kit: Any, reader: Inferencer, monkeypatch: Any) -> None:
    """A-APP-1 for the mirror: after half of the tensors."""
    first, second = publish(node, kit.Model(), 2)
    follow(reader, [first])
    before = reader.bytes.copy()
    calls = []

    def fail_at_second(view: Any, changes: Any) -> None:
        calls.append(changes)
        if len(calls) == 2:
            raise StorageError("the spool cannot be read")
        apply_changes(view, changes)

    monkeypatch.setattr(mirror_module, "apply_changes", fail_at_second)
    assert reader.hop(second) == HopFailed(Version(0, 2), "io", Version(0, 1))
    monkeypatch.undo()
    assert np.array_equal(reader.bytes, before)
    follow(reader, [second])


def test_a_flipped_bit_is_found_and_the_mirror_rebuilt(node: Any, kit: Any, reader: Inferencer) -> None:
    """A-CHAIN-5: right number, wrong base bytes; ends at the correct version."""
    first, second, third = publish(node, kit.Model(), 3)
    follow(reader, [first, second])
    untouched = reader.bytes.copy()
    kit.TABLE.view(reader.bytes, 0)[11_999] ^= 1
    assert reader.hop(third) == HopFailed(Version(0, 3), "root_mismatch", Version(0, 2))
    assert np.array_equal(reader.bytes, untouched)
    follow(reader, [third])


def test_a_mirror_that_cannot_be_rebuilt_is_lost_and_starts_again_from_an_anchor(
    node: Any, kit: Any, reader: Inferencer
) -> None:
    first, second = publish(node, kit.Model(), 2)
    follow(reader, [first])
    reader.store.release([first.blob_id], [], now=0.0)
    kit.TABLE.view(reader.bytes, 0)[11_999] ^= 1
    assert reader.hop(second) == HopFailed(Version(0, 2), "root_mismatch", None)
    assert reader.mirror.held is None
    assert reader.mirror.stage(None) is None
    assert not reader.mirror.verify()
    follow(reader, [first, second])


def count_memories() -> int:
    """Return how many descriptors of mirrors in memory this process has open."""
    opened = Path("/proc/self/fd").iterdir()
    return sum(mirror_module.MEMORY_NAME in os.readlink(path) for path in opened if path.is_symlink())


def test_a_mirror_that_was_lost_half_way_gives_its_memory_back(
    node: Any, kit: Any, reader: Inferencer, monkeypatch: Any
) -> None:
    (first,) = publish(node, kit.Model(), 1)
    follow(reader, [first])
    before = count_memories()

    def fail(*_: object, **__: object) -> None:
        raise StorageError("a chunk went since it was looked at", "damaged")

    monkeypatch.setattr(mirror_module, "load_anchor", fail)
    assert reader.hop(first) == HopFailed(Version(0, 1), "damaged", Version(0, 1))
    assert count_memories() == before > 0


def count_mappings() -> int:
    """Return how many mirrors this process has mapped."""
    return Path("/proc/self/maps").read_text().count(mirror_module.MEMORY_NAME)


def test_the_memory_of_a_lost_mirror_is_gone_before_as_much_is_taken_again(
    node: Any, kit: Any, reader: Inferencer, monkeypatch: Any
) -> None:
    first, second = publish(node, kit.Model(), 2)
    follow(reader, [first])
    rebuild, mapped = mirror_module.rebuild_last, []

    def look(*arguments: Any, **options: Any) -> Any:
        mapped.append(count_mappings())
        return rebuild(*arguments, **options)

    monkeypatch.setattr(mirror_module, "rebuild_last", look)
    kit.TABLE.view(reader.bytes, 0)[11_999] ^= 1
    assert reader.hop(second) == HopFailed(Version(0, 2), "root_mismatch", Version(0, 1))
    assert mapped == [0]


def test_a_mirror_for_which_there_is_no_memory_any_more_is_lost_and_the_node_goes_on(
    node: Any, kit: Any, reader: Inferencer, monkeypatch: Any
) -> None:
    first, second = publish(node, kit.Model(), 2)
    follow(reader, [first])

    def refuse(*_: object, **__: object) -> None:
        raise StorageError("cannot make shared memory", "memory")

    monkeypatch.setattr(mirror_module, "rebuild_last", refuse)
    kit.TABLE.view(reader.bytes, 0)[11_999] ^= 1
    assert reader.hop(second) == HopFailed(Version(0, 2), "root_mismatch", None)
    assert count_memories() == 0


def test_doubt_about_foreign_writes_ends_in_a_check(node: Any, kit: Any, reader: Inferencer) -> None:
    follow(reader, publish(node, kit.Model(), 2))
    kit.TABLE.view(reader.bytes, 1)[3] ^= 1
    assert not reader.mirror.verify()
    assert reader.mirror.held is None


def test_bytes_that_are_no_patch_are_refused(node: Any, kit: Any, reader: Inferencer) -> None:
    first, second = publish(node, kit.Model(), 2)
    follow(reader, [first])
    with node.store.writing_blob() as writer:
        writer.feed(b"no patch")
        blob_id = writer.finish().blob_id
    assert reader.hop(replace(second, blob_id=blob_id)) == HopFailed(Version(0, 2), "decode", Version(0, 1))
    bad_anchor = replace(first, version=Version(0, 2), blob_id=blob_id)
    assert reader.hop(bad_anchor) == HopFailed(Version(0, 2), "decode", Version(0, 1))
    assert reader.hop(replace(second, table_digest=Digest(bytes(32)))).reason == "structure"  # type: ignore[union-attr]
    follow(reader, [second])


def test_a_missing_chunk_leaves_the_mirror_where_it_was(node: Any, kit: Any, reader: Inferencer) -> None:
    first, second = publish(node, kit.Model(), 2)
    follow(reader, [first])
    assert reader.mirror.apply_hop(second) == HopFailed(Version(0, 2), "damaged", Version(0, 1))
    follow(reader, [second])


def test_a_disk_that_cannot_keep_the_fact_undoes_the_hop(
    node: Any, kit: Any, reader: Inferencer, monkeypatch: Any
) -> None:
    first, second = publish(node, kit.Model(), 2)
    follow(reader, [first])
    kit.copy_blob(node.store, reader.store, second)

    def refuse(*_: object) -> None:
        raise StorageError("full", "enospc")

    monkeypatch.setattr(reader.store, "save_state", refuse)
    assert reader.mirror.apply_hop(second) == HopFailed(Version(0, 2), "enospc", Version(0, 1))
    monkeypatch.undo()
    follow(reader, [second])


def test_an_anchor_with_a_lying_root_leaves_what_is_held(node: Any, kit: Any, reader: Inferencer) -> None:
    first, second = publish(node, kit.Model(), 2)
    anchor = node.add_anchor()
    follow(reader, [first])
    lying = replace(anchor, root=Digest(bytes(32)))
    assert reader.hop(lying) == HopFailed(Version(0, 2), "root_mismatch", Version(0, 1))
    wrong_table = replace(anchor, table_digest=Digest(bytes(32)))
    assert reader.hop(wrong_table) == HopFailed(Version(0, 2), "structure", Version(0, 1))
    follow(reader, [anchor])
    assert reader.mirror.held.root == second.root


def test_an_anchor_with_another_table_replaces_the_memory(node: Any, kit: Any, reader: Inferencer) -> None:
    follow(reader, publish(node, kit.Model(), 1))
    other = kit.Model(table=make_table([TensorSpec("w", "BF16", (500,)), TensorSpec("b", "F8_E4M3", (3,))]))
    follow(reader, [node.publish(other, Kind.ANCHOR)])
    assert np.array_equal(reader.bytes, other.bytes)
    other.step(share=0.3)
    follow(reader, [node.publish(other)])
    assert np.array_equal(reader.bytes, other.bytes)


def test_a_version_without_elements_can_be_followed(node: Any, kit: Any, reader: Inferencer) -> None:
    empty = kit.Model(table=make_table([TensorSpec("nothing", "BF16", (0,))]))
    follow(reader, [node.publish(empty), node.publish(empty)])
    staged = reader.mirror.stage(None)
    assert (staged.kind, staged.size_bytes) == (UpdateKind.FULL, 0)
    staged.close()
    staged.finish()


# Restart


def test_after_a_restart_the_mirror_is_rebuilt_from_anchor_and_patches(node: Any, kit: Any, reader: Inferencer) -> None:
    """A-CHAIN-1's second half: what was held is held again, without the network."""
    model = kit.Model()
    manifests = publish(node, model, 4)
    follow(reader, manifests)
    before = reader.bytes.copy()
    assert reader.restart() == Version(0, 4)
    assert np.array_equal(reader.bytes, before)
    follow(reader, [node.publish(model)])


def test_a_restart_takes_another_way_when_a_chunk_is_damaged(node: Any, kit: Any, reader: Inferencer) -> None:
    model = kit.Model()
    first, second, third = publish(node, model, 3)
    skip = node.add_skip(first)
    follow(reader, [first, second, third])
    kit.copy_blob(node.store, reader.store, skip)
    before = reader.bytes.copy()
    (_, digest), *_ = reader.store.read_list(third.blob_id).entries  # type: ignore[union-attr]
    path = next((reader.directory / "chunks").glob(f"*/{digest.hex()}"))
    path.write_bytes(bytes(path.stat().st_size))
    assert reader.restart() == Version(0, 3)
    assert np.array_equal(reader.bytes, before)


def test_a_store_without_a_way_restores_nothing(node: Any, kit: Any, reader: Inferencer) -> None:
    assert reader.restart() is None
    first, second = publish(node, kit.Model(), 2)
    follow(reader, [first, second])
    reader.store.release([first.blob_id], [], now=0.0)
    assert reader.restart() is None
    assert reader.mirror.held is None


# Engines


def read_records(staged: Any) -> list[Any]:
    data = os.pread(staged.descriptor, staged.size_bytes + 1, 0)
    assert len(data) == staged.size_bytes
    return list(decode_changes(data, staged.table))


def test_an_engine_gets_one_set_of_records_however_many_versions_it_missed(
    node: Any, kit: Any, reader: Inferencer
) -> None:
    model = kit.Model()
    first = node.publish(model)
    follow(reader, [first])
    engine = model.bytes.copy()
    for _ in range(4):
        model.step(share=0.002)
        follow(reader, [node.publish(model)])
    staged = reader.mirror.stage(Version(0, 1))
    assert (staged.kind, staged.base_version, staged.version) == (UpdateKind.RECORDS, Version(0, 1), Version(0, 5))
    records = read_records(staged)
    assert [item.tensor_index for item in records] == sorted({item.tensor_index for item in records})
    for changes in records:
        apply_changes(kit.TABLE.view(engine, changes.tensor_index), changes)
    assert np.array_equal(engine, model.bytes)
    assert staged.finish()
    staged.close()
    staged.close()
    assert reader.mirror.stage(Version(0, 5)) is None


def test_an_engine_of_an_unknown_version_gets_everything(node: Any, kit: Any, reader: Inferencer) -> None:
    model = kit.Model()
    manifests = publish(node, model, 2)
    follow(reader, manifests)
    for version in (None, Version(0, 7)):
        staged = reader.mirror.stage(version)
        assert (staged.kind, staged.base_version, staged.version) == (UpdateKind.FULL, None, Version(0, 2))
        region = Region.open_lent(os.dup(staged.descriptor), staged.size_bytes)
        assert np.array_equal(region.bytes, reader.bytes)
        with pytest.raises(ValueError, match="read-only"):
            region.bytes[0] = 1
        region.close()
        staged.close()
        assert staged.finish()


def test_records_beyond_their_share_of_the_model_become_a_full_hand_over(
    node: Any, kit: Any, reader: Inferencer
) -> None:
    model = kit.Model()
    follow(reader, [node.publish(model)])
    for _ in range(3):
        model.step(share=0.3)
        follow(reader, [node.publish(model)])
    staged = reader.mirror.stage(Version(0, 1))
    assert staged.kind is UpdateKind.FULL
    staged.close()
    assert staged.finish()


def test_an_engine_gets_everything_where_the_disk_lost_what_changed(node: Any, kit: Any, reader: Inferencer) -> None:
    follow(reader, publish(node, kit.Model(), 2))
    (spool,) = (reader.directory / "spools").iterdir()
    with spool.open("r+b") as file:
        file.write(bytes(24))
    staged = reader.mirror.stage(Version(0, 1))
    assert (staged.kind, staged.version) == (UpdateKind.FULL, Version(0, 2))
    staged.close()
    staged.finish()


def test_an_anchor_breaks_the_records(node: Any, kit: Any, reader: Inferencer) -> None:
    model = kit.Model()
    follow(reader, publish(node, model, 2))
    follow(reader, [node.publish(model, Kind.ANCHOR)])
    staged = reader.mirror.stage(Version(0, 2))
    assert staged.kind is UpdateKind.FULL
    staged.close()
    staged.finish()


def test_a_hop_waits_for_an_engine_that_reads_the_mirror(node: Any, kit: Any, reader: Inferencer) -> None:
    first, second = publish(node, kit.Model(), 2)
    follow(reader, [first])
    staged = reader.mirror.stage(None)
    before = reader.bytes.copy()
    region = Region.open_lent(os.dup(staged.descriptor), staged.size_bytes)
    kit.copy_blob(node.store, reader.store, second)
    answers: list[object] = []
    hop = threading.Thread(target=lambda: answers.append(reader.mirror.apply_hop(second)))
    hop.start()
    hop.join(0.3)
    assert hop.is_alive()
    assert np.array_equal(region.bytes, before)
    assert staged.finish()
    hop.join(20)
    assert answers == [HopApplied(second.version, second.root)]
    region.close()
    staged.close()


def test_an_engine_that_takes_too_long_loses_its_loan(node: Any, kit: Any, reader: Inferencer) -> None:
    first, second = publish(node, kit.Model(), 2)
    follow(reader, [first])
    staged = reader.mirror.stage(None)
    reader.mirror.loans.patience_seconds = 0.01
    follow(reader, [second])
    assert not staged.finish()
    assert reader.mirror.loans.withdrawn_count == 1
    staged.close()


def test_a_hand_over_nobody_takes_gives_itself_back(node: Any, kit: Any, reader: Inferencer) -> None:
    """The engine died while a worker thread staged for it."""
    first, second = publish(node, kit.Model(), 2)
    follow(reader, [first])
    staged = reader.mirror.stage(None)
    descriptor = staged.descriptor
    del staged
    assert not os.path.exists(f"/proc/self/fd/{descriptor}")
    reader.mirror.loans.end_all()
    assert reader.mirror.loans.withdrawn_count == 0
    follow(reader, [second])


def test_loans_end_at_once_when_none_is_open() -> None:
    loans = staging.Loans()
    loans.end_all()
    give_back = loans.lend()
    assert give_back()
    assert not give_back()


def test_engines_that_were_too_slow_are_waited_for_twice_as_long(monkeypatch: Any) -> None:
    """Where each version comes before a slow disk has written the one before, none would ever be whole."""
    monkeypatch.setattr(staging, "LOAN_SECONDS_MIN", 0.001)
    monkeypatch.setattr(staging, "LOAN_SECONDS_MAX", 0.003)
    loans = staging.Loans()
    waited = []
    for _ in range(3):
        give_back = loans.lend()
        waited.append(loans.patience_seconds)
        loans.end_all()
        assert not give_back()
    assert waited == [0.001, 0.002, 0.003]
    assert loans.withdrawn_count == 3
