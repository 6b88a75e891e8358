"""Questions about holdings: bounded, put off while nothing changes, and answered in any way a peer likes."""

from __future__ import annotations

import itertools

import pytest

from pulsenet.ids import Digest, PeerId, compute_digest
from pulsenet.node.effects import Effect, SendRequest, StrikePeer
from pulsenet.node.events import ReplyReceived, RequestDone, RequestFailed
from pulsenet.node.holdings_fetch import (
    ASK_SECONDS_MAX,
    ASK_SECONDS_MIN,
    BLOBS_MAX,
    PEERS_MAX,
    TIMEOUT_SECONDS,
    HoldingsFetcher,
    Missing,
)
from pulsenet.node.picker import Picker
from pulsenet.node.requests import GRACE_SECONDS
from pulsenet.node.sources import Sources
from pulsenet.wire.messages import GetHoldings, HeadReply, HoldingsReply, Message, Refusal

PEERS = [PeerId(bytes([number]) * 32) for number in range(1, 40)]
A = PEERS[0]
BLOBS = [compute_digest(bytes([number])) for number in range(8)]
BLOB = BLOBS[0]


class Bench:
    def __init__(self, peer_count: int = 1, blob_count: int = 1) -> None:
        self.sources = Sources(lambda count: count - 1)
        for peer_id in PEERS[:peer_count]:
            self.sources.connect(peer_id)
        ids = itertools.count()
        self.machine = HoldingsFetcher(self.sources, lambda: next(ids))
        chunk = compute_digest(b"chunk")
        self.pickers = {b: Picker([chunk], [0], 1, own_id=None, draw=lambda n: 0) for b in BLOBS[:blob_count]}
        self.machine.set_blobs(self.pickers)
        self.targets = PEERS[:peer_count]

    def pump(self, now: float) -> list[SendRequest]:
        effects = self.machine.pump(lambda blob_id: self.targets, now)
        assert all(isinstance(effect, SendRequest) for effect in effects)
        return [effect for effect in effects if isinstance(effect, SendRequest)]

    def reply(self, request: SendRequest, reply: Message, now: float) -> tuple[list[Effect], Missing | None]:
        return self.machine.handle(ReplyReceived(request.request_id, request.peer_id, reply), now)

    def wake(self, now: float) -> float | None:
        return self.machine.next_wake(lambda blob_id: self.targets, now)


HELD = HoldingsReply(BLOB, b"\x80", b"\x00")
NOTHING = HoldingsReply(BLOB, b"\x00", b"\x00")


def test_a_peer_is_asked_once_at_a_time_and_its_answer_reaches_the_picker() -> None:
    bench = Bench()
    (request,) = bench.pump(0.0)
    assert request.message == GetHoldings(BLOB)
    assert bench.pump(0.1) == []
    assert not bench.machine.is_answered(A, BLOB)
    assert bench.reply(request, HELD, 0.2) == ([], None)
    assert bench.machine.is_answered(A, BLOB)
    assert bench.pickers[BLOB].is_whole_at(A)


def test_questions_are_put_off_while_nothing_changes_and_come_soon_again_after_news() -> None:
    bench, now, waits = Bench(), 0.0, []
    for index in range(12):
        (request,) = bench.pump(now)
        bench.reply(request, HELD if index == 11 else NOTHING, now)
        wake = bench.wake(now)
        assert wake is not None
        waits.append(wake - now)
        assert bench.pump(wake - 0.01) == []
        now = wake
    assert waits[0] <= ASK_SECONDS_MIN + 0.01
    assert waits[:9] == sorted(waits[:9])
    assert ASK_SECONDS_MAX / 2 <= waits[10] <= ASK_SECONDS_MAX + 0.01
    assert waits[11] <= ASK_SECONDS_MIN + 0.01


def test_few_blobs_and_few_peers_are_asked_about() -> None:
    bench = Bench(peer_count=30, blob_count=8)
    requests = bench.pump(0.0)
    assert len(requests) == BLOBS_MAX * PEERS_MAX
    assert {request.message for request in requests} == {GetHoldings(blob_id) for blob_id in BLOBS[:BLOBS_MAX]}


def test_who_knows_nothing_of_the_blob_is_told_to_the_owner() -> None:
    bench = Bench()
    (request,) = bench.pump(0.0)
    bench.pickers[BLOB].note(A, HELD)
    assert bench.reply(request, Refusal("not-found", "", 0), 0.1) == ([], Missing(A, BLOB))
    assert bench.machine.is_answered(A, BLOB)
    assert not bench.pickers[BLOB].knows(A)


def test_an_older_node_is_remembered_as_one_that_tells_nothing() -> None:
    bench = Bench()
    (request,) = bench.pump(0.0)
    bench.reply(request, Refusal("busy", "", 0), 0.1)
    source = bench.sources.get(A)
    assert source is not None
    assert source.tells_holdings
    (request,) = bench.pump(10.0)
    bench.reply(request, Refusal("unexpected", "", 0), 10.1)
    assert not source.tells_holdings


@pytest.mark.parametrize("reply", [HeadReply(None), HoldingsReply(BLOB, b"", b""), HoldingsReply(BLOB, b"\x01", b"\0")])
def test_another_answer_costs_a_strike(reply: Message) -> None:
    bench = Bench()
    (request,) = bench.pump(0.0)
    effects, missed = bench.reply(request, reply, 0.1)
    assert missed is None
    assert isinstance(effects[0], StrikePeer)
    assert not bench.pickers[BLOB].knows(A)


def test_failed_and_silent_questions_count_as_failures_and_are_asked_again() -> None:
    bench = Bench()
    (request,) = bench.pump(0.0)
    assert bench.machine.handle(RequestFailed(request.request_id, A, "closed"), 0.1) == ([], None)
    source = bench.sources.get(A)
    assert source is not None
    assert source.failure_count == 1
    (request,) = bench.pump(5.0)
    bench.machine.handle(RequestDone(request.request_id, A), 5.1)
    (request,) = bench.pump(20.0)
    assert bench.pump(20.0 + TIMEOUT_SECONDS + GRACE_SECONDS) == []
    assert source.failure_count == 3
    assert bench.reply(request, HELD, 60.0) == ([], None)
    assert not bench.pickers[BLOB].knows(A)


def test_a_lost_peer_and_a_blob_no_longer_wanted_are_forgotten() -> None:
    bench = Bench(peer_count=2)
    first, second = bench.pump(0.0)
    bench.machine.lose_peer(A)
    assert bench.reply(first, HELD, 0.1) == ([], None)
    assert not bench.pickers[BLOB].knows(A)
    bench.machine.set_blobs({})
    assert bench.reply(second, HELD, 0.1) == ([], None)
    assert bench.wake(0.2) is None
    assert bench.machine.handle(RequestFailed(99, A, "closed"), 0.1) == ([], None)


def test_a_peer_that_is_no_source_any_more_tells_nothing() -> None:
    bench = Bench()
    (request,) = bench.pump(0.0)
    bench.sources.disconnect(A)
    assert bench.reply(request, HELD, 0.1) == ([], None)
    assert not bench.pickers[BLOB].knows(A)


def test_a_long_list_is_asked_about_less_often() -> None:
    bench = Bench()
    digests = [Digest(number.to_bytes(32, "big")) for number in range(16_384)]
    picker = Picker(digests, range(16_384), 16_384, own_id=None, draw=lambda n: 0)
    bench.machine.set_blobs({BLOB: picker})
    (request,) = bench.pump(0.0)
    bench.reply(request, HoldingsReply(BLOB, bytes(2048), bytes(2048)), 0.0)
    wake = bench.wake(0.0)
    assert wake is not None
    assert wake > 2.0


def test_silence_about_a_blob_that_is_no_longer_wanted_still_counts_against_the_peer() -> None:
    bench = Bench()
    bench.pump(0.0)
    bench.machine.set_blobs({})
    bench.pump(TIMEOUT_SECONDS + GRACE_SECONDS)
    source = bench.sources.get(A)
    assert source is not None
    assert source.failure_count == 1
    assert bench.wake(TIMEOUT_SECONDS + GRACE_SECONDS) is None
