"""What a node knows of the run's rounds: whose term it is, what is final, who contributed (SPEC section 6.8 on).

Shared by the node's machines, as :class:`Trust` is. Records pass ``Trust`` first; here they meet each other. A
refusal changes nothing, except that two outcomes of one round are kept as proof and stop everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Final, Self

from pulsenet import limits
from pulsenet.chain.aggregates import Aggregates
from pulsenet.chain.ballot import is_majority
from pulsenet.chain.outcome import outcome_of
from pulsenet.chain.records import Aggregate, Contribution, Receipt, SignedRecord, StateAnchor
from pulsenet.chain.rules import check_record
from pulsenet.chain.signing import decode_signed, encode_signed, record_digest
from pulsenet.chain.state_anchors import ANCHORS_KEPT, StateAnchors
from pulsenet.chain.trust import Trust
from pulsenet.errors import IntegrityError, RemoteProtocolError, StorageError, TrustError
from pulsenet.ids import Digest, PeerId, short
from pulsenet.wire.messages import AggregatesReply, RoundsReply, Votes
from pulsenet.wire.schema import CountMax, decode_value, encode_value

LEDGER_KEY: Final = "rounds/ledger"
"""Name of the ledger among the node's durable state."""

FINALS_MAX: Final = 4_096
"""Final receipts kept; state anchors let the older ones go long before."""

CONTRIBUTIONS_MAX: Final = 65_536
"""Contribution records kept."""

REPLY_SIZE_BYTES_MAX: Final = limits.CHUNK_SIZE_BYTES_MAX - 256 * 1024
"""Receipts in one reply, together; votes and an anchor need room in the same frame."""


@dataclass(frozen=True, slots=True)
class Mandate:
    """Whose term it is, and the votes that prove it."""

    term: int
    coordinator: PeerId
    votes: Votes
    voters: frozenset[PeerId]


@dataclass(frozen=True, slots=True)
class FinalReceipt:
    """A receipt that most authorities signed."""

    receipt: Receipt
    signed: SignedRecord
    outcome: Digest


@dataclass(frozen=True, slots=True)
class ContributionEntry:
    """A contribution and who made it."""

    contribution: Contribution
    signed: SignedRecord
    peer_id: PeerId


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What nobody here needs any more."""

    blob_ids: tuple[Digest, ...]
    record_digests: tuple[Digest, ...]


@dataclass(frozen=True, slots=True)
class _State:
    """What ``save`` writes; the records themselves are in the store."""

    votes: Votes
    finals: Annotated[tuple[Digest, ...], CountMax(FINALS_MAX)]
    contributions: Annotated[tuple[Digest, ...], CountMax(CONTRIBUTIONS_MAX)]
    anchors: Annotated[tuple[Digest, ...], CountMax(ANCHORS_KEPT)]
    aggregates: Annotated[tuple[Digest, ...], CountMax(2 * FINALS_MAX)]
    fork: Annotated[tuple[Digest, ...], CountMax(2)]


class Ledger:
    """The rounds, as far as this node knows them.

    Args:
        trust: The run's rules.
    """

    def __init__(self, trust: Trust) -> None:
        self._trust = trust
        self._mandate: Mandate | None = None
        self._finals: dict[int, FinalReceipt] = {}
        self._contributions: dict[Digest, ContributionEntry] = {}
        self._anchors = StateAnchors(self._find_outcome, self._find_base, trust.may_publish)
        self._fork: tuple[SignedRecord, SignedRecord] | None = None
        self._aggregates = Aggregates()
        self.is_changed = False
        """Whether something is not saved yet; :meth:`save` clears it."""

    # What is known

    @property
    def mandate(self) -> Mandate | None:
        """Whose the newest term is, as far as proved by keys that may vote now; else it is over, and another begins."""
        mandate, descriptor = self._mandate, self._trust.descriptor
        if mandate is None or descriptor is None or not mandate.voters <= set(descriptor.authorities):
            return None
        return mandate if is_majority(len(mandate.voters), len(descriptor.authorities)) else None

    @property
    def term_newest(self) -> int:
        """The newest term that was ever proved, 0 before the first: no mandate of an earlier one is believed."""
        return 0 if self._mandate is None else self._mandate.term

    @property
    def fork(self) -> tuple[SignedRecord, SignedRecord] | None:
        """Two final receipts of one round that say different things; nothing is accepted after that."""
        return self._fork

    @property
    def next_round_index(self) -> int:
        """The round that is due on top of everything known."""
        newest = max(self._finals, default=-1) + 1
        if all(anchor.round_index <= newest for anchor, _ in self._anchors):
            return newest  # asked at every event: anchors are judged only where one leads further
        return max([newest, *(anchor.round_index for anchor in self.anchors)])

    @property
    def anchors(self) -> tuple[StateAnchor, ...]:
        """The newest state anchors that count, ascending."""
        return tuple(anchor for anchor, _ in self._anchors.list_counted())

    def anchor_signer(self, anchor: StateAnchor) -> PeerId | None:
        """Return who signed an anchor that is kept."""
        return next((signed.signers[0] for known, signed in self._anchors if known == anchor), None)

    def final(self, round_index: int) -> FinalReceipt | None:
        """Return the final receipt of a round, if known and kept."""
        return self._finals.get(round_index)

    def outcome_before(self, round_index: int) -> Digest | None:
        """Return what the receipt of ``round_index`` must name as previous; ``None`` for round 0 or if unknown."""
        known = self._find_outcome(round_index - 1)
        if known is not None:
            return known
        return next((anchor.outcome for anchor in self.anchors if anchor.round_index == round_index), None)

    def knows_round_before(self, round_index: int) -> bool:
        """Say whether :meth:`outcome_before` is known."""
        return round_index == 0 or self.outcome_before(round_index) is not None

    def contribution(self, digest: Digest) -> ContributionEntry | None:
        """Return a contribution by its digest."""
        return self._contributions.get(digest)

    def contributions_to(self, round_index: int) -> dict[PeerId, tuple[Digest, ContributionEntry]]:
        """Return the contributions to a round, the first of each key."""
        return {
            entry.peer_id: (digest, entry)
            for digest, entry in self._contributions.items()
            if entry.contribution.round_index == round_index
        }

    def aggregate(self, round_index: int) -> Aggregate | None:
        """Return what a round adds up to; ``None`` before an authority said so, or if two say different things."""
        return self._aggregates.get(round_index)

    def aggregate_signer(self, round_index: int) -> PeerId | None:
        """Return who signed what :meth:`aggregate` returns."""
        signed = self._aggregates.signed(round_index)
        return signed[0].signers[0] if len(signed) == 1 else None

    def is_disputed(self, round_index: int) -> bool:
        """Say whether authorities signed different sums of one round."""
        return self._aggregates.is_disputed(round_index)

    def records(self) -> Iterator[SignedRecord]:
        """Yield every record that what :meth:`save` writes names."""
        yield from self._aggregates.records()
        yield from (signed for _, signed in self._anchors)
        yield from (entry.signed for entry in self._contributions.values())
        yield from (final.signed for final in self._finals.values())
        yield from self._fork or ()

    def reply(self, round_index: int) -> RoundsReply:
        """Answer ``GetRounds``."""
        receipts: list[bytes] = []
        room_bytes = REPLY_SIZE_BYTES_MAX
        anchors = self._anchors.list_counted()
        index = min((index for index in self._finals if index >= round_index), default=round_index)
        while index in self._finals and len(receipts) < limits.ROUND_RECEIPTS_PER_REPLY_MAX:
            data = encode_signed(self._finals[index].signed)
            if len(data) > room_bytes:
                break
            receipts.append(data)
            room_bytes -= len(data)
            index += 1
        return RoundsReply(
            round_index=self.next_round_index,
            votes=() if self.mandate is None else self.mandate.votes,
            receipts=tuple(receipts),
            state_anchor=encode_signed(anchors[-1][1]) if anchors else None,
        )

    def reply_aggregates(self, round_index: int) -> AggregatesReply:
        """Answer ``GetAggregates``."""
        return AggregatesReply(tuple(encode_signed(signed) for signed in self._aggregates.signed(round_index)))

    # What may change it

    def accept_mandate(self, votes: Sequence[bytes]) -> Mandate:
        """Take the votes of one term and return the newest mandate known.

        Raises:
            TrustError: ``untrusted`` when they do not prove one candidate's term, or a code of ``accept_vote``.
            RemoteProtocolError: ``decode`` or ``schema``.
        """
        mandate = self.mandate
        if mandate is not None and tuple(votes) == mandate.votes:
            return mandate
        signed = [decode_signed(vote) for vote in votes]
        opened = [self._trust.accept_vote(record) for record in signed]
        subjects = {(vote.term, vote.candidate) for vote in opened}
        voters = {record.signers[0] for record in signed}
        if len(subjects) != 1 or not is_majority(len(voters), self.authority_count):
            raise TrustError("untrusted", f"{len(voters)} votes for {len(subjects)} candidates prove no term")
        ((term, coordinator),) = subjects
        newest = self._mandate
        if newest is None or term > newest.term:
            self._mandate = newest = Mandate(term, coordinator, tuple(votes), frozenset(voters))
            self.is_changed = True
        return newest

    def accept_final(self, signed: SignedRecord) -> bool:
        """Take a final receipt and say whether it is news.

        Raises:
            TrustError: ``untrusted`` while too few signed, ``fork`` for a second outcome of a round,
                ``mismatch`` when it does not follow the round before, or a code of ``accept_receipt``.
            RemoteProtocolError: ``decode`` or ``schema``.
        """
        if self._fork is not None:
            raise TrustError("fork", "two final receipts of one round are known")
        receipt = self._open_vouched(signed)
        if receipt is None:
            receipt = self._trust.accept_receipt(signed)
            if not self._trust.is_final(signed):
                raise TrustError("untrusted", f"{len(signed.signers)} signatures make no receipt final")
        outcome = outcome_of(receipt)
        known = self._finals.get(receipt.round_index)
        if known is not None:
            if known.outcome != outcome:
                self._fork = (known.signed, signed)
                self.is_changed = True
                raise TrustError("fork", f"two final receipts of round {receipt.round_index}")
            return False
        if self._anchors.replaces_round(receipt.round_index):
            return False
        before = self.outcome_before(receipt.round_index)
        if before is not None and receipt.previous != before:
            raise TrustError("mismatch", f"the receipt of round {receipt.round_index} does not follow the one before")
        self._finals[receipt.round_index] = FinalReceipt(receipt, signed, outcome)
        self.is_changed = True
        return True

    def accept_contribution(self, signed: SignedRecord) -> ContributionEntry:
        """Take a contribution; the first of a key and round counts.

        Raises:
            TrustError: ``duplicate`` for a second one, or a code of ``Trust.accept_contribution``.
            RemoteProtocolError: ``decode`` or ``schema``.
        """
        digest = record_digest(signed)
        known = self._contributions.get(digest)
        if known is not None:
            return known
        contribution = self._trust.accept_contribution(signed, self._admitted_to(signed))
        peer_id = signed.signers[0]
        if peer_id in self.contributions_to(contribution.round_index):
            raise TrustError("duplicate", f"{short(peer_id)} signed two contributions to {contribution.round_index}")
        return self._add(digest, ContributionEntry(contribution, signed, peer_id))

    def accept_listed(self, signed: SignedRecord) -> ContributionEntry:
        """Take a contribution that a receipt lists by its digest: its coordinator judged who may contribute.

        Raises:
            TrustError: a code of ``open_record``.
            RemoteProtocolError: ``decode`` or ``schema``.
        """
        digest = record_digest(signed)
        known = self._contributions.get(digest)
        if known is not None:
            return known
        contribution = self._trust.accept_contribution(signed, admitted=(signed.signers[0],))
        return self._add(digest, ContributionEntry(contribution, signed, signed.signers[0]))

    def accept_anchor(self, signed: SignedRecord) -> bool:
        """Take a state anchor and say whether it is news.

        Raises:
            TrustError: ``mismatch`` when it contradicts a final receipt or another anchor, or a code of
                ``Trust.accept_state_anchor``.
            RemoteProtocolError: ``decode`` or ``schema``.
        """
        anchor = self._trust.accept_state_anchor(signed)
        is_news = self._anchors.add(anchor, signed)
        self.is_changed |= is_news
        return is_news

    def accept_aggregate(self, signed: SignedRecord) -> bool:
        """Take what an authority says that a round adds up to, and say whether it is news.

        Raises:
            TrustError: ``mismatch`` when the round is not known as final, or its receipt is another or has another
                number of members; or a code of ``Trust.accept_aggregate``.
            RemoteProtocolError: ``decode`` or ``schema``.
        """
        aggregate = self._trust.accept_aggregate(signed)
        final = self._finals.get(aggregate.round_index)
        if final is None or final.outcome != aggregate.outcome:
            raise TrustError("mismatch", f"sums of a receipt of round {aggregate.round_index} that is not final here")
        if len(aggregate.slices) != len(final.receipt.members):
            raise TrustError("mismatch", f"{len(aggregate.slices)} slices of {len(final.receipt.members)} members")
        is_news = self._aggregates.add(aggregate, signed)
        self.is_changed |= is_news
        return is_news

    def forget_old(self, round_index_min: int) -> Forgotten | None:
        """Drop what lies before the older of two state anchors and before ``round_index_min``, replaced anchors too."""
        anchors = self.anchors
        if len(anchors) < ANCHORS_KEPT:
            return None
        oldest = min(anchors[0].round_index, round_index_min)
        finals = [index for index in self._finals if index < oldest]
        contributions = [d for d, entry in self._contributions.items() if entry.contribution.round_index < oldest]
        replaced = self._anchors.take_replaced()
        if not finals and not contributions and not replaced:
            return None
        records = [record_digest(self._finals.pop(index).signed) for index in finals]
        records += [record_digest(signed) for _, signed in replaced]
        slice_ids, aggregates = self._aggregates.forget_before(oldest)
        gone = [self._contributions.pop(digest) for digest in contributions]
        used = {entry.contribution.blob_id for entry in self._contributions.values()}
        used |= {anchor.blob_id for anchor, _ in self._anchors}
        blob_ids = {entry.contribution.blob_id for entry in gone} | {anchor.blob_id for anchor, _ in replaced}
        blob_ids = (blob_ids | slice_ids) - used
        self.is_changed = True
        return Forgotten(tuple(sorted(blob_ids)), (*records, *aggregates, *contributions))

    @property
    def authority_count(self) -> int:
        """Authorities of the newest descriptor."""
        descriptor = self._trust.descriptor
        return 0 if descriptor is None else len(descriptor.authorities)

    # What outlives a restart

    def save(self) -> bytes:
        """Return what to keep under ``LEDGER_KEY``; the records it names are stored before it."""
        self.is_changed = False
        state = _State(
            votes=() if self._mandate is None else self._mandate.votes,
            finals=tuple(record_digest(final.signed) for final in self._finals.values())[-FINALS_MAX:],
            contributions=tuple(self._contributions)[-CONTRIBUTIONS_MAX:],
            anchors=tuple(record_digest(signed) for _, signed in self._anchors),
            aggregates=self._aggregates.digests()[-2 * FINALS_MAX :],
            fork=() if self._fork is None else tuple(record_digest(signed) for signed in self._fork),
        )
        return encode_value(state)

    @classmethod
    def restore(cls, trust: Trust, data: bytes | None, read: Callable[[Digest], bytes | None]) -> Self:
        """Return the ledger that ``save`` wrote.

        Args:
            read: Returns the encoded signed record whose payload has this digest.

        Raises:
            StorageError: it is damaged, or a record it names is gone.
        """
        ledger = cls(trust)
        if data is None:
            return ledger
        try:
            state = decode_value(_State, data)
            # What is here was accepted once; whether its keys may still sign is not asked again.
            for digest in state.anchors:
                signed = _read(read, digest)
                ledger._anchors.restore(decode_value(StateAnchor, signed.payload), signed)
            for digest in state.aggregates:
                signed = _read(read, digest)
                ledger._aggregates.add(decode_value(Aggregate, signed.payload), signed)
            for digest in state.contributions:
                signed = _read(read, digest)
                contribution = decode_value(Contribution, signed.payload)
                ledger._add(digest, ContributionEntry(contribution, signed, signed.signers[0]))
            for digest in state.finals:
                signed = _read(read, digest)
                receipt = decode_value(Receipt, signed.payload)
                ledger._finals[receipt.round_index] = FinalReceipt(receipt, signed, outcome_of(receipt))
            if state.votes:
                with suppress(TrustError):
                    # A term of keys that may not vote any more is over: its successor is heard of soon.
                    ledger.accept_mandate(state.votes)
            if state.fork:
                first, second = (_read(read, digest) for digest in state.fork)
                ledger._fork = (first, second)
        except (RemoteProtocolError, IntegrityError) as error:
            raise StorageError(f"the ledger of rounds is damaged: {error}", reason="damaged") from error
        ledger.is_changed = False
        return ledger

    def _find_outcome(self, round_index: int) -> Digest | None:
        final = self._finals.get(round_index)
        return None if final is None else final.outcome

    def _find_base(self, round_index: int) -> Digest | None:
        final = self._finals.get(round_index)
        return None if final is None else final.receipt.base_state_root

    def _open_vouched(self, signed: SignedRecord) -> Receipt | None:
        """Open a receipt whose outcome a later one or an anchor names: former authorities may have signed it."""
        if signed.type != Receipt.TYPE:
            return None
        receipt = decode_value(Receipt, signed.payload)
        check_record(receipt)
        after = self._finals.get(receipt.round_index + 1)
        named = None if after is None else after.receipt.previous
        if named is None:
            at = receipt.round_index + 1
            named = next((anchor.outcome for anchor in self.anchors if anchor.round_index == at), None)
        return receipt if outcome_of(receipt) == named else None

    def _add(self, digest: Digest, entry: ContributionEntry) -> ContributionEntry:
        self._contributions[digest] = entry
        self.is_changed = True
        return entry

    def _admitted_to(self, signed: SignedRecord) -> tuple[PeerId, ...]:
        """Return the unlisted keys that contributed to the round that this contribution is for."""
        descriptor = self._trust.descriptor
        listed = () if descriptor is None else descriptor.trainers
        round_index = decode_value(Contribution, signed.payload).round_index
        return tuple(peer_id for peer_id in self.contributions_to(round_index) if peer_id not in listed)


def _read(read: Callable[[Digest], bytes | None], digest: Digest) -> SignedRecord:
    data = read(digest)
    if data is None:
        raise StorageError(f"record {short(digest)} of the rounds is gone", reason="damaged")
    return decode_signed(data)
