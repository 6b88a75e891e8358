"""Records are asked of one source at a time, the teller first, and of others when the answer does not satisfy."""

from __future__ import annotations

import itertools

import pytest

from pulsenet.ids import Digest, PeerId
from pulsenet.node.effects import Count, Effect, SendRequest, StrikePeer
from pulsenet.node.events import ReplyReceived, RequestDone, RequestFailed
from pulsenet.node.records_fetch import (
    NEEDS_MAX,
    RECORD_TIMEOUT_SECONDS,
    Need,
    RecordsArrived,
    RecordsFetcher,
)
from pulsenet.node.requests import GRACE_SECONDS
from pulsenet.node.sources import Sources
from pulsenet.wire.messages import (
    Ack,
    GetDescriptors,
    GetEpochs,
    GetHead,
    GetRecords,
    HeadReply,
    Message,
    RecordsReply,
    Refusal,
)

A, B, C = (PeerId(bytes([i]) * 32) for i in (1, 2, 3))
NEED = GetRecords((Digest(b"d" * 32),))


class Bench:
    def __init__(self, *peer_ids: PeerId) -> None:
        self.sources = Sources(lambda count: 0)
        for peer_id in peer_ids:
            self.sources.connect(peer_id)
        ids = itertools.count(1)
        self.fetcher = RecordsFetcher(self.sources, lambda: next(ids))

    def need(self, *needs: Need, hint: PeerId | None = None) -> None:
        self.fetcher.set_needs(dict.fromkeys(needs, hint))

    def pump(self, now: float) -> list[SendRequest]:
        return requests(self.fetcher.pump(now))

    def reply(self, request: SendRequest, message: Message, now: float) -> tuple[list[Effect], RecordsArrived | None]:
        return self.fetcher.handle(ReplyReceived(request.request_id, request.peer_id, message), now)


def requests(effects: list[Effect]) -> list[SendRequest]:
    return [effect for effect in effects if isinstance(effect, SendRequest)]


@pytest.mark.parametrize("need", [NEED, GetDescriptors(3), GetEpochs(1)])
def test_an_answer_is_handed_to_the_owner(need: Need) -> None:
    bench = Bench(A)
    bench.need(need)
    (request,) = bench.pump(0.0)
    assert request.message == need
    assert bench.pump(0.0) == []
    assert bench.reply(request, RecordsReply((b"x", b"y")), 1.0) == ([], RecordsArrived(need, A, (b"x", b"y")))


def test_a_head_is_handed_over_or_its_absence() -> None:
    bench = Bench(A)
    bench.need(GetHead())
    (request,) = bench.pump(0.0)
    assert bench.reply(request, HeadReply(b"h"), 1.0) == ([], RecordsArrived(GetHead(), A, (b"h",)))
    (request,) = bench.pump(60.0) or bench.pump(61.0)
    assert bench.reply(request, HeadReply(None), 61.0) == ([], RecordsArrived(GetHead(), A, ()))


def test_the_teller_is_asked_first_and_the_others_after_it() -> None:
    bench = Bench(A, B, C)
    bench.need(NEED, hint=C)
    asked = []
    for _ in range(3):
        (request,) = bench.pump(0.0)
        asked.append(request.peer_id)
        bench.reply(request, RecordsReply(()), 0.0)
    assert asked[0] == C
    assert sorted(asked) == [A, B, C]


def test_after_a_lap_over_all_sources_there_is_a_pause() -> None:
    bench = Bench(A)
    bench.need(NEED)
    pauses = []
    now = 0.0
    for _ in range(4):
        (request,) = bench.pump(now)
        bench.reply(request, RecordsReply(()), now)
        assert bench.pump(now) == []
        wake = bench.fetcher.next_wake(now)
        assert wake is not None
        pauses.append(wake - now)
        now = wake
    assert pauses == sorted(pauses)
    assert pauses[0] < pauses[-1]


def test_a_satisfied_need_is_not_asked_again() -> None:
    bench = Bench(A)
    bench.need(NEED)
    (request,) = bench.pump(0.0)
    bench.reply(request, RecordsReply((b"x",)), 0.0)
    bench.need()
    assert bench.pump(1e6) == []
    assert bench.fetcher.next_wake(0.0) is None


@pytest.mark.parametrize("ending", ["failed", "done", "refused", "overdue"])
def test_a_request_without_an_answer_is_tried_elsewhere(ending: str) -> None:
    bench = Bench(A, B)
    bench.need(NEED, hint=A)
    (request,) = bench.pump(0.0)
    now = 1.0
    if ending == "failed":
        bench.fetcher.handle(RequestFailed(request.request_id, A, "timeout"), now)
    elif ending == "done":
        bench.fetcher.handle(RequestDone(request.request_id, A), now)
    elif ending == "refused":
        assert bench.reply(request, Refusal("busy", "", 5000), now) == ([], None)
    else:
        now = RECORD_TIMEOUT_SECONDS + GRACE_SECONDS
        assert bench.fetcher.next_wake(0.0) == now
    (again,) = bench.pump(now)
    assert again.peer_id == B
    source = bench.sources.get(A)
    assert source is not None
    assert (source.failure_count, source.requests_in_flight) == (1, 0)


@pytest.mark.parametrize(("need", "reply"), [(GetHead(), RecordsReply(())), (NEED, HeadReply(None)), (NEED, Ack())])
def test_an_answer_to_another_question_costs_a_strike(need: Need, reply: Message) -> None:
    bench = Bench(A)
    bench.need(need)
    (request,) = bench.pump(0.0)
    assert bench.reply(request, reply, 0.0) == ([StrikePeer(A, "unexpected"), Count("rejected", "unexpected")], None)


def test_a_lost_peer_is_replaced_at_once() -> None:
    bench = Bench(A, B)
    bench.need(NEED, hint=A)
    bench.pump(0.0)
    bench.sources.disconnect(A)
    bench.fetcher.lose_peer(A)
    assert [request.peer_id for request in bench.pump(0.0)] == [B]


def test_without_sources_nothing_is_asked_and_needs_are_bounded() -> None:
    bench = Bench()
    bench.need(*(GetEpochs(number) for number in range(NEEDS_MAX + 5)))
    assert bench.pump(0.0) == []
    for number in range(40):
        bench.sources.connect(PeerId(bytes([number + 1]) * 32))
    assert len(bench.pump(0.0)) == NEEDS_MAX


def test_a_source_that_backs_off_is_waited_for() -> None:
    bench = Bench(A)
    bench.sources.note_failure(A, 0.0)
    bench.need(NEED)
    assert bench.pump(0.0) == []
    wake = bench.fetcher.next_wake(0.0)
    assert wake is not None
    assert len(bench.pump(wake)) == 1


def test_events_of_other_requests_are_ignored() -> None:
    bench = Bench(A)
    assert bench.fetcher.handle(RequestFailed(9, A, "closed"), 0.0) == ([], None)
    assert bench.fetcher.handle(ReplyReceived(9, A, HeadReply(None)), 0.0) == ([], None)
