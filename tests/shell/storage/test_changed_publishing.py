"""Publishing by what changed since an earlier hand-over: the versions and blobs of whole parts, or whole parts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pulsenet.chain.records import Kind
from pulsenet.local.changed_parts import ChangedPartWriter, compute_listed_max
from pulsenet.local.protocol import Origin
from pulsenet.local.shared_memory import Region
from pulsenet.node.effects import EncodeSnapshot, StoreAnchor
from pulsenet.node.events import EncodeFailed, ExtraFailed, PatchEncoded
from pulsenet.tensors.digest import compute_region_root
from pulsenet.tensors.params import TensorSpec, make_table
from pulsenetd.storage.parts import PartQueue

SENDER, OTHER = bytes(16), bytes(range(16))


class Process:
    """A training process that keeps a baseline: weights, and a copy of each hand-over."""

    def __init__(self, node: Any, model: Any, sender: bytes = SENDER) -> None:
        self.node = node
        self.model = model
        self.sender = sender
        self.handed: dict[int, Any] = {}
        self.draw = np.random.default_rng(1)

    def offer(self) -> tuple[int, PartQueue]:
        number = len(self.handed) + 1
        self.handed[number] = self.model.bytes.copy()
        queue = PartQueue(self.model.table, origin=Origin(self.sender, number))
        self.node.generation += 1
        self.node.publisher.offer(self.node.generation, queue)
        return self.node.generation, queue

    def put_parts(self, queue: PartQueue, *, extra_share: float = 0.0) -> None:
        """Put in what the daemon wants: changes since the base it named, and some elements that did not change."""
        if queue.base_number is None:
            for index in range(len(self.model.table.tensors)):
                self.model.put_part(queue, index)
            return
        layout = queue.next_layout(len(self.model.table.tensors))
        writer = ChangedPartWriter(layout)
        for index, spec in enumerate(self.model.table.tensors):
            old = self.model.table.view(self.handed[queue.base_number], index)
            new = self.model.table.view(self.model.bytes, index)
            is_listed = (old != new) | (self.draw.random(new.size) < extra_share)
            indices = np.flatnonzero(is_listed).astype(spec.index_dtype)
            if indices.size > compute_listed_max(spec):
                writer.write_whole(index, [new.view(np.uint8)])
            else:
                writer.write_listed(index, indices, new[indices])
        queue.put_changed(layout, Region.open_snapshot(*writer.seal()))

    def encode(self, kind: Kind | None = None, *, extra_share: float = 0.0) -> PatchEncoded:
        generation, queue = self.offer()
        self.put_parts(queue, extra_share=extra_share)
        return self.node.encode_offered(generation, kind)


@pytest.fixture
def process(node: Any, kit: Any) -> Process:
    return Process(node, kit.Model())


def publish(process: Process, kind: Kind | None = None, *, extra_share: float = 0.0) -> Any:
    return process.node.publish_encoded(process.model, kind, lambda: process.encode(kind, extra_share=extra_share))


def base_of(process: Process) -> int | None:
    generation, queue = process.offer()
    process.node.publisher.drop(generation)
    return queue.base_number


@given(seed=st.integers(0, 1 << 30), shares=st.lists(st.sampled_from([0.0, 0.001, 0.05, 0.3, 1.0]), max_size=4))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_blobs_and_roots_are_those_of_whole_parts(kit: Any, seed: int, shares: list[float]) -> None:
    """Mixed dtypes; elements listed though they did not change, and tensors that changed too much to be listed."""
    with kit.make_node() as whole_node, kit.make_node() as changed_node:
        process = Process(changed_node, kit.Model(seed))
        for share in [0.0, *shares]:
            process.model.step(share=share)
            for kind in (None, Kind.ANCHOR) if share == 0.05 else (None,):
                expected = whole_node.publish(process.model, kind)
                manifest = publish(process, kind, extra_share=0.01)
                assert manifest == expected
                pieces = [b"".join(node.store.read_blob(manifest.blob_id)) for node in (whole_node, changed_node)]
                assert pieces[0] == pieces[1]
                assert np.array_equal(changed_node.publisher._baseline.region.bytes, process.model.bytes)
                assert changed_node.publisher._baseline.hashes == whole_node.publisher._baseline.hashes
        assert base_of(process) is not None


def test_the_base_is_the_last_committed_hand_over(process: Process, kit: Any) -> None:
    assert base_of(process) is None, "nothing is committed"
    publish(process)
    assert base_of(process) == 2
    process.model.step()
    publish(process)
    assert base_of(process) == 4
    other = Process(process.node, process.model, OTHER)
    assert base_of(other) is None, "another process has not handed that over"
    publish(other)
    assert base_of(process) is None
    assert base_of(other) == 2


def test_a_hand_over_that_failed_or_was_replaced_is_no_base(process: Process) -> None:
    publish(process)
    for _ in range(2):
        process.model.step()
        lost = process.encode()
        process.node.publisher.drop(lost.generation)
    process.model.step()
    manifest = publish(process)
    assert manifest.root == compute_region_root(process.model.table, process.model.bytes)
    assert manifest.base_version.number == 1
    assert np.array_equal(process.node.publisher._baseline.region.bytes, process.model.bytes)


def test_a_base_may_move_on_while_an_offer_waits(process: Process) -> None:
    """The process lists what changed since hand-over 1; by the time it is encoded the baseline is hand-over 2."""
    publish(process)
    process.model.step()
    generation, queue = process.offer()
    process.put_parts(queue)
    newer_base = process.handed[2]
    process.model.step()
    later_generation, later = process.offer()
    assert (queue.base_number, later.base_number) == (1, 1)
    # What changed in hand-over 2 is listed too, whether or not it changed again.
    touched = [
        np.flatnonzero(
            process.model.table.view(process.handed[1], index) != process.model.table.view(newer_base, index)
        )
        for index in range(len(process.model.table.tensors))
    ]
    layout = later.next_layout(len(process.model.table.tensors))
    writer = ChangedPartWriter(layout)
    for index, spec in enumerate(process.model.table.tensors):
        new = process.model.table.view(process.model.bytes, index)
        again = np.flatnonzero(process.model.table.view(newer_base, index) != new)
        indices = np.union1d(touched[index], again).astype(spec.index_dtype)
        writer.write_listed(index, indices, new[indices])
    later.put_changed(layout, Region.open_snapshot(*writer.seal()))
    node = process.node
    first = node.publish_encoded(process.model, None, lambda: node.encode_offered(generation, None))
    assert first.root == compute_region_root(process.model.table, newer_base)
    second = node.publish_encoded(process.model, None, lambda: node.encode_offered(later_generation, None))
    assert second.root == compute_region_root(process.model.table, process.model.bytes)
    assert np.array_equal(node.publisher._baseline.region.bytes, process.model.bytes)


def test_while_another_process_waits_whole_parts_are_asked_for(process: Process) -> None:
    publish(process)
    other_generation, _ = Process(process.node, process.model, OTHER).offer()
    assert base_of(process) is None
    process.node.publisher.drop(other_generation)
    assert base_of(process) == 1
    process.node.generation += 1
    process.node.publisher.offer(process.node.generation, PartQueue(process.model.table))
    assert base_of(process) is None, "one that keeps no device baseline"


def test_after_a_restart_whole_parts_are_asked_for(tmp_path: Path, kit: Any) -> None:
    node = kit.Node(tmp_path)
    process = Process(node, kit.Model())
    publish(process)
    node.close()
    process.node = node = kit.Node(tmp_path)
    node.publisher.restore()
    assert base_of(process) is None
    process.model.step()
    manifest = publish(process)
    assert (manifest.kind, base_of(process)) == (Kind.PATCH, 3)
    node.close()


def test_another_table_or_an_older_number_has_no_base(process: Process, kit: Any) -> None:
    publish(process)
    other = Process(process.node, kit.Model(table=make_table([TensorSpec("w", "BF16", (10,))])))
    other.handed = dict(process.handed)
    assert base_of(other) is None
    process.handed.clear()
    assert base_of(process) is None


def test_a_baseline_lost_meanwhile_fails_the_publish_and_the_next_parts_are_whole(process: Process) -> None:
    publish(process)
    generation, queue = process.offer()
    process.put_parts(queue)
    assert queue.base_number == 1
    node = process.node
    process.model.table.view(node.publisher._baseline.region.bytes, 0)[7] ^= 1
    assert isinstance(node.publisher.store_anchor(StoreAnchor(node.version)), ExtraFailed)
    answer = node.publisher.encode_snapshot(EncodeSnapshot(generation, Kind.PATCH))
    assert answer == EncodeFailed(generation, "no_baseline")
    assert base_of(process) is None
    generation, queue = process.offer()
    queue.base_number = 1
    process.put_parts(queue)
    answer = node.publisher.encode_snapshot(EncodeSnapshot(generation, Kind.ANCHOR))
    assert answer == EncodeFailed(generation, "other_base")
    manifest = publish(process, Kind.ANCHOR)
    assert manifest.root == compute_region_root(process.model.table, process.model.bytes)
    assert base_of(process) is not None


def test_a_base_that_is_no_more_when_the_encoder_begins_fails_the_publish(process: Process) -> None:
    """Another process's version was committed in between: the machine does not do that, and the pipeline checks."""
    publish(process)
    generation, queue = process.offer()
    process.put_parts(queue)
    publish(Process(process.node, process.model, OTHER))
    before = len(process.node.store.chunk_digests())
    answer = process.node.publisher.encode_snapshot(EncodeSnapshot(generation, Kind.PATCH))
    assert answer == EncodeFailed(generation, "other_base")
    assert len(process.node.store.chunk_digests()) == before


@pytest.fixture
def bad_parts(process: Process) -> Iterator[tuple[int, PartQueue]]:
    publish(process)
    generation, queue = process.offer()
    layout = queue.next_layout(len(process.model.table.tensors))
    writer = ChangedPartWriter(layout)
    writer.write_listed(0, np.array([9, 8], np.uint32), np.zeros(2, np.uint16))
    for index, spec in enumerate(process.model.table.tensors[1:], start=1):
        writer.write_listed(index, np.zeros(0, spec.index_dtype), np.zeros(0, spec.bits_dtype))
    queue.put_changed(layout, Region.open_snapshot(*writer.seal()))
    yield generation, queue
    queue.close()


@pytest.mark.parametrize("kind", [Kind.PATCH, Kind.ANCHOR])
def test_a_process_that_lists_nonsense_fails_and_hands_over_whole_parts_next(
    process: Process, bad_parts: tuple[int, PartQueue], kind: Kind
) -> None:
    generation, _ = bad_parts
    before = len(process.node.store.chunk_digests())
    answer = process.node.publisher.encode_snapshot(EncodeSnapshot(generation, kind))
    assert answer == EncodeFailed(generation, "bad_changes")
    assert len(process.node.store.chunk_digests()) == before
    assert base_of(process) is None
    process.model.step()
    manifest = publish(process)
    assert manifest.root == compute_region_root(process.model.table, process.model.bytes)
    assert base_of(process) is not None


def test_tensors_without_changes_are_neither_read_nor_hashed(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(process)
    process.model.table.view(process.model.bytes, 1)[3] ^= 1
    hashed: list[int] = []
    original = process.node.publisher._run_blocks

    def count(function: Any, items: Any) -> Any:
        listed = list(items)
        if function.__name__ == "hash_tensor":
            hashed.append(len(listed))
        return original(function, listed)

    monkeypatch.setattr(process.node.publisher, "_run_blocks", count)
    manifest = publish(process)
    assert manifest.root == compute_region_root(process.model.table, process.model.bytes)
    assert manifest.changed_count == 1
    assert hashed == [1]
