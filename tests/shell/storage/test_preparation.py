"""Decoding a patch while its chunks are being stored."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pulsenet.chain.records import Kind
from pulsenet.codec.patch import decode_patch
from pulsenet.errors import StorageError
from pulsenet.ids import Digest, Version
from pulsenetd.storage.preparation import Preparation, can_prepare
from pulsenetd.storage.rebuild import HeldVersion, Weights, load_anchor
from pulsenetd.storage.spools import SpoolDirectory
from pulsenetd.storage.store import Store


class Arrival:
    """A patch on its way from a publisher's store to another, whose chunks arrive when the test says so."""

    def __init__(self, directory: Path, kit: Any, node: Any) -> None:
        model = kit.Model()
        anchor = node.publish(model)
        model.step(share=0.3)
        self.patch = node.publish(model)
        self.upstream = node.store
        self.new = model.bytes
        self.table = model.table
        self.store = Store.open(directory)
        kit.copy_blob(node.store, self.store, anchor)
        self.weights: Weights = load_anchor(self.store, anchor, name="test")
        self.spool_directory = directory / "spools"
        self.spools = SpoolDirectory(self.spool_directory)
        self.store.put_chunk_list(self.patch.blob_id, node.store.chunk_list(self.patch.blob_id))
        self.missing = self.store.missing_chunks(self.patch.blob_id)

    def prepare(self) -> Preparation:
        return Preparation(self.patch, self.weights, self.store, self.spools, map)

    def let_in(self, index: int, data: bytes | None = None) -> None:
        digest = self.missing[index][1]
        self.store.put_chunks({digest: self.upstream.chunk(digest) if data is None else data})

    def spool_count(self) -> int:
        return len(list(self.spool_directory.iterdir()))


@pytest.fixture
def arrival(tmp_path: Path, kit: Any, node: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arrival]:
    # Chunks of half a kilobyte, so that a small patch has many.
    monkeypatch.setattr("pulsenetd.storage.store.ChunkCutter", lambda: kit.ChunkCutter(512))
    made = Arrival(tmp_path / "follower", kit, node)
    assert len(made.missing) >= 5
    yield made
    made.store.close()


def test_the_spool_is_ready_when_the_last_chunk_is(arrival: Arrival) -> None:
    before = arrival.weights.region.bytes.copy()
    preparation = arrival.prepare()
    # In any order, as chunks come.
    for index in [*range(1, len(arrival.missing)), 0]:
        arrival.let_in(index)
    spool = preparation.finish()
    assert spool is not None
    pieces = arrival.store.read_blob(arrival.patch.blob_id)
    assert list(spool.read_blocks()) == list(decode_patch(pieces, arrival.table, before))
    assert np.array_equal(arrival.weights.region.bytes, before)


def test_chunks_that_are_there_already_are_used(arrival: Arrival) -> None:
    for index in range(len(arrival.missing)):
        arrival.let_in(index)
    assert arrival.prepare().finish() is not None


def test_a_preparation_can_be_cancelled_at_any_point_and_leaves_nothing(arrival: Arrival) -> None:
    for count in range(len(arrival.missing) + 1):
        preparation = arrival.prepare()
        for index in range(count):
            arrival.let_in(index)
        preparation.cancel()
        assert arrival.spool_count() == 0
    assert threading.active_count() == len([t for t in threading.enumerate() if t.name != "prepare-hop"])


def test_a_chunk_that_never_came_or_is_damaged_makes_no_spool(arrival: Arrival) -> None:
    preparation = arrival.prepare()
    for index in range(len(arrival.missing) - 1):
        arrival.let_in(index)
    assert preparation.finish() is None
    arrival.let_in(len(arrival.missing) - 1)
    path = arrival.store._chunks._path(arrival.missing[2][1])
    path.write_bytes(b"damaged")
    preparation = arrival.prepare()
    assert preparation.finish() is None
    assert arrival.spool_count() == 0


def test_a_blob_that_is_no_patch_makes_no_spool(arrival: Arrival) -> None:
    with arrival.store.writing_blob() as writer:
        writer.feed(bytes(1000))
        chunk_list = writer.finish()
    arrival.patch = replace(arrival.patch, blob_id=chunk_list.blob_id)
    assert arrival.prepare().finish() is None
    assert arrival.spool_count() == 0


@pytest.mark.parametrize("at", ["begin", "write", "finish"])
def test_a_full_disk_makes_no_spool_and_is_left_to_the_hop(
    arrival: Arrival, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise StorageError("no space left", "enospc")

    target = (
        "pulsenetd.storage.spools.SpoolDirectory.begin"
        if at == "begin"
        else f"pulsenetd.storage.spools.SpoolWriter.{at}"
    )
    monkeypatch.setattr(target, refuse)
    preparation = arrival.prepare()
    for index in range(len(arrival.missing)):
        arrival.let_in(index)
    assert preparation.finish() is None
    assert arrival.spool_count() == 0


def test_only_patches_from_exactly_what_is_held_are_prepared(kit: Any) -> None:
    root, table_digest = Digest(b"r" * 32), Digest(b"t" * 32)
    held = HeldVersion(Version(0, 4), root, table_digest)
    fits = kit.make_manifest(
        kind=Kind.PATCH, base_version=held.version, base_root=root, version=Version(0, 5), table_digest=table_digest
    )
    assert can_prepare(fits, held)
    assert can_prepare(replace(fits, kind=Kind.SKIP, version=Version(0, 9)), held)
    assert not can_prepare(replace(fits, kind=Kind.ANCHOR), held)
    assert not can_prepare(replace(fits, base_version=Version(1, 4)), held)
    assert not can_prepare(replace(fits, base_root=Digest(bytes(32))), held)
    assert not can_prepare(replace(fits, table_digest=Digest(bytes(32))), held)
