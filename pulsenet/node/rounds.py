"""A trainer's part in the rounds, as a machine: contribute, wait for the final receipt, step with everybody.

The training process holds every array; this machine decides what it does next and never twice. A contribution is
stored before it is sent, and sent until the final receipt of its round says what became of it. State moves by final
receipts alone, one after another, so a restart at any time goes on from the last whole state on disk.
"""

from __future__ import annotations

from pulsenet.chain.ledger import FinalReceipt
from pulsenet.chain.records import StateAnchor
from pulsenet.chain.round_settings import RoundSettings
from pulsenet.chain.signing import decode_signed, encode_signed, record_digest, seal
from pulsenet.ids import Digest, PeerId
from pulsenet.node.effects import (
    Count,
    Effect,
    Fate,
    Log,
    Release,
    Report,
    RestoreState,
    RunInnerSteps,
    ShowToMachines,
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
    ReceiptSeen,
    ReplyReceived,
    RestoreFailed,
    StateLost,
    StateReached,
    StateRestored,
    StateStepped,
    StepFailed,
    TermSeen,
    TrainingAttached,
    TrainingLost,
)
from pulsenet.node.fetch import StoreIndex
from pulsenet.node.gathering import Gathering
from pulsenet.node.ledger_machine import LedgerMachine
from pulsenet.node.machine import Seat
from pulsenet.node.own_work import OwnWork, make_contribution
from pulsenet.node.rounds_contact import Contact
from pulsenet.node.rounds_news import take_rounds
from pulsenet.node.rounds_phase import Phase, Step, follow
from pulsenet.node.rounds_report import make_report
from pulsenet.wire.messages import RoundsReply

RETRY_SECONDS = 5.0
"""Wait after the training process failed at something, before it is asked again."""

ALONE_SECONDS = 10.0
"""A node that heard from nobody for so long since its training process came goes by its own records alone."""

EXTENSIONS_MAX = 2
"""While no coordinator is heard of, a round's inner steps go on for at most this many times their number."""


class Rounds(LedgerMachine):
    """The machine of a trainer.

    Args:
        seat: The node's; machines of one node share its rules and its ledger.
        index: What the store holds.
        own: What was last saved under ``OWN_KEY``.

    Raises:
        StorageError: ``own`` is damaged.
    """

    def __init__(self, seat: Seat, index: StoreIndex, *, own: bytes | None = None) -> None:
        super().__init__(seat)
        self._contact = Contact(seat, self._courier)
        self._gathering = Gathering(seat, index, self._courier)
        self._own = OwnWork(seat.peer_id, self._settings.missed_rounds_max, own)
        self._phase = Phase.IDLE
        self._round_index = 0
        self._state_root: Digest | None = None
        self._extension_count = self._steps_number = 0
        self._drops_residual = False
        self._is_cut_off = False
        self._awaits_news_until: float | None = None
        """Until then inner steps are held back: rounds that are over may have to be stepped first."""
        self._alone_until: float | None = None
        """When this node, which its own records say is cut off, stops hoping for others'."""
        self._restoring: StateAnchor | None = None
        """What the training process reads, while it does; a newer anchor that is heard of meanwhile changes nothing."""
        self._bad_anchors: set[Digest] = set()
        self._retry_at = 0.0
        self._told: Report | None = None

    @property
    def phase(self) -> Phase:
        """What the trainer is doing."""
        return self._phase

    @property
    def round_index(self) -> int:
        """Rounds that led to the state it holds."""
        return self._round_index

    @property
    def state_root(self) -> Digest | None:
        """Root of the state it holds; ``None`` while it holds none."""
        return self._state_root

    def _fetch(self, event: Event, now: float) -> list[Effect]:
        return self._gathering.handle(event, now)

    def _take(self, event: Event, now: float) -> list[Effect]:
        match event:
            case PeerConnected():
                self._contact.poll_soon(now)
            case TermSeen(votes, source):
                self._ledger.accept_mandate(votes)
                self._contact.note_heard(source, now)
            case ReceiptSeen():
                return self._take_receipt(event, now)
            case ReplyReceived(_, peer_id, RoundsReply() as reply):
                return self._take_rounds(peer_id, reply, now)
            case ReplyReceived():
                self._contact.take_reply(event, now)
            case _:
                return self._take_training(event, now)
        return []

    # What the run says

    def _take_receipt(self, event: ReceiptSeen, now: float) -> list[Effect]:
        self._contact.note_heard(event.source, now)
        signed = decode_signed(event.record)
        self._trust.accept_receipt(signed)
        if not self._trust.is_final(signed) or not self._ledger.accept_final(signed):
            return []
        return [StoreRecord(signed)]

    def _take_rounds(self, peer_id: PeerId, reply: RoundsReply, now: float) -> list[Effect]:
        try:
            effects = take_rounds(self._ledger, reply, peer_id)
        finally:
            self._contact.note_heard(peer_id, now)
            self._contact.note_answer(peer_id)
        if peer_id in self._authorities:
            # Authorities keep what leads on. Anybody else may keep it back, and would take this node off its state.
            is_behind = reply.round_index > self._round_index and self._state_root is not None
            self._is_cut_off = is_behind and self._ledger.final(self._round_index) is None
        return effects

    # What the training process says

    def _take_training(self, event: Event, now: float) -> list[Effect]:
        match event:
            case TrainingAttached():
                return self._attach(event, now)
            case TrainingLost() if self._phase is not Phase.IDLE:
                self._move(Step.LOST)
                self._state_root = None
                return [ShowToMachines(StateLost())]
            case InnerStepsDone(round_index) if self._is_due(Phase.TRAINING, round_index):
                return self._end_inner_steps(now)
            case ContributionStored(round_index) if self._is_due(Phase.STORING, round_index):
                self._move(Step.STORED)
                return self._contribute(event)
            case ContributionFailed(round_index, reason) if self._is_due(Phase.STORING, round_index):
                self._move(Step.FAILED)
                return [Count("contributions", reason), *self._start_inner_steps()]
            case StateStepped(round_index, state_root) if self._is_due(Phase.STEPPING, round_index - 1):
                return self._settle(round_index, state_root)
            case StepFailed(round_index, reason) if self._is_due(Phase.STEPPING, round_index):
                self._move(Step.FAILED)
                self._gathering.note_failed(reason)
                self._retry_at = now + RETRY_SECONDS
                return [Log("warning", f"round {round_index} was not applied: {reason}")]
            case StateRestored() if self._phase is Phase.RESTORING:
                return self._take_restored(event, now)
            case RestoreFailed(reason) if self._phase is Phase.RESTORING:
                return self._refuse_anchor(reason, now)
        return []

    def _is_due(self, phase: Phase, round_index: int) -> bool:
        return self._phase is phase and self._round_index == round_index

    def _attach(self, event: TrainingAttached, now: float) -> list[Effect]:
        if self._phase is not Phase.IDLE:
            # The one before died unnoticed.
            self._move(Step.LOST)
        if event.round_index is None or event.state_root is None:
            self._drops_residual = True
            self._move(Step.ASTRAY)
            return [ShowToMachines(StateLost())]
        self._hold(event.round_index, event.state_root)
        ledger = self._ledger
        is_known = event.round_index >= ledger.next_round_index or ledger.final(event.round_index) is not None
        self._awaits_news_until = self._contact.await_news(now, ALONE_SECONDS, is_known=is_known)
        effects: list[Effect] = [ShowToMachines(self._state_event)]
        if event.round_index > self._ledger.next_round_index:
            text = f"no receipt known here leads to round {event.round_index}, whose state the training process holds"
            effects.append(Log("warning", f"{text}; if its checkpoint is of another run, none ever will"))
        stored = event.stored
        sent = self._own.sent_to(event.round_index)
        if sent is not None:
            # One contribution a round: it was sent, or may have been, and nothing else may be.
            self._move(Step.STORED)
            self._contact.begin(sent)
            return effects
        if stored is not None and (stored.round_index, stored.base_state_root) == (event.round_index, event.state_root):
            self._move(Step.STORED)
            return [*effects, *self._contribute(stored)]
        self._move(Step.ATTACHED)
        return [*effects, *self._start_inner_steps()]

    def _start_inner_steps(self, extension_count: int = 0) -> list[Effect]:
        self._steps_number, self._extension_count = self._steps_number + 1, extension_count
        return self._order_inner_steps()

    def _order_inner_steps(self) -> list[Effect]:
        if self._awaits_news_until is not None or self._ledger.final(self._round_index) is not None:
            return []
        return [RunInnerSteps(self._round_index, self._settings.inner_steps, self._steps_number)]

    def _end_inner_steps(self, now: float) -> list[Effect]:
        if self._settings.keeps_uncounted and self._extension_count < EXTENSIONS_MAX and self._contact.is_silent(now):
            return self._start_inner_steps(self._extension_count + 1)
        self._move(Step.DONE)
        return [StoreContribution(self._round_index)]

    def _contribute(self, stored: ContributionStored) -> list[Effect]:
        record = make_contribution(self._trust, self._peer_id, stored)
        signed = seal(record, self._sign, self._peer_id)
        self._own.note_sent(stored.round_index, record_digest(signed))
        self._ledger.accept_listed(signed)
        self._contact.begin(record_digest(signed))
        return [StoreRecord(signed), self._own.save()]

    def _settle(self, round_index: int, state_root: Digest) -> list[Effect]:
        final = self._ledger.final(round_index - 1)
        assert final is not None
        fate = self._own.judge(final.receipt)
        self._own.note_settled(round_index - 1, fate)
        effects: list[Effect] = [Count("contributions", fate)]
        if fate in (Fate.REJECTED, Fate.DROPPED) or (fate is Fate.MISSED and not self._settings.keeps_uncounted):
            effects.append(Count("wasted_inner_steps", fate, float(self._settings.inner_steps)))
        self._hold(round_index, state_root)
        effects += [ShowToMachines(self._state_event), *self._forget(round_index)]
        return [self._own.save(), *effects, *self._take_part(Step.DONE)]

    def _forget(self, round_index_min: int) -> list[Effect]:
        gone = self._ledger.forget_old(round_index_min)
        if gone is None:
            return []
        self._own.forget_before(self._ledger.anchors[0].round_index)
        return [Release(gone.blob_ids, gone.record_digests, spares_versions=True)]

    def _take_restored(self, event: StateRestored, now: float) -> list[Effect]:
        anchor = self._restoring
        assert anchor is not None, "nothing else is restored"
        if (event.round_index, event.state_root) != (anchor.round_index, anchor.state_root):
            return self._refuse_anchor("root_mismatch", now)
        self._hold(event.round_index, event.state_root)
        self._drops_residual = False
        return [ShowToMachines(self._state_event), *self._take_part(Step.DONE)]

    def _hold(self, round_index: int, state_root: Digest) -> None:
        """Note the state that the training process holds; what was said of the one before says nothing of it."""
        self._round_index, self._state_root, self._is_cut_off = round_index, state_root, False

    def _take_part(self, step: Step) -> list[Effect]:
        """Begin the round of the state that is held; ``step`` leads to its inner steps."""
        sent = self._own.sent_to(self._round_index)
        if sent is None:
            self._move(step)
            return self._start_inner_steps()
        # What an earlier life sent for this round, perhaps from another state, still stands: nothing else may be sent.
        self._move(Step.STORED)
        self._contact.begin(sent)
        return []

    def _refuse_anchor(self, reason: str, now: float) -> list[Effect]:
        anchor = self._restoring
        assert anchor is not None, "nothing else is restored"
        self._move(Step.FAILED)
        self._retry_at = now + RETRY_SECONDS
        # Of those that the ledger dropped none is restored any more.
        self._bad_anchors &= {known.blob_id for known in self._ledger.anchors}
        self._bad_anchors.add(anchor.blob_id)
        return [Count("rejected", reason), Log("warning", f"a state anchor was not restored: {reason}")]

    # What follows

    def _go_on(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if self._phase is Phase.IDLE:
            # Nobody steps these rounds here, perhaps for months, and as an authority this node fetches what they list.
            effects += self._forget(self._ledger.next_round_index)
        if self._ledger.fork is None:
            # While nothing more comes of what a receipt lists, it may be gone: then a later anchor is the way on.
            if self._phase is Phase.GATHERING:
                self._is_cut_off = self._gathering.is_stalled(now)
            self._note_alone(now)
            effects += self._check_state()
            if self._phase in (Phase.TRAINING, Phase.PENDING) and self._ledger.final(self._round_index) is not None:
                self._move(Step.FINAL)
            if self._phase is not Phase.STEPPING:
                effects += self._gathering.update(now, final=self._due_final, anchor=self._wanted_anchor())
            effects += self._use_what_is_whole(now)
        until = self._awaits_news_until
        if until is not None and (now >= until or self._contact.is_informed()):
            self._awaits_news_until = None
            effects += self._start_inner_steps() if self._phase is Phase.TRAINING else []
        effects += self._gathering.pump(now)
        effects += self._send_contribution(now)
        waits = self._phase in (Phase.JOINING, Phase.PENDING)
        waits |= self._awaits_news_until is not None or self._alone_until is not None
        # A training process may have come back with more than this ledger knows. Where nothing leads on from its state,
        # what is missing on the way to a later state anchor is asked for, however many answers it takes.
        is_held = self._state_root is not None and not self._is_cut_off
        due = self._ledger.next_round_index
        poll_from = min(self._round_index, due) if is_held else due
        return effects + self._contact.poll(now, from_round_index=poll_from, is_waiting=waits, members_first=True)

    def _store_again(self) -> list[Effect]:
        self._told = None
        return [self._own.save(), *self._order_again(), ShowToMachines(self._state_event)]

    def _note_alone(self, now: float) -> None:
        """Notice that the own records lead on only from later, where no other authority is that might have more."""
        anchors, is_there = self._ledger.anchors, self._phase in (Phase.TRAINING, Phase.PENDING)
        is_behind = is_there and bool(anchors) and anchors[0].round_index > self._round_index
        has_others = bool(self._courier.connected & self._authorities)
        if not is_behind or has_others or self._ledger.final(self._round_index) is not None:
            self._alone_until = None
        elif self._alone_until is None:
            self._alone_until = now + ALONE_SECONDS
        elif now >= self._alone_until:
            self._is_cut_off = True

    def _check_state(self) -> list[Effect]:
        """Leave a state that is not everybody's, or from which no receipts lead on any more."""
        if self._phase not in (Phase.TRAINING, Phase.PENDING, Phase.GATHERING):
            return []
        # A state anchor of this very round is the word of one authority, whose own state may be the rotten one.
        final = self._ledger.final(self._round_index)
        has_diverged = final is not None and final.receipt.base_state_root != self._state_root
        has_later = any(anchor.round_index > self._round_index for anchor in self._ledger.anchors)
        is_cut_off = self._is_cut_off and (final is None or self._phase is Phase.GATHERING)
        if not has_diverged and not (is_cut_off and has_later):
            return []
        reason = "diverged" if has_diverged else "outdated"
        self._move(Step.ASTRAY)
        self._state_root = None
        self._drops_residual = True
        wasted = Count("wasted_inner_steps", reason, float(self._settings.inner_steps))
        text = f"the state of round {self._round_index} is {reason}: it is restored from a state anchor"
        blamed = self._gathering.note_astray(self._round_index) if has_diverged else []
        return [ShowToMachines(StateLost()), wasted, Log("warning", text), *blamed]

    def _use_what_is_whole(self, now: float) -> list[Effect]:
        if now < self._retry_at:
            return []
        if self._phase is Phase.JOINING:
            anchor = self._restoring = self._anchor()
            is_whole = anchor is not None and self._gathering.holds_anchor(anchor)
        else:
            final = self._due_final
            is_whole = final is not None and self._gathering.is_whole(final)
        if not is_whole:
            return []
        self._move(Step.WHOLE)
        return self._order_again()

    def _order_again(self) -> list[Effect]:
        """Return what the training process is to do now; it does nothing twice that bears the same number."""
        match self._phase:
            case Phase.STORING:
                return [StoreContribution(self._round_index)]
            case Phase.TRAINING:
                return self._order_inner_steps()
            case Phase.STEPPING:
                final = self._ledger.final(self._round_index)
                assert final is not None
                return self._gathering.order(final, self._own.judge(final.receipt))
            case Phase.RESTORING:
                assert self._restoring is not None, "nothing else is restored"
                return [RestoreState(self._restoring, self._drops_residual)]
        return []

    def _send_contribution(self, now: float) -> list[Effect]:
        if self._phase is not Phase.PENDING:
            return []
        digest = self._own.sent_to(self._round_index)
        entry = None if digest is None else self._ledger.contribution(digest)
        if entry is None or not self._contact.may_send(now):
            return []
        record = encode_signed(entry.signed)
        mandate = self._ledger.mandate
        if mandate is not None and mandate.coordinator == self._peer_id:
            return [ShowToMachines(ContributionSeen(record, None))]
        return self._contact.send(record)

    @property
    def _due_final(self) -> FinalReceipt | None:
        """The receipt whose contents are being gathered."""
        return self._ledger.final(self._round_index) if self._phase is Phase.GATHERING else None

    @property
    def _authorities(self) -> set[PeerId]:
        descriptor = self._trust.descriptor
        return set() if descriptor is None else set(descriptor.authorities)

    def _wanted_anchor(self) -> StateAnchor | None:
        if self._phase is Phase.RESTORING:
            return self._restoring
        return self._anchor() if self._phase is Phase.JOINING else None

    def _anchor(self) -> StateAnchor | None:
        """Return the newest state anchor that did not fail here."""
        good = [anchor for anchor in self._ledger.anchors if anchor.blob_id not in self._bad_anchors]
        return good[-1] if good else None

    @property
    def _state_event(self) -> StateReached | StateLost:
        return StateLost() if self._state_root is None else StateReached(self._round_index, self._state_root)

    @property
    def _settings(self) -> RoundSettings:
        assert self._trust.descriptor is not None
        return RoundSettings.of(self._trust.descriptor)

    def _move(self, step: Step) -> None:
        self._phase = follow(self._phase, step)

    def _report(self, now: float) -> list[Effect]:
        report = make_report(
            self._ledger,
            phase=self._phase,
            round_index=self._round_index,
            has_anchor=self._anchor() is not None,
            contact=self._contact,
            progress=self._gathering.progress(),
            now=now,
        )
        told, self._told = self._told, report
        return [] if report == told else [report]

    def _wakes(self, now: float) -> list[float | None]:
        contact_at = self._contact.next_wake(now)
        return [self._gathering.next_wake(now), contact_at, self._retry_at, self._alone_until, self._awaits_news_until]
