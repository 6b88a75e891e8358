"""An authority's part in the rounds, as a machine: voting, countersigning, and closing rounds in its own term.

What is promised is stored before it is said (``Candidacy``, ``chain/ballot.py``); what is counted is decided by
``Collection``; what is final is kept by ``Ledger``. This machine moves records between them and the network.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pulsenet.chain.ballot import Place, Stored, find_inherited, find_store_refusal, is_behind, is_older, store
from pulsenet.chain.ledger import LEDGER_KEY, Ledger, Mandate
from pulsenet.chain.outcome import listed_by, outcome_of
from pulsenet.chain.records import Receipt, SignedRecord, StateAnchor
from pulsenet.chain.round_settings import RoundSettings
from pulsenet.chain.signing import Sign, add_signature, decode_signed, encode_signed, record_digest, seal
from pulsenet.chain.trust import Trust
from pulsenet.errors import LocalProtocolError, RemoteProtocolError, TrustError
from pulsenet.ids import Digest, PeerId
from pulsenet.node.candidacy import Candidacy, decode_ballot
from pulsenet.node.closing import Collection
from pulsenet.node.courier import Courier
from pulsenet.node.effects import (
    CheckContribution,
    Count,
    Effect,
    Log,
    SaveState,
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
    PeerLost,
    ReceiptSeen,
    StateAnchorStored,
    StateLost,
    StateReached,
    StoreFailed,
    TermSeen,
    VoteSeen,
)
from pulsenet.node.fetch import StoreIndex
from pulsenet.node.gather import Gatherer
from pulsenet.node.machine import Draw, sooner
from pulsenet.node.proposal import Proposal
from pulsenet.node.rounds_news import store_learnt
from pulsenet.node.verdicts import Verdicts
from pulsenet.wire.messages import PushReceipt, PushTerm

STORE_RETRY_SECONDS = 5.0
"""Wait after the disk refused, before everything is stored again."""

FIND_SECONDS = 10.0
"""For so long after its start a coordinator counts on whoever was counted last: they have to find it again first."""


@dataclass(frozen=True, slots=True)
class _Offer:
    """A receipt of another coordinator that is not stored yet."""

    receipt: Receipt
    signed: SignedRecord


class Coordinator:
    """The machine of an authority; it also closes rounds while the term is its own.

    Args:
        trust: The run's rules; shared with the node's other machines.
        ledger: The rounds; shared likewise.
        peer_id: This node's key.
        sign: Signs with that key.
        draw: Chance.
        index: What the store holds.
        ballot: What was last saved under ``BALLOT_KEY``.

    Raises:
        StorageError: the ballot is damaged: this key must not vote.
    """

    def __init__(
        self,
        trust: Trust,
        ledger: Ledger,
        peer_id: PeerId,
        sign: Sign,
        draw: Draw,
        index: StoreIndex,
        *,
        ballot: bytes | None = None,
    ) -> None:
        self._trust = trust
        self._ledger = ledger
        self._peer_id = peer_id
        self._sign = sign
        self._draw = draw
        self._index = index
        self._courier = Courier()
        self._gatherer = Gatherer(ledger, draw, index, self._courier.take_request_id)
        self._ballot = decode_ballot(ballot)
        self._candidacy: Candidacy | None = None
        self._found_until = 0.0
        self._state: StateReached | None = None
        self._collection: Collection | None = None
        self._proposal: Proposal | None = None
        self._is_unsaved = False
        self._offer: _Offer | None = None
        self._shown: SignedRecord | None = None
        self._newest: tuple[SignedRecord, ...] = ()
        self._timer_at: float | None = None
        self._is_fork_told = False
        self.verdicts = Verdicts()
        """What became of items that were pushed here."""

    @property
    def term(self) -> int:
        """The newest term whose coordinator is known here; 0 before the first."""
        return 0 if self._ledger.mandate is None else self._ledger.mandate.term

    def is_leading(self, now: float) -> bool:
        """Say whether this node is the coordinator now: only then may it publish versions of the run."""
        return self._candidacy is not None and self._candidacy.is_leading(now)

    def handle(self, event: Event, now: float, now_ms: int) -> list[Effect]:
        """Take in one event; see :class:`pulsenet.node.machine.Machine`."""
        candidacy = self._candidacy
        if candidacy is None:
            self._found_until = now + FIND_SECONDS
            common = (self._trust, self._ledger, self._peer_id, self._sign, self._draw, self._courier)
            candidacy = self._candidacy = Candidacy(*common, ballot=self._ballot, now=now)
        if self._timer_at is not None and now >= self._timer_at:
            self._timer_at = None
        effects = self._gatherer.handle(event, now)
        if isinstance(event, StoreFailed) and event.digest is None:
            # Nothing may be said that is not stored: whatever comes next begins with storing all of it again.
            self._is_unsaved = True
            self._timer_at = sooner(self._timer_at, now + STORE_RETRY_SECONDS)
            return [Count("rejected", event.reason), SetTimer(self._timer_at)]
        try:
            effects += self._take(candidacy, event, now)
        except (RemoteProtocolError, TrustError) as error:
            effects += [*store_learnt(self._ledger), Count("rejected", error.code)]
            self.verdicts.note(event, error.code)
        return effects + self._go_on(candidacy, now)

    def _take(self, candidacy: Candidacy, event: Event, now: float) -> list[Effect]:
        match event:
            case PeerConnected(peer_id):
                self._courier.connected.add(peer_id)
                if candidacy.is_leading(now) and self._ledger.mandate is not None:
                    return [self._courier.send(peer_id, PushTerm(self._ledger.mandate.votes))]
            case PeerLost(peer_id):
                self._courier.connected.discard(peer_id)
            case VoteSeen():
                return self._take_vote(candidacy, event, now)
            case TermSeen(votes, source):
                self._note_term(candidacy, self._ledger.accept_mandate(votes), source, now)
            case ContributionSeen():
                return self._take_contribution(candidacy, event, now)
            case ContributionChecked(digest, reason):
                if self._collection is not None:
                    self._collection.decide(digest, reason)
                return [Count("rejected", reason)] if reason else []
            case ReceiptSeen():
                return self._take_receipt(candidacy, event, now)
            case StateReached() | StateLost():
                self._state = event if isinstance(event, StateReached) else None
                if self._collection is not None:
                    # A check that was ordered may have died with its training process.
                    self._collection.asked.clear()
                return [] if self._state is None else self._order_anchor(self._state.round_index)
            case StateAnchorStored():
                return self._take_anchor(event)
            case _:
                pass
        return []

    def _order_anchor(self, round_index: int) -> list[Effect]:
        settings = self._settings
        blob_ids = [anchor.blob_id for anchor in self._ledger.anchors if anchor.round_index == round_index]
        # Another authority may have signed it already; each writes the blob itself, so that several hold it.
        is_held = any(self._index.chunk_list(blob_id) is not None for blob_id in blob_ids)
        is_due = settings is not None and round_index % settings.state_anchor_interval == 0
        return [StoreStateAnchor(round_index)] if is_due and not is_held else []

    # What others say

    def _take_vote(self, candidacy: Candidacy, event: VoteSeen, now: float) -> list[Effect]:
        signed = decode_signed(event.record)
        given = self._trust.accept_vote(signed)
        effects, refusal = candidacy.take_vote(given, signed.signers[0], event.record, now)
        self.verdicts.note(event, refusal)
        newest = candidacy.ballot.newest
        if refusal == "stale" and newest is not None:
            # The candidate must know what it may not undo: then it can stand again and propose it.
            record = self._index.record(newest.digest)
            if record is not None:
                effects.append(self._courier.send(event.source, PushReceipt(record, ())))
        return effects

    def _note_term(self, candidacy: Candidacy, mandate: Mandate, source: PeerId | None, now: float) -> None:
        if source == mandate.coordinator:
            candidacy.note_coordinator(now)

    def _take_contribution(self, candidacy: Candidacy, event: ContributionSeen, now: float) -> list[Effect]:
        if not candidacy.is_leading(now):
            self.verdicts.note(event, "not-coordinator")
            return []
        signed = decode_signed(event.record)
        round_index = self._trust.accept_contribution(signed, admitted=signed.signers).round_index
        if round_index != self._ledger.next_round_index:
            self.verdicts.note(event, "round")
            return []
        self._ledger.accept_contribution(signed)
        self.verdicts.note(event, "")
        return [StoreRecord(signed)]

    def _take_anchor(self, event: StateAnchorStored) -> list[Effect]:
        assert self._trust.descriptor is not None
        if not self._ledger.knows_round_before(event.round_index):
            return []
        anchor = StateAnchor(
            run_id=self._trust.run_id,
            revision=self._trust.descriptor.revision,
            round_index=event.round_index,
            state_root=event.state_root,
            outcome=self._ledger.outcome_before(event.round_index),
            blob_id=event.blob_id,
            encoded_size_bytes=event.encoded_size_bytes,
        )
        signed = seal(anchor, self._sign, self._peer_id)
        return [StoreRecord(signed)] if self._ledger.accept_anchor(signed) else []

    def _take_receipt(self, candidacy: Candidacy, event: ReceiptSeen, now: float) -> list[Effect]:
        signed = decode_signed(event.record)
        receipt = self._trust.accept_receipt(signed)
        self.verdicts.note(event, "")
        if event.votes:
            self._note_term(candidacy, self._ledger.accept_mandate(event.votes), event.source, now)
        if self._proposal is not None and self._proposal.is_copy(signed):
            self._proposal.merge(signed)
            return self._finish(self._proposal.signed) if self._trust.is_final(self._proposal.signed) else []
        if self._trust.is_final(signed):
            return [StoreRecord(signed)] if self._ledger.accept_final(signed) else []
        if receipt.coordinator == self._peer_id or receipt.round_index < self._ledger.next_round_index:
            return self._help_on(event, receipt)
        stored = _name(receipt, signed)
        is_news = is_older(candidacy.newest, stored) and candidacy.is_in_reach(receipt.term)
        if is_news and event.source != receipt.coordinator:
            candidacy.shown, self._shown = stored, signed
        known = self._ledger.mandate
        if known is None or (known.term, known.coordinator) != (receipt.term, receipt.coordinator):
            raise TrustError("untrusted", f"nobody proved term {receipt.term}")
        self._check_offer(candidacy, receipt, stored)
        self._offer = _Offer(receipt, signed)
        return []

    def _help_on(self, event: ReceiptSeen, receipt: Receipt) -> list[Effect]:
        """Show the final receipt of a round to whoever still proposes it."""
        final = self._ledger.final(receipt.round_index)
        if final is None or event.source is None or receipt.coordinator == self._peer_id:
            return []
        return [self._courier.send(event.source, PushReceipt(encode_signed(final.signed), ()))]

    # What this authority stores for others

    def _check_offer(self, candidacy: Candidacy, receipt: Receipt, stored: Stored) -> None:
        refusal = find_store_refusal(candidacy.ballot, place=stored.place, outcome=stored.outcome)
        if refusal:
            raise TrustError(refusal, f"a receipt of round {receipt.round_index}, term {receipt.term}")
        state = self._state
        is_there = state is not None and state.round_index == receipt.round_index
        if state is not None and is_there and state.state_root != receipt.base_state_root:
            raise TrustError("mismatch", f"round {receipt.round_index} leads on from another state than ours")
        before = self._ledger.outcome_before(receipt.round_index)
        if before is not None and receipt.previous != before:
            raise TrustError("mismatch", f"round {receipt.round_index} does not follow the one before")

    def _countersign(self, candidacy: Candidacy, now: float) -> list[Effect]:
        """Store and countersign the offered receipt once everything it lists is here."""
        offer = self._offer
        if offer is None or not self._gatherer.holds_contributions(listed_by(offer.receipt)):
            return []
        self._offer = None
        stored = _name(offer.receipt, offer.signed)
        try:
            self._check_offer(candidacy, offer.receipt, stored)
        except TrustError as error:
            return [Count("rejected", error.code)]
        signed = add_signature(offer.signed, self._sign, self._peer_id)
        candidacy.ballot = store(candidacy.ballot, stored, offer.receipt.coordinator)
        self._newest = (signed,)
        told = self._courier.send(offer.receipt.coordinator, PushReceipt(encode_signed(signed), ()))
        return [*self._store_listed(offer.receipt), StoreRecord(signed), candidacy.save(), told]

    # What this authority closes itself

    def _lead(self, candidacy: Candidacy, now: float) -> list[Effect]:
        state, settings = self._state, self._settings
        if state is None:
            # Whoever renews holds everybody up until it closes rounds again: a training process may be gone for good.
            return []
        effects = candidacy.renew_if_due(now)
        if not candidacy.is_leading(now) or settings is None:
            return effects
        if state.round_index != self._ledger.next_round_index:
            return effects
        round_index = state.round_index
        proposed = candidacy.ballot.newest
        if self._proposal is not None and proposed is not None:
            if proposed.place == Place(round_index, candidacy.ballot.term):
                if now >= self._proposal.shown_again_at:
                    effects += self._show(candidacy, self._proposal, now)
                return effects
            self._proposal = None
        if not self._ledger.knows_round_before(round_index) or is_behind(candidacy.newest, round_index):
            return effects
        inherited = find_inherited(candidacy.newest, round_index)
        if inherited is not None:
            return effects + self._propose_again(candidacy, inherited, now)
        return effects + self._close(candidacy, state, settings, now)

    def _collect(self, candidacy: Candidacy, now: float) -> None:
        """Take up what was contributed to the round that is due, before anything is wanted for it."""
        state = self._state
        if state is None or state.round_index != self._ledger.next_round_index or not candidacy.is_leading(now):
            return
        collection = self._collection
        expected = (state.round_index, state.state_root)
        if collection is None or (collection.round_index, collection.base_state_root) != expected:
            collection = self._collection = Collection(*expected)
        for peer_id, (digest, entry) in self._ledger.contributions_to(state.round_index).items():
            collection.add(peer_id, digest, entry)

    def _close(self, candidacy: Candidacy, state: StateReached, settings: RoundSettings, now: float) -> list[Effect]:
        collection = self._collection
        if collection is None or collection.round_index != state.round_index:
            return []
        effects: list[Effect] = []
        for peer_id, (digest, entry) in collection.undecided().items():
            refused = self._gatherer.refusal_of(entry.contribution.blob_id)
            if refused:
                collection.decide(digest, "decode")
            elif peer_id not in collection.asked and self._gatherer.holds_contributions((digest,)):
                collection.asked.add(peer_id)
                effects.append(CheckContribution(entry.contribution, digest))
        if not collection.is_complete(self._expected(now), settings, now):
            return effects
        receipt = self._make_receipt(candidacy, collection, settings.clip_norm_ratio)
        return effects + self._propose(candidacy, receipt, now)

    def _make_receipt(self, candidacy: Candidacy, collection: Collection, ratio: float) -> Receipt:
        assert self._trust.descriptor is not None
        return Receipt(
            run_id=self._trust.run_id,
            revision=self._trust.descriptor.revision,
            term=candidacy.ballot.term,
            coordinator=self._peer_id,
            round_index=collection.round_index,
            base_state_root=collection.base_state_root,
            previous=self._ledger.outcome_before(collection.round_index),
            members=collection.members(ratio),
            rejected=collection.rejected(),
        )

    def _propose_again(self, candidacy: Candidacy, inherited: Stored, now: float) -> list[Effect]:
        """Propose what an earlier coordinator may have made final, under the own term and unchanged otherwise."""
        receipt = self._find_inherited_receipt(inherited)
        if receipt is None or not self._gatherer.holds_contributions(listed_by(receipt)):
            return []
        assert self._trust.descriptor is not None
        revision, term = self._trust.descriptor.revision, candidacy.ballot.term
        again = replace(receipt, revision=revision, term=term, coordinator=self._peer_id)
        return self._propose(candidacy, again, now)

    def _propose(self, candidacy: Candidacy, receipt: Receipt, now: float) -> list[Effect]:
        signed = seal(receipt, self._sign, self._peer_id)
        stored = _name(receipt, signed)
        refusal = find_store_refusal(candidacy.ballot, place=stored.place, outcome=stored.outcome)
        if refusal:
            raise LocalProtocolError(f"round {receipt.round_index} may not be proposed: {refusal}")
        candidacy.ballot = store(candidacy.ballot, stored, self._peer_id)
        self._newest = (signed,)
        self._proposal = Proposal(signed, now)
        self._collection = None
        return self._store_listed(receipt) + self._show(candidacy, self._proposal, now)

    def _store_listed(self, receipt: Receipt) -> list[Effect]:
        """Return the orders to store what a receipt lists, which a full disk may have kept in memory only."""
        entries = [self._ledger.contribution(digest) for digest in listed_by(receipt)]
        return [StoreRecord(entry.signed) for entry in entries if entry is not None]

    def _show(self, candidacy: Candidacy, proposal: Proposal, now: float) -> list[Effect]:
        assert self._trust.descriptor is not None
        kept: list[Effect] = [StoreRecord(proposal.signed), candidacy.save()]
        told = proposal.show(self._courier, self._ledger, self._trust.descriptor.authorities, now)
        if self._trust.is_final(proposal.signed):
            # Final by this one signature, so not before it is on disk: the event comes back only after that.
            told = [ShowToMachines(ReceiptSeen(encode_signed(proposal.signed), (), None))]
        return kept + told

    def _finish(self, signed: SignedRecord) -> list[Effect]:
        self._proposal = None
        if not self._ledger.accept_final(signed):
            return []
        record = encode_signed(signed)
        effects: list[Effect] = [StoreRecord(signed), ShowToMachines(ReceiptSeen(record, (), None))]
        return effects + self._courier.send_to_connected(PushReceipt(record, ()))

    # What follows

    def _go_on(self, candidacy: Candidacy, now: float) -> list[Effect]:
        effects: list[Effect] = []
        state = self._state
        is_ready = state is not None and state.round_index == self._ledger.next_round_index
        is_ready = is_ready and not is_behind(candidacy.newest, self._ledger.next_round_index)
        if self._ledger.fork is None:
            effects += candidacy.stand_if_due(now, is_ready=is_ready)
            self._collect(candidacy, now)
            effects += self._want()
            effects += self._countersign(candidacy, now)
            effects += self._lead(candidacy, now)
        elif not self._is_fork_told:
            self._is_fork_told = True
            effects.append(
                Log("error", "two final receipts of one round are known: rounds stop, the owner must step in")
            )
        effects += self._gatherer.pump(now)
        if self._is_unsaved:
            self._is_unsaved = False
            effects += [StoreRecord(signed) for signed in (*self._ledger.records(), *self._newest)]
            effects += [candidacy.save(), SaveState(LEDGER_KEY, self._ledger.save())]
            effects += [] if self._state is None else self._order_anchor(self._state.round_index)
            if self._collection is not None:
                self._collection.asked.clear()
        if self._ledger.is_changed:
            effects.append(SaveState(LEDGER_KEY, self._ledger.save()))
        return effects + self._set_timer(candidacy, now, is_ready=is_ready)

    def _want(self) -> list[Effect]:
        """Name the contributions that a round may need next: offered, inherited, or sent to this coordinator."""
        wanted: dict[Digest, PeerId | None] = {}
        if self._offer is not None:
            wanted.update(dict.fromkeys(listed_by(self._offer.receipt), self._offer.receipt.coordinator))
        candidacy = self._candidacy
        assert candidacy is not None
        due = self._ledger.next_round_index
        inherited = find_inherited(candidacy.newest, due)
        receipt = None if inherited is None else self._find_inherited_receipt(inherited)
        if receipt is not None:
            wanted.update(dict.fromkeys(listed_by(receipt), receipt.coordinator))
        elif self._collection is not None and self._collection.round_index == due:
            undecided = self._collection.undecided().values()
            wanted.update({digest: entry.peer_id for digest, entry in undecided})
        return self._gatherer.set_wants(wanted, None)

    def _find_inherited_receipt(self, inherited: Stored) -> Receipt | None:
        if self._shown is not None and record_digest(self._shown) == inherited.digest:
            return self._trust.accept_receipt(self._shown)
        record = self._index.record(inherited.digest)
        return None if record is None else self._trust.accept_receipt(decode_signed(record))

    def _expected(self, now: float) -> set[PeerId]:
        """Return whose contributions a round waits for: trainers that can be reached, and this node's own."""
        assert self._trust.descriptor is not None
        reachable = {*self._courier.connected, self._peer_id}
        before = self._ledger.final(self._ledger.next_round_index - 1)
        if now < self._found_until and before is not None:
            reachable |= {member.peer_id for member in before.receipt.members}
        return reachable & set(self._trust.descriptor.trainers)

    @property
    def _settings(self) -> RoundSettings | None:
        descriptor = self._trust.descriptor
        return None if descriptor is None else RoundSettings.of(descriptor)

    def _set_timer(self, candidacy: Candidacy, now: float, *, is_ready: bool) -> list[Effect]:
        times = [candidacy.next_wake(now, is_ready=is_ready), self._gatherer.next_wake(now), self._found_until]
        if self._proposal is not None:
            times.append(self._proposal.shown_again_at)
        collection, settings = self._collection, self._settings
        if collection is not None and collection.enough_at is not None and settings is not None:
            times.append(collection.enough_at + settings.contribution_wait_seconds)
        at = min((time for time in times if time is not None and time > now), default=None)
        if at is None or at == self._timer_at:
            return []
        self._timer_at = at
        return [SetTimer(at)]


def _name(receipt: Receipt, signed: SignedRecord) -> Stored:
    return Stored(Place(receipt.round_index, receipt.term), outcome_of(receipt), record_digest(signed))
