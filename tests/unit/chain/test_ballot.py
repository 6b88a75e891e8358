"""What an authority may promise, and what its earlier promises forbid."""

from __future__ import annotations

import pytest

from pulsenet.chain.ballot import (
    Ballot,
    Place,
    Stored,
    find_inherited,
    find_store_refusal,
    find_vote_refusal,
    is_behind,
    is_majority,
    is_older,
    may_stand,
    stand,
    store,
    vote,
)
from pulsenet.ids import Digest, PeerId, compute_digest

FIRST, SECOND = PeerId(b"1" * 32), PeerId(b"2" * 32)


def stored(round_index: int, term: int, outcome: str = "a") -> Stored:
    name = compute_digest(outcome.encode())
    return Stored(Place(round_index, term), name, Digest(name[::-1]))


def test_more_than_half_is_a_majority() -> None:
    assert [is_majority(count, 4) for count in range(5)] == [False, False, False, True, True]
    assert is_majority(1, 1)
    assert not is_majority(1, 2)


def test_only_rank_0_stands_where_nobody_can_be_missed() -> None:
    assert [may_stand(rank, 2) for rank in range(2)] == [True, False]
    assert all(may_stand(rank, 3) for rank in range(3))


def test_receipts_are_ordered_by_round_then_term() -> None:
    ordered = [None, stored(0, 1), stored(0, 3), stored(1, 2)]
    for index, older in enumerate(ordered):
        assert [is_older(older, other) for other in ordered] == [place > index for place in range(len(ordered))]


def test_a_key_votes_once_per_term() -> None:
    ballot = vote(Ballot(), term=3, candidate=FIRST)
    assert find_vote_refusal(ballot, term=3, candidate=FIRST, newest=None) == ""
    assert find_vote_refusal(ballot, term=3, candidate=SECOND, newest=None) == "voted"
    assert find_vote_refusal(ballot, term=2, candidate=SECOND, newest=None) == "term"
    assert find_vote_refusal(ballot, term=4, candidate=SECOND, newest=None) == ""


def test_a_candidate_votes_for_itself_in_a_new_term() -> None:
    ballot = stand(Ballot(), FIRST, 4)
    assert find_vote_refusal(ballot, term=4, candidate=SECOND, newest=None) == "voted"


def test_a_candidate_with_an_older_receipt_gets_no_vote() -> None:
    ballot = Ballot(newest=stored(1, 2))
    assert find_vote_refusal(ballot, term=5, candidate=FIRST, newest=stored(1, 1)) == "stale"
    assert find_vote_refusal(ballot, term=5, candidate=FIRST, newest=None) == "stale"
    assert find_vote_refusal(ballot, term=5, candidate=FIRST, newest=stored(1, 2)) == ""


@pytest.mark.parametrize(
    ("place", "outcome", "refusal"),
    [
        (Place(1, 4), "a", "term"),
        (Place(0, 5), "a", "stale"),
        (Place(1, 5), "b", "conflict"),
        (Place(1, 5), "a", ""),
        (Place(1, 6), "b", ""),
        (Place(2, 5), "b", ""),
    ],
)
def test_a_receipt_is_stored_only_forward(place: Place, outcome: str, refusal: str) -> None:
    ballot = Ballot(5, FIRST, stored(1, 5))
    assert find_store_refusal(ballot, place=place, outcome=compute_digest(outcome.encode())) == refusal


def test_storing_a_receipt_of_a_later_term_promises_that_term() -> None:
    ballot = store(Ballot(1, FIRST), stored(0, 2), SECOND)
    assert ballot == Ballot(2, SECOND, stored(0, 2))
    assert find_vote_refusal(ballot, term=1, candidate=FIRST, newest=stored(0, 2)) == "term"


def test_a_vote_given_in_a_term_outlives_the_receipt_of_its_coordinator() -> None:
    """Otherwise a key that voted for the loser could vote for the winner as well."""
    assert store(Ballot(2, FIRST), stored(0, 2), SECOND).voted_for == FIRST


def test_a_coordinator_inherits_the_receipt_of_the_round_that_is_due() -> None:
    assert find_inherited(stored(1, 1), 1) == stored(1, 1)
    assert find_inherited(stored(1, 1), 2) is None
    assert find_inherited(None, 0) is None


def test_whoever_knows_a_receipt_of_a_later_round_is_behind() -> None:
    assert is_behind(stored(2, 1), 1)
    assert not is_behind(stored(1, 1), 1)
    assert not is_behind(None, 0)


def test_a_receipt_stored_in_the_term_of_a_vote_leaves_the_vote() -> None:
    ballot, first = vote(Ballot(), term=2, candidate=FIRST), stored(0, 2)
    assert find_store_refusal(ballot, place=first.place, outcome=first.outcome) == "", "nothing was stored before"
    assert store(ballot, first, SECOND) == Ballot(2, FIRST, first)
