"""A disk that damages chunks hands none of them out."""

from __future__ import annotations

import pytest

from pulsenet.errors import StorageError
from pulsenet.ids import Digest, compute_digest
from pulsenet.testing.disk import FailingStore
from pulsenet.testing.fakes import Chance
from pulsenet.wire.chunks import ChunkCutter

DATA = bytes(range(200))


def store_with_blob() -> tuple[FailingStore, Digest]:
    store = FailingStore()
    cutter = ChunkCutter(50)
    store.chunks.update([*cutter.feed(DATA), *cutter.finish()])
    store.lists[cutter.chunk_list.blob_id] = cutter.chunk_list.encode()
    return store, cutter.chunk_list.blob_id


def test_a_sound_disk_gives_back_what_it_holds() -> None:
    store, blob_id = store_with_blob()
    assert b"".join(store.read_blob(blob_id)) == DATA
    assert store.chunk(compute_digest(DATA[:50])) == DATA[:50]
    assert store.chunk(compute_digest(b"other")) is None


def test_a_flipped_bit_is_found_when_it_is_read_and_the_chunk_dropped() -> None:
    store, blob_id = store_with_blob()
    store.flip_bit(Chance(1))
    (digest,) = store.suspects
    assert store.has_chunk(digest)
    assert store.chunk(digest) is None
    assert not store.has_chunk(digest)
    assert store.damaged_count == 1
    with pytest.raises(StorageError, match="damaged"):
        store.read_blob(blob_id)


def test_reading_a_damaged_blob_drops_all_that_is_damaged_of_it() -> None:
    store, blob_id = store_with_blob()
    for seed in range(20):
        store.flip_bit(Chance(seed))
    flipped = set(store.suspects)
    with pytest.raises(StorageError, match="damaged"):
        store.read_blob(blob_id)
    assert not flipped & store.chunks.keys()
    assert not store.suspects


def test_two_flips_of_one_bit_damage_nothing() -> None:
    store, blob_id = store_with_blob()
    store.flip_bit(Chance(1))
    store.flip_bit(Chance(1))
    assert b"".join(store.read_blob(blob_id)) == DATA
    assert store.damaged_count == 0


def test_a_torn_chunk_is_a_damaged_one_and_a_whole_one_is_not_torn() -> None:
    store, _ = store_with_blob()
    digest = compute_digest(b"new chunk")
    store.tear(digest, b"new chunk", Chance(3))
    assert len(store.chunks[digest]) < len(b"new chunk")
    assert store.chunk(digest) is None
    held = compute_digest(DATA[:50])
    store.tear(held, DATA[:50], Chance(3))
    assert store.chunk(held) == DATA[:50]


def test_an_empty_disk_cannot_rot() -> None:
    store = FailingStore()
    store.flip_bit(Chance(1))
    assert not store.suspects
