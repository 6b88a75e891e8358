"""An authority: it stores before it says, countersigns what it holds, and closes rounds only in its own term."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pulsenet.chain.ballot import Ballot, Place, Stored, find_vote_refusal
from pulsenet.chain.ledger import LEDGER_KEY, Ledger
from pulsenet.chain.outcome import outcome_of
from pulsenet.chain.records import Contribution, Member, Receipt, SignedRecord, Vote
from pulsenet.chain.signing import decode_signed, encode_signed, record_digest
from pulsenet.errors import LocalProtocolError
from pulsenet.ids import compute_digest
from pulsenet.limits import VOTE_RENEW_SECONDS
from pulsenet.node.candidacy import BALLOT_KEY, decode_ballot, stored_of
from pulsenet.node.closing import REFUSED_WAITS
from pulsenet.node.coordinator import FIND_SECONDS, Coordinator
from pulsenet.node.effects import (
    EXECUTION_ORDER,
    CheckContribution,
    Count,
    Effect,
    SaveState,
    SendRequest,
    SetTimer,
    ShowToMachines,
    StoreRecord,
    StoreStateAnchor,
)
from pulsenet.node.events import (
    ContributionChecked,
    ContributionSeen,
    Event,
    PeerConnected,
    ReceiptSeen,
    ReplyReceived,
    StateAnchorStored,
    StateLost,
    StateReached,
    StoreFailed,
    TimerFired,
    VoteSeen,
)
from pulsenet.node.ledger_machine import STORE_RETRY_SECONDS
from pulsenet.node.patience import AGAIN_ROUNDS, MISSED_MAX
from pulsenet.node.proposal import RESEND_SECONDS
from pulsenet.testing.fakes import FakeStore, only
from pulsenet.testing.toy_training import write_blob
from pulsenet.wire.messages import PushContribution, PushReceipt, PushReply, PushVote
from pulsenet.wire.schema import decode_value

STATE = compute_digest(b"state 0")


class Bench:
    """The authority of rank 0 among ``count``; the others are played."""

    def __init__(self, make_run: Callable[..., Any], count: int, rank: int = 0, trainer_count: int = 1) -> None:
        keys = sorted((make_run.key(seed) for seed in range(2, 2 + count)), key=lambda key: key.peer_id)  # type: ignore[attr-defined]
        self.trainers = [make_run.key(50 + index) for index in range(trainer_count)]  # type: ignore[attr-defined]
        self.trainer = self.trainers[0]
        self.me, self.others = keys[rank], [key for index, key in enumerate(keys) if index != rank]
        trainers = tuple(sorted(key.peer_id for key in self.trainers))
        self.run = make_run(authorities=tuple(keys), trainers=trainers)
        self.trust = self.run.trust()
        self.ledger = Ledger(self.trust)
        self.store = FakeStore()
        self.now = 0.0
        self.wake_at = 0.0
        """What the machine last asked to be woken at."""
        self.begin()

    def begin(self) -> None:
        """Start the machine on what earlier lives stored."""
        seat = self.run.seat(self.me, self.trust, self.ledger)
        self.machine = Coordinator(seat, self.store, ballot=self.store.state.get(BALLOT_KEY))
        self.tell(TimerFired())
        for key in self.others:
            self.tell(PeerConnected(key.peer_id, (), outbound=True))

    def tell(self, event: Event) -> list[Effect]:
        effects = sorted(self.machine.handle(event, self.now, 0), key=lambda effect: EXECUTION_ORDER[type(effect)])
        self.store.keep(effects)
        self.wake_at = next((effect.at for effect in only(effects, SetTimer)), self.wake_at)
        return effects

    def vote(self, key: Any, term: int, candidate: Any) -> VoteSeen:
        return VoteSeen(self.run.vote(candidate, term=term, voter=key), key.peer_id)

    def contribution(self, *, is_held: bool = True, trainer: int = 0, round_index: int = 0) -> SignedRecord:
        store, key = self.store if is_held else FakeStore(), self.trainers[trainer]
        blob_id, size_bytes = write_blob(store, bytes(range(20)))
        record = Contribution(self.run.run_id, 0, key.peer_id, round_index, STATE, blob_id, size_bytes, 2, 100, 0, 1)
        signed: SignedRecord = self.run.seal(record, key)
        return signed

    def receipt(self, coordinator: Any, *keys: Any, term: int = 1, contribution: SignedRecord | None = None) -> bytes:
        member = Member(self.trainer.peer_id, record_digest(contribution or self.contribution()), 0x3F80_0000)
        receipt = Receipt(self.run.run_id, 0, term, coordinator.peer_id, 0, STATE, None, (member,), ())
        return encode_signed(self.run.seal(receipt, coordinator, *keys))

    def votes(self, candidate: Any, term: int = 1) -> tuple[bytes, ...]:
        keys = [candidate, *(key for key in (self.me, *self.others) if key is not candidate)]
        needed = len(keys) // 2 + 1
        return tuple(self.vote(key, term, candidate).record for key in keys[:needed])

    def lead(self) -> list[Effect]:
        """Let the authority under test reach its state and be elected."""
        effects = self.tell(StateReached(0, STATE))
        for key in self.others:
            effects += self.tell(self.vote(key, 1, self.me))
        return effects

    def close(self, trainer: int = 0, round_index: int = 0) -> list[Effect]:
        """Let a trainer contribute, and its content be good."""
        signed = self.contribution(trainer=trainer, round_index=round_index)
        effects = self.tell(ContributionSeen(encode_signed(signed), None))
        assert only(effects, CheckContribution)
        return self.tell(ContributionChecked(record_digest(signed), ""))


def pushed(effects: list[Effect], kind: type) -> list[Any]:
    return [effect for effect in only(effects, SendRequest) if isinstance(effect.message, kind)]


def test_one_authority_closes_a_round_with_its_signature_on_disk_first(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 1)
    assert only(bench.lead(), StoreStateAnchor) == [StoreStateAnchor(0)]
    bench.machine._courier.connected.add(bench.trainer.peer_id)
    effects = bench.close()
    assert bench.ledger.final(0) is None, "not before it is on disk"
    assert [effect.key for effect in only(effects, SaveState)].count(BALLOT_KEY) == 1
    (shown,) = only(effects, ShowToMachines)
    effects = bench.tell(shown.event)
    assert bench.ledger.final(0) is not None
    (push,) = pushed(effects, PushReceipt)
    assert push.peer_id == bench.trainer.peer_id


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_coordinator_that_has_just_begun_waits_for_those_who_were_counted_before(
    make_run: Callable[..., Any], comes_back: bool
) -> None:
    """After a restart nobody is connected yet; closing at once would leave out whoever is about to find it."""
    bench = Bench(make_run, 1, trainer_count=2)
    bench.lead()
    for key in bench.trainers:
        bench.tell(PeerConnected(key.peer_id, (), outbound=False))
    bench.close(0)
    (shown,) = only(bench.close(1), ShowToMachines)
    bench.tell(shown.event)
    assert bench.ledger.next_round_index == 1
    bench.begin()
    bench.tell(StateReached(1, STATE))
    assert bench.machine.is_leading(bench.now)
    assert not only(bench.close(0, 1), ShowToMachines)
    if comes_back:
        effects = bench.close(1, 1)
    else:
        bench.now += FIND_SECONDS
        effects = bench.tell(TimerFired())
    (shown,) = only(effects, ShowToMachines)
    assert len(bench.trust.accept_receipt(decode_signed(shown.event.record)).members) == 1 + comes_back


def test_a_receipt_is_final_with_the_second_of_three_signatures(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 3)
    assert bench.machine.term == 0
    bench.lead()
    assert bench.machine.is_leading(bench.now)
    assert bench.machine.term == 1
    pushes = pushed(bench.close(), PushReceipt)
    assert {push.peer_id for push in pushes} == {key.peer_id for key in bench.others}
    assert pushes[0].message.votes
    assert bench.ledger.final(0) is None
    signed = decode_signed(pushes[0].message.receipt)
    receipt = bench.trust.accept_receipt(signed)
    answer = encode_signed(bench.run.seal(receipt, bench.me, bench.others[0]))
    bench.tell(ReceiptSeen(answer, (), bench.others[0].peer_id))
    assert bench.ledger.final(0) is not None


def test_a_proposal_is_shown_again_to_whoever_did_not_answer(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 5)
    bench.lead()
    (shown, *_) = pushed(bench.close(), PushReceipt)
    first, *silent = bench.others
    receipt = bench.trust.accept_receipt(decode_signed(shown.message.receipt))
    answer = encode_signed(bench.run.seal(receipt, bench.me, first))
    bench.tell(ReceiptSeen(answer, (), first.peer_id))
    assert bench.ledger.final(0) is None, "two of five"
    bench.now += RESEND_SECONDS
    pushes = pushed(bench.tell(TimerFired()), PushReceipt)
    assert {push.peer_id for push in pushes} == {key.peer_id for key in silent}
    assert {push.message.receipt for push in pushes} == {answer}, "with the signature that came"


def test_who_is_elected_anew_proposes_the_same_under_the_new_term(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 3)
    bench.lead()
    (shown, *_) = pushed(bench.close(), PushReceipt)
    before = bench.trust.accept_receipt(decode_signed(shown.message.receipt))
    bench.now = 100.0
    bench.tell(TimerFired())
    effects = bench.tell(bench.vote(bench.others[0], 2, bench.me))
    (again, *_) = pushed(effects, PushReceipt)
    assert bench.trust.accept_receipt(decode_signed(again.message.receipt)) == replace(before, term=2)


def test_a_check_that_died_with_its_training_process_is_ordered_again(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 1)
    bench.lead()
    signed = bench.contribution()
    assert only(bench.tell(ContributionSeen(encode_signed(signed), None)), CheckContribution)
    bench.tell(StateLost())
    assert only(bench.tell(StateReached(0, STATE)), CheckContribution)
    effects = bench.tell(ContributionChecked(record_digest(signed), ""))
    assert [effect.record.type for effect in only(effects, StoreRecord)][-1] == Receipt.TYPE


def test_nothing_is_closed_without_a_state(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 1)
    bench.now = 1e6
    assert bench.tell(TimerFired()) == []
    assert not bench.machine.is_leading(bench.now)


def test_a_coordinator_without_a_training_process_lets_its_term_end(make_run: Callable[..., Any]) -> None:
    """Else a process that ended for good would stop the rounds of everybody."""
    bench = Bench(make_run, 3)
    bench.lead()
    bench.now += VOTE_RENEW_SECONDS
    assert pushed(bench.tell(TimerFired()), PushVote), "it renews while it holds a state"
    bench.tell(StateLost())
    for _ in range(4):
        bench.now += VOTE_RENEW_SECONDS
        assert not pushed(bench.tell(TimerFired()), PushVote)
    assert not bench.machine.is_leading(bench.now)
    assert pushed(bench.tell(StateReached(0, STATE)), PushVote), "back, it asks for the term again"


def test_a_coordinator_whose_state_nobody_else_has_lets_its_term_end(make_run: Callable[..., Any]) -> None:
    """Its weights are rotten, and no receipt of it can become final: one flipped bit would stop the run for good."""
    bench = Bench(make_run, 3)
    bench.lead()
    refusals = [
        ReplyReceived(push.request_id, push.peer_id, PushReply(False, "mismatch"))
        for push in pushed(bench.close(), PushReceipt)
    ]
    bench.tell(refusals[0])
    bench.now += VOTE_RENEW_SECONDS
    assert pushed(bench.tell(TimerFired()), PushVote), "the other one may still sign"
    bench.tell(refusals[1])
    for _ in range(4):
        bench.now += VOTE_RENEW_SECONDS
        assert not pushed(bench.tell(TimerFired()), PushVote)
    assert not bench.machine.is_leading(bench.now)
    bench.now += 1e3
    assert not pushed(bench.tell(TimerFired()), PushVote), "nor does it stand again with that state"
    assert pushed(bench.tell(StateReached(0, STATE)), PushVote), "restored"


@pytest.mark.parametrize(
    ("reply", "is_of_authority"), [(PushReply(False, "stale"), True), (PushReply(False, "mismatch"), False)]
)
def test_no_other_refusal_ends_a_term(make_run: Callable[..., Any], reply: PushReply, is_of_authority: bool) -> None:
    bench = Bench(make_run, 3)
    bench.lead()
    for push in pushed(bench.close(), PushReceipt):
        peer_id = push.peer_id if is_of_authority else bench.trainer.peer_id
        bench.tell(ReplyReceived(push.request_id, peer_id, reply))
    bench.now += VOTE_RENEW_SECONDS
    assert pushed(bench.tell(TimerFired()), PushVote)


def test_a_contribution_elsewhere_is_answered_with_why_not(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 3)
    record = encode_signed(bench.contribution())
    bench.tell(ContributionSeen(record, bench.trainer.peer_id))
    assert bench.machine.verdicts.find(PushContribution(record)) == "not-coordinator"
    bench.lead()
    bench.tell(ContributionSeen(record, bench.trainer.peer_id))
    assert bench.machine.verdicts.find(PushContribution(record)) == ""
    stranger = encode_signed(bench.run.seal(bench.trust.accept_contribution(bench.contribution()), bench.run.stranger))
    bench.tell(ContributionSeen(stranger, bench.trainer.peer_id))
    assert bench.machine.verdicts.find(PushContribution(stranger)) == "untrusted"


def test_an_authority_countersigns_only_what_it_holds(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 3, rank=1)
    coordinator = bench.others[0]
    signed = bench.contribution(is_held=False)
    record = bench.receipt(coordinator, contribution=signed)
    effects = bench.tell(ReceiptSeen(record, bench.votes(coordinator), coordinator.peer_id))
    assert pushed(effects, PushReceipt) == []
    bench.ledger.accept_contribution(signed)
    bench.contribution()  # now the blob is here
    bench.machine._gatherer.set_wants({}, None)
    effects = bench.tell(TimerFired())
    (push,) = pushed(effects, PushReceipt)
    assert push.peer_id == coordinator.peer_id
    assert bench.me.peer_id in decode_signed(push.message.receipt).signers
    kinds = [type(effect) for effect in effects]
    assert kinds.index(SaveState) < kinds.index(SendRequest)


@pytest.mark.parametrize("held", ["other state", "no proof", "promised"])
def test_a_receipt_that_may_not_be_stored_is_refused(make_run: Callable[..., Any], held: str) -> None:
    bench = Bench(make_run, 3, rank=1)
    coordinator = bench.others[0]
    record, votes = bench.receipt(coordinator), bench.votes(coordinator)
    expected = {"other state": "mismatch", "no proof": "untrusted", "promised": "term"}[held]
    if held == "other state":
        bench.tell(StateReached(0, compute_digest(b"other")))
    elif held == "promised":
        bench.tell(bench.vote(bench.others[1], 5, bench.others[1]))
    bench.tell(ReceiptSeen(record, () if held == "no proof" else votes, coordinator.peer_id))
    assert bench.machine.verdicts.find(PushReceipt(record, ())) == expected
    assert bench.store.state.get(BALLOT_KEY) is None or held == "promised"


def test_a_stale_candidate_is_shown_what_it_lacks(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 3, rank=2)
    first, second = bench.others
    bench.tell(ContributionSeen(encode_signed(bench.contribution()), None))
    bench.ledger.accept_contribution(bench.contribution())
    bench.tell(ReceiptSeen(bench.receipt(first), bench.votes(first), first.peer_id))
    bench.now = 100.0
    asked = bench.vote(second, 2, second)
    effects = bench.tell(asked)
    assert bench.machine.verdicts.find(PushVote(asked.record)) == "stale"
    (push,) = pushed(effects, PushReceipt)
    assert push.peer_id == second.peer_id


def test_a_new_coordinator_proposes_what_it_was_shown_again(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 3, rank=0)
    former, voter = bench.others
    bench.ledger.accept_contribution(bench.contribution())
    shown = bench.receipt(former, voter, term=1)
    # Two of three signed it, so it would be final; as one signature shows it, it is not known to be.
    alone = bench.receipt(former, term=1)
    bench.tell(ReceiptSeen(alone, (), voter.peer_id))
    bench.tell(StateReached(0, STATE))
    bench.now = 30.0
    bench.tell(TimerFired())
    term = bench.machine._candidacy.ballot.term  # type: ignore[union-attr]
    effects = bench.tell(bench.vote(voter, term, bench.me))
    effects += bench.tell(TimerFired())
    pushes = pushed(effects, PushReceipt)
    again = bench.trust.accept_receipt(decode_signed(pushes[0].message.receipt))
    former_receipt = bench.trust.accept_receipt(decode_signed(shown))
    assert again.term > former_receipt.term
    assert again.members == former_receipt.members


def test_a_receipt_of_a_term_out_of_reach_does_not_lift_the_own_one(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 3)
    bad, other = bench.others
    record = bench.receipt(bad, bad, term=(1 << 63) - 1)
    bench.tell(ReceiptSeen(record, (), other.peer_id))
    bench.now = 100.0
    bench.lead()
    assert decode_ballot(bench.store.state[BALLOT_KEY]).term == 1


def test_a_state_anchor_is_signed_once_it_is_stored(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 1)
    bench.lead()
    blob_id, size_bytes = write_blob(bench.store, bytes(48))
    effects = bench.tell(StateAnchorStored(0, STATE, blob_id, size_bytes))
    assert only(effects, StoreRecord)[0].record.type == "stateanchor"
    assert [anchor.blob_id for anchor in bench.ledger.anchors] == [blob_id]
    assert only(bench.tell(StateReached(0, STATE)), StoreStateAnchor) == []
    assert LEDGER_KEY in bench.store.state


def test_after_a_full_disk_everything_is_stored_again_before_anything_is_said(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 3)
    bench.lead()
    bench.close()
    bench.store.records.clear()
    bench.store.state.clear()
    bench.tell(StoreFailed(None, "enospc"))
    bench.now += STORE_RETRY_SECONDS
    effects = bench.tell(TimerFired())
    assert {BALLOT_KEY, LEDGER_KEY} <= set(bench.store.state)
    assert bench.store.record(record_digest(bench.contribution())) is not None
    ballot = decode_ballot(bench.store.state[BALLOT_KEY])
    assert ballot.newest is not None
    assert bench.store.record(ballot.newest.digest) is not None, "a ballot names no receipt that is not on disk"
    kinds = [type(effect) for effect in effects]
    assert kinds.index(SaveState) < kinds.index(SendRequest)


def test_a_promise_that_the_disk_refused_is_stored_again_by_who_collects_nothing(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 3)
    bench.now = 100.0
    bench.tell(bench.vote(bench.others[0], 2, bench.others[0]))
    promised = bench.store.state.pop(BALLOT_KEY)
    bench.tell(StoreFailed(None, "enospc"))
    bench.now += STORE_RETRY_SECONDS
    bench.tell(TimerFired())
    assert bench.store.state[BALLOT_KEY] == promised


def test_two_outcomes_of_one_round_stop_the_machine_and_are_told_once(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 1)
    bench.tell(ReceiptSeen(bench.receipt(bench.me), (), None))
    other = Member(bench.trainer.peer_id, record_digest(bench.contribution()), 1)
    receipt = Receipt(bench.run.run_id, 0, 1, bench.me.peer_id, 0, STATE, None, (other,), ())
    bench.tell(ReceiptSeen(encode_signed(bench.run.seal(receipt, bench.me)), (), None))
    assert bench.ledger.fork is not None
    bench.now = 100.0
    bench.tell(StateReached(0, STATE))
    assert not bench.machine.is_leading(bench.now)


def test_what_is_told_to_an_authority_that_collects_nothing_changes_nothing(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 3)
    assert bench.tell(ContributionChecked(record_digest(bench.contribution()), "")) == []
    assert bench.tell(StateAnchorStored(3, STATE, STATE, 48)) == [], "nobody knows what round 2 came to"


def test_a_contribution_to_another_round_is_answered_with_it(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 1)
    bench.lead()
    record = encode_signed(bench.contribution(round_index=1))
    bench.tell(ContributionSeen(record, bench.trainer.peer_id))
    assert bench.machine.verdicts.find(PushContribution(record)) == "round"
    assert bench.ledger.contributions_to(1) == {}


def test_a_contribution_whose_blob_is_of_another_form_is_rejected_without_a_check(
    make_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(make_run, 1)
    bench.lead()
    monkeypatch.setattr(bench.machine._gatherer, "refusal_of", lambda blob_id: "decode")
    effects = bench.tell(ContributionSeen(encode_signed(bench.contribution()), None))
    assert only(effects, CheckContribution) == []
    receipt = next(effect.record for effect in only(effects, StoreRecord) if effect.record.type == Receipt.TYPE)
    assert [refused.reason for refused in bench.trust.accept_receipt(receipt).rejected] == ["decode"]


@pytest.mark.parametrize("is_ours", [False, True])
def test_whoever_still_proposes_what_is_final_is_shown_it(make_run: Callable[..., Any], is_ours: bool) -> None:
    bench = Bench(make_run, 3)
    first, second = bench.others
    final = bench.receipt(first, second)
    bench.tell(ReceiptSeen(final, (), first.peer_id))
    assert bench.ledger.final(0) is not None
    late = bench.receipt(bench.me if is_ours else second, term=2)
    pushes = pushed(bench.tell(ReceiptSeen(late, (), second.peer_id)), PushReceipt)
    assert [(push.peer_id, push.message.receipt) for push in pushes] == ([] if is_ours else [(second.peer_id, final)])


def test_a_receipt_that_does_not_follow_the_final_one_is_refused(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 3)
    first, second = bench.others
    bench.tell(ReceiptSeen(bench.receipt(first, second), (), first.peer_id))
    member = Member(bench.trainer.peer_id, record_digest(bench.contribution()), 0x3F80_0000)
    astray = Receipt(bench.run.run_id, 0, 1, first.peer_id, 1, STATE, compute_digest(b"astray"), (member,), ())
    record = encode_signed(bench.run.seal(astray, first))
    bench.tell(ReceiptSeen(record, bench.votes(first), first.peer_id))
    assert bench.machine.verdicts.find(PushReceipt(record, ())) == "mismatch"


def test_an_offer_is_judged_again_when_what_it_lists_has_come(make_run: Callable[..., Any]) -> None:
    """Meanwhile this authority promised its vote to a later term."""
    bench = Bench(make_run, 3, rank=1)
    coordinator, other = bench.others
    signed = bench.contribution(is_held=False)
    bench.tell(ReceiptSeen(bench.receipt(coordinator, contribution=signed), bench.votes(coordinator), None))
    bench.now = 100.0
    bench.tell(bench.vote(other, 2, other))
    assert decode_ballot(bench.store.state[BALLOT_KEY]).term == 2
    bench.ledger.accept_contribution(signed)
    bench.contribution()
    effects = bench.tell(TimerFired())
    assert Count("rejected", "term") in effects
    assert pushed(effects, PushReceipt) == []


def test_a_state_that_falls_behind_what_is_final_closes_nothing(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 3)
    bench.lead()
    first, second = bench.others
    bench.tell(ReceiptSeen(bench.receipt(first, second), (), first.peer_id))
    assert bench.ledger.next_round_index == 1
    effects = bench.tell(ContributionSeen(encode_signed(bench.contribution(round_index=1)), None))
    assert not only(effects, CheckContribution)


def test_a_coordinator_that_hears_of_a_later_round_closes_nothing(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 3)
    bench.lead()
    first, second = bench.others
    member = Member(bench.trainer.peer_id, record_digest(bench.contribution()), 0x3F80_0000)
    later = Receipt(bench.run.run_id, 0, 2, first.peer_id, 1, STATE, compute_digest(b"round 0"), (member,), ())
    bench.tell(ReceiptSeen(encode_signed(bench.run.seal(later, first)), (), second.peer_id))
    assert bench.machine.is_leading(bench.now)
    effects = bench.tell(ContributionSeen(encode_signed(bench.contribution()), None))
    assert only(effects, CheckContribution) + pushed(effects, PushReceipt) == []


def test_an_own_proposal_that_came_back_final_is_told_once(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 3)
    bench.lead()
    (first, *_) = pushed(bench.close(), PushReceipt)
    receipt = bench.trust.accept_receipt(decode_signed(first.message.receipt))
    final = encode_signed(bench.run.seal(receipt, bench.me, *bench.others))
    bench.ledger.accept_final(decode_signed(final))
    effects = bench.tell(ReceiptSeen(final, (), bench.others[0].peer_id))
    assert not only(effects, ShowToMachines), "its round was final here already"


def test_a_check_that_a_full_disk_swallowed_is_ordered_again(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 3)
    bench.lead()
    assert only(bench.tell(ContributionSeen(encode_signed(bench.contribution()), None)), CheckContribution)
    bench.tell(StoreFailed(None, "enospc"))
    bench.now += STORE_RETRY_SECONDS
    bench.tell(TimerFired())
    assert only(bench.tell(TimerFired()), CheckContribution)


def test_an_authority_signs_nothing_that_its_own_ballot_forbids(make_run: Callable[..., Any]) -> None:
    """Whatever led there: a second word for one place would undo what is final."""
    bench = Bench(make_run, 3)
    receipt = bench.trust.accept_receipt(decode_signed(bench.receipt(bench.me)))
    bench.machine._candidacy.ballot = Ballot(term=9)
    with pytest.raises(LocalProtocolError, match="may not be proposed: term"):
        bench.machine._propose(receipt, bench.now)


def test_what_was_shown_is_proposed_again_once_all_it_lists_is_here(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 3)
    former, voter = bench.others
    signed = bench.contribution(is_held=False)
    bench.tell(ReceiptSeen(bench.receipt(former, contribution=signed), (), voter.peer_id))
    bench.tell(StateReached(0, STATE))
    bench.now = 30.0
    bench.tell(TimerFired())
    effects = bench.tell(bench.vote(voter, bench.machine._candidacy.ballot.term, bench.me))
    assert bench.machine.is_leading(bench.now)
    assert pushed(effects, PushReceipt) == []
    bench.ledger.accept_contribution(signed)
    bench.contribution()
    bench.machine._gatherer.set_wants({}, None)
    assert pushed(bench.tell(TimerFired()), PushReceipt)


@pytest.mark.parametrize("revoked", [0, 1])
def test_what_was_shown_is_proposed_again_though_one_who_signed_it_is_revoked(
    make_run: Callable[..., Any], revoked: int
) -> None:
    """Whoever else signed it stored it, so it may be final."""
    bench = Bench(make_run, 5)
    former, second, voter, other = bench.others
    signed = bench.contribution(is_held=False)
    shown = bench.receipt(former, second, contribution=signed)
    bench.tell(ReceiptSeen(shown, (), voter.peer_id))
    bench.tell(StateReached(0, STATE))
    bench.now = 30.0
    bench.tell(TimerFired())
    for key in (voter, other):
        bench.tell(bench.vote(key, bench.machine._candidacy.ballot.term, bench.me))
    assert bench.machine.is_leading(bench.now)
    keys = (bench.me, *bench.others)
    left = tuple(sorted(key.peer_id for key in keys if key is not bench.others[revoked]))
    bench.trust.accept_descriptor(bench.run.revise(authorities=left))
    bench.ledger.accept_contribution(signed)
    bench.contribution()
    bench.machine._gatherer.set_wants({}, None)
    (push, *_) = pushed(bench.tell(TimerFired()), PushReceipt)
    again = bench.trust.accept_receipt(decode_signed(push.message.receipt))
    assert again.members == decode_value(Receipt, decode_signed(shown).payload).members


def test_what_a_key_showed_holds_nobody_up_once_it_is_revoked(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 3)
    honest, rogue = bench.others
    member = Member(bench.trainer.peer_id, record_digest(bench.contribution()), 0x3F80_0000)
    far = Receipt(bench.run.run_id, 0, 1, rogue.peer_id, 1_000, STATE, compute_digest(b"before"), (member,), ())
    bench.tell(ReceiptSeen(encode_signed(bench.run.seal(far, rogue)), (), honest.peer_id))
    bench.lead()
    assert not bench.machine.is_leading(bench.now), "whoever is behind does not stand"
    left = tuple(sorted((bench.me.peer_id, honest.peer_id)))
    bench.trust.accept_descriptor(bench.run.revise(authorities=left))
    (asked, *_) = pushed(bench.tell(TimerFired()), PushVote)
    term = decode_value(Vote, decode_signed(asked.message.vote).payload).term
    bench.tell(bench.vote(honest, term, bench.me))
    assert bench.machine.is_leading(bench.now)


def test_a_receipt_stored_for_a_key_that_is_revoked_since_is_proposed_again(make_run: Callable[..., Any]) -> None:
    """It may be final elsewhere, and whoever stored it proved it then."""
    bench = Bench(make_run, 3)
    gone, honest = bench.others
    bench.tell(StateReached(0, STATE))
    stored = bench.receipt(gone)
    bench.ledger.accept_contribution(bench.contribution())
    bench.tell(ReceiptSeen(stored, bench.votes(gone), gone.peer_id))
    left = tuple(sorted((bench.me.peer_id, honest.peer_id)))
    bench.trust.accept_descriptor(bench.run.revise(authorities=left))
    bench.now = 100.0
    (asked, *_) = pushed(bench.tell(TimerFired()), PushVote)
    term = decode_value(Vote, decode_signed(asked.message.vote).payload).term
    (again, *_) = pushed(bench.tell(bench.vote(honest, term, bench.me)), PushReceipt)
    receipt = bench.trust.accept_receipt(decode_signed(again.message.receipt))
    before = decode_value(Receipt, decode_signed(stored).payload)
    assert receipt == replace(before, revision=1, term=term, coordinator=bench.me.peer_id)


def test_a_countersignature_of_a_key_that_is_revoked_since_holds_no_round_up(make_run: Callable[..., Any]) -> None:
    """Nobody takes a receipt with it, and the term goes on: its votes are of others."""
    bench = Bench(make_run, 5)
    bench.lead()
    first, second, gone, _ = bench.others
    (shown, *_) = pushed(bench.close(), PushReceipt)
    receipt = bench.trust.accept_receipt(decode_signed(shown.message.receipt))
    answer = encode_signed(bench.run.seal(receipt, bench.me, gone))
    bench.tell(ReceiptSeen(answer, (), gone.peer_id))
    left = tuple(sorted(key.peer_id for key in (bench.me, *bench.others) if key is not gone))
    bench.trust.accept_descriptor(bench.run.revise(authorities=left))
    bench.tell(ReceiptSeen(encode_signed(bench.run.seal(receipt, bench.me, first)), (), first.peer_id))
    bench.now += RESEND_SECONDS
    pushes = pushed(bench.tell(TimerFired()), PushReceipt)
    assert {push.message.receipt for push in pushes} == {encode_signed(bench.run.seal(receipt, bench.me, first))}
    bench.tell(ReceiptSeen(encode_signed(bench.run.seal(receipt, bench.me, second)), (), second.peer_id))
    assert bench.ledger.final(0) is not None, "three of four"


def test_nobody_is_shown_the_signature_of_a_key_that_is_revoked_since(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 5, rank=1)
    coordinator, candidate, _, gone = bench.others
    signed = bench.contribution(is_held=False)
    record = bench.receipt(coordinator, gone, contribution=signed)
    bench.tell(ReceiptSeen(record, bench.votes(coordinator), coordinator.peer_id))
    bench.tell(TimerFired())
    keys = (bench.me, *bench.others)
    left = tuple(sorted(key.peer_id for key in keys if key is not gone))
    bench.trust.accept_descriptor(bench.run.revise(authorities=left))
    bench.ledger.accept_contribution(signed)
    bench.contribution()
    bench.machine._gatherer.set_wants({}, None)
    (push,) = pushed(bench.tell(TimerFired()), PushReceipt)
    both = tuple(sorted((coordinator.peer_id, bench.me.peer_id)))
    assert decode_signed(push.message.receipt).signers == both
    # What was countersigned before the revision is shown to a candidate that lacks it, without that signature too.
    bench.store.put_record(bench.run.seal(bench.trust.accept_receipt(decode_signed(push.message.receipt)), *keys))
    bench.now = 100.0
    (push,) = pushed(bench.tell(bench.vote(candidate, 2, candidate)), PushReceipt)
    assert decode_signed(push.message.receipt).signers == left


def test_a_contribution_larger_than_the_state_is_rejected_and_never_fetched(make_run: Callable[..., Any]) -> None:
    """Up to 277 GB may be signed, and a trainer that is listed, or any stranger in an open run, may sign that."""
    bench = Bench(make_run, 1, trainer_count=2)
    bench.lead()
    (shown,) = only(bench.close(), ShowToMachines)
    bench.tell(shown.event)
    bench.tell(StateReached(1, STATE))
    liar = bench.trainers[1]
    bench.tell(PeerConnected(liar.peer_id, (), outbound=False))
    honest = bench.contribution(trainer=1, round_index=1, is_held=False)
    huge = replace(decode_value(Contribution, honest.payload), blob_id=compute_digest(b"huge"), element_count=1 << 36)
    effects = bench.tell(ContributionSeen(encode_signed(bench.run.seal(huge, liar)), liar.peer_id))
    assert only(effects, SendRequest) == []
    (shown,) = only(bench.close(round_index=1), ShowToMachines)
    receipt = bench.trust.accept_receipt(decode_signed(shown.event.record))
    assert [member.peer_id for member in receipt.members] == [bench.trainer.peer_id]
    assert [(item.peer_id, item.reason) for item in receipt.rejected] == [(liar.peer_id, "shape")]


def test_what_this_node_contributes_says_how_large_the_state_is(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 1, trainer_count=2)
    bench.lead()
    liar, mine = bench.trainers[1], bench.contribution()
    record = replace(decode_value(Contribution, mine.payload), peer_id=bench.me.peer_id)
    bench.ledger.accept_listed(bench.run.seal(record, bench.me))
    huge = replace(record, peer_id=liar.peer_id, blob_id=compute_digest(b"huge"), element_count=1 << 36)
    bench.tell(PeerConnected(liar.peer_id, (), outbound=False))
    effects = bench.tell(ContributionSeen(encode_signed(bench.run.seal(huge, liar)), liar.peer_id))
    assert only(effects, SendRequest) == []


def test_a_trainer_that_is_not_listed_is_waited_for_once_it_contributed(make_run: Callable[..., Any]) -> None:
    """The coordinator's own contribution would end every round before that of an equal that nobody listed."""
    bench = Bench(make_run, 1, trainer_count=2)
    listed, stranger = bench.trainers
    left = (listed.peer_id,)
    bench.trust.accept_descriptor(bench.run.revise(trainers=left, open_trainers_max=1))
    for key in bench.trainers:
        bench.tell(PeerConnected(key.peer_id, (), outbound=False))

    def finish(effects: list[Effect]) -> list[Any]:
        (shown,) = only(effects, ShowToMachines)
        bench.tell(shown.event)
        bench.tell(StateReached(bench.ledger.next_round_index, STATE))
        return [member.peer_id for member in bench.trust.accept_receipt(decode_signed(shown.event.record)).members]

    bench.lead()
    assert finish(bench.close()) == [listed.peer_id]
    late = encode_signed(bench.contribution(trainer=1))
    bench.tell(ContributionSeen(late, stranger.peer_id))
    assert bench.machine.verdicts.find(PushContribution(late)) == "round"
    assert only(bench.close(round_index=1), ShowToMachines) == [], "it may come yet"
    assert finish(bench.close(trainer=1, round_index=1)) == sorted((listed.peer_id, stranger.peer_id))
    assert only(bench.close(round_index=2), ShowToMachines) == [], "it was counted"
    bench.now = 30.0
    assert finish(bench.tell(TimerFired())) == [listed.peer_id]
    assert finish(bench.close(round_index=3)) == [listed.peer_id]


class TestMuteTrainers:
    """A daemon whose training process is gone is connected like any other."""

    def begin(self, make_run: Callable[..., Any]) -> Bench:
        bench = Bench(make_run, 1, trainer_count=2)
        for key in bench.trainers:
            bench.tell(PeerConnected(key.peer_id, (), outbound=False))
        bench.now = FIND_SECONDS
        bench.lead()
        return bench

    def finish(self, bench: Bench, effects: list[Effect]) -> int:
        """Begin the next round, and return how many this one counted."""
        (shown,) = only(effects, ShowToMachines)
        bench.tell(shown.event)
        bench.tell(StateReached(bench.ledger.next_round_index, STATE))
        return len(bench.trust.accept_receipt(decode_signed(shown.event.record)).members)

    def wait(self, bench: Bench) -> float:
        """Let the first trainer contribute to the round that is due, and return how long the second is waited for."""
        effects, since = bench.close(round_index=bench.ledger.next_round_index), bench.now
        while not only(effects, ShowToMachines):
            bench.now = bench.wake_at
            effects = bench.tell(TimerFired())
        assert self.finish(bench, effects) == 1
        return bench.now - since

    def test_after_eight_rounds_one_that_stays_mute_is_waited_for_once_in_sixteen(
        self, make_run: Callable[..., Any]
    ) -> None:
        bench = self.begin(make_run)
        waits = [self.wait(bench) for _ in range(2 * AGAIN_ROUNDS)]
        assert waits == [30.0] * MISSED_MAX + [0.0] * 8 + [30.0] + [0.0] * 15

    def test_one_that_is_counted_again_is_waited_for_as_ever(self, make_run: Callable[..., Any]) -> None:
        bench = self.begin(make_run)
        for _ in range(AGAIN_ROUNDS):
            self.wait(bench)
        assert not only(bench.close(round_index=AGAIN_ROUNDS), ShowToMachines)
        bench.now += 29.0
        assert self.finish(bench, bench.close(trainer=1, round_index=AGAIN_ROUNDS)) == 2
        assert self.wait(bench) == 30.0

    def test_one_that_came_just_too_late_is_waited_for_as_ever(self, make_run: Callable[..., Any]) -> None:
        bench = self.begin(make_run)
        for _ in range(MISSED_MAX):
            self.wait(bench)
        bench.tell(ContributionSeen(encode_signed(bench.contribution(trainer=1, round_index=1)), None))
        assert self.wait(bench) == 0.0, "it says nothing of now"
        bench.tell(ContributionSeen(encode_signed(bench.contribution(trainer=1, round_index=MISSED_MAX)), None))
        assert self.wait(bench) == 30.0

    def test_one_that_came_before_the_receipt_was_final_came_just_too_late(self, make_run: Callable[..., Any]) -> None:
        bench = self.begin(make_run)
        for _ in range(MISSED_MAX):
            self.wait(bench)
        closed = bench.close(round_index=MISSED_MAX)
        bench.tell(ContributionSeen(encode_signed(bench.contribution(trainer=1, round_index=MISSED_MAX)), None))
        assert self.finish(bench, closed) == 1
        assert self.wait(bench) == 30.0

    def wait_in_vain(self, bench: Bench) -> float:
        """Let the first trainer's be rejected in the round that is due; return how long the second is waited for."""
        signed = bench.contribution(round_index=bench.ledger.next_round_index)
        bench.tell(ContributionSeen(encode_signed(signed), None))
        bench.tell(ContributionChecked(record_digest(signed), "finite"))
        since = bench.now
        while not only(effects := bench.tell(TimerFired()), ShowToMachines):
            bench.now = bench.wake_at
        assert self.finish(bench, effects) == 0
        return bench.now - since

    def test_a_round_whose_one_contribution_was_rejected_ends_beside_it(self, make_run: Callable[..., Any]) -> None:
        """Nobody contributes twice to a round, so it stood still as long as the mute one was connected."""
        bench = self.begin(make_run)
        assert self.wait_in_vain(bench) == 30.0 * REFUSED_WAITS
        waits = [self.wait(bench) for _ in range(MISSED_MAX + 1)]
        assert waits == [30.0] * MISSED_MAX + [0.0], "that one it did not miss: none moved the state"

    @pytest.mark.unmeasured
    def test_whoever_is_rejected_in_each_round_cannot_end_all_before_the_others_are_there(
        self, make_run: Callable[..., Any]
    ) -> None:
        """What is rejected takes no inner steps to make, and theirs may last for hours."""
        bench = self.begin(make_run)
        waits = [self.wait_in_vain(bench) / 30.0 / REFUSED_WAITS for _ in range(MISSED_MAX + 1)]
        assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 64.0, 64.0]
        assert self.wait(bench) == 30.0
        assert self.wait_in_vain(bench) / 30.0 / REFUSED_WAITS == 32.0, "one that moves the state takes one step back"


def test_who_countersigned_no_final_receipt_can_still_be_elected_by_those_who_did(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, 3)
    gone, voter = bench.others
    final = bench.receipt(gone, voter)
    bench.tell(ReceiptSeen(final, (), voter.peer_id))
    bench.tell(StateReached(1, STATE))
    left = tuple(sorted((bench.me.peer_id, voter.peer_id)))
    for change in (lambda: None, lambda: bench.trust.accept_descriptor(bench.run.revise(authorities=left))):
        change()
        bench.now += 60.0
        (asked, *_) = pushed(bench.tell(TimerFired()), PushVote)
        vote = decode_value(Vote, decode_signed(asked.message.vote).payload)
        stored = Stored(Place(0, 1), outcome_of(bench.ledger.final(0).receipt), record_digest(decode_signed(final)))
        promised = Ballot(term=1, voted_for=gone.peer_id, newest=stored)
        newest = stored_of(vote.newest)
        assert find_vote_refusal(promised, term=vote.term, candidate=bench.me.peer_id, newest=newest) == ""


def test_the_receipt_of_a_later_term_that_a_voter_stored_of_a_final_round_is_heeded(
    make_run: Callable[..., Any],
) -> None:
    bench = Bench(make_run, 5)
    first, second, *more = bench.others
    bench.tell(ReceiptSeen(bench.receipt(first, *more), (), first.peer_id))
    assert bench.ledger.final(0) is not None
    again = bench.receipt(second, more[0], term=3)
    bench.tell(ReceiptSeen(again, (), more[0].peer_id))
    assert bench.machine._candidacy.newest.place == Place(0, 3)
