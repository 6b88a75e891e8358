"""What a node answers about rounds: the serving rule for messages 20 to 27, pure (SPEC section 3)."""

from __future__ import annotations

from collections.abc import Callable

from pulsenet.chain.ledger import Ledger
from pulsenet.ids import PeerId
from pulsenet.node.events import ContributionSeen, ReceiptSeen, TermSeen, VoteSeen
from pulsenet.node.verdicts import RoundPush
from pulsenet.wire.messages import (
    GetAggregates,
    GetRounds,
    Message,
    PushContribution,
    PushReceipt,
    PushReply,
    PushTerm,
    PushVote,
)

ROUND_REQUESTS = (PushVote, PushTerm, PushContribution, PushReceipt, GetRounds, GetAggregates)
"""Requests this module answers."""


def event_of(push: RoundPush, source: PeerId) -> VoteSeen | TermSeen | ContributionSeen | ReceiptSeen:
    """Return what to show the machines before a pushed item is answered."""
    match push:
        case PushVote(vote):
            return VoteSeen(vote, source)
        case PushTerm(votes):
            return TermSeen(votes, source)
        case PushContribution(contribution):
            return ContributionSeen(contribution, source)
        case _:
            return ReceiptSeen(push.receipt, push.votes, source)


def respond_to_round(
    request: RoundPush | GetRounds | GetAggregates, ledger: Ledger, find_verdict: Callable[[RoundPush], str] | None
) -> Message:
    """Return the reply to one request, after the machines saw what it pushed.

    Args:
        find_verdict: What the node's coordinator made of it; ``None`` where the node is no authority.
    """
    match request:
        case GetRounds(round_index):
            return ledger.reply(round_index)
        case GetAggregates(round_index):
            return ledger.reply_aggregates(round_index)
        case PushVote() | PushContribution() if find_verdict is None:
            return PushReply(accepted=False, reason="not-authority")
        case _:
            reason = "" if find_verdict is None else find_verdict(request)
            return PushReply(accepted=not reason, reason=reason)
