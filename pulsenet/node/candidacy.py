"""Whose term it is: standing, voting and leases, for one authority (SPEC section 6.8).

The rules of what may be promised are in ``chain/ballot.py``. Here is when: a lease runs on the voter's own
monotonic clock, and rank only orders who stands first. Nothing final depends on any of these times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pulsenet import limits
from pulsenet.chain.ballot import (
    Ballot,
    Place,
    Stored,
    find_vote_refusal,
    is_majority,
    is_older,
    may_stand,
    stand,
    vote,
)
from pulsenet.chain.records import ReceiptName, SignedRecord, Vote
from pulsenet.chain.signing import encode_signed, record_digest, seal
from pulsenet.errors import RemoteProtocolError, StorageError
from pulsenet.ids import PeerId
from pulsenet.node.courier import Courier
from pulsenet.node.effects import Count, Effect, Log, SaveState, ShowToMachines
from pulsenet.node.events import TermSeen
from pulsenet.node.machine import Seat
from pulsenet.wire.messages import PushTerm, PushVote
from pulsenet.wire.schema import decode_value, encode_value

BALLOT_KEY: Final = "rounds/ballot"
"""Name of the ballot among the node's durable state."""

LEASE_SECONDS: Final = limits.VOTE_LEASE_SECONDS
RENEW_SECONDS: Final = limits.VOTE_RENEW_SECONDS

RANK_SECONDS: Final = 3.0
"""How much longer each rank waits than the one before, before it stands."""

JITTER_MS: Final = 1_000

TERM_STEP_MAX: Final = 1 << 32
"""A term further above every known one is refused: with it one key could use up all terms there are."""


@dataclass(frozen=True, slots=True)
class _State:
    """What is saved of a ballot."""

    term: int
    voted_for: PeerId | None
    newest: ReceiptName | None


def name_of(stored: Stored | None) -> ReceiptName | None:
    """Return a stored receipt's name as votes state it."""
    if stored is None:
        return None
    return ReceiptName(stored.place.round_index, stored.place.term, stored.outcome, stored.digest)


def stored_of(name: ReceiptName | None) -> Stored | None:
    """Return what a vote states as the rules take it."""
    return None if name is None else Stored(Place(name.round_index, name.term), name.outcome, name.digest)


def encode_ballot(ballot: Ballot) -> bytes:
    """Return what to keep under ``BALLOT_KEY``."""
    return encode_value(_State(ballot.term, ballot.voted_for, name_of(ballot.newest)))


def decode_ballot(data: bytes | None) -> Ballot:
    """Return the ballot that was saved; an authority that never promised anything has none.

    Raises:
        StorageError: it is damaged; the key must not vote again before the owner promoted it anew.
    """
    if data is None:
        return Ballot()
    try:
        state = decode_value(_State, data)
    except RemoteProtocolError as error:
        raise StorageError(f"the ballot is damaged: {error}", reason="damaged") from error
    return Ballot(state.term, state.voted_for, stored_of(state.newest))


class Candidacy:
    """One authority among the others.

    Args:
        seat: The node's.
        courier: Whom messages can be sent to.
        ballot: What was promised before.
    """

    def __init__(self, seat: Seat, courier: Courier, ballot: Ballot) -> None:
        self._trust = seat.trust
        self._ledger = seat.ledger
        self._peer_id = seat.peer_id
        self._sign = seat.sign
        self._draw = seat.draw
        self._courier = courier
        self.ballot = ballot
        """What this key promised; whoever changes it saves it in the same breath."""
        self.shown: Stored | None = None
        """A newer receipt than its own that another authority stored and showed."""
        self._votes: dict[PeerId, tuple[bytes, float]] = {}
        self._led_term = 0
        self._term_seen = ballot.term
        self.began_at: float | None = None
        """When this life of the node began."""
        self._lease_until = self._renewed_at = self._stand_at = 0.0

    def begin(self, now: float) -> None:
        """The node's life has begun; only the first call counts."""
        if self.began_at is not None:
            return
        self.began_at = now
        # After a restart the lease given before is counted anew.
        has_voted = self.ballot.voted_for not in (None, self._peer_id)
        self._lease_until = now + LEASE_SECONDS if has_voted else now
        self._renewed_at = now
        self._put_off_standing(self._lease_until)

    # What others may ask

    @property
    def newest(self) -> Stored | None:
        """The newest receipt this authority knows of: one it stored, one it was shown, or one that is final."""
        newest = self.shown if is_older(self.ballot.newest, self.shown) else self.ballot.newest
        final = self._ledger.final(self._ledger.next_round_index - 1)
        # Most stored it without this authority, and vote for nobody who does not know it.
        if final is not None and (newest is None or newest.place.round_index < final.receipt.round_index):
            place = Place(final.receipt.round_index, final.receipt.term)
            return Stored(place, final.outcome, record_digest(final.signed))
        return newest

    def is_leading(self, now: float) -> bool:
        """Say whether this authority is the coordinator, by votes that were renewed lately."""
        mandate = self._ledger.mandate
        if self._led_term == 0 or self._led_term != self.ballot.term or mandate is None:
            return False
        if (mandate.term, mandate.coordinator) != (self._led_term, self._peer_id):
            return False
        # A vote is counted from its arrival, so that its voter's lease is not outlived.
        fresh = {voter for voter, (_, at) in self._votes.items() if now - at < LEASE_SECONDS - RENEW_SECONDS}
        return is_majority(len({self._peer_id, *fresh} & set(self._authorities)), len(self._authorities))

    def is_outvoted_by(self, others: set[PeerId]) -> bool:
        """Say whether the authorities without these others are no majority."""
        authorities = self._authorities
        return not is_majority(len(set(authorities) - others), len(authorities))

    @property
    def _authorities(self) -> tuple[PeerId, ...]:
        descriptor = self._trust.descriptor
        return () if descriptor is None else descriptor.authorities

    def is_in_reach(self, term: int) -> bool:
        """Say whether elections can have led to a term."""
        return term <= self._known_term + TERM_STEP_MAX

    @property
    def _known_term(self) -> int:
        shown_term = 0 if self.newest is None else self.newest.place.term
        return max(self.ballot.term, self._term_seen, shown_term, self._ledger.term_newest)

    # What happens

    def note_coordinator(self, now: float) -> None:
        """The coordinator gave a sign of life: nobody needs to stand."""
        self._put_off_standing(now + LEASE_SECONDS)

    def take_vote(self, ballot_of: Vote, voter: PeerId, record: bytes, now: float) -> tuple[list[Effect], str]:
        """Take in an accepted vote: one given to us, or a candidate's for itself. Return also why it was refused."""
        if not self.is_in_reach(ballot_of.term):
            return [Count("votes", "term")], "term"
        self._term_seen = max(self._term_seen, ballot_of.term)
        if ballot_of.candidate == self._peer_id:
            return self._count_vote(ballot_of, voter, record, now), ""
        if voter != ballot_of.candidate:
            return [], ""
        return self._answer_candidate(ballot_of, now)

    def _answer_candidate(self, asked: Vote, now: float) -> tuple[list[Effect], str]:
        candidate = asked.candidate
        refusal = find_vote_refusal(self.ballot, term=asked.term, candidate=candidate, newest=stored_of(asked.newest))
        is_bound = now < self._lease_until and self.ballot.voted_for != candidate
        if not refusal and (is_bound or self.is_leading(now)):
            refusal = "lease"
        if refusal:
            return [Count("votes", refusal)], refusal
        self.ballot = vote(self.ballot, term=asked.term, candidate=candidate)
        self._lease_until = now + LEASE_SECONDS
        self._put_off_standing(self._lease_until)
        signed = encode_signed(self._make_vote(candidate))
        return [self.save(), self._courier.send(candidate, PushVote(signed))], ""

    def _count_vote(self, given: Vote, voter: PeerId, record: bytes, now: float) -> list[Effect]:
        if given.term != self.ballot.term or self.ballot.voted_for != self._peer_id or voter == self._peer_id:
            return []
        self._votes[voter] = (record, now)
        return self._take_office(now)

    def stand_if_due(self, now: float, *, is_ready: bool) -> list[Effect]:
        """Stand as a candidate if no coordinator was heard of for long enough.

        Args:
            is_ready: Whether this node is a trainer that holds the current state.
        """
        if self._peer_id not in self._authorities or self.is_leading(now):
            return []
        rank = self._authorities.index(self._peer_id)
        if not is_ready or not may_stand(rank, len(self._authorities)) or now < self._stand_at:
            return []
        self.ballot = stand(self.ballot, self._peer_id, self._known_term + 1)
        self._votes = {}
        self._renewed_at = now
        self._put_off_standing(now + LEASE_SECONDS / 2)
        asked = PushVote(encode_signed(self._make_vote(self._peer_id)))
        effects: list[Effect] = [self.save(), Count("votes", "stood")]
        return effects + self._courier.send_to_connected(asked, self._authorities) + self._take_office(now)

    def renew_if_due(self, now: float) -> list[Effect]:
        """Ask for the votes of a term again before their leases end, and tell everybody whose term it is."""
        mandate = self._ledger.mandate
        is_mine = self._led_term != 0 and mandate is not None and mandate.term == self._led_term == self.ballot.term
        if not is_mine or now < self._renewed_at + RENEW_SECONDS:
            return []
        assert mandate is not None
        self._renewed_at = now
        if self.is_leading(now):
            self._put_off_standing(now + LEASE_SECONDS)
        asked = PushVote(encode_signed(self._make_vote(self._peer_id)))
        effects = self._courier.send_to_connected(asked, self._authorities)
        return effects + self._courier.send_to_connected(PushTerm(mandate.votes))

    def next_wake(self, now: float, *, is_ready: bool) -> float | None:
        """Return the earliest later time at which standing or renewing may be due."""
        times = [self._stand_at] if is_ready else []
        if self._led_term != 0:
            times.append(self._renewed_at + RENEW_SECONDS)
        return min((at for at in times if at > now), default=None)

    def save(self) -> SaveState:
        """Return the order to store the ballot; it comes before everything that follows from it."""
        return SaveState(BALLOT_KEY, encode_ballot(self.ballot))

    def _take_office(self, now: float) -> list[Effect]:
        given = [record for voter, (record, _) in self._votes.items() if voter in self._authorities]
        if self._led_term == self.ballot.term or not is_majority(1 + len(given), len(self._authorities)):
            return []
        own = encode_signed(self._make_vote(self._peer_id))
        votes = (own, *given[: len(self._authorities) // 2])
        mandate = self._ledger.accept_mandate(votes)
        self._led_term = self.ballot.term
        self._put_off_standing(now + LEASE_SECONDS)
        text = f"this node coordinates term {mandate.term}"
        told = self._courier.send_to_connected(PushTerm(votes))
        return [ShowToMachines(TermSeen(votes, None)), Log("info", text), *told]

    def _make_vote(self, candidate: PeerId) -> SignedRecord:
        assert self._trust.descriptor is not None
        newest = self.newest if candidate == self._peer_id else self.ballot.newest
        # A receipt shown from a later term than the vote's cannot be named, nor does it need to be.
        if newest is not None and newest.place.term > self.ballot.term:
            newest = self.ballot.newest
        record = Vote(
            run_id=self._trust.run_id,
            revision=self._trust.descriptor.revision,
            term=self.ballot.term,
            candidate=candidate,
            newest=name_of(newest),
        )
        return seal(record, self._sign, self._peer_id)

    def _put_off_standing(self, at: float) -> None:
        authorities = self._authorities
        rank = authorities.index(self._peer_id) if self._peer_id in authorities else 0
        jitter_seconds = self._draw(JITTER_MS + 1) / 1000 if len(authorities) > 1 else 0.0
        self._stand_at = at + rank * RANK_SECONDS + jitter_seconds
