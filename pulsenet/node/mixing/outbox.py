"""Shares on their way to others: each is pushed until the receiver said what became of it, or its time is over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pulsenet.ids import Digest, PeerId
from pulsenet.node.courier import Courier
from pulsenet.node.effects import Effect, SendRequest
from pulsenet.node.events import Event, ReplyReceived, RequestFailed
from pulsenet.wire.messages import PushReply, PushShare, Refusal

RESEND_SECONDS: Final = 2.0
"""How often a share is pushed that did not arrive, or that the receiver could not judge yet."""

PUSH_SECONDS_MAX: Final = 120.0
"""How long a share is pushed at all; whoever still wants it asks."""

PUSHES_IN_FLIGHT_MAX: Final = 32

PUSH_TIMEOUT_SECONDS: Final = 5.0
"""How long a receiver may take to judge a share: shorter than other requests, since a training process waits."""

GRACE_SECONDS: Final = 10.0
"""If the shell stays silent so long after its own deadline, a push is given up here."""

NOT_YET: Final = ("roster", "early", "not-attached", "revision-unknown")
"""Codes of a receiver that may judge otherwise later."""


@dataclass(slots=True)
class _Push:
    receiver: PeerId
    record: bytes
    round_index: int
    ends_at: float
    send_at: float
    request_id: int | None = None
    gives_up_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """A receiver judged a share; ``code`` is empty if it took it."""

    receiver: PeerId
    digest: Digest
    code: str


class Outbox:
    """Pushes in flight and due.

    Args:
        courier: Knows who can be reached, and numbers requests.
    """

    def __init__(self, courier: Courier) -> None:
        self._courier = courier
        self._pushes: dict[tuple[PeerId, Digest], _Push] = {}
        self._requests: dict[int, tuple[PeerId, Digest]] = {}

    def __len__(self) -> int:
        return len(self._pushes)

    def add(self, receiver: PeerId, digest: Digest, record: bytes, round_index: int, now: float) -> None:
        """Push a share to a member, as soon as that can be reached."""
        if (receiver, digest) not in self._pushes:
            self._pushes[receiver, digest] = _Push(receiver, record, round_index, now + PUSH_SECONDS_MAX, now)

    def forget_before(self, round_index: int) -> None:
        """Give up shares of earlier rounds."""
        for key in [key for key, push in self._pushes.items() if push.round_index < round_index]:
            self._drop(key)

    def handle(self, event: Event, now: float) -> Outcome | None:
        """Take in an event about one of our pushes; anything else is ignored."""
        if not isinstance(event, ReplyReceived | RequestFailed) or event.request_id not in self._requests:
            return None
        key = self._requests.pop(event.request_id)
        push = self._pushes[key]
        push.request_id = None
        push.send_at = now + RESEND_SECONDS
        if isinstance(event, RequestFailed):
            return None
        if isinstance(event.reply, Refusal):
            push.send_at = now + max(RESEND_SECONDS, event.reply.retry_after_ms / 1000)
            return None
        is_judged = isinstance(event.reply, PushReply) and event.reply.reason not in NOT_YET
        code = event.reply.reason if isinstance(event.reply, PushReply) else "unexpected"
        if is_judged:
            self._drop(key)
        return Outcome(key[0], key[1], code)

    def pump(self, now: float) -> list[Effect]:
        """Return the pushes that are due."""
        effects: list[Effect] = []
        for key, push in list(self._pushes.items()):
            if push.request_id is not None and now >= push.gives_up_at:
                del self._requests[push.request_id]
                push.request_id = None
            if now >= push.ends_at:
                self._drop(key)
                continue
            is_due = push.request_id is None and now >= push.send_at and push.receiver in self._courier.connected
            if is_due and len(self._requests) < PUSHES_IN_FLIGHT_MAX:
                number = self._courier.take_request_id()
                request = SendRequest(number, push.receiver, PushShare(push.record), PUSH_TIMEOUT_SECONDS)
                push.request_id = number
                push.gives_up_at = now + PUSH_TIMEOUT_SECONDS + GRACE_SECONDS
                self._requests[request.request_id] = key
                effects.append(request)
        return effects

    def next_wake(self, now: float) -> float | None:
        """Return the earliest later time at which :meth:`pump` may find something to do."""
        times = [push.ends_at for push in self._pushes.values()]
        times += [push.gives_up_at for push in self._pushes.values() if push.request_id is not None]
        times += [push.send_at for push in self._pushes.values() if push.request_id is None]
        return min((at for at in times if at > now), default=None)

    def _drop(self, key: tuple[PeerId, Digest]) -> None:
        push = self._pushes.pop(key)
        if push.request_id is not None:
            self._requests.pop(push.request_id, None)
