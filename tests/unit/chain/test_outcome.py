"""A receipt says the same whoever proposes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pulsenet.chain.outcome import listed_by, outcome_of
from pulsenet.chain.records import Member, Receipt, Rejection
from pulsenet.ids import PeerId, RunId, compute_digest

NAME = compute_digest(b"name")
RECEIPT = Receipt(
    run_id=RunId(NAME),
    revision=0,
    term=3,
    coordinator=PeerId(b"c" * 32),
    round_index=7,
    base_state_root=NAME,
    previous=NAME,
    members=(Member(PeerId(b"m" * 32), NAME, 1),),
    rejected=(),
)


@pytest.mark.parametrize("changes", [{"term": 4}, {"coordinator": PeerId(b"d" * 32)}, {"revision": 2}])
def test_term_coordinator_and_revision_are_not_part_of_the_outcome(changes: dict[str, Any]) -> None:
    assert outcome_of(replace(RECEIPT, **changes)) == outcome_of(RECEIPT)


@pytest.mark.parametrize(
    "changes",
    [
        {"run_id": RunId(bytes(32))},
        {"round_index": 8},
        {"base_state_root": compute_digest(b"other")},
        {"previous": None},
        {"members": ()},
        {"members": (Member(PeerId(b"m" * 32), NAME, 2),)},
        {"rejected": (Rejection(PeerId(b"r" * 32), NAME, "finite"),)},
    ],
)
def test_everything_else_is(changes: dict[str, Any]) -> None:
    assert outcome_of(replace(RECEIPT, **changes)) != outcome_of(RECEIPT)


def test_a_receipt_lists_what_it_counts_in_its_order() -> None:
    other = compute_digest(b"other")
    members = (Member(PeerId(b"m" * 32), NAME, 1), Member(PeerId(b"n" * 32), other, 1))
    assert listed_by(replace(RECEIPT, members=members)) == (NAME, other)
