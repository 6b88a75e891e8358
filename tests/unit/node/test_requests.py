"""Requests under way: each ends once, by an answer, a failure, its peer's loss or the shell's silence."""

from __future__ import annotations

import pytest

from pulsenet import limits
from pulsenet.ids import PeerId
from pulsenet.node.courier import Courier
from pulsenet.node.events import Event, ReplyReceived, RequestDone, RequestFailed, TimerFired
from pulsenet.node.requests import GRACE_SECONDS, OpenRequests
from pulsenet.wire.messages import GetHead, HeadReply

FIRST, SECOND = PeerId(b"1" * 32), PeerId(b"2" * 32)
GIVES_UP_SECONDS = limits.REQUEST_OPEN_SECONDS_MAX + GRACE_SECONDS


def open_two() -> OpenRequests[str]:
    courier, requests = Courier(), OpenRequests[str]()
    for peer_id, about, now in ((FIRST, "one", 0.0), (SECOND, "two", 5.0)):
        sent = courier.send(peer_id, GetHead())
        assert requests.add(sent, about, now) is sent
    return requests


@pytest.mark.parametrize(
    "event", [ReplyReceived(1, FIRST, HeadReply(None)), RequestFailed(1, FIRST, "timeout"), RequestDone(1, FIRST)]
)
def test_an_event_ends_the_request_it_is_about_and_no_other(event: Event) -> None:
    requests = open_two()
    ended = requests.end(event)
    assert ended is not None
    assert (ended.peer_id, ended.about, ended.sent_at) == (FIRST, "one", 0.0)
    assert [request.about for request in requests] == ["two"]
    assert requests.end(event) is None
    assert requests.end(TimerFired()) is None


def test_what_the_shell_never_ends_is_overdue_after_the_grace() -> None:
    requests = open_two()
    assert requests.next_wake(0.0) == GIVES_UP_SECONDS
    assert requests.end_overdue(GIVES_UP_SECONDS - 0.1) == []
    assert [request.about for request in requests.end_overdue(GIVES_UP_SECONDS)] == ["one"]
    assert requests.next_wake(GIVES_UP_SECONDS) == GIVES_UP_SECONDS + 5.0
    assert len(requests) == 1


def test_a_peer_that_is_gone_ends_its_own() -> None:
    requests = open_two()
    assert [request.about for request in requests.end_of(SECOND)] == ["two"]
    assert requests.end_of(SECOND) == []
    assert len(requests) == 1
