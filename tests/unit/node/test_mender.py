"""What a publisher's disk lost comes back from peers, or is given up aloud."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from pulsenet.chain.records import Have, Kind
from pulsenet.chain.trust import entry_of
from pulsenet.ids import Digest, PeerId, Version
from pulsenet.node.effects import Effect, Log, SendRequest, SetTimer, ShowToMachines, StoreChunk
from pulsenet.node.events import (
    BlobDamaged,
    BlobLost,
    ChunkStored,
    Event,
    PeerConnected,
    PeerLost,
    ReplyReceived,
    RequestDone,
    TimerFired,
)
from pulsenet.node.mender import MEND_SECONDS, Mender
from pulsenet.node.published import PublishedState, Retained
from pulsenet.node.respond import respond
from pulsenet.testing.fakes import Chance, make_key, only
from pulsenet.testing.script import ScriptedPublisher

READER = make_key("reader")
NAME = Digest(bytes(32))


class Bench:
    """A publisher of two patches whose disk lost the second."""

    def __init__(self) -> None:
        self.publisher = ScriptedPublisher()
        digests = [
            self.publisher.add(Kind.PATCH, Version(0, number), Version(0, number + 1), bytes([number]) * 100)
            for number in range(2)
        ]
        manifests = [self.publisher.manifests[digest] for digest in digests]
        retained = tuple(
            Retained(entry_of(manifest, digest), manifest.blob_id)
            for manifest, digest in zip(manifests, digests, strict=True)
        )
        self.state: PublishedState | None = PublishedState(
            Version(0, 2), NAME, NAME, NAME, NAME, None, 1, 10, 5, 1, retained, (NAME,)
        )
        self.store = self.publisher.store
        self.blob_id = manifests[1].blob_id
        self.reader = copy.deepcopy(self.store)
        for digest in self.store.digests_of(self.store.lists[self.blob_id]):
            del self.store.chunks[digest]
        self.haves: dict[PeerId, Have] = {}
        self.now = 0.0

    def make(self, *lacking: Digest) -> Mender:
        return Mender(
            self.publisher.peer_id,
            Chance(1),
            self.store,
            find_state=lambda: self.state,
            have_of=self.haves.get,
            lacking=lacking,
        )

    def tell(self, mender: Mender, *events: Event) -> list[Effect]:
        return [effect for event in events for effect in mender.handle(event, self.now, 0)]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def meet(peer_id: PeerId) -> PeerConnected:
    return PeerConnected(peer_id, (), outbound=True)


def serve(bench: Bench, mender: Mender, effects: list[Effect]) -> list[Effect]:
    """Answer as a reader that has everything, store what comes, and return all that follows from that."""
    seen, queue = list(effects), list(effects)
    while queue:
        effect = queue.pop(0)
        events: list[Event] = []
        if isinstance(effect, SendRequest):
            replies = respond(effect.message, bench.reader)
            events = [ReplyReceived(effect.request_id, effect.peer_id, reply) for reply in replies]
            events.append(RequestDone(effect.request_id, effect.peer_id))
        elif isinstance(effect, StoreChunk):
            bench.store.chunks[effect.digest] = effect.data
            events = [ChunkStored(effect.digest)]
        new = bench.tell(mender, *events)
        seen += new
        queue += new
    return seen


@pytest.mark.parametrize("is_from_start", [False, True])
def test_what_is_lost_is_fetched_from_whoever_has_it(bench: Bench, is_from_start: bool) -> None:
    mender = bench.make(*([bench.blob_id] if is_from_start else []))
    effects = bench.tell(mender, meet(bench.publisher.peer_id), meet(READER))
    if not is_from_start:
        assert effects == []
        effects = bench.tell(mender, BlobDamaged(bench.blob_id))
    assert mender.lacking == (bench.blob_id,)
    assert {effect.peer_id for effect in effects if isinstance(effect, SendRequest)} == {READER}
    seen = serve(bench, mender, effects)
    assert bench.store.chunks == bench.reader.chunks
    assert mender.lacking == ()
    assert any("whole again" in effect.text for effect in seen if isinstance(effect, Log))
    assert bench.tell(mender, TimerFired()) == []


def test_what_nobody_has_is_told_once_with_what_to_do_and_asked_for_on(bench: Bench) -> None:
    mender = bench.make()
    effects = bench.tell(mender, BlobDamaged(bench.blob_id))
    assert only(effects, SetTimer)
    bench.now = MEND_SECONDS
    effects = bench.tell(mender, TimerFired())
    assert only(effects, ShowToMachines) == [ShowToMachines(BlobLost(bench.blob_id))]
    (told,) = only(effects, Log)
    assert "pulsenet doctor" in told.text
    bench.now *= 3
    assert only(bench.tell(mender, TimerFired()), Log) == []
    # Somebody who has it is met later.
    effects = bench.tell(mender, meet(READER))
    assert only(effects, SendRequest)
    # Damaged again, it is told again.
    effects = bench.tell(mender, PeerLost(READER, "closed"), BlobDamaged(bench.blob_id))
    bench.now *= 2
    assert only(bench.tell(mender, TimerFired()), ShowToMachines)


def test_what_is_not_offered_is_not_fetched(bench: Bench) -> None:
    mender = bench.make()
    bench.tell(mender, meet(READER))
    assert bench.tell(mender, BlobDamaged(NAME)) == []
    assert bench.state is not None
    bench.state = replace(bench.state, retained=bench.state.retained[:1])
    assert bench.tell(mender, BlobDamaged(bench.blob_id)) == []
    bench.state = None
    assert bench.tell(mender, BlobDamaged(bench.blob_id)) == []
    assert mender.lacking == ()


def test_a_manifest_that_is_damaged_too_is_left_alone(bench: Bench) -> None:
    assert bench.state is not None
    bench.store.records[bench.state.retained[1].entry.manifest_digest] = b"rubbish"
    mender = bench.make(bench.blob_id)
    assert bench.tell(mender, meet(READER)) == []
    assert mender.lacking == ()


def test_what_a_reader_claims_is_listened_to(bench: Bench) -> None:
    bench.haves[READER] = Have(bench.publisher.run_id, "seed", 0, 1, 2, (), (), 1)
    mender = bench.make(bench.blob_id)
    assert only(bench.tell(mender, meet(READER)), SendRequest)
