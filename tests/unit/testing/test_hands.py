"""The hands do what a daemon's workers do: encode, commit, apply, swap, and refuse what cannot be done."""

from __future__ import annotations

from pulsenet.chain.records import Kind
from pulsenet.ids import Digest, Version
from pulsenet.node.effects import Commit, EncodeSkip, EncodeSnapshot, HandToEngine, StoreAnchor, StoreChunk
from pulsenet.node.events import (
    AnchorStored,
    ChunkStored,
    Committed,
    EncodeFailed,
    EngineApplied,
    EngineFailed,
    ExtraFailed,
    PatchEncoded,
    SkipEncoded,
)
from pulsenet.testing.fakes import Chance, FakeStore
from pulsenet.testing.hands import Hands
from pulsenet.testing.weights import change_region, make_region


def make_hands(*, engine_fails: bool = False) -> tuple[Hands, list[tuple[Version, Digest]]]:
    noted: list[tuple[Version, Digest]] = []
    hands = Hands(
        FakeStore(),
        engine_fails=lambda: engine_fails,
        note_version=lambda version, root: noted.append((version, root)),
    )
    return hands, noted


def commit(hands: Hands, generation: int, number: int, kind: Kind) -> PatchEncoded:
    encoded = hands.finish(EncodeSnapshot(generation, kind))
    assert isinstance(encoded, PatchEncoded)
    version = Version(0, number)
    assert hands.finish(Commit(generation, version, encoded.root, (), (("key", b"value"),))) == Committed(version)
    return encoded


def test_a_publish_moves_the_baseline_only_at_its_commit() -> None:
    hands, noted = make_hands()
    region = make_region(Chance(1))
    generation = hands.take_snapshot(region)
    assert hands.finish(EncodeSnapshot(generation, Kind.PATCH)) == EncodeFailed(generation, "no_baseline")
    assert hands.mirror.version is None
    encoded = commit(hands, generation, 1, Kind.ANCHOR)
    assert hands.store.holds_blob(encoded.blob_id)
    assert noted == [(Version(0, 1), encoded.root)]
    assert hands.store.state == {"key": b"value"}
    second = hands.take_snapshot(change_region(region, Chance(2), 9))
    assert 1 <= commit(hands, second, 2, Kind.PATCH).changed_count <= 9
    assert hands.mirror.version == Version(0, 2)


def test_extras_are_made_of_committed_versions_only() -> None:
    hands, noted = make_hands()
    region = make_region(Chance(1))
    assert hands.finish(StoreAnchor(Version(0, 1))) == ExtraFailed(Version(0, 1), "no_baseline")
    commit(hands, hands.take_snapshot(region), 1, Kind.ANCHOR)
    commit(hands, hands.take_snapshot(change_region(region, Chance(2), 9)), 2, Kind.PATCH)
    assert isinstance(hands.finish(StoreAnchor(Version(0, 2))), AnchorStored)
    assert isinstance(hands.finish(EncodeSkip(Version(0, 1), Version(0, 2))), SkipEncoded)
    assert hands.finish(EncodeSkip(Version(0, 0), Version(0, 2))) == ExtraFailed(Version(0, 2), "no_spool")
    assert hands.finish(Commit(None, Version(0, 2), Digest(b"r" * 32), (), ())) == Committed(Version(0, 2))
    assert len(noted) == 2


def test_the_engine_gets_the_mirrors_newest_version() -> None:
    hands, _ = make_hands()
    assert hands.finish(HandToEngine(Version(0, 1))) == EngineFailed(None, "refused")
    commit(hands, hands.take_snapshot(make_region(Chance(1))), 2, Kind.ANCHOR)
    assert hands.finish(HandToEngine(Version(0, 1))) == EngineApplied(Version(0, 2))
    assert hands.swaps == [Version(0, 2)]
    failing, _ = make_hands(engine_fails=True)
    commit(failing, failing.take_snapshot(make_region(Chance(1))), 1, Kind.ANCHOR)
    assert failing.finish(HandToEngine(Version(0, 1))) == EngineFailed(None, "refused")


def test_a_chunk_is_durable_when_its_event_comes() -> None:
    hands, _ = make_hands()
    digest = Digest(b"d" * 32)
    assert hands.finish(StoreChunk(digest, b"data")) == ChunkStored(digest)
    assert hands.store.chunks == {digest: b"data"}
    assert hands.fetched_size_bytes == 4
