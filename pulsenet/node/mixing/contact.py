"""A trainer's line to whoever keeps the roster: telling that it is there, and hearing who mixes."""

from __future__ import annotations

from typing import Final

from pulsenet.chain.records import Descriptor
from pulsenet.ids import PeerId
from pulsenet.node.courier import Courier
from pulsenet.node.effects import Effect, ShowToMachines
from pulsenet.node.events import ReplyReceived, RequestFailed
from pulsenet.node.machine import Seat
from pulsenet.node.mixing.events import PresenceSeen
from pulsenet.node.requests import OpenRequests
from pulsenet.wire.messages import GetRoster

PRESENCE_SECONDS: Final = 10.0
"""How often a trainer tells that it is there."""

ASK_SECONDS: Final = 2.0
"""How often at most, when something else makes it ask."""


class RosterContact:
    """Whom to ask, and when.

    Args:
        seat: The node's.
        courier: Whom messages can be sent to.
    """

    def __init__(self, seat: Seat, courier: Courier) -> None:
        self._ledger = seat.ledger
        self._peer_id = seat.peer_id
        self._draw = seat.draw
        self._courier = courier
        self._ask_at = 0.0
        self._asked_at = -ASK_SECONDS
        self._whom: PeerId | None = None
        self._requests: OpenRequests[None] = OpenRequests()

    def ask_now(self, now: float) -> None:
        """Tell at once: a round opens."""
        self._ask_at = now

    def ask_soon(self, now: float, whom: PeerId | None = None) -> None:
        """Ask again, but not all the time; ``whom`` knows a roster that this node does not."""
        self._ask_at = min(self._ask_at, max(now, self._asked_at + ASK_SECONDS))
        self._whom = whom or self._whom

    def is_ours(self, event: ReplyReceived | RequestFailed) -> bool:
        """Say whether an answer is to one of our questions, and stop waiting for it."""
        return self._requests.end(event) is not None

    def poll(
        self, now: float, round_index: int | None, descriptor: Descriptor | None, *, is_joining: bool
    ) -> list[Effect]:
        """Return the question, if one is due.

        Args:
            now: Monotonic time.
            round_index: The round this node is in; ``None`` while it is in none.
            descriptor: Whom to ask while no coordinator is known.
            is_joining: Whether the training process looks for a state.
        """
        if now < self._ask_at:
            return []
        self._requests.end_overdue(now)
        mandate = self._ledger.mandate
        coordinator = None if mandate is None else mandate.coordinator
        effects: list[Effect] = []
        # This node's own authority, if it is one, stands only while it knows of a training process.
        here: list[Effect] = []
        if round_index is not None or is_joining:
            here.append(ShowToMachines(PresenceSeen(self._peer_id, round_index)))
        if coordinator is not None and coordinator in self._courier.connected:
            effects += self._ask(coordinator, round_index, now)
        whom, self._whom = self._whom, None
        members = set() if descriptor is None else {*descriptor.trainers, *descriptor.authorities}
        others = sorted((self._courier.connected & members or self._courier.connected) - {self._peer_id})
        if whom in self._courier.connected and whom != coordinator:
            assert whom is not None
            effects += self._ask(whom, None, now)
        elif not effects and others and coordinator != self._peer_id:
            effects += self._ask(others[self._draw(len(others))], round_index, now)
        self._asked_at = now
        is_told = bool(effects) or coordinator == self._peer_id
        self._ask_at = now + (PRESENCE_SECONDS if is_told else ASK_SECONDS)
        return here + effects

    def next_wake(self, now: float) -> float | None:
        """Return when the next question is due."""
        return self._ask_at if self._ask_at > now else None

    def _ask(self, peer_id: PeerId, round_index: int | None, now: float) -> list[Effect]:
        return [self._requests.add(self._courier.send(peer_id, GetRoster(round_index)), None, now)]
