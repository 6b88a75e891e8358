"""What one authority promised, and the rules by which it may promise more (SPEC section 6.8).

These few functions are the whole agreement: one decree a round, chosen once more than half of the authorities
stored it. The exhaustive model in ``tests/model`` and the coordinator's machine both run on them. Nothing here
waits, sends or signs; whoever calls stores the returned ballot before it says anything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pulsenet.ids import Digest, PeerId

TAKEOVER_AUTHORITIES_MIN = 3
"""With fewer authorities none can be missed, so nobody takes over by itself: the owner promotes."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where a receipt stands: its round first, then the term that proposed it."""

    round_index: int
    term: int


@dataclass(frozen=True, slots=True)
class Stored:
    """The newest receipt an authority stored."""

    place: Place
    outcome: Digest
    """What the receipt says, whoever proposed it in whichever term."""
    digest: Digest
    """Digest of the receipt itself."""


@dataclass(frozen=True, slots=True)
class Ballot:
    """One authority's durable promises."""

    term: int = 0
    """Nothing of an earlier term is voted for or stored any more."""
    voted_for: PeerId | None = None
    """The candidate this key voted for in ``term``."""
    newest: Stored | None = None


def is_majority(count: int, authority_count: int) -> bool:
    """Say whether ``count`` of the authorities are more than half."""
    return 2 * count > authority_count


def may_stand(rank: int, authority_count: int) -> bool:
    """Say whether the authority of this rank may ever be a candidate."""
    return rank == 0 or authority_count >= TAKEOVER_AUTHORITIES_MIN


def is_older(first: Stored | None, second: Stored | None) -> bool:
    """Say whether the first newest-stored receipt is older than the second."""
    if second is None:
        return False
    return first is None or first.place < second.place


def stand(ballot: Ballot, key: PeerId, term: int) -> Ballot:
    """Return the ballot of a candidate that votes for itself in a new term."""
    assert term > ballot.term
    return replace(ballot, term=term, voted_for=key)


def find_vote_refusal(ballot: Ballot, *, term: int, candidate: PeerId, newest: Stored | None) -> str:
    """Return why this key may not vote for the candidate, or the empty string.

    ``term``: it promised a later one. ``voted``: it voted for another in this term. ``stale``: the candidate's
    newest stored receipt is older than its own, so the candidate could undo what is final.
    """
    if term < ballot.term:
        return "term"
    if term == ballot.term and ballot.voted_for not in (None, candidate):
        return "voted"
    return "stale" if is_older(newest, ballot.newest) else ""


def vote(ballot: Ballot, *, term: int, candidate: PeerId) -> Ballot:
    """Return the ballot once it holds a vote that was not refused."""
    return replace(ballot, term=term, voted_for=candidate)


def find_store_refusal(ballot: Ballot, *, place: Place, outcome: Digest) -> str:
    """Return why this key may not store and countersign a receipt, or the empty string.

    ``term``: it promised a later term. ``stale``: it stored one of a later round or term. ``conflict``: the
    term's coordinator already proposed something else for this round.
    """
    if place.term < ballot.term:
        return "term"
    newest = ballot.newest
    if newest is not None and place < newest.place:
        return "stale"
    if newest is not None and place == newest.place and outcome != newest.outcome:
        return "conflict"
    return ""


def store(ballot: Ballot, receipt: Stored, coordinator: PeerId) -> Ballot:
    """Return the ballot once it holds a receipt that was not refused; a vote given in its term stands."""
    if receipt.place.term > ballot.term:
        return Ballot(receipt.place.term, coordinator, receipt)
    return replace(ballot, newest=receipt)


def is_behind(newest: Stored | None, next_round_index: int) -> bool:
    """Say whether a receipt of a later round is known, so that the round that seems due is final already.

    Whoever is behind neither stands nor closes a round before it learned what is final.
    """
    return newest is not None and newest.place.round_index > next_round_index


def find_inherited(newest: Stored | None, next_round_index: int) -> Stored | None:
    """Return the receipt a coordinator must propose again before it may close the round itself.

    Args:
        newest: The newest receipt it stored, or was shown by an authority that stored it.
    """
    return newest if newest is not None and newest.place.round_index == next_round_index else None
