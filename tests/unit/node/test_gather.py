"""Contribution records first, then every blob, each from whoever has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pulsenet.chain.ledger import Ledger
from pulsenet.chain.records import Contribution, StateAnchor
from pulsenet.chain.signing import encode_signed, record_digest
from pulsenet.ids import compute_digest
from pulsenet.node.courier import Courier
from pulsenet.node.effects import Count, Effect, SendRequest, StoreChunk, StoreChunkList, StoreRecord, StrikePeer
from pulsenet.node.events import ChunkStored, PeerConnected, PeerLost, ReplyReceived, RequestDone, StoreFailed
from pulsenet.node.gather import Gatherer
from pulsenet.node.respond import respond
from pulsenet.testing.fakes import FakeStore
from pulsenet.testing.toy_training import write_blob
from pulsenet.wire.messages import GetChunks, RecordsReply
from pulsenet.wire.schema import decode_value


class Bench:
    """A gatherer and one donor that holds a contribution."""

    def __init__(self, make_run: Callable[..., Any]) -> None:
        self.run = make_run(trainers=(make_run.second.peer_id,))  # type: ignore[attr-defined]
        self.ledger = Ledger(self.run.trust())
        self.store, self.donor = FakeStore(), FakeStore()
        self.gatherer = Gatherer(self.ledger, lambda count: 0, self.store, Courier().take_request_id)
        self.peer = self.run.publisher.peer_id
        self.blob_id, size_bytes = write_blob(self.donor, bytes(range(40)))
        record = Contribution(
            self.run.run_id, 0, self.run.second.peer_id, 0, self.blob_id, self.blob_id, size_bytes, 5, 100, 0, 1
        )
        self.signed = self.run.seal(record, self.run.second)
        self.digest = record_digest(self.signed)
        self.donor.put_record(self.signed)
        self.now = 0.0
        self.log: list[Effect] = []

    def run_until_quiet(self, effects: list[Effect]) -> None:
        """Carry out what is ordered, with the donor answering, until nothing is left to do."""
        queue = list(effects)
        while queue:
            effect = queue.pop(0)
            self.log.append(effect)
            match effect:
                case SendRequest(request_id, peer_id, message):
                    for reply in respond(message, self.donor):
                        queue += self.gatherer.handle(ReplyReceived(request_id, peer_id, reply), self.now)
                    if isinstance(message, GetChunks):
                        queue += self.gatherer.handle(RequestDone(request_id, peer_id), self.now)
                case StoreRecord(record):
                    self.store.put_record(record)
                case StoreChunkList(blob_id, data):
                    self.store.lists[blob_id] = data
                case StoreChunk(digest, data):
                    self.store.chunks[digest] = data
                    queue += self.gatherer.handle(ChunkStored(digest), self.now)
            queue += self.gatherer.pump(self.now)


@pytest.fixture
def bench(make_run: Callable[..., Any]) -> Bench:
    return Bench(make_run)


def test_a_listed_contribution_is_fetched_record_and_blob(bench: Bench) -> None:
    bench.gatherer.handle(PeerConnected(bench.peer, (), outbound=True), 0.0)
    effects = bench.gatherer.set_wants({bench.digest: bench.peer}, None)
    assert not bench.gatherer.holds_contributions((bench.digest,))
    bench.run_until_quiet([*effects, *bench.gatherer.pump(0.0)])
    assert bench.gatherer.holds_contributions((bench.digest,))
    assert b"".join(bench.store.read_blob(bench.blob_id)) == bytes(range(40))
    assert bench.store.record(bench.digest) == encode_signed(bench.signed)


def test_what_the_store_holds_is_not_asked_for(bench: Bench) -> None:
    bench.store = bench.donor
    bench.gatherer = Gatherer(bench.ledger, lambda count: 0, bench.donor, Courier().take_request_id)
    bench.ledger.accept_contribution(bench.signed)
    bench.gatherer.set_wants({bench.digest: None}, None)
    assert bench.gatherer.pump(0.0) == []
    assert bench.gatherer.holds_contributions((bench.digest,))


def test_a_record_that_becomes_known_otherwise_is_noticed(bench: Bench) -> None:
    bench.gatherer.handle(PeerConnected(bench.peer, (), outbound=True), 0.0)
    bench.gatherer.set_wants({bench.digest: bench.peer}, None)
    bench.ledger.accept_contribution(bench.signed)
    bench.gatherer.set_wants({bench.digest: bench.peer}, None)
    bench.run_until_quiet(bench.gatherer.pump(0.0))
    assert bench.gatherer.holds_contributions((bench.digest,))


def test_a_record_nobody_asked_for_costs_a_strike(bench: Bench) -> None:
    bench.gatherer.handle(PeerConnected(bench.peer, (), outbound=True), 0.0)
    other = compute_digest(b"other")
    bench.gatherer.set_wants({other: bench.peer}, None)
    (request,) = bench.gatherer.pump(0.0)
    assert isinstance(request, SendRequest)
    reply = RecordsReply((encode_signed(bench.signed),))
    effects = bench.gatherer.handle(ReplyReceived(request.request_id, bench.peer, reply), 0.0)
    assert StrikePeer(bench.peer, "unexpected") in effects
    assert bench.ledger.contribution(bench.digest) is None


def test_whoever_passes_on_what_a_later_revision_allows_is_not_struck(bench: Bench) -> None:
    bench.gatherer.handle(PeerConnected(bench.peer, (), outbound=True), 0.0)
    contribution = decode_value(Contribution, bench.signed.payload)
    signed = bench.run.seal(replace(contribution, revision=1), bench.run.second)
    bench.gatherer.set_wants({record_digest(signed): bench.peer}, None)
    (request,) = bench.gatherer.pump(0.0)
    assert isinstance(request, SendRequest)
    reply = RecordsReply((encode_signed(signed),))
    effects = bench.gatherer.handle(ReplyReceived(request.request_id, bench.peer, reply), 0.0)
    assert effects == [Count("rejected", "revision-unknown")]


def test_a_state_anchor_is_fetched_by_its_signed_size(bench: Bench) -> None:
    bench.gatherer.handle(PeerConnected(bench.peer, (), outbound=True), 0.0)
    anchor = StateAnchor(bench.run.run_id, 0, 0, bench.blob_id, None, bench.blob_id, 40)
    bench.run_until_quiet([*bench.gatherer.set_wants({}, anchor), *bench.gatherer.pump(0.0)])
    assert bench.gatherer.is_whole(anchor.blob_id)
    # One whose size is not the signed one is never fetched at all.
    short = StateAnchor(bench.run.run_id, 0, 0, bench.blob_id, None, bench.blob_id, 39)
    bench.store.lists.clear()
    bench.store.chunks.clear()
    bench.gatherer.set_wants({}, None)
    bench.run_until_quiet([*bench.gatherer.set_wants({}, short), *bench.gatherer.pump(0.0)])
    assert not bench.gatherer.is_whole(short.blob_id)
    assert bench.gatherer.refusal_of(bench.blob_id) == "chunk-list"


def test_after_a_full_disk_the_store_is_asked_again_what_it_holds(bench: Bench) -> None:
    bench.gatherer.handle(PeerConnected(bench.peer, (), outbound=True), 0.0)
    bench.run_until_quiet([*bench.gatherer.set_wants({bench.digest: bench.peer}, None), *bench.gatherer.pump(0.0)])
    bench.store.lists.clear()
    bench.gatherer.handle(StoreFailed(None, "enospc"), 0.0)
    assert not bench.gatherer.holds_contributions((bench.digest,))
    bench.now = 60.0
    bench.run_until_quiet(
        [*bench.gatherer.set_wants({bench.digest: bench.peer}, None), *bench.gatherer.pump(bench.now)]
    )
    assert bench.gatherer.holds_contributions((bench.digest,))
    assert bench.blob_id in bench.store.lists


def test_a_lost_peer_is_asked_nothing_more(bench: Bench) -> None:
    bench.gatherer.handle(PeerConnected(bench.peer, (), outbound=True), 0.0)
    bench.gatherer.set_wants({bench.digest: bench.peer}, None)
    bench.gatherer.pump(0.0)
    bench.gatherer.handle(PeerLost(bench.peer, "closed"), 0.0)
    assert bench.gatherer.pump(100.0) == []
    assert bench.gatherer.progress().wanted_size_bytes == 0
    assert bench.gatherer.next_wake(1e9) is None
