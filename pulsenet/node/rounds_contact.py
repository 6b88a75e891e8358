"""A trainer's line to the coordinator: sending the contribution until it is taken, and asking how far the run is."""

from __future__ import annotations

from collections import deque
from typing import Final

from pulsenet import limits
from pulsenet.ids import Digest, PeerId
from pulsenet.node.courier import Courier
from pulsenet.node.effects import Effect
from pulsenet.node.events import ReplyReceived
from pulsenet.node.machine import Seat
from pulsenet.wire.messages import GetRounds, PushContribution, PushReply, Refusal

RESEND_SECONDS: Final = 2.0
"""How often a contribution is sent that nobody took yet."""

REMIND_SECONDS: Final = 15.0
"""How often one that was taken is sent all the same: its coordinator may have lost its term unheard."""

POLL_SECONDS: Final = 15.0
POLL_WAITING_SECONDS: Final = 3.0
"""How often the rounds are asked for while inner steps run, and while everything waits for an answer."""

WAIT_SECONDS_MAX: Final = 60.0
"""Whoever is busy for longer is asked again after so long: a peer must not keep this node from asking others."""

SENT_IDS_MAX: Final = 64
"""Requests with a contribution whose answer is known as such: it comes within a minute, and a round may last weeks."""


class Contact:
    """Whom to tell and whom to ask, and when.

    Args:
        seat: The node's.
        courier: Whom messages can be sent to.
    """

    def __init__(self, seat: Seat, courier: Courier) -> None:
        self._trust = seat.trust
        self._ledger = seat.ledger
        self._peer_id = seat.peer_id
        self._draw = seat.draw
        self._courier = courier
        self._heard_at: float | None = None
        self._has_answer = False
        self._contribution: Digest | None = None
        self._send_at = 0.0
        self._sent_term = 0
        self._sent_ids: deque[int] = deque(maxlen=SENT_IDS_MAX)
        self._poll_at = 0.0
        self.refusal = ""
        """Why the last question was not answered: ``busy``, for one; empty once it was."""
        self.wait_seconds = 0.0
        """How long the refusing side said it would take."""

    def note_heard(self, source: PeerId | None, now: float) -> None:
        """Somebody said something about the rounds; ``None`` is another machine of this node."""
        mandate = self._ledger.mandate
        if mandate is not None and source in (None, mandate.coordinator):
            self._heard_at = now

    @property
    def _members(self) -> set[PeerId]:
        descriptor = self._trust.descriptor
        return set() if descriptor is None else {*descriptor.trainers, *descriptor.authorities}

    def note_answer(self, peer_id: PeerId) -> None:
        """A peer answered how far the run is; only those who take part in rounds know it first hand."""
        self._has_answer |= peer_id in self._members

    def await_news(self, now: float, seconds_max: float, *, is_known: bool) -> float | None:
        """Return until when a training process that came waits for news.

        Args:
            seconds_max: Longest wait.
            is_known: Whether what leads on from its state is known here; if not, answers to earlier questions, asked
                before it was there, say nothing of it.
        """
        if not is_known:
            self._has_answer = False
            self.poll_soon(now)
        return None if self.is_informed() else now + seconds_max

    def is_informed(self) -> bool:
        """Say whether a member answered how far the run is, or this node is the only one."""
        return self._has_answer or self._members <= {self._peer_id}

    def is_silent(self, now: float) -> bool:
        """Say whether no coordinator was heard of for the length of a lease."""
        mandate = self._ledger.mandate
        if mandate is not None and mandate.coordinator == self._peer_id:
            return False
        return self._heard_at is None or now - self._heard_at > limits.VOTE_LEASE_SECONDS

    # The contribution

    def begin(self, contribution_digest: Digest) -> None:
        """A new contribution waits to be sent."""
        self._contribution = contribution_digest
        self._send_at = 0.0
        self._sent_ids.clear()

    def may_send(self, now: float) -> bool:
        """Say whether to send the contribution now, and count on its being sent."""
        mandate = self._ledger.mandate
        if mandate is None or (now < self._send_at and mandate.term == self._sent_term):
            return False
        if mandate.coordinator not in (self._peer_id, *self._courier.connected):
            return False
        self._sent_term = mandate.term
        self._send_at = now + RESEND_SECONDS
        return True

    def send(self, record: bytes) -> list[Effect]:
        """Return the order to send the contribution to the coordinator."""
        assert self._ledger.mandate is not None
        request = self._courier.send(self._ledger.mandate.coordinator, PushContribution(record))
        self._sent_ids.append(request.request_id)
        return [request]

    def take_reply(self, event: ReplyReceived, now: float) -> None:
        """Take in the answer to a contribution or a refused question."""
        if isinstance(event.reply, Refusal):
            self.refusal = event.reply.code
            self.wait_seconds = min(event.reply.retry_after_ms / 1000, WAIT_SECONDS_MAX)
            self._poll_at = now + max(self.wait_seconds, POLL_WAITING_SECONDS)
        elif isinstance(event.reply, PushReply) and event.request_id in self._sent_ids:
            self.note_heard(event.peer_id, now)
            if event.reply.accepted:
                self._send_at = now + REMIND_SECONDS
            else:
                # Another term, or another round: ask somebody how far the run is.
                self._poll_at = min(self._poll_at, now)

    # The questions

    def poll_soon(self, now: float) -> None:
        """Ask at the next chance: somebody new can be asked."""
        self._poll_at = min(self._poll_at, now)

    def poll(self, now: float, *, from_round_index: int, is_waiting: bool, members_first: bool = False) -> list[Effect]:
        """Return the question how far the run is, if one is due; whoever takes part asks members before others."""
        interval = POLL_WAITING_SECONDS if is_waiting else POLL_SECONDS
        self._poll_at = min(self._poll_at, now + max(interval, self.wait_seconds))
        if now < self._poll_at or not self._courier.connected:
            return []
        self._poll_at = now + interval
        self.refusal, self.wait_seconds = "", 0.0
        members = self._courier.connected & self._members if members_first else set()
        connected = sorted(members or self._courier.connected)
        mandate = self._ledger.mandate
        peer_id = connected[self._draw(len(connected))]
        # The coordinator knows best, but not if it is the one that went silent.
        if mandate is not None and mandate.coordinator in connected and self._draw(2):
            peer_id = mandate.coordinator
        return [self._courier.send(peer_id, GetRounds(from_round_index))]

    def next_wake(self, now: float) -> float | None:
        """Return the earliest later time at which something is due to be sent."""
        times = [self._poll_at] if self._courier.connected else []
        if self._contribution is not None:
            times.append(self._send_at)
        return min((at for at in times if at > now), default=None)
