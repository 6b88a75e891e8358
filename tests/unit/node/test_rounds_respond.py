"""What a node answers about rounds."""

from __future__ import annotations

from typing import Any

import pytest

from pulsenet.chain.ledger import Ledger
from pulsenet.node.events import ContributionSeen, ReceiptSeen, TermSeen, VoteSeen
from pulsenet.node.rounds_respond import event_of, respond_to_round
from pulsenet.node.verdicts import RoundPush
from pulsenet.wire.messages import (
    GetAggregates,
    GetRounds,
    PushContribution,
    PushReceipt,
    PushReply,
    PushTerm,
    PushVote,
)

PUSHES: list[RoundPush] = [PushVote(b"v"), PushTerm((b"v",)), PushContribution(b"c"), PushReceipt(b"r", (b"v",))]


def test_every_push_is_shown_to_the_machines_with_its_source(run: Any) -> None:
    source = run.stranger.peer_id
    assert [event_of(push, source) for push in PUSHES] == [
        VoteSeen(b"v", source),
        TermSeen((b"v",), source),
        ContributionSeen(b"c", source),
        ReceiptSeen(b"r", (b"v",), source),
    ]


@pytest.mark.parametrize("push", PUSHES)
def test_the_verdict_is_the_answer(run: Any, push: RoundPush) -> None:
    ledger = Ledger(run.trust())
    assert respond_to_round(push, ledger, lambda push: "") == PushReply(accepted=True, reason="")
    assert respond_to_round(push, ledger, lambda push: "stale") == PushReply(accepted=False, reason="stale")


def test_who_is_no_authority_says_so_and_takes_the_rest(run: Any) -> None:
    ledger = Ledger(run.trust())
    replies = [respond_to_round(push, ledger, None) for push in PUSHES]
    refused = PushReply(accepted=False, reason="not-authority")
    taken = PushReply(accepted=True, reason="")
    assert replies == [refused, taken, refused, taken]


def test_rounds_are_answered_from_the_ledger(run: Any) -> None:
    ledger = Ledger(run.trust())
    assert respond_to_round(GetRounds(0), ledger, None) == ledger.reply(0)
    assert respond_to_round(GetAggregates(0), ledger, None) == ledger.reply_aggregates(0)
