"""Orders wait for the training process, each is given out once, and what is done is only answered again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from pulsenet.chain.ledger import FinalReceipt, Ledger
from pulsenet.chain.records import Contribution, Member, Receipt, Rejection, SliceName, StateAnchor
from pulsenet.errors import RemoteProtocolError
from pulsenet.ids import Digest, PeerId, compute_digest
from pulsenet.local import rounds_protocol as local
from pulsenet.node.effects import (
    CheckContribution,
    Effect,
    Fate,
    RestoreState,
    RunInnerSteps,
    StepState,
    StoreContribution,
    StoreStateAnchor,
    SumSlices,
)
from pulsenet.node.events import (
    ContributionChecked,
    ContributionFailed,
    ContributionStored,
    Event,
    InnerStepsDone,
    RestoreFailed,
    SlicesSummed,
    StateAnchorStored,
    StateRestored,
    StateStepped,
    StepFailed,
    SumFailed,
    TrainingAttached,
    TrainingLost,
)
from pulsenetd.handlers.training import Held, TrainingDesk
from pulsenetd.metrics import Metrics
from pulsenetd.outer.pace import Measured, Pace

OTHER = PeerId(b"o" * 32)
BLOB = compute_digest(b"blob")


def root(round_index: int) -> Digest:
    return compute_digest(b"state %d" % round_index)


class Scene:
    """A desk whose machine is the test: what it is told is in ``heard``."""

    def __init__(self, run: Any) -> None:
        self.run, self.me = run, run.publisher.peer_id
        self.ledger = Ledger(run.trust())
        self.metrics = Metrics()
        self.heard: list[Event] = []
        self.settled = 0
        self.on_settle: Callable[[], Awaitable[None]] | None = None
        self.owner = object()
        self.now = 0.0
        self.measured: list[Measured] = []
        self.desk = TrainingDesk(
            run.trust(),
            self.ledger,
            self.me,
            self.metrics,
            pace=Pace(self.measured.append, lambda: self.now),
            post=self.heard.append,
            settle=self._settle,
        )

    async def _settle(self) -> None:
        self.settled += 1
        if self.on_settle is not None:
            await self.on_settle()

    def order(self, effect: Effect) -> None:
        """Let a machine order something."""
        asyncio.run(self.desk.table()[type(effect)](effect, self.heard.append))

    def next(self, wait_seconds: float = 0.0) -> local.Order | None:
        return asyncio.run(self.desk.next_order(wait_seconds))

    def attach(self, round_index: int | None = 0) -> None:
        self.desk.open(self.owner)
        asyncio.run(self.desk.hold(round_index, None if round_index is None else root(round_index)))

    def take(self) -> list[Event]:
        heard = list(self.heard)
        self.heard.clear()
        return heard

    def contribution(self, round_index: int = 0, peer_id: PeerId | None = None) -> Contribution:
        return Contribution(
            run_id=self.run.run_id,
            revision=0,
            peer_id=peer_id or self.me,
            round_index=round_index,
            base_state_root=root(round_index),
            blob_id=BLOB,
            encoded_size_bytes=80,
            entry_count=2,
            element_count=10,
            norm_bits=0x3F80_0000,
            codec_id=1,
        )

    def stored(self, round_index: int = 0) -> ContributionStored:
        return ContributionStored(round_index, root(round_index), BLOB, 80, 2, 10, 0x3F80_0000, 1)

    def close_round(self, round_index: int = 0, fate: Fate = Fate.COUNTED) -> StepState:
        """Put a final receipt into the ledger, and return what its machine orders."""
        members = (Member(self.me, compute_digest(b"mine"), 0x3F80_0000),) if fate is Fate.COUNTED else ()
        rejected = (Rejection(self.me, compute_digest(b"mine"), "norm"),) if fate is Fate.REJECTED else ()
        receipt = Receipt(self.run.run_id, 0, 1, OTHER, round_index, root(round_index), None, members, rejected)
        self.ledger._finals[round_index] = FinalReceipt(receipt, self.run.genesis, BLOB)
        listed = tuple((member, self.contribution(round_index)) for member in members)
        return StepState(round_index, listed, fate)

    def check(self, round_index: int = 0, name: bytes = b"theirs") -> CheckContribution:
        return CheckContribution(self.contribution(round_index, OTHER), compute_digest(name))


@pytest.fixture
def scene(run: Any) -> Scene:
    return Scene(run)


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        call()
    return caught.value.code


# Coming and going


def test_a_second_process_is_told_to_wait(scene: Scene) -> None:
    scene.attach()
    assert refusal(lambda: scene.desk.open(object())) == "busy"
    scene.desk.open(scene.owner)
    scene.desk.close(object())
    assert refusal(lambda: scene.desk.open(object())) == "busy"
    scene.desk.close(scene.owner)
    scene.desk.open(object())


def test_the_machine_hears_of_a_process_and_of_its_end(scene: Scene) -> None:
    scene.attach(3)
    assert scene.take() == [TrainingAttached(3, root(3), None)]
    assert scene.desk.held == Held(3, root(3))
    scene.desk.close(scene.owner)
    assert scene.take() == [TrainingLost()]
    scene.attach(None)
    assert scene.take() == [TrainingAttached(None, None, None)]
    scene.desk.close(scene.owner)
    assert scene.take() == [TrainingLost()]


def test_a_process_that_never_said_what_it_holds_is_not_missed(scene: Scene) -> None:
    scene.desk.open(scene.owner)
    scene.desk.close(scene.owner)
    assert scene.take() == []


def test_orders_meant_for_the_process_before_do_not_reach_the_next(scene: Scene) -> None:
    """The machine may order for the first while the second is opening: it has not heard of the loss yet."""
    scene.attach(0)
    scene.desk.close(scene.owner)

    async def order_late() -> None:
        if scene.settled == 3:  # before the second process is told of
            effect = RunInnerSteps(0, 8)
            await scene.desk.table()[RunInnerSteps](effect, scene.heard.append)

    scene.on_settle = order_late
    scene.attach(0)
    assert scene.next() is None


def test_saying_anew_what_is_held_voids_what_was_ordered(scene: Scene) -> None:
    scene.attach(4)
    scene.order(StoreStateAnchor(4))
    scene.order(RunInnerSteps(4, 8))
    scene.attach(2)
    assert scene.next() is None
    scene.order(RunInnerSteps(2, 8))
    assert scene.next() == local.GoOn(2)


# Inner steps and contributions


def test_inner_steps_are_done_when_the_contribution_is_offered(scene: Scene) -> None:
    scene.attach()
    scene.take()
    scene.order(RunInnerSteps(0, 8))
    assert scene.next() == local.GoOn(0)
    assert scene.next() is None, "given out once"
    scene.desk.offer(scene.stored())
    assert scene.take() == [InnerStepsDone(0)]
    scene.order(StoreContribution(0))
    scene.order(StoreContribution(0))
    assert scene.take() == [scene.stored(), scene.stored()], "ordered again, it is only answered again"


def test_a_contribution_may_be_there_before_it_is_asked_for(scene: Scene) -> None:
    scene.attach()
    scene.take()
    scene.desk.offer(scene.stored())
    assert scene.take() == []
    scene.order(RunInnerSteps(0, 8))
    assert scene.take() == [InnerStepsDone(0)]
    assert scene.next() is None


def test_more_inner_steps_make_another_contribution(scene: Scene) -> None:
    scene.attach()
    scene.order(RunInnerSteps(0, 8))
    scene.desk.offer(scene.stored())
    assert scene.next() is None, "the wish is answered"
    scene.order(RunInnerSteps(0, 8, 1))
    scene.take()
    assert scene.next() == local.GoOn(0)
    scene.order(StoreContribution(0))
    assert scene.take() == [], "the first was taken back"
    scene.desk.offer(scene.stored())
    assert scene.take() == [InnerStepsDone(0)]


def test_a_second_wish_to_go_on_is_one_with_the_first(scene: Scene) -> None:
    scene.attach()
    scene.order(RunInnerSteps(0, 8))
    scene.order(RunInnerSteps(0, 8, 1))
    assert scene.next() == local.GoOn(0)
    assert scene.next() is None


def test_steps_that_were_run_are_not_run_again_for_an_order_that_is_told_again(scene: Scene) -> None:
    """A machine whose disk was full orders again what may have been lost, and may not have heard of the answer yet."""
    scene.attach()
    scene.take()
    scene.order(RunInnerSteps(0, 8, 1))
    scene.desk.offer(scene.stored())
    scene.order(RunInnerSteps(0, 8, 1))
    assert scene.next() is None
    assert scene.take() == [InnerStepsDone(0)]
    scene.order(StoreContribution(0))
    assert scene.take() == [scene.stored()]


def test_a_process_with_nothing_to_send_says_why(scene: Scene) -> None:
    scene.attach()
    scene.take()
    scene.order(RunInnerSteps(0, 8))
    scene.desk.abstain(0, "finite")
    scene.order(StoreContribution(0))
    assert scene.take() == [InnerStepsDone(0), ContributionFailed(0, "finite")]
    scene.order(RunInnerSteps(0, 8, 1))
    assert scene.next() == local.GoOn(0)
    assert scene.take() == []


def test_a_contribution_to_another_round_is_moot(scene: Scene) -> None:
    scene.attach(3)
    scene.take()
    scene.order(RunInnerSteps(3, 8))
    scene.desk.offer(scene.stored(2))
    scene.desk.abstain(4, "finite")
    assert scene.take() == []


def test_a_contribution_that_nobody_could_sign_is_refused(scene: Scene) -> None:
    scene.attach()
    assert refusal(lambda: scene.desk.offer(replace(scene.stored(), norm_bits=0x7FC0_0000))) == "schema"
    assert refusal(lambda: scene.desk.offer(replace(scene.stored(), base_state_root=root(9)))) == "base"


def test_inner_steps_of_a_round_that_nobody_holds_are_not_ordered(scene: Scene) -> None:
    scene.order(RunInnerSteps(0, 8))
    scene.attach(2)
    scene.order(RunInnerSteps(1, 8))
    assert scene.next() is None


# The outer step


def test_inner_steps_end_with_the_contribution_and_begin_with_the_next_state(scene: Scene) -> None:
    scene.attach()
    for round_index in (0, 1):
        scene.now += 30.0
        scene.desk.offer(scene.stored(round_index))
        scene.now += 10.0
        scene.order(scene.close_round(round_index))
        assert isinstance(scene.next(), local.StepOrder)
        scene.desk.finish_step(local.Stepped(round_index + 1, root(round_index + 1)))
    assert scene.measured == [Measured(work_seconds=30.0, wait_seconds=10.0)]


def test_an_outer_step_is_ordered_once_and_answered_as_often_as_it_is_asked_for(scene: Scene) -> None:
    scene.attach()
    scene.take()
    effect = scene.close_round()
    scene.order(effect)
    scene.order(effect)
    order = scene.next()
    member = local.CountedMember(scene.me, 0x3F80_0000, BLOB, 80)
    assert isinstance(order, local.StepOrder)
    assert (order.round_index, order.base_state_root, order.fate, order.reason) == (0, root(0), Fate.COUNTED, "")
    assert order.members == (member,)
    scene.order(effect)
    scene.desk.finish_step(local.Stepped(1, root(1)))
    assert scene.take() == [StateStepped(1, root(1))]
    assert scene.desk.held == Held(1, root(1))
    assert scene.next() is None
    scene.order(effect)
    assert scene.take() == [StateStepped(1, root(1))]
    assert scene.next() is None


def test_a_final_receipt_ends_the_wish_for_inner_steps(scene: Scene) -> None:
    scene.attach()
    scene.take()
    scene.order(RunInnerSteps(0, 8))
    scene.order(scene.close_round(fate=Fate.MISSED))
    assert isinstance(scene.next(), local.StepOrder)
    scene.desk.offer(scene.stored())
    assert scene.take() == [], "too late: the receipt decides"


def test_a_rejected_trainer_learns_the_reason(scene: Scene) -> None:
    scene.attach()
    scene.order(scene.close_round(fate=Fate.REJECTED))
    order = scene.next()
    assert isinstance(order, local.StepOrder)
    assert (order.fate, order.reason, order.members) == (Fate.REJECTED, "norm", ())


def test_a_step_that_failed_is_counted_and_may_be_ordered_again(scene: Scene) -> None:
    scene.attach()
    scene.take()
    effect = scene.close_round()
    scene.order(effect)
    scene.next()
    scene.desk.fail_step(local.StepFailed(0, "damaged"))
    assert scene.take() == [StepFailed(0, "damaged")]
    assert scene.metrics.registry.get_sample_value("pulsenet_rejected_total", {"reason": "damaged"}) == 1.0
    scene.order(effect)
    assert isinstance(scene.next(), local.StepOrder)


def test_a_step_of_a_state_that_nobody_holds_is_not_ordered(scene: Scene) -> None:
    scene.order(scene.close_round())
    scene.attach(5)
    scene.order(scene.close_round())
    scene.order(StepState(5, (), Fate.MISSED))
    assert scene.next() is None


# Checks


def test_a_contribution_is_checked_once(scene: Scene) -> None:
    scene.attach()
    scene.take()
    scene.order(scene.check())
    scene.order(scene.check())
    order = scene.next()
    assert isinstance(order, local.CheckOrder)
    assert (order.peer_id, order.contribution_digest) == (OTHER, compute_digest(b"theirs"))
    scene.order(scene.check())
    scene.desk.finish_check(local.Checked(compute_digest(b"theirs"), "finite"))
    assert scene.take() == [ContributionChecked(compute_digest(b"theirs"), "finite")]
    assert scene.next() is None


def test_a_check_outlives_the_process_that_was_to_make_it(scene: Scene) -> None:
    """A coordinator asks once: without this, the round would never close."""
    scene.attach()
    scene.order(scene.check())
    scene.order(scene.check(name=b"another"))
    assert isinstance(scene.next(), local.CheckOrder)
    scene.desk.close(scene.owner)
    scene.attach()
    given = [scene.next()]
    scene.desk.finish_check(local.Checked(compute_digest(b"theirs"), ""))
    given.append(scene.next())
    assert [order.contribution_digest for order in given if isinstance(order, local.CheckOrder)] == [
        compute_digest(b"theirs"),
        compute_digest(b"another"),
    ]


def test_a_check_waits_for_a_process_that_is_in_its_round(scene: Scene) -> None:
    scene.order(scene.check(2))
    scene.attach(1)
    assert scene.next() is None
    scene.order(scene.close_round(1))
    scene.next()
    scene.desk.finish_step(local.Stepped(2, root(2)))
    assert isinstance(scene.next(), local.CheckOrder)


def test_checks_of_a_closed_round_are_dropped(scene: Scene) -> None:
    scene.attach()
    scene.order(scene.check())
    scene.order(scene.close_round())
    assert isinstance(scene.next(), local.StepOrder)
    scene.desk.finish_step(local.Stepped(1, root(1)))
    assert scene.next() is None


def test_checks_of_older_rounds_go_with_those_of_a_newer_one(scene: Scene) -> None:
    scene.order(scene.check(0, b"old"))
    scene.order(scene.check(1, b"new"))
    scene.attach(0)
    assert scene.next() is None
    scene.order(scene.check(0, b"late"))
    scene.attach(1)
    order = scene.next()
    assert isinstance(order, local.CheckOrder)
    assert order.contribution_digest == compute_digest(b"new")


# State anchors


def anchor_of(round_index: int) -> StateAnchor:
    return StateAnchor(Any, 0, round_index, root(round_index), None, BLOB, 160)  # type: ignore[arg-type]


def test_a_state_is_restored_instead_of_everything_ordered_before(scene: Scene) -> None:
    scene.attach(1)
    scene.take()
    scene.order(RunInnerSteps(1, 8))
    scene.order(scene.close_round(1))
    scene.order(RestoreState(anchor_of(4), True))
    assert scene.next() == local.RestoreOrder(4, root(4), BLOB, 160, True)
    scene.desk.finish_restore(local.Restored(4, root(4)))
    assert scene.take() == [StateRestored(4, root(4))]
    assert scene.desk.held == Held(4, root(4))
    assert scene.next() is None


def test_a_refused_restore_keeps_the_state(scene: Scene) -> None:
    scene.attach(None)
    scene.take()
    scene.order(RestoreState(anchor_of(4), False))
    scene.next()
    scene.desk.refuse_restore(local.RestoreRefused("root_mismatch"))
    assert scene.take() == [RestoreFailed("root_mismatch")]
    assert scene.desk.held is None


def test_without_a_process_nothing_is_restored(scene: Scene) -> None:
    scene.order(RestoreState(anchor_of(4), False))
    scene.attach(None)
    assert scene.next() is None


def test_a_state_anchor_is_written_once_before_the_next_step(scene: Scene) -> None:
    scene.attach()
    scene.take()
    scene.order(StoreStateAnchor(0))
    scene.order(StoreStateAnchor(0))
    scene.order(scene.close_round())
    assert scene.next() == local.AnchorOrder(0)
    scene.order(StoreStateAnchor(0))
    scene.desk.finish_anchor(local.AnchorStored(0, root(0), BLOB, 160))
    assert scene.take() == [StateAnchorStored(0, root(0), BLOB, 160)]
    assert isinstance(scene.next(), local.StepOrder)


def test_an_anchor_of_a_state_that_is_left_is_not_asked_for(scene: Scene) -> None:
    scene.attach()
    effect = scene.close_round()
    scene.order(effect)
    scene.order(StoreStateAnchor(0))
    scene.next()
    scene.desk.finish_step(local.Stepped(1, root(1)))
    assert scene.next() is None
    scene.order(StoreStateAnchor(0))
    assert scene.next() is None


def test_an_anchor_that_could_not_be_written_is_counted(scene: Scene) -> None:
    scene.attach()
    scene.take()
    scene.order(StoreStateAnchor(0))
    scene.next()
    scene.desk.refuse_anchor(local.AnchorRefused(0, "enospc"))
    assert scene.take() == []
    assert scene.metrics.registry.get_sample_value("pulsenet_rejected_total", {"reason": "enospc"}) == 1.0
    assert scene.next() is None


# What a process may not do


def test_an_order_is_answered_before_the_next_is_asked_for(scene: Scene) -> None:
    scene.attach()
    scene.order(scene.check())
    scene.next()
    assert refusal(scene.next) == "message-unexpected"


def test_what_was_not_ordered_is_not_answered(scene: Scene) -> None:
    scene.attach()
    desk, zero = scene.desk, root(0)
    for call in (
        lambda: desk.finish_check(local.Checked(BLOB, "")),
        lambda: desk.finish_step(local.Stepped(1, zero)),
        lambda: desk.fail_step(local.StepFailed(0, "memory")),
        lambda: desk.finish_restore(local.Restored(0, zero)),
        lambda: desk.refuse_restore(local.RestoreRefused("decode")),
        lambda: desk.finish_anchor(local.AnchorStored(0, zero, BLOB, 160)),
        lambda: desk.refuse_anchor(local.AnchorRefused(0, "enospc")),
    ):
        assert refusal(call) == "message-unexpected"


def test_an_answer_is_of_the_order_that_was_given(scene: Scene) -> None:
    scene.attach()
    scene.order(scene.check())
    scene.next()
    assert refusal(lambda: scene.desk.finish_check(local.Checked(BLOB, ""))) == "message-unexpected"
    scene.attach()
    scene.order(scene.close_round())
    scene.next()  # the check, which waits for whoever comes
    scene.desk._given = None
    scene.order(scene.close_round())
    scene.next()
    assert refusal(lambda: scene.desk.finish_step(local.Stepped(2, root(2)))) == "message-unexpected"
    scene.attach()
    scene.order(scene.close_round())
    scene.next()
    assert refusal(lambda: scene.desk.fail_step(local.StepFailed(1, "memory"))) == "message-unexpected"
    scene.attach()
    scene.order(StoreStateAnchor(0))
    scene.next()
    wrong = local.AnchorStored(0, root(1), BLOB, 160)
    assert refusal(lambda: scene.desk.finish_anchor(wrong)) == "message-unexpected"


def test_a_check_finds_only_what_the_specification_knows(scene: Scene) -> None:
    scene.attach()
    scene.order(scene.check())
    scene.next()
    assert refusal(lambda: scene.desk.finish_check(local.Checked(compute_digest(b"theirs"), "ugly"))) == "schema"


def test_who_waits_for_an_order_gets_it_when_it_comes(scene: Scene, hands: Any) -> None:
    scene.attach()

    async def wait() -> list[local.Order | None]:
        waiting = asyncio.create_task(scene.desk.next_order(60.0))
        await asyncio.sleep(0)
        await scene.desk.table()[StoreStateAnchor](StoreStateAnchor(0), scene.heard.append)
        first = await waiting
        scene.desk.finish_anchor(local.AnchorStored(0, root(0), BLOB, 160))
        return [first, await scene.desk.next_order(60.0)]

    assert hands.run_quickly(wait) == [local.AnchorOrder(0), None]


# Slices


def make_sum(scene: Scene, slices: tuple[int, ...] = (1,), stored: tuple[int, ...] = (1,)) -> SumSlices:
    """Return the order to sum slices of a round that is final."""
    effect = scene.close_round()
    ranges = () if len(slices) > 1 else (((84, 9),),) * len(effect.members)
    return SumSlices(0, effect.members, slices, stored, ranges)


def test_sums_are_ordered_once_and_their_names_passed_on(scene: Scene) -> None:
    scene.attach()
    scene.take()
    effect = make_sum(scene)
    scene.order(effect)
    scene.order(effect)
    order = scene.next()
    member = local.CountedMember(scene.me, 0x3F80_0000, BLOB, 80)
    wanted = local.WantedSlice(1, True, (local.ByteRange(84, 9),))
    assert order == local.SumOrder(0, root(0), (member,), (wanted,))
    assert scene.desk.stored_slices() == {1}
    summed = local.Summed(0, (local.SliceBlob(1, BLOB, 9),))
    assert refusal(lambda: scene.desk.finish_sum(replace(summed, round_index=1))) == "message-unexpected"
    scene.order(effect)
    assert isinstance(scene.next(), local.SumOrder)
    scene.desk.finish_sum(summed)
    assert scene.take() == [SlicesSummed(0, ((1, SliceName(BLOB, 9)),))]
    assert scene.next() is None
    assert scene.desk.stored_slices() == frozenset()


def test_all_slices_are_ordered_without_ranges(scene: Scene) -> None:
    scene.attach()
    scene.order(make_sum(scene, slices=(0, 1), stored=(0,)))
    order = scene.next()
    assert isinstance(order, local.SumOrder)
    assert order.slices == (local.WantedSlice(0, True, ()), local.WantedSlice(1, False, ()))
    assert scene.desk.stored_slices() == {0}


def test_a_sum_that_failed_is_counted(scene: Scene) -> None:
    scene.attach()
    scene.take()
    scene.order(make_sum(scene))
    scene.next()
    refused = local.SumRefused(0, "decode")
    assert refusal(lambda: scene.desk.refuse_sum(replace(refused, round_index=1))) == "message-unexpected"
    scene.order(make_sum(scene))
    scene.next()
    scene.desk.refuse_sum(refused)
    assert scene.take() == [SumFailed(0, "decode")]
    assert scene.metrics.registry.get_sample_value("pulsenet_rejected_total", {"reason": "decode"}) == 1.0


def test_sums_nobody_can_make_are_not_ordered(scene: Scene) -> None:
    effect = make_sum(scene)
    scene.order(effect)
    scene.attach(3)
    scene.order(effect)
    assert scene.next() is None


def test_a_step_by_slices_names_them_and_replaces_a_sum_that_waits(scene: Scene) -> None:
    scene.attach()
    scene.order(make_sum(scene))
    scene.order(replace(scene.close_round(), slices=(SliceName(BLOB, 9), SliceName(root(1), 8))))
    order = scene.next()
    assert isinstance(order, local.StepOrder)
    assert order.slices == (local.SliceBlob(0, BLOB, 9), local.SliceBlob(1, root(1), 8))
