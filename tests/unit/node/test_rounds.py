"""A trainer: one contribution a round, stored before it is sent, and state that only final receipts move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pulsenet.chain.ledger import LEDGER_KEY, Ledger
from pulsenet.chain.outcome import outcome_of
from pulsenet.chain.records import Member, Receipt, Rejection, StateAnchor
from pulsenet.chain.signing import decode_signed, encode_signed, record_digest
from pulsenet.chain.state_anchors import ANCHORS_KEPT
from pulsenet.ids import Digest, compute_digest
from pulsenet.node.effects import (
    EXECUTION_ORDER,
    Count,
    Effect,
    Fate,
    Log,
    RestoreState,
    RunInnerSteps,
    SaveState,
    SendRequest,
    SetTimer,
    ShowToMachines,
    StepState,
    StoreContribution,
    StoreRecord,
)
from pulsenet.node.events import (
    ContributionFailed,
    ContributionSeen,
    ContributionStored,
    Event,
    InnerStepsDone,
    PeerConnected,
    PeerLost,
    ReceiptSeen,
    ReplyReceived,
    RestoreFailed,
    StateLost,
    StateReached,
    StateRestored,
    StateStepped,
    StepFailed,
    StoreFailed,
    TermSeen,
    TimerFired,
    TrainingAttached,
    TrainingLost,
)
from pulsenet.node.gathering import GATHER_SECONDS_MAX
from pulsenet.node.ledger_machine import STORE_RETRY_SECONDS
from pulsenet.node.own_work import OWN_KEY
from pulsenet.node.rounds import ALONE_SECONDS, EXTENSIONS_MAX, RETRY_SECONDS, Rounds
from pulsenet.node.rounds_phase import Phase
from pulsenet.testing.fakes import FakeStore, only
from pulsenet.testing.toy_training import write_blob
from pulsenet.wire.messages import GetRounds, PushContribution, Refusal, RoundsReply


def root(round_index: int) -> Digest:
    return compute_digest(b"state %d" % round_index)


class Bench:
    """One trainer; the authorities and the training process are played."""

    def __init__(self, make_run: Callable[..., Any], authorities: tuple[Any, ...] | None = None, **fields: Any) -> None:
        self.me, self.authority = make_run.second, make_run.publisher  # type: ignore[attr-defined]
        self.run = make_run(authorities=authorities, trainers=(self.me.peer_id,), **fields)
        self.trust = self.run.trust()
        self.store = FakeStore()
        self.now = 0.0
        self.receipts: dict[int, Receipt] = {}
        self.begin()

    def begin(self, *, is_answered: bool = True) -> None:
        """Start the machine, for the first time or anew from the disk; somebody answers how far the run is."""
        self.ledger = Ledger.restore(self.trust, self.store.state.get(LEDGER_KEY), self.store.record)
        own = self.store.state.get(OWN_KEY)
        self.machine = Rounds(self.run.seat(self.me, self.trust, self.ledger), self.store, own=own)
        self.tell(TimerFired())
        self.tell(PeerConnected(self.authority.peer_id, (), outbound=True))
        self.tell(TermSeen((self.run.vote(self.authority),), self.authority.peer_id))
        if is_answered:
            self.answer()

    def answer(self) -> list[Effect]:
        """Answer that nothing is newer than what this node knows."""
        reply = RoundsReply(self.ledger.next_round_index, (), (), None)
        return self.tell(ReplyReceived(1, self.authority.peer_id, reply))

    def tell(self, event: Event) -> list[Effect]:
        effects = sorted(self.machine.handle(event, self.now, 0), key=lambda effect: EXECUTION_ORDER[type(effect)])
        self.store.keep(effects)
        return effects

    def attach(self, round_index: int = 0, stored: ContributionStored | None = None) -> list[Effect]:
        return self.tell(TrainingAttached(round_index, root(round_index), stored))

    def stored(self, round_index: int = 0) -> ContributionStored:
        blob_id, size_bytes = write_blob(self.store, b"contribution %d" % round_index)
        return ContributionStored(round_index, root(round_index), blob_id, size_bytes, 1, 100, 0, 1)

    def contribute(self, round_index: int = 0) -> list[Effect]:
        """Run the inner steps of a round and store the contribution."""
        effects = self.tell(InnerStepsDone(round_index))
        return effects + self.tell(self.stored(round_index))

    def finish(
        self, round_index: int = 0, fate: Fate = Fate.COUNTED, base: Digest | None = None, also: Any = None
    ) -> list[Effect]:
        """Show the final receipt of a round."""
        receipt = self.receipts[round_index] = self.receipt_of(round_index, fate, base)
        keys = (self.authority,) if also is None else (self.authority, also)
        record = encode_signed(self.run.seal(receipt, *keys))
        return self.tell(ReceiptSeen(record, (), self.authority.peer_id))

    def receipt_of(self, round_index: int, fate: Fate = Fate.COUNTED, base: Digest | None = None) -> Receipt:
        own = self.machine._own.sent_to(round_index) or root(99)
        before = self.receipts.get(round_index - 1)
        bad = Rejection(self.run.stranger.peer_id, root(98), "finite")
        return Receipt(
            run_id=self.run.run_id,
            revision=0,
            term=1,
            coordinator=self.authority.peer_id,
            round_index=round_index,
            base_state_root=base or root(round_index),
            previous=None if before is None else outcome_of(before),
            members=(Member(self.me.peer_id, own, 0x3F80_0000),) if fate is Fate.COUNTED else (),
            rejected=(Rejection(self.me.peer_id, own, "norm"),) if fate is Fate.REJECTED else (bad,),
        )

    def anchor(self, round_index: int, state_root: Digest | None = None) -> bytes:
        before = self.receipts.get(round_index - 1)
        outcome = root(50) if round_index else None
        if before is not None:
            outcome = outcome_of(before)
        blob_id, size_bytes = write_blob(self.store, b"state anchor %d" % round_index)
        state_root = state_root or root(round_index)
        anchor = StateAnchor(self.run.run_id, 0, round_index, state_root, outcome, blob_id, size_bytes)
        return encode_signed(self.run.seal(anchor, self.authority))

    def tell_rounds(self, round_index: int, anchor: bytes | None, key: Any = None) -> list[Effect]:
        peer_id = (key or self.authority).peer_id
        return self.tell(ReplyReceived(1, peer_id, RoundsReply(round_index, (), (), anchor)))


def pushed(effects: list[Effect]) -> list[Any]:
    return [effect.message for effect in only(effects, SendRequest) if isinstance(effect.message, PushContribution)]


@pytest.fixture
def bench(make_run: Callable[..., Any]) -> Bench:
    return Bench(make_run)


def test_a_round_goes_from_inner_steps_to_the_next_state(bench: Bench) -> None:
    assert only(bench.attach(), RunInnerSteps) == [RunInnerSteps(0, 8, 1)]
    effects = bench.tell(InnerStepsDone(0))
    assert only(effects, StoreContribution) == [StoreContribution(0)]
    assert pushed(effects) == []
    effects = bench.tell(bench.stored())
    (push,) = pushed(effects)
    kinds = [type(effect) for effect in effects]
    assert kinds.index(StoreRecord) < kinds.index(SendRequest)
    assert bench.trust.accept_contribution(decode_signed(push.contribution)).base_state_root == root(0)
    (order,) = only(bench.finish(), StepState)
    assert (order.round_index, order.fate, len(order.members)) == (0, Fate.COUNTED, 1)
    effects = bench.tell(StateStepped(1, root(1)))
    assert ShowToMachines(StateReached(1, root(1))) in effects
    assert only(effects, RunInnerSteps) == [RunInnerSteps(1, 8, 2)]
    assert bench.machine.state_root == root(1)


@pytest.mark.parametrize("fate", [Fate.COUNTED, Fate.MISSED, Fate.REJECTED])
def test_the_final_receipt_alone_decides_the_fate(bench: Bench, fate: Fate) -> None:
    bench.attach()
    bench.contribute()
    bench.now = 1e4
    assert only(bench.tell(TimerFired()), StepState) == []
    (order,) = only(bench.finish(fate=fate), StepState)
    assert order.fate is fate
    assert Count("contributions", fate) in bench.tell(StateStepped(1, root(1)))


def test_a_receipt_that_is_not_final_moves_nothing(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, authorities=(make_run.publisher, make_run.third))  # type: ignore[attr-defined]
    bench.attach()
    bench.tell(InnerStepsDone(0))
    bench.now = 1e4
    for _ in range(EXTENSIONS_MAX):
        bench.tell(InnerStepsDone(0))
    bench.tell(bench.stored())
    assert only(bench.finish(), StepState) == [], "one signature of two"
    assert bench.machine.phase is Phase.PENDING
    assert len(only(bench.finish(also=bench.run.third), StepState)) == 1


def test_a_late_trainer_is_interrupted_and_folds_back(bench: Bench) -> None:
    bench.attach()
    (order,) = only(bench.finish(fate=Fate.MISSED), StepState)
    assert order.fate is Fate.MISSED
    bench.tell(InnerStepsDone(0))
    assert bench.machine.phase is Phase.STEPPING


def test_after_a_restart_the_same_contribution_is_sent_again_and_no_other(bench: Bench) -> None:
    bench.attach()
    (first,) = pushed(bench.contribute())
    bench.begin()
    effects = bench.attach(stored=bench.stored())
    assert bench.machine.phase is Phase.PENDING
    assert only(effects, RunInnerSteps) == []
    assert pushed(effects) == [first]


def test_a_contribution_stored_and_never_sent_is_sent_after_a_restart(bench: Bench) -> None:
    bench.attach()
    bench.tell(InnerStepsDone(0))
    bench.begin()
    assert len(pushed(bench.attach(stored=bench.stored()))) == 1


def test_a_returning_trainer_replays_what_it_missed_before_it_trains(bench: Bench) -> None:
    bench.attach()
    bench.contribute()
    bench.finish()
    bench.begin()
    (order,) = only(bench.attach(), StepState)
    assert (order.round_index, order.fate) == (0, Fate.COUNTED)


def test_from_a_checkpoint_before_what_was_sent_nothing_else_is_sent(bench: Bench) -> None:
    """The process died after it had sent, and its newest checkpoint is of the round before."""
    bench.attach()
    bench.contribute()
    bench.finish()
    bench.tell(StateStepped(1, root(1)))
    (first,) = pushed(bench.contribute(1))
    bench.begin()
    bench.attach()
    effects = bench.tell(StateStepped(1, root(1)))
    assert bench.machine.phase is Phase.PENDING
    assert only(effects, RunInnerSteps) == []
    assert pushed(effects) == [first]
    (order,) = only(bench.finish(1), StepState)
    assert order.fate is Fate.COUNTED


def test_failed_work_is_tried_again(bench: Bench) -> None:
    bench.attach()
    bench.tell(InnerStepsDone(0))
    effects = bench.tell(ContributionFailed(0, "finite"))
    assert only(effects, RunInnerSteps)
    bench.contribute()
    bench.finish()
    assert only(bench.tell(StepFailed(0, "memory")), StepState) == []
    bench.now += RETRY_SECONDS
    assert len(only(bench.tell(TimerFired()), StepState)) == 1


def test_inner_steps_that_may_have_been_lost_behind_a_full_disk_are_ordered_again_under_their_number(
    bench: Bench,
) -> None:
    (first,) = only(bench.attach(), RunInnerSteps)
    bench.tell(StoreFailed(None, "enospc"))
    bench.now += RETRY_SECONDS
    assert only(bench.tell(TimerFired()), RunInnerSteps) == [first]
    bench.tell(InnerStepsDone(0))
    (again,) = only(bench.tell(ContributionFailed(0, "finite")), RunInnerSteps)
    assert again.number > first.number, "other steps"


def test_without_a_coordinator_inner_steps_go_on_up_to_a_bound(bench: Bench) -> None:
    bench.attach()
    bench.now = 1e4
    for _ in range(EXTENSIONS_MAX):
        assert only(bench.tell(InnerStepsDone(0)), RunInnerSteps)
    assert only(bench.tell(InnerStepsDone(0)), StoreContribution)


def test_who_refuses_a_question_is_asked_again_when_it_said(bench: Bench) -> None:
    bench.tell(ReplyReceived(1, bench.authority.peer_id, Refusal("rate", "", 60_000)))
    asked = []
    for _ in range(6):
        bench.now += 10.0
        asked.append(
            [e.message for e in only(bench.tell(TimerFired()), SendRequest) if isinstance(e.message, GetRounds)]
        )
    assert [len(messages) for messages in asked] == [0, 0, 0, 0, 0, 1]


def test_under_ddp_a_gradient_waits_for_a_coordinator_and_is_wasted_if_missed(make_run: Callable[..., Any]) -> None:
    """There is nothing to go on with ahead of the round, and nothing that would be sent later."""
    bench = Bench(make_run, algorithm="ddp")
    bench.attach()
    bench.now = 1e4
    effects = bench.tell(InnerStepsDone(0))
    assert only(effects, StoreContribution)
    assert not only(effects, RunInnerSteps)
    bench.tell(bench.stored())
    (order,) = only(bench.finish(fate=Fate.MISSED), StepState)
    assert order.fate is Fate.MISSED
    effects = bench.tell(StateStepped(1, root(1)))
    assert [(one.label, one.value) for one in only(effects, Count) if one.name == "wasted_inner_steps"] == [
        ("missed", 1.0)
    ]


def test_a_joiner_restores_the_newest_anchor_and_checks_its_root(bench: Bench) -> None:
    assert ShowToMachines(StateLost()) in bench.tell(TrainingAttached(None, None, None))
    assert bench.machine.phase is Phase.JOINING
    (order,) = only(bench.tell_rounds(4, bench.anchor(4)), RestoreState)
    assert order.drops_residual
    bench.tell(StateRestored(4, root(5)))
    assert bench.machine.phase is Phase.JOINING, "another root than the anchor's"
    bench.now = 100.0
    assert only(bench.tell(TimerFired()), RestoreState) == [], "that anchor is bad"
    (order,) = only(bench.tell_rounds(6, bench.anchor(6)), RestoreState)
    effects = bench.tell(StateRestored(6, root(6)))
    assert only(effects, RunInnerSteps) == [RunInnerSteps(6, 8, 1)]


def test_a_newer_anchor_that_is_heard_of_meanwhile_undoes_no_restore(bench: Bench) -> None:
    """Reading a state takes minutes, and anchors come every few rounds: the newer one is no reason to read it again."""
    bench.tell(TrainingAttached(None, None, None))
    orders = only(bench.tell_rounds(4, bench.anchor(4)), RestoreState)
    bench.tell_rounds(6, bench.anchor(6))
    bench.tell(StoreFailed(None, "enospc"))
    bench.now += STORE_RETRY_SECONDS
    assert only(bench.tell(TimerFired()), RestoreState) == orders
    bench.tell(StateRestored(4, root(4)))
    assert (bench.machine.phase, bench.machine.round_index) == (Phase.TRAINING, 4)


def test_the_anchor_that_could_not_be_read_is_bad_and_not_a_newer_one(bench: Bench) -> None:
    bench.tell(TrainingAttached(None, None, None))
    bench.tell_rounds(4, bench.anchor(4))
    bench.tell_rounds(6, bench.anchor(6))
    bench.tell(RestoreFailed("decode"))
    bench.now += RETRY_SECONDS
    (order,) = only(bench.tell(TimerFired()), RestoreState)
    assert order.anchor.round_index == 6


def test_bad_anchors_that_nobody_tells_of_any_more_are_forgotten(bench: Bench) -> None:
    bench.tell(TrainingAttached(None, None, None))
    for index in range(4, 40, 2):
        bench.now += 100.0
        assert only(bench.tell_rounds(index, bench.anchor(index)), RestoreState)
        bench.tell(RestoreFailed("decode"))
    assert len(bench.machine._bad_anchors) <= ANCHORS_KEPT + 1


def test_another_root_than_everybodys_is_a_reason_to_restore(bench: Bench) -> None:
    bench.attach()
    bench.tell_rounds(0, bench.anchor(0))
    bench.contribute()
    effects = bench.finish(base=root(7))
    assert ShowToMachines(StateLost()) in effects
    assert Count("wasted_inner_steps", "diverged", 8.0) in effects


def test_the_word_of_one_authority_takes_nobody_off_the_state_that_receipts_led_to(bench: Bench) -> None:
    """Its weights may be rotten, or its key may have leaked: the next final receipt says who is right, or goes on."""
    bench.attach()
    bench.contribute()
    bench.finish()
    bench.tell(StateStepped(1, root(1)))
    bench.tell_rounds(1, bench.anchor(1, root(7)))
    assert [anchor.state_root for anchor in bench.ledger.anchors] == [root(7)], "no receipt contradicts it yet"
    assert (bench.machine.phase, bench.machine.state_root) == (Phase.TRAINING, root(1))
    bench.contribute(1)
    assert only(bench.finish(1), StepState)
    assert bench.ledger.anchors == ()


def test_a_state_no_receipts_lead_on_from_is_replaced(bench: Bench) -> None:
    bench.attach(2)
    effects = bench.tell_rounds(9, bench.anchor(8))
    assert Count("wasted_inner_steps", "outdated", 8.0) in effects
    assert only(effects, RestoreState)


def test_a_peer_that_keeps_receipts_back_takes_nobody_off_its_state(bench: Bench) -> None:
    bench.attach(2)
    effects = bench.tell_rounds(9, bench.anchor(8), bench.run.stranger)
    assert not only(effects, RestoreState)
    assert bench.machine.state_root == root(2)
    assert only(bench.tell_rounds(9, None), RestoreState), "an authority that has none is believed"


def test_that_nothing_led_on_from_an_earlier_state_says_nothing_of_the_next(bench: Bench) -> None:
    bench.attach()
    bench.tell_rounds(9, None)
    bench.contribute()
    bench.finish()
    bench.tell(StateStepped(1, root(1)))
    bench.ledger.accept_anchor(decode_signed(bench.anchor(8)))
    bench.tell(TimerFired())
    assert bench.machine.state_root == root(1)
    bench.tell(TrainingLost())
    bench.tell_rounds(9, None)
    bench.attach(2)
    bench.tell(TimerFired())
    assert bench.machine.state_root == root(2)


def test_alone_with_a_state_older_than_its_own_records_it_is_restored(bench: Bench) -> None:
    """A lone trainer's process that starts without its checkpoint: nobody else could say that it is behind."""
    bench.attach()
    for round_index in range(5):
        bench.contribute(round_index)
        bench.finish(round_index)
        bench.tell(StateStepped(round_index + 1, root(round_index + 1)))
        bench.tell_rounds(round_index + 1, bench.anchor(round_index + 1) if round_index > 1 else None)
    bench.begin()
    assert bench.ledger.final(0) is None
    bench.tell(PeerLost(bench.authority.peer_id, "closed"))
    bench.attach()
    assert bench.machine.phase is Phase.TRAINING, "others may be found yet"
    bench.now += ALONE_SECONDS
    bench.tell(TimerFired())
    assert bench.machine.phase in (Phase.JOINING, Phase.RESTORING)


def test_the_only_authority_waits_for_nobody_to_say_that_it_is_behind(make_run: Callable[..., Any]) -> None:
    """Its trainers are there, but may keep back what leads on: what it signed itself has to do."""
    bench = Bench(make_run, authorities=(make_run.second,))  # type: ignore[attr-defined]
    bench.attach()
    bench.authority = bench.me
    for round_index in (8, 16):
        bench.ledger.accept_anchor(decode_signed(bench.anchor(round_index)))
    assert not only(bench.tell_rounds(16, None, bench.run.stranger), RestoreState)
    bench.now += ALONE_SECONDS / 2
    asked = [effect.message for effect in only(bench.tell(TimerFired()), SendRequest)]
    assert GetRounds(0) in asked, "they may have it"
    bench.now += ALONE_SECONDS / 2
    assert only(bench.tell(TimerFired()), RestoreState)


def test_the_checkpoint_of_another_run_is_told(bench: Bench) -> None:
    (warning,) = only(bench.attach(50), Log)
    assert "round 50" in warning.text
    assert bench.machine.round_index == 50


def test_what_nobody_has_any_more_is_given_up_for_an_anchor(bench: Bench) -> None:
    bench.attach()
    bench.finish(fate=Fate.COUNTED)  # lists a contribution that is nowhere
    assert bench.machine.phase is Phase.GATHERING
    bench.tell_rounds(9, bench.anchor(8))
    bench.now = GATHER_SECONDS_MAX + 1
    assert only(bench.tell(TimerFired()), RestoreState)


def test_a_training_process_that_dies_leaves_no_state(bench: Bench) -> None:
    bench.attach()
    assert ShowToMachines(StateLost()) in bench.tell(TrainingLost())
    assert bench.machine.phase is Phase.IDLE
    assert bench.machine.state_root is None
    assert bench.tell(TrainingLost()) == []


def test_rounds_that_pass_without_a_training_process_are_let_go_of_all_the_same(bench: Bench) -> None:
    """It may be gone for months; an authority's node fetches all that rounds list meanwhile."""
    bench.attach()
    bench.tell(TrainingLost())
    for round_index in range(6):
        bench.finish(round_index)
        if round_index % 2:
            bench.tell_rounds(round_index + 1, bench.anchor(round_index + 1))
    assert [anchor.round_index for anchor in bench.ledger.anchors] == [4, 6]
    assert [index for index in range(6) if bench.ledger.final(index) is not None] == [4, 5]
    kept = [decode_signed(data).type for data in bench.store.records.values()]
    assert (kept.count("receipt"), kept.count("stateanchor")) == (2, 2)


def test_after_a_full_disk_orders_are_given_again(bench: Bench) -> None:
    bench.attach()
    bench.contribute()
    bench.finish()
    bench.tell(StoreFailed(None, "enospc"))
    bench.now += RETRY_SECONDS
    effects = bench.tell(TimerFired())
    assert len(only(effects, StepState)) == 1
    kinds = [type(effect) for effect in effects]
    assert kinds.index(SaveState) < kinds.index(StepState)


def test_old_news_and_foreign_records_change_nothing(bench: Bench) -> None:
    bench.attach()
    effects = bench.tell(ReceiptSeen(b"\xc0", (), bench.authority.peer_id))
    assert Count("rejected", "schema") in effects
    assert record_digest(bench.run.genesis) == bench.run.run_id
    assert bench.machine.phase is Phase.TRAINING


def test_inner_steps_wait_for_the_first_answer_how_far_the_run_is(bench: Bench) -> None:
    bench.begin(is_answered=False)
    assert not only(bench.attach(), RunInnerSteps)
    assert not only(bench.tell(TimerFired()), RunInnerSteps)
    assert only(bench.answer(), RunInnerSteps)
    assert not only(bench.answer(), RunInnerSteps)


def test_rounds_that_are_over_are_stepped_before_inner_steps_are_run(bench: Bench) -> None:
    bench.attach()
    bench.contribute()
    bench.finish()
    bench.begin(is_answered=False)
    effects = bench.attach()
    effects += bench.answer()
    assert not only(effects, RunInnerSteps)
    assert bench.machine.phase is not Phase.TRAINING


def test_an_answer_that_does_not_come_is_not_waited_for_long(bench: Bench) -> None:
    bench.begin(is_answered=False)
    (timer,) = only(bench.attach(), SetTimer)[-1:]
    assert timer.at <= ALONE_SECONDS
    bench.now = ALONE_SECONDS
    assert only(bench.tell(TimerFired()), RunInnerSteps)


def test_nobody_is_waited_for_where_nobody_is_listed(make_run: Callable[..., Any]) -> None:
    alone = make_run(trainers=())
    trust = alone.trust()
    key = make_run.publisher  # type: ignore[attr-defined]
    assert trust.descriptor.authorities == (key.peer_id,)
    machine = Rounds(alone.seat(key, trust, Ledger(trust)), FakeStore())
    effects = machine.handle(TrainingAttached(0, root(0), None), 0.0, 0)
    assert only(effects, RunInnerSteps)


def test_an_answer_from_before_the_training_process_came_says_nothing_of_its_state(bench: Bench) -> None:
    """The rounds that lead on from an old checkpoint are kept by nobody: a state anchor is the way, not inner steps."""
    bench.tell_rounds(9, bench.anchor(8))
    effects = bench.attach(3)
    assert not only(effects, RunInnerSteps)
    questions = [request.message for request in only(effects, SendRequest)]
    assert GetRounds(3) in questions
    effects = bench.tell_rounds(9, bench.anchor(8))
    assert not only(effects, RunInnerSteps)
    assert bench.machine.phase is Phase.RESTORING
    assert only(effects, RestoreState)


def test_a_training_process_that_comes_anew_takes_the_place_of_the_one_before(bench: Bench) -> None:
    bench.attach()
    (order,) = only(bench.attach(), RunInnerSteps)
    assert order.round_index == 0
    assert bench.machine.phase is Phase.TRAINING


def test_after_two_final_receipts_of_one_round_no_state_moves(bench: Bench) -> None:
    bench.attach()
    bench.contribute()
    bench.ledger.accept_final(bench.run.seal(replace(bench.receipt_of(0), base_state_root=root(7)), bench.authority))
    bench.finish()
    assert bench.ledger.fork is not None
    bench.now += 1e4
    assert only(bench.tell(TimerFired()), StepState) == []
    assert bench.machine.phase is Phase.PENDING


def test_alone_with_newer_records_it_waits_a_while_for_others(bench: Bench) -> None:
    bench.attach()
    bench.tell(PeerLost(bench.authority.peer_id, "closed"))
    bench.ledger.accept_anchor(decode_signed(bench.anchor(8)))
    bench.ledger.accept_anchor(decode_signed(bench.anchor(16)))
    for part in (0.0, 0.5, 0.9):
        bench.now = part * ALONE_SECONDS
        bench.tell(TimerFired())
        assert bench.machine.phase is Phase.TRAINING
    bench.now = ALONE_SECONDS
    bench.tell(TimerFired())
    assert bench.machine.phase is Phase.RESTORING


def test_what_was_being_stored_on_a_full_disk_is_ordered_again(bench: Bench) -> None:
    bench.attach()
    assert only(bench.tell(InnerStepsDone(0)), StoreContribution)
    bench.tell(StoreFailed(None, "enospc"))
    bench.now += RETRY_SECONDS
    assert only(bench.tell(TimerFired()), StoreContribution) == [StoreContribution(0)]


def test_a_full_disk_orders_nothing_of_a_training_process_that_waits_or_is_not_there(bench: Bench) -> None:
    orders = (RunInnerSteps, StoreContribution, StepState, RestoreState)
    for begin in (lambda: [], lambda: [*bench.attach(), *bench.contribute()]):
        begin()
        bench.tell(StoreFailed(None, "enospc"))
        bench.now += RETRY_SECONDS
        effects = bench.tell(TimerFired())
        assert only(effects, SaveState)
        assert not [effect for effect in effects if isinstance(effect, orders)]


def test_the_coordinators_own_trainer_contributes_in_its_own_process(make_run: Callable[..., Any]) -> None:
    bench = Bench(make_run, authorities=(make_run.second,))  # type: ignore[attr-defined]
    bench.tell(TermSeen((bench.run.vote(bench.me),), None))
    bench.attach()
    effects = bench.contribute()
    assert pushed(effects) == []
    (shown,) = [e.event for e in only(effects, ShowToMachines) if isinstance(e.event, ContributionSeen)]
    assert shown.source is None
    assert bench.trust.accept_contribution(decode_signed(shown.record)).peer_id == bench.me.peer_id
