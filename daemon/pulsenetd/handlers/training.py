"""Effects for the training process of a trainer's rounds: orders wait here for it, and its answers become events.

The process holds every array and speaks when it likes; the machines order when they must. This desk stands between
them: it gives each order out once, drops those that later ones make void, and answers again what is done already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from pulsenet.chain.ledger import Ledger
from pulsenet.chain.records import Contribution, Member, SliceName
from pulsenet.chain.rules import check_record
from pulsenet.chain.trust import Trust
from pulsenet.errors import RemoteProtocolError
from pulsenet.ids import Digest, PeerId
from pulsenet.local import rounds_protocol as local
from pulsenet.node.effects import (
    CheckContribution,
    Effect,
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
from pulsenet.node.own_work import make_contribution
from pulsenetd.driver import Handler, Post
from pulsenetd.logs import logger
from pulsenetd.metrics import Metrics
from pulsenetd.outer.pace import Pace

CHECK_REASONS: Final = frozenset({"", "base", "shape", "finite", "norm", "decode"})
"""What a check may find (SPEC section 6.9)."""

Given = TypeVar("Given", local.CheckOrder, local.SumOrder, local.StepOrder, local.RestoreOrder, local.AnchorOrder)


@dataclass(slots=True)
class _Order:
    """What the process is to do, and whom its answer goes to."""

    message: local.Order
    post: Post


@dataclass(slots=True)
class _Offer:
    """What the process has for a round, or why it has nothing."""

    outcome: ContributionStored | ContributionFailed
    is_used: bool = False
    """Whether the machine was told that the inner steps are done."""


@dataclass(frozen=True, slots=True)
class Held:
    """The outer state of the training process."""

    round_index: int
    state_root: Digest


class TrainingDesk:
    """Between the machines of the rounds and one training process.

    All methods run in the event loop and none of them waits, but for :meth:`hold` and :meth:`next_order`.

    Args:
        trust: The run's rules.
        ledger: The rounds.
        peer_id: This node's key.
        metrics: Where the process's own figures and its failures are counted.
        pace: Told when the process works and when it waits.
        post: Queues an event for the machine of the trainer's rounds.
        settle: Waits until that machine has taken in what was queued for it.
    """

    def __init__(
        self,
        trust: Trust,
        ledger: Ledger,
        peer_id: PeerId,
        metrics: Metrics,
        *,
        pace: Pace,
        post: Callable[[Event], None],
        settle: Callable[[], Awaitable[None]],
    ) -> None:
        self._trust = trust
        self._ledger = ledger
        self._peer_id = peer_id
        self._metrics = metrics
        self._pace = pace
        self._post = post
        self._settle = settle
        self._owner: object | None = None
        self._is_attached = False
        self.held: Held | None = None
        """What the process says it holds."""
        self._orders: list[_Order] = []
        self._given: _Order | None = None
        self._offer: _Offer | None = None
        self._steps_due: Post | None = None
        """Answers the wish for inner steps of the round that is held."""
        self._steps_number: int | None = None
        """Of the order of inner steps that was taken last."""
        self._has_orders = asyncio.Event()

    def table(self) -> dict[type[Effect], Handler]:
        """Return the handlers by effect."""
        return {
            RunInnerSteps: self._run_inner_steps,
            StoreContribution: self._store_contribution,
            CheckContribution: self._check_contribution,
            SumSlices: self._sum_slices,
            StepState: self._step_state,
            RestoreState: self._restore_state,
            StoreStateAnchor: self._store_state_anchor,
        }

    # The process comes and goes

    def open(self, owner: object) -> None:
        """Let a process take part; only one may at a time.

        Raises:
            RemoteProtocolError: ``busy``.
        """
        if self._owner is not None and self._owner is not owner:
            raise RemoteProtocolError("busy", "another training process takes part in the rounds of this node")
        self._owner = owner

    def close(self, owner: object) -> None:
        """The process is gone, with everything it did not store; another one's closing changes nothing."""
        if self._owner is not owner:
            return
        self._owner = self.held = None
        self._pace.forget()
        self._drop_orders()
        if self._is_attached:
            self._is_attached = False
            self._post(TrainingLost())

    async def hold(self, round_index: int | None, state_root: Digest | None) -> None:
        """Begin anew with the outer state that the process holds; orders given before are void."""
        # What the machine orders until it hears of this is meant for the state before.
        self._steps_due = None
        await self._settle()
        self._drop_orders()
        self.held = None if round_index is None or state_root is None else Held(round_index, state_root)
        self._is_attached = True
        self._pace.begin()
        # A contribution that was offered and not sent died with whoever offered it; inner steps make another.
        self._post(TrainingAttached(round_index, state_root, None))
        await self._settle()

    def _drop_orders(self) -> None:
        """Drop what was ordered of the process; a check is the coordinator's, which asks once, and waits."""
        given = [] if self._given is None else [self._given]
        self._orders = [order for order in (*given, *self._orders) if isinstance(order.message, local.CheckOrder)]
        self._given = self._offer = self._steps_due = self._steps_number = None

    # What the machines want

    async def _run_inner_steps(self, effect: RunInnerSteps, post: Post) -> None:
        if not self._holds(effect.round_index) or effect.number == self._steps_number:
            return
        self._steps_number = effect.number
        offer = self._offer
        if offer is not None and not offer.is_used and offer.outcome.round_index == effect.round_index:
            offer.is_used = True
            post(InnerStepsDone(effect.round_index))
            return
        # Either the steps of a new round, or more of them because no coordinator is heard of.
        self._offer = None
        self._steps_due = post
        self._put(local.GoOn(effect.round_index), post)

    async def _store_contribution(self, effect: StoreContribution, post: Post) -> None:
        offer = self._offer
        if offer is None or offer.outcome.round_index != effect.round_index:
            return  # the process is gone, which the machine hears as well
        if isinstance(offer.outcome, ContributionFailed):
            self._offer = None
        post(offer.outcome)

    async def _check_contribution(self, effect: CheckContribution, post: Post) -> None:
        contribution, digest = effect.contribution, effect.contribution_digest
        known = [order.message for order in (*self._orders, *([self._given] if self._given else []))]
        if any(isinstance(message, local.CheckOrder) and message.contribution_digest == digest for message in known):
            return
        self._drop_checks(contribution.round_index - 1)
        message = local.CheckOrder(
            contribution_digest=digest,
            peer_id=contribution.peer_id,
            round_index=contribution.round_index,
            base_state_root=contribution.base_state_root,
            blob_id=contribution.blob_id,
            encoded_size_bytes=contribution.encoded_size_bytes,
            entry_count=contribution.entry_count,
            element_count=contribution.element_count,
            norm_bits=contribution.norm_bits,
            codec_id=contribution.codec_id,
        )
        self._orders.append(_Order(message, post))
        self._has_orders.set()

    async def _sum_slices(self, effect: SumSlices, post: Post) -> None:
        final = self._ledger.final(effect.round_index)
        if not self._holds(effect.round_index) or final is None:
            return
        self._take_back(local.GoOn)
        wanted = []
        for position, place in enumerate(effect.slices):
            ranges = tuple(local.ByteRange(*member[position]) for member in effect.ranges)
            wanted.append(local.WantedSlice(place, place in effect.stored, ranges))
        members = _list_members(effect.members)
        self._put(local.SumOrder(effect.round_index, final.receipt.base_state_root, members, tuple(wanted)), post)

    async def _step_state(self, effect: StepState, post: Post) -> None:
        round_index, held = effect.round_index, self.held
        self._drop_checks(round_index)
        if held is not None and held.round_index == round_index + 1:
            post(StateStepped(held.round_index, held.state_root))
            return
        final = self._ledger.final(round_index)
        if not self._holds(round_index) or final is None:
            return
        self._offer = self._steps_due = None
        self._take_back(local.GoOn)
        rejected = {rejection.peer_id: rejection.reason for rejection in final.receipt.rejected}
        order = local.StepOrder(
            round_index=round_index,
            base_state_root=final.receipt.base_state_root,
            fate=effect.fate,
            reason=rejected.get(self._peer_id, ""),
            members=_list_members(effect.members),
            slices=tuple(
                local.SliceBlob(place, name.blob_id, name.encoded_size_bytes)
                for place, name in enumerate(effect.slices)
            ),
        )
        self._take_back(local.SumOrder)
        self._put(order, post)

    async def _restore_state(self, effect: RestoreState, post: Post) -> None:
        if self._owner is None:
            return
        self._offer = self._steps_due = None
        self._take_back(local.GoOn, local.SumOrder, local.StepOrder)
        anchor = effect.anchor
        order = local.RestoreOrder(
            round_index=anchor.round_index,
            state_root=anchor.state_root,
            blob_id=anchor.blob_id,
            encoded_size_bytes=anchor.encoded_size_bytes,
            drops_residual=effect.drops_residual,
        )
        self._put(order, post)

    async def _store_state_anchor(self, effect: StoreStateAnchor, post: Post) -> None:
        if self._holds(effect.round_index):
            self._put(local.AnchorOrder(effect.round_index), post)

    def _holds(self, round_index: int) -> bool:
        return self.held is not None and self.held.round_index == round_index

    def _put(self, message: local.Order, post: Post) -> None:
        """Let an order wait; one of its kind that waits is void, and one that is given out is not given again."""
        if self._given is not None and self._given.message == message:
            self._given.post = post
            return
        self._take_back(type(message))
        self._orders.append(_Order(message, post))
        self._has_orders.set()

    def _take_back(self, *kinds: type[local.Order]) -> None:
        self._orders = [order for order in self._orders if not isinstance(order.message, kinds)]

    def _drop_checks(self, round_index_max: int) -> None:
        self._orders = [
            order
            for order in self._orders
            if not isinstance(order.message, local.CheckOrder) or order.message.round_index > round_index_max
        ]

    # What the process asks and answers

    async def next_order(self, wait_seconds: float) -> local.Order | None:
        """Return the oldest order that is about the state that is held, or ``None`` when the time is up.

        Raises:
            RemoteProtocolError: ``message-unexpected``: the one before is not answered.
        """
        if self._given is not None:
            kind = type(self._given.message).__name__
            raise RemoteProtocolError("message-unexpected", f"orders are asked for before a {kind} is answered")
        give_up_at = asyncio.get_running_loop().time() + wait_seconds
        while (message := self._give()) is None and wait_seconds > 0:
            self._has_orders.clear()
            try:
                async with asyncio.timeout_at(give_up_at):
                    await self._has_orders.wait()
            except TimeoutError:
                return self._give()
        return message

    def _give(self) -> local.Order | None:
        for order in list(self._orders):
            message = order.message
            if isinstance(message, local.RestoreOrder) or self._holds(message.round_index):
                self._orders.remove(order)
                if isinstance(message, local.GoOn):
                    self._pace.begin()
                else:
                    self._given = order
                return message
            if self.held is not None and message.round_index < self.held.round_index:
                self._orders.remove(order)
        return None

    def offer(self, stored: ContributionStored) -> None:
        """Take the round's contribution, whose blob is durable.

        Raises:
            RemoteProtocolError: ``schema``: fields that no contribution has.
        """
        check_record(make_contribution(self._trust, self._peer_id, stored))
        self._take_outcome(stored)

    def abstain(self, round_index: int, reason: str) -> None:
        """Take why there is none."""
        self._take_outcome(ContributionFailed(round_index, reason))

    def _take_outcome(self, outcome: ContributionStored | ContributionFailed) -> None:
        held = self.held
        if held is None or held.round_index != outcome.round_index:
            return  # moot: the next order says where the round is
        if isinstance(outcome, ContributionStored) and outcome.base_state_root != held.state_root:
            raise RemoteProtocolError("base", "the contribution starts from another state than the one held")
        self._pace.end()
        self._take_back(local.GoOn)
        self._offer = _Offer(outcome)
        if self._steps_due is not None:
            answer, self._steps_due = self._steps_due, None
            self._offer.is_used = True
            answer(InnerStepsDone(outcome.round_index))

    def finish_check(self, checked: local.Checked) -> None:
        """Take what a check found."""
        if checked.reason not in CHECK_REASONS:
            raise RemoteProtocolError("schema", f"a check finds no {checked.reason!r}")
        order, post = self._take_given(local.CheckOrder)
        if checked.contribution_digest != order.contribution_digest:
            raise RemoteProtocolError("message-unexpected", "the check of another contribution")
        post(ContributionChecked(checked.contribution_digest, checked.reason))

    def finish_sum(self, summed: local.Summed) -> None:
        """Take the blobs of slices; those to be stored are durable."""
        order, post = self._take_given(local.SumOrder, summed.round_index)
        if [each.slice_index for each in summed.slices] != [each.slice_index for each in order.slices]:
            raise RemoteProtocolError("message-unexpected", "other slices than were ordered")
        names = tuple((each.slice_index, SliceName(each.blob_id, each.encoded_size_bytes)) for each in summed.slices)
        post(SlicesSummed(summed.round_index, names))

    def stored_slices(self) -> frozenset[int]:
        """Return which slices of the order that is being answered must have been put."""
        message = None if self._given is None else self._given.message
        wanted = message.slices if isinstance(message, local.SumOrder) else ()
        return frozenset(each.slice_index for each in wanted if each.is_stored)

    def refuse_sum(self, refused: local.SumRefused) -> None:
        """Take why slices were not summed."""
        _, post = self._take_given(local.SumOrder, refused.round_index)
        self._metrics.count("rejected", refused.reason)
        post(SumFailed(refused.round_index, refused.reason))

    def finish_step(self, stepped: local.Stepped) -> None:
        """Take the state that an outer step led to."""
        _, post = self._take_given(local.StepOrder, stepped.round_index - 1)
        self.held = Held(stepped.round_index, stepped.state_root)
        self._pace.begin()
        self._offer = self._steps_due = None
        post(StateStepped(stepped.round_index, stepped.state_root))

    def fail_step(self, failed: local.StepFailed) -> None:
        """Take why the outer step was not done."""
        _, post = self._take_given(local.StepOrder, failed.round_index)
        self._metrics.count("rejected", failed.reason)
        post(StepFailed(failed.round_index, failed.reason))

    def finish_restore(self, restored: local.Restored) -> None:
        """Take the state that was restored."""
        _, post = self._take_given(local.RestoreOrder)
        self.held = Held(restored.round_index, restored.state_root)
        self._pace.begin()
        post(StateRestored(restored.round_index, restored.state_root))

    def refuse_restore(self, refused: local.RestoreRefused) -> None:
        """Take why an anchor was not restored."""
        _, post = self._take_given(local.RestoreOrder)
        post(RestoreFailed(refused.reason))

    def finish_anchor(self, stored: local.AnchorStored) -> None:
        """Take the blob of the outer state, which is durable."""
        _, post = self._take_given(local.AnchorOrder, stored.round_index)
        if self.held != Held(stored.round_index, stored.state_root):
            raise RemoteProtocolError("message-unexpected", "the anchor of another state than the one held")
        post(StateAnchorStored(stored.round_index, stored.state_root, stored.blob_id, stored.encoded_size_bytes))

    def refuse_anchor(self, refused: local.AnchorRefused) -> None:
        """Take why there is no blob of the outer state; the next one is due in its own time."""
        self._take_given(local.AnchorOrder)
        self._metrics.count("rejected", refused.reason)
        logger.warning("no state anchor of round %d was written: %s", refused.round_index, refused.reason)

    def _take_given(self, kind: type[Given], round_index: int | None = None) -> tuple[Given, Post]:
        """Return the order that is being answered, of this round if one is said.

        Raises:
            RemoteProtocolError: ``message-unexpected``: none of this kind was given out, or of another round.
        """
        given = self._given
        if given is None or not isinstance(given.message, kind):
            raise RemoteProtocolError("message-unexpected", f"no {kind.__name__} was given out")
        self._given = None
        if round_index is not None and given.message.round_index != round_index:
            raise RemoteProtocolError("message-unexpected", f"round {round_index} was not ordered")
        return given.message, given.post


def _list_members(members: tuple[tuple[Member, Contribution], ...]) -> tuple[local.CountedMember, ...]:
    return tuple(
        local.CountedMember(
            peer_id=member.peer_id,
            scale_bits=member.scale_bits,
            blob_id=contribution.blob_id,
            encoded_size_bytes=contribution.encoded_size_bytes,
        )
        for member, contribution in members
    )
