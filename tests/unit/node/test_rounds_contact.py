"""A trainer's line to the coordinator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pulsenet import limits
from pulsenet.chain.ledger import Ledger
from pulsenet.ids import compute_digest
from pulsenet.node.courier import Courier
from pulsenet.node.effects import SendRequest
from pulsenet.node.events import ReplyReceived
from pulsenet.node.rounds_contact import (
    POLL_SECONDS,
    POLL_WAITING_SECONDS,
    REMIND_SECONDS,
    RESEND_SECONDS,
    SENT_IDS_MAX,
    WAIT_SECONDS_MAX,
    Contact,
)
from pulsenet.wire.messages import GetRounds, PushContribution, PushReply, Refusal

NAME = compute_digest(b"name")


class Bench:
    def __init__(self, run: Any) -> None:
        self.run = run
        trust = run.trust()
        self.ledger = Ledger(trust)
        self.courier = Courier()
        self.contact = Contact(run.seat(run.third, trust, self.ledger), self.courier)

    def elect(self, term: int = 1) -> None:
        self.ledger.accept_mandate((self.run.vote(self.run.publisher, term=term),))

    def connect(self) -> None:
        self.courier.connected.add(self.run.publisher.peer_id)

    def reply(self, reply: Any, now: float, request_id: int = 1) -> None:
        self.contact.take_reply(ReplyReceived(request_id, self.run.publisher.peer_id, reply), now)


@pytest.fixture
def bench(run: Any) -> Bench:
    return Bench(run)


def test_nothing_is_sent_before_a_coordinator_is_known_and_reached(bench: Bench) -> None:
    bench.contact.begin(NAME)
    assert not bench.contact.may_send(0.0)
    bench.elect()
    assert not bench.contact.may_send(0.0)
    bench.connect()
    assert bench.contact.may_send(0.0)


def test_a_contribution_is_sent_again_until_it_is_taken(bench: Bench) -> None:
    bench.elect()
    bench.connect()
    bench.contact.begin(NAME)
    assert bench.contact.may_send(0.0)
    (request,) = bench.contact.send(b"record")
    assert isinstance(request, SendRequest)
    assert request.message == PushContribution(b"record")
    assert not bench.contact.may_send(RESEND_SECONDS - 0.1)
    assert bench.contact.may_send(RESEND_SECONDS)
    bench.reply(PushReply(accepted=True, reason=""), 3.0, request.request_id)
    assert not bench.contact.may_send(3.0 + REMIND_SECONDS - 0.1)
    assert bench.contact.may_send(3.0 + REMIND_SECONDS)


def test_a_contribution_that_is_sent_for_weeks_takes_no_more_room_each_time(bench: Bench) -> None:
    bench.elect()
    bench.connect()
    bench.contact.begin(NAME)
    for _ in range(SENT_IDS_MAX + 1):
        (request,) = bench.contact.send(b"record")
    assert len(bench.contact._sent_ids) == SENT_IDS_MAX
    assert isinstance(request, SendRequest)
    assert bench.contact.may_send(0.0)
    bench.reply(PushReply(accepted=True, reason=""), 3.0, request.request_id)
    assert not bench.contact.may_send(3.0 + RESEND_SECONDS), "the newest answer counts"


def test_a_new_term_is_told_at_once(bench: Bench) -> None:
    bench.elect(1)
    bench.connect()
    bench.contact.begin(NAME)
    assert bench.contact.may_send(0.0)
    assert not bench.contact.may_send(0.1)
    bench.elect(2)
    assert bench.contact.may_send(0.1)


def test_a_refused_contribution_makes_the_trainer_ask_how_far_the_run_is(bench: Bench) -> None:
    bench.elect()
    bench.connect()
    assert bench.contact.poll(0.0, from_round_index=3, is_waiting=False)
    assert bench.contact.poll(1.0, from_round_index=3, is_waiting=False) == []
    (request,) = bench.contact.send(b"record")
    assert isinstance(request, SendRequest)
    bench.reply(PushReply(accepted=False, reason="round"), 2.0, request.request_id)
    (question,) = bench.contact.poll(2.0, from_round_index=3, is_waiting=False)
    assert isinstance(question, SendRequest)
    assert question.message == GetRounds(3)


def test_questions_come_more_often_while_everything_waits(bench: Bench) -> None:
    bench.connect()
    bench.contact.poll(0.0, from_round_index=0, is_waiting=False)
    assert bench.contact.next_wake(0.0) == POLL_SECONDS
    assert bench.contact.poll(POLL_WAITING_SECONDS - 0.1, from_round_index=0, is_waiting=True) == []
    assert bench.contact.poll(2 * POLL_WAITING_SECONDS, from_round_index=0, is_waiting=True)


def test_a_busy_donor_is_left_alone_for_as_long_as_it_said(bench: Bench) -> None:
    bench.connect()
    bench.contact.poll(0.0, from_round_index=0, is_waiting=True)
    bench.reply(Refusal("busy", "", 60_000), 0.1)
    assert (bench.contact.refusal, bench.contact.wait_seconds) == ("busy", 60.0)
    assert bench.contact.poll(59.0, from_round_index=0, is_waiting=True) == []
    assert bench.contact.poll(60.1, from_round_index=0, is_waiting=True)
    assert bench.contact.refusal == ""


def test_a_peer_that_says_to_wait_for_ever_keeps_nobody_from_asking(bench: Bench) -> None:
    bench.connect()
    bench.contact.poll(0.0, from_round_index=0, is_waiting=True)
    bench.reply(Refusal("busy", "", (1 << 63) - 1), 0.0)
    assert bench.contact.next_wake(0.0) == WAIT_SECONDS_MAX
    assert bench.contact.poll(WAIT_SECONDS_MAX, from_round_index=0, is_waiting=True)


def test_silence_is_a_lease_without_a_sign(bench: Bench) -> None:
    assert bench.contact.is_silent(0.0)
    bench.elect()
    bench.contact.note_heard(bench.run.stranger.peer_id, 0.0)
    assert bench.contact.is_silent(0.0)
    bench.contact.note_heard(bench.run.publisher.peer_id, 0.0)
    assert not bench.contact.is_silent(limits.VOTE_LEASE_SECONDS)
    assert bench.contact.is_silent(limits.VOTE_LEASE_SECONDS + 0.1)


def test_nobody_is_asked_where_nobody_is(bench: Bench) -> None:
    assert bench.contact.poll(0.0, from_round_index=0, is_waiting=True) == []
    assert bench.contact.next_wake(0.0) is None


def test_members_are_asked_before_others_and_only_their_answer_informs(bench: Bench) -> None:
    member, stranger = bench.run.publisher.peer_id, bench.run.stranger.peer_id
    assert not bench.contact.is_informed()
    bench.courier.connected.add(stranger)
    (question,) = bench.contact.poll(0.0, from_round_index=0, is_waiting=True, members_first=True)
    assert isinstance(question, SendRequest)
    assert question.peer_id == stranger
    bench.contact.note_answer(stranger)
    assert not bench.contact.is_informed()
    bench.connect()
    for now in (10.0, 20.0, 30.0):
        (question,) = bench.contact.poll(now, from_round_index=0, is_waiting=True, members_first=True)
        assert isinstance(question, SendRequest)
        assert question.peer_id == member
    bench.contact.note_answer(member)
    assert bench.contact.is_informed()


def test_a_coordinator_is_never_silent_to_itself(bench: Bench, run: Any) -> None:
    bench.elect()
    own = Contact(run.seat(run.publisher, run.trust(), bench.ledger), bench.courier)
    assert not own.is_silent(1e6)
    assert bench.contact.is_silent(1e6)


def test_an_answer_to_somebody_elses_push_says_nothing_of_the_coordinator(bench: Bench) -> None:
    bench.elect()
    bench.connect()
    bench.reply(PushReply(True, ""), 1.0, request_id=77)
    assert bench.contact.is_silent(1.0)


def test_now_and_then_the_coordinator_is_asked_how_far_the_run_is(bench: Bench, run: Any) -> None:
    bench.elect()
    bench.courier.connected |= {run.publisher.peer_id, run.second.peer_id}
    asked = set()
    for draws in ((0, 0), (1, 0), (0, 1), (1, 1)):
        values = iter(draws)
        seat = run.seat(run.third, run.trust(), bench.ledger)
        contact = Contact(replace(seat, draw=lambda count, values=values: next(values)), bench.courier)
        (request,) = contact.poll(0.0, from_round_index=0, is_waiting=False)
        asked.add((draws, request.peer_id == run.publisher.peer_id))
    assert {((0, 1), True), ((1, 1), True)} <= asked
    assert {is_coordinator for draws, is_coordinator in asked if not draws[1]} == {True, False}
