"""The client's half of one publish: offer weights, send parts while they are wanted, learn the outcome."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from pulsenet.errors import RemoteProtocolError, UnavailableError
from pulsenet.ids import Version
from pulsenet.local import protocol
from pulsenet.local.parts import SealedPart
from pulsenet.local.protocol import LocalMessage, PublishStatus
from pulsenet.local.sockets import Channel

REPLY_SECONDS_MAX: Final = 30.0
"""The daemon answers at once, apart from the waiting a request asks for."""

Reply = TypeVar("Reply")


@dataclass(frozen=True, slots=True)
class PublishResult:
    """What became of one publish. Sizes and version are set once committed."""

    status: PublishStatus
    version: Version | None = None
    """What the weights are called from now on: (epoch, number)."""
    raw_size_bytes: int = 0
    """Bytes of the whole version, dense."""
    encoded_size_bytes: int = 0
    """Bytes that travel."""
    changed_count: int = 0
    """Elements whose bits differ from those of the version before; all of them in an anchor."""
    element_count: int = 0
    """Elements of all tensors."""
    reason: str = ""
    """Why not, for a person; begins with a stable code and a colon."""


class PartSource(Protocol):
    """Where the parts of one publish come from."""

    def begin(self) -> protocol.Origin | None:
        """Number the hand-over about to be tried; ``None`` if all its parts will be whole."""

    def make_parts(self, base_number: int | None) -> Generator[SealedPart]:
        """Return the parts, made one at a time.

        Args:
            base_number: The hand-over that changed parts may start from; ``None`` for whole parts.
        """


@dataclass(frozen=True, slots=True)
class WholeParts:
    """Parts of a process that keeps no device baseline."""

    make: Callable[[], Generator[SealedPart]]

    def begin(self) -> None:
        """Return that nothing is numbered."""

    def make_parts(self, base_number: int | None) -> Generator[SealedPart]:
        """Return the parts."""
        return self.make()


def hand_over(
    channel: Channel,
    offer: protocol.OfferSnapshot,
    begin: Callable[[int | None], Generator[SealedPart]],
    tensor_count: int,
    give_up_at: float,
) -> PublishResult:
    """Offer weights, send their parts as they are wanted, and return what became of them.

    ``begin`` is given the daemon's ``base_number``.

    Raises:
        UnavailableError: The daemon went away, or the time was up, before it had them all.
        RemoteProtocolError: It refused.
    """
    channel.send(offer, timeout_seconds=REPLY_SECONDS_MAX)
    if tensor_count == 0:
        return _await_outcome(channel, offer, give_up_at)
    reply = channel.receive(REPLY_SECONDS_MAX).message
    if not isinstance(reply, protocol.PublishDone):
        wanted = expect(reply, protocol.PartWanted)
        with closing(begin(wanted.base_number)) as parts:
            for part in parts:
                channel.send(_announce(part), descriptor=part.descriptor, timeout_seconds=REPLY_SECONDS_MAX)
                if part.layout.end == tensor_count:
                    return _await_outcome(channel, offer, give_up_at)
                seconds = _rest_seconds(give_up_at) if offer.is_blocking else REPLY_SECONDS_MAX
                reply = channel.receive(seconds).message
                if isinstance(reply, protocol.PublishDone):
                    break
                expect(reply, protocol.PartWanted)
    return _as_result(expect(reply, protocol.PublishDone))


def _announce(part: SealedPart) -> LocalMessage:
    if part.changed_size_bytes is None:
        return protocol.SnapshotPart(part.layout.count)
    return protocol.ChangedPart(part.layout.count, part.changed_size_bytes)


def _await_outcome(channel: Channel, offer: protocol.OfferSnapshot, give_up_at: float) -> PublishResult:
    try:
        frame = channel.receive(_rest_seconds(give_up_at) if offer.wait else REPLY_SECONDS_MAX)
    except UnavailableError as error:
        channel.close()
        text = f"outcome_unknown: {error}; if it was not committed, the next publish carries its changes"
        return PublishResult(PublishStatus.FAILED, reason=text)
    return _as_result(expect(frame.message, protocol.PublishDone))


def _as_result(done: protocol.PublishDone) -> PublishResult:
    return PublishResult(
        status=done.status,
        version=done.version,
        raw_size_bytes=done.raw_size_bytes,
        encoded_size_bytes=done.encoded_size_bytes,
        changed_count=done.changed_count,
        element_count=done.element_count,
        reason=done.reason,
    )


def _rest_seconds(give_up_at: float) -> float | None:
    return None if give_up_at == float("inf") else max(0.0, give_up_at - time.monotonic())


def expect(message: LocalMessage, message_type: type[Reply]) -> Reply:
    """Return the message if it is of this type.

    Raises:
        RemoteProtocolError: A refusal, under its code, or another message (``message-unexpected``).
    """
    if isinstance(message, message_type):
        return message
    if isinstance(message, protocol.LocalRefusal):
        raise RemoteProtocolError(message.code, message.detail)
    raise RemoteProtocolError("message-unexpected", type(message).__name__)
