"""What became of pushed items, for the answer that the serving rule gives after the machines saw them."""

from __future__ import annotations

from typing import Final

from pulsenet.ids import Digest, compute_digest
from pulsenet.node.events import ContributionSeen, Event, ReceiptSeen, TermSeen, VoteSeen
from pulsenet.node.mixing.events import ProbeSeen, ShareSeen
from pulsenet.wire.messages import PushContribution, PushProbe, PushReceipt, PushShare, PushTerm, PushVote

VERDICTS_MAX: Final = 256
"""Answers remembered; each is asked for right after its event."""

RoundPush = PushVote | PushTerm | PushContribution | PushReceipt
"""Requests that hand over a record of a round."""


class Verdicts:
    """Codes by item; an item nobody judged was taken."""

    def __init__(self) -> None:
        self._codes: dict[Digest, str] = {}

    def note(self, event: Event, code: str) -> None:
        """Remember what became of a pushed item; events of other kinds are ignored."""
        match event:
            case VoteSeen(said) | ContributionSeen(said) | ReceiptSeen(said) | ShareSeen(said) | ProbeSeen(said):
                pass
            case TermSeen(votes):
                said = b"".join(votes)
            case _:
                return
        key = compute_digest(said)
        self._codes.pop(key, None)
        self._codes[key] = code
        if len(self._codes) > VERDICTS_MAX:
            del self._codes[next(iter(self._codes))]

    def find(self, push: RoundPush | PushShare | PushProbe) -> str:
        """Return the empty string if the item was taken, or a stable code."""
        match push:
            case PushVote(said) | PushContribution(said) | PushReceipt(said) | PushShare(said) | PushProbe(said):
                pass
            case _:
                said = b"".join(push.votes)
        return self._codes.get(compute_digest(said), "")
