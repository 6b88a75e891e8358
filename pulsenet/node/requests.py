"""Requests under way: what each is about, until it is answered, has failed, or nobody waits for it any more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from pulsenet.ids import PeerId
from pulsenet.node.effects import SendRequest
from pulsenet.node.events import Event, ReplyReceived, RequestDone, RequestFailed

GRACE_SECONDS: Final = 10.0
"""If the shell stays silent this long after its own deadline, a request is given up here."""

About = TypeVar("About")


@dataclass(frozen=True, slots=True)
class OpenRequest(Generic[About]):
    """One of them."""

    request_id: int
    peer_id: PeerId
    about: About
    """What its owner wants to know of it once it is over."""
    sent_at: float
    gives_up_at: float


class OpenRequests(Generic[About]):
    """Those of one owner; each leaves by exactly one of the ``end`` methods."""

    def __init__(self) -> None:
        self._open: dict[int, OpenRequest[About]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenRequest[About]]:
        return iter(self._open.values())

    def add(self, request: SendRequest, about: About, now: float) -> SendRequest:
        """Take up a request that is sent now, and return it."""
        gives_up_at = now + request.timeout_seconds + GRACE_SECONDS
        self._open[request.request_id] = OpenRequest(request.request_id, request.peer_id, about, now, gives_up_at)
        return request

    def end(self, event: Event) -> OpenRequest[About] | None:
        """Return the request that an event ends; ``None`` if it is about none of them."""
        if isinstance(event, ReplyReceived | RequestFailed | RequestDone):
            return self._open.pop(event.request_id, None)
        return None

    def end_overdue(self, now: float) -> list[OpenRequest[About]]:
        """Return those that the shell never ended."""
        return self._end_where(lambda request: request.gives_up_at <= now)

    def end_of(self, peer_id: PeerId) -> list[OpenRequest[About]]:
        """Return those to a peer that is gone."""
        return self._end_where(lambda request: request.peer_id == peer_id)

    def next_wake(self, now: float) -> float | None:
        """Return the earliest later time at which one is overdue."""
        return min((request.gives_up_at for request in self if request.gives_up_at > now), default=None)

    def _end_where(self, is_over: Callable[[OpenRequest[About]], bool]) -> list[OpenRequest[About]]:
        ended = [request for request in self if is_over(request)]
        for request in ended:
            del self._open[request.request_id]
        return ended
