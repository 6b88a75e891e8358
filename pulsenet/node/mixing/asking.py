"""Asking members for what should have come while the training process waits: a restart may have lost it here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pulsenet.ids import PeerId
from pulsenet.node.courier import Courier
from pulsenet.node.effects import Effect
from pulsenet.node.mixing.work import Work
from pulsenet.outer.mixing.settings import Job
from pulsenet.wire.messages import GetShares

ASK_SECONDS: Final = 3.0
"""How long the training process waits before a member is asked, and between two questions."""


class Asking:
    """When whom to ask; answers are judged as what is pushed.

    Args:
        courier: Whom messages can be sent to.
    """

    def __init__(self, courier: Courier) -> None:
        self._courier = courier
        self._ask_at: dict[tuple[Job, PeerId], float] = {}

    def open(self) -> None:
        """Forget the round before."""
        self._ask_at = {}

    def ask(self, works: Mapping[Job, Work], now: float) -> list[Effect]:
        """Return the questions that are due."""
        effects: list[Effect] = []
        for (job, peer_id), due in self._list(works):
            if now >= due:
                self._ask_at[job, peer_id] = now + ASK_SECONDS
                request = GetShares(works[job].bench.round_index, int(job), 0)
                effects.append(self._courier.send(peer_id, request))
        return effects

    def next_wake(self, works: Mapping[Job, Work], now: float) -> float | None:
        """Return the earliest later time at which a question is due."""
        return min((due for _, due in self._list(works) if due > now), default=None)

    def _list(self, works: Mapping[Job, Work]) -> list[tuple[tuple[Job, PeerId], float]]:
        return [
            ((job, peer_id), self._ask_at.get((job, peer_id), work.wanted_at + ASK_SECONDS))
            for job, work in works.items()
            if work.result is None and work.wanted_at is not None
            for peer_id in work.missing()
            if peer_id in self._courier.connected
        ]
