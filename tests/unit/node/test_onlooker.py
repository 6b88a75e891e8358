"""A node that trains nothing keeps informed of the rounds, and lets go of what is over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pulsenet.chain.ledger import LEDGER_KEY, Ledger
from pulsenet.chain.outcome import outcome_of
from pulsenet.chain.records import Member, Receipt, SignedRecord, StateAnchor
from pulsenet.chain.signing import encode_signed, record_digest
from pulsenet.ids import compute_digest
from pulsenet.node.effects import (
    Count,
    Effect,
    Release,
    Report,
    SendRequest,
    SetTimer,
    ShowToMachines,
    StoreRecord,
    StrikePeer,
)
from pulsenet.node.events import (
    Event,
    PeerConnected,
    PeerLost,
    ReceiptSeen,
    ReplyReceived,
    TermSeen,
    TimerFired,
)
from pulsenet.node.onlooker import Onlooker
from pulsenet.node.rounds_contact import POLL_SECONDS
from pulsenet.testing.fakes import FakeStore, only
from pulsenet.wire.messages import GetRounds, Refusal, RoundsReply


class Bench:
    """An onlooker, connected to the only authority."""

    def __init__(self, run: Any) -> None:
        self.run, self.authority = run, run.publisher
        self.trust, self.store = run.trust(), FakeStore()
        self.ledger = Ledger(self.trust)
        self.machine = Onlooker(run.seat(run.third, self.trust, self.ledger))
        self.now = 0.0
        self.receipts: dict[int, Receipt] = {}

    def tell(self, event: Event) -> list[Effect]:
        effects = self.machine.handle(event, self.now, 0)
        self.store.keep(effects)
        return effects

    def connect(self) -> list[Effect]:
        return self.tell(PeerConnected(self.authority.peer_id, (), outbound=True))

    def final(self, round_index: int) -> SignedRecord:
        signed: SignedRecord = self.run.seal(self.final_receipt(round_index), self.authority)
        return signed

    def final_receipt(self, round_index: int) -> Receipt:
        before = self.receipts.get(round_index - 1)
        self.receipts[round_index] = receipt = Receipt(
            run_id=self.run.run_id,
            revision=0,
            term=1,
            coordinator=self.authority.peer_id,
            round_index=round_index,
            base_state_root=compute_digest(b"state %d" % round_index),
            previous=None if before is None else outcome_of(before),
            members=(Member(self.run.second.peer_id, compute_digest(b"contribution %d" % round_index), 0x3F80_0000),),
            rejected=(),
        )
        return receipt

    def anchor(self, round_index: int) -> SignedRecord:
        before = self.receipts.get(round_index - 1)
        record = StateAnchor(
            run_id=self.run.run_id,
            revision=0,
            round_index=round_index,
            state_root=compute_digest(b"state %d" % round_index),
            outcome=None if before is None else outcome_of(before),
            blob_id=compute_digest(b"anchor %d" % round_index),
            encoded_size_bytes=80,
        )
        signed: SignedRecord = self.run.seal(record, self.authority)
        return signed

    def votes(self) -> tuple[bytes, ...]:
        return (self.run.vote(self.authority),)

    def reply(self, *receipts: SignedRecord, anchor: SignedRecord | None = None) -> list[Effect]:
        encoded = tuple(encode_signed(signed) for signed in receipts)
        state_anchor = None if anchor is None else encode_signed(anchor)
        reply = RoundsReply(len(self.receipts), self.votes(), encoded, state_anchor)
        return self.tell(ReplyReceived(1, self.authority.peer_id, reply))


@pytest.fixture
def bench(run: Any) -> Bench:
    return Bench(run)


def test_it_asks_those_it_meets_and_then_from_time_to_time(bench: Bench) -> None:
    assert only(bench.tell(TimerFired()), SendRequest) == []
    effects = bench.connect()
    assert [request.message for request in only(effects, SendRequest)] == [GetRounds(0)]
    (timer,) = only(effects, SetTimer)
    assert timer.at == POLL_SECONDS
    bench.reply(bench.final(0))
    bench.now = POLL_SECONDS
    effects = bench.tell(TimerFired())
    assert [request.message for request in only(effects, SendRequest)] == [GetRounds(1)]
    bench.now = 2 * POLL_SECONDS
    bench.tell(PeerLost(bench.authority.peer_id, "closed"))
    assert only(bench.tell(TimerFired()), SendRequest) == []


def test_what_it_learns_is_stored_shown_and_reported_once(bench: Bench) -> None:
    finals = [bench.final(index) for index in range(3)]
    effects = bench.reply(*finals, anchor=bench.anchor(0))
    assert bench.ledger.next_round_index == 3
    assert bench.ledger.mandate is not None
    assert len(only(effects, StoreRecord)) == 4
    shown = [effect.event.record for effect in only(effects, ShowToMachines)]
    assert sorted(shown) == sorted(encode_signed(signed) for signed in finals)
    (report,) = only(effects, Report)
    assert dict(report.fields) == {"rounds_phase": "watching", "round_index": 3, "round_contributors": 1}
    assert only(bench.reply(*finals, anchor=bench.anchor(0)), Report) == []
    restored = Ledger.restore(bench.trust, bench.store.state[LEDGER_KEY], bench.store.record)
    assert restored.next_round_index == 3


def test_pushed_terms_and_final_receipts_are_taken(bench: Bench) -> None:
    bench.tell(TermSeen(bench.votes(), None))
    assert bench.ledger.mandate is not None
    record = encode_signed(bench.final(0))
    assert len(only(bench.tell(ReceiptSeen(record, (), bench.authority.peer_id)), StoreRecord)) == 1
    assert only(bench.tell(ReceiptSeen(record, (), bench.authority.peer_id)), StoreRecord) == []
    assert bench.ledger.next_round_index == 1


def test_what_lies_before_the_older_anchor_goes(bench: Bench) -> None:
    """An authority that only votes would keep every contribution of the run otherwise."""
    finals = [bench.final(index) for index in range(4)]
    bench.reply(*finals)
    bench.reply(anchor=bench.anchor(2))
    effects = bench.reply(anchor=bench.anchor(4))
    (release,) = only(effects, Release)
    assert set(release.record_digests) == {record_digest(finals[0]), record_digest(finals[1])}
    assert release.spares_versions
    assert bench.ledger.final(1) is None
    assert bench.ledger.final(2) is not None


def test_what_breaks_the_specification_is_counted_and_struck(bench: Bench) -> None:
    effects = bench.tell(ReceiptSeen(b"nonsense", (), bench.authority.peer_id))
    assert Count("rejected", "schema") in effects
    assert StrikePeer(bench.authority.peer_id, "schema") in effects
    bench.final(0)
    forged = encode_signed(bench.run.seal(bench.receipts[0], bench.run.stranger))
    assert Count("rejected", "untrusted") in bench.tell(ReceiptSeen(forged, (), bench.authority.peer_id))
    assert bench.ledger.next_round_index == 0


def test_a_busy_peer_is_asked_later(bench: Bench) -> None:
    bench.connect()
    bench.tell(ReplyReceived(1, bench.authority.peer_id, Refusal("busy", "", 40_000)))
    bench.now = 39.0
    assert only(bench.tell(TimerFired()), SendRequest) == []
    bench.now = 40.0
    assert len(only(bench.tell(TimerFired()), SendRequest)) == 1


def restore(bench: Bench) -> Ledger:
    return Ledger.restore(bench.trust, bench.store.state[LEDGER_KEY], bench.store.record)


def test_what_was_learnt_before_a_refusal_is_stored_all_the_same(bench: Bench) -> None:
    """A reply with a good receipt before a bad one made the ledger name a record that no disk holds."""
    first, second = bench.final(0), bench.final(1)
    forged = bench.run.seal(replace(bench.receipts[0], base_state_root=compute_digest(b"another")), bench.run.stranger)
    assert Count("rejected", "untrusted") in bench.reply(forged, second)
    restored = restore(bench)
    assert restored.final(1) is not None
    assert restored.final(0) is None
    bench.reply(first)
    assert restore(bench).next_round_index == 2


def test_a_fork_of_the_rounds_is_known_after_a_restart(bench: Bench) -> None:
    bench.reply(bench.final(0))
    del bench.receipts[0]
    other = replace(bench.final_receipt(0), base_state_root=compute_digest(b"another state"))
    effects = bench.reply(bench.run.seal(other, bench.authority))
    assert Count("rejected", "fork") in effects
    assert restore(bench).fork is not None
