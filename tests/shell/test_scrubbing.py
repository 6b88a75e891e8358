"""A running node finds what its disk damaged, and its machines hear of it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor

import pytest

from pulsenet.chain.records import Contribution
from pulsenet.chain.signing import seal
from pulsenet.ids import Digest, PeerId, RunId, compute_digest
from pulsenet.node.events import BlobDamaged, Event, RoomTaken
from pulsenet.wire.chunks import ChunkList
from pulsenetd import scrubbing
from pulsenetd.driver import Driver
from pulsenetd.scrubbing import Scrubber
from pulsenetd.storage.store import Store

PARTS = [b"one", b"two", b"three"]


@pytest.fixture
def thread() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


@pytest.fixture
def chunk_list(store: Store) -> ChunkList:
    held = ChunkList(tuple((len(part), compute_digest(part)) for part in PARTS))
    store.put_chunk_list(held.blob_id, held.encode())
    for part in PARTS:
        store.put_chunks({compute_digest(part): part})
    return held


def damage(store: Store, part: bytes) -> None:
    name = compute_digest(part).hex()
    (store.directory / "chunks" / name[:2] / name).write_bytes(b"x" * len(part))


async def test_all_is_read_little_by_little_and_damage_told_once(
    store: Store, chunk_list: ChunkList, thread: Executor
) -> None:
    """A-DSK-2."""
    posted: list[Event] = []
    scrubber = Scrubber(store, thread, posted.append)
    damage(store, b"two")
    for _ in PARTS:
        await scrubber.look()
    assert posted == [BlobDamaged(chunk_list.blob_id)]
    assert scrubber.pass_count == 1
    assert not store.is_complete(chunk_list.blob_id)
    for _ in PARTS:
        await scrubber.look()
    assert len(posted) == 1


async def test_what_a_reader_found_damaged_is_told_too(store: Store, chunk_list: ChunkList, thread: Executor) -> None:
    posted: list[Event] = []
    scrubber = Scrubber(store, thread, posted.append)
    damage(store, b"three")
    assert store.chunk(compute_digest(b"three")) is None
    await scrubber.look()
    assert posted == [BlobDamaged(chunk_list.blob_id)]


async def test_a_large_store_is_read_within_a_day(
    store: Store, chunk_list: ChunkList, thread: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrubbing, "PASS_SECONDS", 2 * scrubbing.LOOK_SECONDS)
    scrubber = Scrubber(store, thread, lambda event: None)
    await scrubber.look()
    assert scrubber.pass_count == 0
    await scrubber.look()
    assert scrubber.pass_count == 1


async def test_a_chunk_that_was_let_go_meanwhile_is_no_damage(
    store: Store, chunk_list: ChunkList, thread: Executor
) -> None:
    posted: list[Event] = []
    scrubber = Scrubber(store, thread, posted.append)
    await scrubber.look()
    store.release([chunk_list.blob_id], [], now=0.0)
    for _ in PARTS:
        await scrubber.look()
    assert posted == []


async def test_room_that_rounds_take_is_told_when_it_changes(
    store: Store, chunk_list: ChunkList, thread: Executor
) -> None:
    """Found in use: contributions of rounds came on top of the operator's limit."""
    posted: list[Event] = []
    scrubber = Scrubber(store, thread, posted.append)
    zero, peer_id = Digest(bytes(32)), PeerId(bytes(32))
    await scrubber.look()
    contribution = Contribution(RunId(zero), 0, peer_id, 3, zero, chunk_list.blob_id, 11, 1, 10, 0, 1)
    digest = store.put_record(seal(contribution, lambda message: bytes(64), peer_id))
    for _ in range(2):
        await scrubber.look()
    store.release([], [digest], now=0.0)
    await scrubber.look()
    assert posted == [RoomTaken(sum(map(len, PARTS))), RoomTaken(0)]


async def test_the_driver_shows_every_machine_what_the_scrubber_tells(
    store: Store, chunk_list: ChunkList, thread: Executor
) -> None:
    """Found in use: a trainer's node ended a minute after its first round."""
    driver = Driver({}, {}, monotonic=lambda: 0.0, wall_ms=lambda: 0)
    scrubber = Scrubber(store, thread, driver.post)
    zero, peer_id = Digest(bytes(32)), PeerId(bytes(32))
    contribution = Contribution(RunId(zero), 0, peer_id, 3, zero, chunk_list.blob_id, 11, 1, 10, 0, 1)
    store.put_record(seal(contribution, lambda message: bytes(64), peer_id))
    damage(store, b"two")
    for _ in PARTS:
        await scrubber.look()
    assert scrubber.pass_count == 1
