"""An authority's part in the rounds, as a machine: voting, countersigning, and closing rounds in its own term.

What is promised is stored before it is said (``Candidacy``, ``chain/ballot.py``); what is counted is decided by
``Collection``; what is final is kept by ``Ledger``. This machine moves records between them and the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pulsenet.chain.ballot import Place, Stored, find_inherited, find_store_refusal, is_behind, is_older, store
from pulsenet.chain.ledger import ContributionEntry
from pulsenet.chain.outcome import listed_by, outcome_of
from pulsenet.chain.records import Receipt, SignedRecord, StateAnchor
from pulsenet.chain.round_settings import RoundSettings
from pulsenet.chain.signing import (
    add_signature,
    decode_signed,
    encode_signed,
    keep_signatures,
    record_digest,
    seal,
)
from pulsenet.errors import LocalProtocolError, TrustError
from pulsenet.ids import Digest, PeerId
from pulsenet.node.authority import Authority
from pulsenet.node.closing import Collection
from pulsenet.node.effects import (
    CheckContribution,
    Count,
    Effect,
    Log,
    ShowToMachines,
    StoreRecord,
    StoreStateAnchor,
)
from pulsenet.node.events import (
    ContributionChecked,
    ContributionSeen,
    Event,
    ReceiptSeen,
    ReplyReceived,
    StateAnchorStored,
    StateLost,
    StateReached,
)
from pulsenet.node.fetch import StoreIndex
from pulsenet.node.gather import Gatherer
from pulsenet.node.machine import Seat
from pulsenet.node.patience import Patience
from pulsenet.node.proposal import Proposal
from pulsenet.node.strangers import Strangers
from pulsenet.wire.messages import PushReceipt, PushReply
from pulsenet.wire.schema import decode_value

FIND_SECONDS = 10.0
"""For so long after its start a coordinator counts on whoever was counted last: they have to find it again first."""


class Coordinator(Authority):
    """The machine of an authority; it also closes rounds while the term is its own.

    Args:
        seat: The node's; machines of one node share its rules and its ledger.
        index: What the store holds.
        ballot: What was last saved under ``BALLOT_KEY``.

    Raises:
        StorageError: the ballot is damaged: this key must not vote.
    """

    def __init__(self, seat: Seat, index: StoreIndex, *, ballot: bytes | None = None) -> None:
        super().__init__(seat, ballot)
        self._index = index
        self._gatherer = Gatherer(seat.ledger, seat.draw, index, self._courier.take_request_id)
        self._state: StateReached | None = None
        self._strangers = Strangers()
        self._patience = Patience()
        self._collection: Collection | None = None
        self._proposal: Proposal | None = None
        self._offer: tuple[Receipt, SignedRecord] | None = None
        """A receipt of another coordinator that is not stored yet."""
        self._contradicted_by: set[PeerId] = set()
        """Authorities that hold another state of the round that this one proposed to close."""
        self._shown: SignedRecord | None = None
        self._newest: tuple[SignedRecord, ...] = ()
        self._is_fork_told = False

    def _fetch(self, event: Event, now: float) -> list[Effect]:
        return self._gatherer.handle(event, now)

    def _take_more(self, event: Event, now: float) -> list[Effect]:
        match event:
            case ContributionSeen():
                return self._take_contribution(event, now)
            case ContributionChecked(digest, reason):
                if self._collection is not None:
                    self._collection.decide(digest, reason)
                return [Count("rejected", reason)] if reason else []
            case ReceiptSeen():
                return self._take_receipt(event, now)
            case ReplyReceived(_, peer_id, PushReply(False, "mismatch")) if self._proposal is not None:
                self._contradicted_by.add(peer_id)
                return []
            case StateReached() | StateLost():
                self._state = event if isinstance(event, StateReached) else None
                self._contradicted_by.clear()
                if self._collection is not None:
                    # A check that was ordered may have died with its training process.
                    self._collection.asked.clear()
                return [] if self._state is None else self._order_anchor(self._state.round_index)
            case StateAnchorStored():
                return self._take_anchor(event)
            case _:
                return []

    def _order_anchor(self, round_index: int) -> list[Effect]:
        settings = self._settings
        blob_ids = [anchor.blob_id for anchor in self._ledger.anchors if anchor.round_index == round_index]
        # Another authority may have signed it already; each writes the blob itself, so that several hold it.
        is_held = any(self._index.chunk_list(blob_id) is not None for blob_id in blob_ids)
        is_due = settings is not None and round_index % settings.state_anchor_interval == 0
        return [StoreStateAnchor(round_index)] if is_due and not is_held else []

    # What others say

    def _explain(self, refusal: str, candidate: PeerId) -> list[Effect]:
        newest = self._candidacy.ballot.newest
        if refusal != "stale" or newest is None:
            return []
        # The candidate must know what it may not undo: then it can stand again and propose it.
        record = self._index.record(newest.digest)
        return [] if record is None else [self._courier.send(candidate, self._show_stored(record))]

    def _show_stored(self, record: bytes) -> PushReceipt:
        shown = keep_signatures(decode_signed(record), self._authorities | {self._peer_id})
        return PushReceipt(encode_signed(shown), ())

    def _take_contribution(self, event: ContributionSeen, now: float) -> list[Effect]:
        if not self.is_leading(now):
            self.verdicts.note(event, "not-coordinator")
            return []
        signed = decode_signed(event.record)
        round_index = self._trust.accept_contribution(signed, admitted=signed.signers).round_index
        if signed.signers[0] not in self._trainers:
            self._strangers.note(signed.signers[0], round_index)
        elif round_index == self._closed_round_index:
            self._patience.note_late(signed.signers[0])
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

    def _take_receipt(self, event: ReceiptSeen, now: float) -> list[Effect]:
        signed = decode_signed(event.record)
        receipt = self._trust.accept_receipt(signed)
        self.verdicts.note(event, "")
        self._forget_revoked()
        if event.votes:
            self._take_term(event.votes, event.source, now)
        if self._proposal is not None and self._proposal.is_copy(signed):
            self._proposal.merge(signed)
            return self._finish(self._proposal.signed) if self._trust.is_final(self._proposal.signed) else []
        stored = _name(receipt, signed)
        is_news = is_older(self._candidacy.newest, stored) and self._candidacy.is_in_reach(receipt.term)
        if is_news and event.source != receipt.coordinator:
            self._candidacy.shown, self._shown = stored, signed
        if self._trust.is_final(signed):
            return [StoreRecord(signed)] if self._ledger.accept_final(signed) else []
        if receipt.coordinator == self._peer_id or receipt.round_index < self._ledger.next_round_index:
            return self._help_on(event, receipt)
        known = self._ledger.mandate
        if known is None or (known.term, known.coordinator) != (receipt.term, receipt.coordinator):
            raise TrustError("untrusted", f"nobody proved term {receipt.term}")
        self._check_offer(receipt, stored)
        self._offer = receipt, signed
        return []

    def _help_on(self, event: ReceiptSeen, receipt: Receipt) -> list[Effect]:
        """Show the final receipt of a round to whoever still proposes it."""
        final = self._ledger.final(receipt.round_index)
        if final is None or event.source is None or receipt.coordinator == self._peer_id:
            return []
        return [self._courier.send(event.source, PushReceipt(encode_signed(final.signed), ()))]

    # What this authority stores for others

    def _check_offer(self, receipt: Receipt, stored: Stored) -> None:
        refusal = find_store_refusal(self._candidacy.ballot, place=stored.place, outcome=stored.outcome)
        if refusal:
            raise TrustError(refusal, f"a receipt of round {receipt.round_index}, term {receipt.term}")
        state = self._state
        is_there = state is not None and state.round_index == receipt.round_index
        if state is not None and is_there and state.state_root != receipt.base_state_root:
            raise TrustError("mismatch", f"round {receipt.round_index} leads on from another state than ours")
        before = self._ledger.outcome_before(receipt.round_index)
        if before is not None and receipt.previous != before:
            raise TrustError("mismatch", f"round {receipt.round_index} does not follow the one before")

    def _countersign(self) -> list[Effect]:
        """Store and countersign the offered receipt once everything it lists is here."""
        if self._offer is None or not self._gatherer.holds_contributions(listed_by(self._offer[0])):
            return []
        (receipt, offered), self._offer = self._offer, None
        stored = _name(receipt, offered)
        try:
            self._check_offer(receipt, stored)
        except TrustError as error:
            return [Count("rejected", error.code)]
        signed = add_signature(offered, self._sign, self._peer_id)
        self._candidacy.ballot = store(self._candidacy.ballot, stored, receipt.coordinator)
        self._newest = (signed,)
        told = self._courier.send(receipt.coordinator, PushReceipt(encode_signed(signed), ()))
        return [*self._store_listed(receipt), StoreRecord(signed), self._candidacy.save(), told]

    # What this authority closes itself

    def _lead(self, now: float) -> list[Effect]:
        state, settings = self._state, self._settings
        if state is None or self._candidacy.is_outvoted_by(self._contradicted_by):
            # Whoever renews holds everybody up until it closes rounds again: a training process may be gone for good,
            # and a state that no other authority has is told so by a final receipt of theirs alone.
            return []
        effects = self._candidacy.renew_if_due(now)
        if not self.is_leading(now) or settings is None:
            return effects
        if state.round_index != self._ledger.next_round_index:
            return effects
        round_index = state.round_index
        proposed = self._candidacy.ballot.newest
        if self._proposal is not None and proposed is not None:
            if proposed.place == Place(round_index, self._candidacy.ballot.term):
                if now >= self._proposal.shown_again_at:
                    effects += self._show(self._proposal, now)
                return effects
            self._proposal = None
        if not self._ledger.knows_round_before(round_index) or is_behind(self._candidacy.newest, round_index):
            return effects
        inherited = find_inherited(self._candidacy.newest, round_index)
        if inherited is not None:
            return effects + self._propose_again(inherited, now)
        return effects + self._close(state, settings, now)

    def _collect(self, now: float) -> None:
        """Take up what was contributed to the round that is due, before anything is wanted for it."""
        state = self._state
        if state is None or state.round_index != self._ledger.next_round_index or not self.is_leading(now):
            return
        collection = self._collection
        expected = (state.round_index, state.state_root)
        if collection is None or (collection.round_index, collection.base_state_root) != expected:
            collection = self._collection = Collection(*expected, self._patience.refused_waits)
        sent = self._ledger.contributions_to(state.round_index)
        for peer_id, (digest, entry) in sent.items():
            collection.add(peer_id, digest, entry)
        element_count = self._find_element_count(sent)
        if element_count is not None:
            collection.refuse_other_shapes(element_count)

    def _find_element_count(self, sent: Mapping[PeerId, tuple[Digest, ContributionEntry]]) -> int | None:
        """Return how many elements the state has, by what this node contributes or what the round before counted."""
        if self._peer_id in sent:
            return sent[self._peer_id][1].contribution.element_count
        before = self._ledger.final(self._ledger.next_round_index - 1)
        listed = () if before is None else listed_by(before.receipt)
        entry = self._ledger.contribution(listed[0]) if listed else None
        return None if entry is None else entry.contribution.element_count

    def _close(self, state: StateReached, settings: RoundSettings, now: float) -> list[Effect]:
        collection = self._collection
        assert collection is not None, "whoever leads in its state's round has collected for it"
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
        receipt = self._make_receipt(collection, settings)
        connected = self._reachable & self._trainers
        self._patience.note_closed(connected, collection.found, has_members=bool(receipt.members))
        return effects + self._propose(receipt, now)

    def _make_receipt(self, collection: Collection, settings: RoundSettings) -> Receipt:
        assert self._trust.descriptor is not None
        return Receipt(
            run_id=self._trust.run_id,
            revision=self._trust.descriptor.revision,
            term=self._candidacy.ballot.term,
            coordinator=self._peer_id,
            round_index=collection.round_index,
            base_state_root=collection.base_state_root,
            previous=self._ledger.outcome_before(collection.round_index),
            members=collection.members(settings.clip_norm_ratio, settings.contributions_min),
            rejected=collection.rejected(),
        )

    def _propose_again(self, inherited: Stored, now: float) -> list[Effect]:
        """Propose what an earlier coordinator may have made final, under the own term and unchanged otherwise."""
        receipt = self._find_inherited_receipt(inherited)
        if receipt is None or not self._gatherer.holds_contributions(listed_by(receipt)):
            return []
        assert self._trust.descriptor is not None
        revision, term = self._trust.descriptor.revision, self._candidacy.ballot.term
        again = replace(receipt, revision=revision, term=term, coordinator=self._peer_id)
        return self._propose(again, now)

    def _propose(self, receipt: Receipt, now: float) -> list[Effect]:
        signed = seal(receipt, self._sign, self._peer_id)
        stored = _name(receipt, signed)
        refusal = find_store_refusal(self._candidacy.ballot, place=stored.place, outcome=stored.outcome)
        if refusal:
            raise LocalProtocolError(f"round {receipt.round_index} may not be proposed: {refusal}")
        self._candidacy.ballot = store(self._candidacy.ballot, stored, self._peer_id)
        self._newest = (signed,)
        self._proposal = Proposal(signed, now)
        self._collection = None
        return self._store_listed(receipt) + self._show(self._proposal, now)

    def _store_listed(self, receipt: Receipt) -> list[Effect]:
        """Return the orders to store what a receipt lists, which a full disk may have kept in memory only."""
        entries = [self._ledger.contribution(digest) for digest in listed_by(receipt)]
        return [StoreRecord(entry.signed) for entry in entries if entry is not None]

    def _show(self, proposal: Proposal, now: float) -> list[Effect]:
        assert self._trust.descriptor is not None
        kept: list[Effect] = [StoreRecord(proposal.signed), self._candidacy.save()]
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

    def _go_on(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if self._ledger.fork is None:
            self._forget_revoked()
            effects += self._candidacy.stand_if_due(now, is_ready=self._is_ready)
            self._collect(now)
            effects += self._want()
            effects += self._countersign()
            effects += self._lead(now)
        elif not self._is_fork_told:
            self._is_fork_told = True
            effects.append(
                Log("error", "two final receipts of one round are known: rounds stop, the owner must step in")
            )
        return effects + self._gatherer.pump(now)

    def _forget_revoked(self) -> None:
        """What an authority showed or countersigned holds nobody up once the owner revoked its key."""
        authorities = self._authorities
        if self._shown is not None:
            # Whoever else signed it stored it: it may be final.
            self._shown = keep_signatures(self._shown, authorities)
            if not self._shown.signers:
                self._shown = self._candidacy.shown = None
        if self._proposal is not None:
            self._proposal.keep_signatures(authorities | {self._peer_id})
        if self._offer is not None:
            receipt, signed = self._offer
            self._offer = receipt, keep_signatures(signed, authorities | {receipt.coordinator})

    @property
    def _is_ready(self) -> bool:
        """Whether this node holds the newest state there is."""
        due, state = self._ledger.next_round_index, self._state
        is_there = state is not None and state.round_index == due and not is_behind(self._candidacy.newest, due)
        return is_there and not self._candidacy.is_outvoted_by(self._contradicted_by)

    def _store_again(self) -> list[Effect]:
        if self._collection is not None:
            self._collection.asked.clear()
        anchor = [] if self._state is None else self._order_anchor(self._state.round_index)
        return [*(StoreRecord(signed) for signed in self._newest), *super()._store_again(), *anchor]

    def _want(self) -> list[Effect]:
        """Name the contributions that a round may need next: offered, inherited, or sent to this coordinator."""
        wanted: dict[Digest, PeerId | None] = {}
        if self._offer is not None:
            offered = self._offer[0]
            wanted.update(dict.fromkeys(listed_by(offered), offered.coordinator))
        due = self._ledger.next_round_index
        inherited = find_inherited(self._candidacy.newest, due)
        receipt = None if inherited is None else self._find_inherited_receipt(inherited)
        if receipt is not None:
            wanted.update(dict.fromkeys(listed_by(receipt), receipt.coordinator))
        elif self._collection is not None and self._collection.round_index == due:
            undecided = self._collection.undecided().values()
            wanted.update({digest: entry.peer_id for digest, entry in undecided})
        return self._gatherer.set_wants(wanted, None)

    def _find_inherited_receipt(self, inherited: Stored) -> Receipt | None:
        # What was shown to this node, or stored by it, was accepted then; whether its keys may still sign is not asked.
        if self._shown is not None and record_digest(self._shown) == inherited.digest:
            return decode_value(Receipt, self._shown.payload)
        record = self._index.record(inherited.digest)
        return None if record is None else decode_value(Receipt, decode_signed(record).payload)

    def _expected(self, now: float) -> set[PeerId]:
        """Return whose contributions a round waits for: those of trainers that can be reached, its own too."""
        assert self._trust.descriptor is not None
        assert self._collection is not None
        reachable = self._reachable
        due, trainers = self._collection.round_index, self._trainers
        before = self._ledger.final(due - 1)
        counted = [] if before is None else [member.peer_id for member in before.receipt.members]
        if now < self._found_until:
            reachable |= set(counted)
        strangers = self._strangers.expect(
            due,
            counted=[peer_id for peer_id in counted if peer_id not in trainers],
            reachable=reachable,
            here=[peer_id for peer_id in self._collection.found if peer_id not in trainers],
            places=self._trust.descriptor.open_trainers_max,
        )
        return {peer_id for peer_id in reachable & trainers if self._patience.awaits(peer_id)} | strangers

    @property
    def _closed_round_index(self) -> int:
        """The newest round that takes no more contributions, be its receipt final or only proposed."""
        due = self._ledger.next_round_index
        return due - 1 if self._proposal is None else due

    @property
    def _reachable(self) -> set[PeerId]:
        return {*self._courier.connected, self._peer_id}

    @property
    def _authorities(self) -> set[PeerId]:
        assert self._trust.descriptor is not None
        return set(self._trust.descriptor.authorities)

    @property
    def _trainers(self) -> set[PeerId]:
        assert self._trust.descriptor is not None
        return set(self._trust.descriptor.trainers)

    @property
    def _found_until(self) -> float:
        assert self._candidacy.began_at is not None
        return self._candidacy.began_at + FIND_SECONDS

    @property
    def _settings(self) -> RoundSettings | None:
        descriptor = self._trust.descriptor
        return None if descriptor is None else RoundSettings.of(descriptor)

    def _wakes(self, now: float) -> list[float | None]:
        times = [self._candidacy.next_wake(now, is_ready=self._is_ready), self._gatherer.next_wake(now)]
        times.append(self._found_until)
        if self._proposal is not None:
            times.append(self._proposal.shown_again_at)
        collection, settings = self._collection, self._settings
        if collection is not None and settings is not None:
            times.append(collection.ends_at(settings))
        return times


def _name(receipt: Receipt, signed: SignedRecord) -> Stored:
    return Stored(Place(receipt.round_index, receipt.term), outcome_of(receipt), record_digest(signed))
