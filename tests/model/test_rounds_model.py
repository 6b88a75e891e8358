"""The agreement on rounds, in every order in which it can happen; and each of its rules, broken, is found out."""

from __future__ import annotations

from typing import Any

import pytest

from pulsenet.chain import ballot
from pulsenet.chain.ballot import Ballot, Place
from pulsenet.testing.rounds_model import Bounds, Model, Rules, explore

TWO_ROUNDS = Bounds(round_count=2, term_max=2)
THREE_TERMS = Bounds(round_count=1, term_max=3, candidate_count=2)


@pytest.mark.parametrize(
    ("bounds", "state_count"),
    [
        (TWO_ROUNDS, 297_406),
        pytest.param(THREE_TERMS, 417_913, marks=pytest.mark.nightly),
        (Bounds(authority_count=1), 200),
        (Bounds(authority_count=2), 525),
    ],
    ids=["three-authorities-two-rounds", "three-authorities-three-terms", "one-authority", "two-authorities"],
)
def test_no_order_of_crash_loss_and_duplication_breaks_a_rule(bounds: Bounds, state_count: int) -> None:
    result = explore(Model(bounds))
    assert result.violation == ""
    # A search that became smaller checks less than it says.
    assert result.state_count == state_count


def vote_again(promised: Ballot, **asked: Any) -> str:
    refusal = ballot.find_vote_refusal(promised, **asked)
    return "" if refusal == "voted" else refusal


def vote_for_stale(promised: Ballot, **asked: Any) -> str:
    refusal = ballot.find_vote_refusal(promised, **asked)
    return "" if refusal == "stale" else refusal


def vote_in_old_term(promised: Ballot, **asked: Any) -> str:
    refusal = ballot.find_vote_refusal(promised, **asked)
    return "" if refusal == "term" else refusal


def store_of_old_term(promised: Ballot, *, place: Place, outcome: Any) -> str:
    refusal = ballot.find_store_refusal(promised, place=place, outcome=outcome)
    return "" if refusal == "term" else refusal


def store_another(promised: Ballot, *, place: Place, outcome: Any) -> str:
    refusal = ballot.find_store_refusal(promised, place=place, outcome=outcome)
    return "" if refusal == "conflict" else refusal


TWICE = "a key voted twice in a term"
TWO = "two final receipts in one round"
KEPT = "a counted contribution was kept as well"

BROKEN = {
    "a key votes again in its term": (Rules(find_vote_refusal=vote_again), TWO_ROUNDS, TWICE),
    "a key votes in a term that is over": (Rules(find_vote_refusal=vote_in_old_term), TWO_ROUNDS, TWICE),
    "a vote is sent before it is stored": (Rules(stores_before_sending=False), TWO_ROUNDS, TWICE),
    "a candidate with an older receipt is voted for": (Rules(find_vote_refusal=vote_for_stale), TWO_ROUNDS, TWO),
    "a receipt of an earlier term is stored": (Rules(find_store_refusal=store_of_old_term), TWO_ROUNDS, TWO),
    "a second receipt of a round and term is stored": (
        Rules(find_store_refusal=store_another, find_inherited=lambda newest, index: None),
        TWO_ROUNDS,
        TWO,
    ),
    "a coordinator that is behind closes a round": (Rules(is_behind=lambda newest, index: False), TWO_ROUNDS, TWO),
    "a new coordinator does not propose the newest again": (
        Rules(find_inherited=lambda newest, index: None),
        TWO_ROUNDS,
        TWO,
    ),
    "a receipt is proposed again under its old term": (
        Rules(proposes_in_own_term=False),
        Bounds(round_count=1, term_max=4, standing=(0, 1, 0, 1)),
        TWO,
    ),
    "a proposal moves state": (Rules(waits_for_final=False), TWO_ROUNDS, KEPT),
    "a round is closed before the one before": (
        Rules(waits_for_round_before=False),
        TWO_ROUNDS,
        "a round is final and the one before is not",
    ),
    "a pending contribution is taken back": (Rules(holds_while_pending=False), TWO_ROUNDS, KEPT),
    "fewer than half of the authorities are enough": (
        Rules(is_majority=lambda count, authority_count: 3 * count >= authority_count),
        TWO_ROUNDS,
        TWO,
    ),
    "one of two authorities takes over": (
        Rules(may_stand=lambda rank, authority_count: True),
        Bounds(authority_count=2),
        "an automatic take-over with fewer than three authorities",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_found_out(name: str) -> None:
    broken, bounds, violation = BROKEN[name]
    result = explore(Model(bounds, broken))
    assert result.violation == violation, f"after {result.state_count} states"
