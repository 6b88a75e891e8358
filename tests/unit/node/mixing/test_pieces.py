"""The small parts: who is reached, what is kept, pushed and asked, and how contributors are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pulsenet.chain.records import Share, ShareKind
from pulsenet.chain.signing import decode_signed, record_digest
from pulsenet.errors import StorageError
from pulsenet.ids import PeerId, compute_digest
from pulsenet.node.courier import Courier
from pulsenet.node.effects import Count, Release, SendRequest
from pulsenet.node.events import PeerConnected, PeerLost, ReplyReceived, RequestFailed
from pulsenet.node.mixing.effects import StartMixing
from pulsenet.node.mixing.events import (
    AdoptFailed,
    DebtName,
    MixingAttached,
    MixingLost,
    PartsCombined,
    PartSlice,
    PartStored,
    PresenceSeen,
    ProbeSeen,
    RoundWanted,
    ShareSeen,
    StateStored,
)
from pulsenet.node.mixing.everybody import read_contributors, write_contributors
from pulsenet.node.mixing.inbox import Inbox
from pulsenet.node.mixing.joining import ALONE_SECONDS
from pulsenet.node.mixing.journal import DEBTS_MAX, MIXING_KEY, TAKEN_MAX, Exchange, Journal, Stand
from pulsenet.node.mixing.outbox import PUSH_SECONDS_MAX, PUSHES_IN_FLIGHT_MAX, Outbox
from pulsenet.node.mixing.reach import GRACE_SECONDS, Reach
from pulsenet.node.mixing.respond import event_of, respond_to_mixing
from pulsenet.outer.mixing.settings import Job
from pulsenet.testing.fakes import make_key
from pulsenet.testing.toy_mixing import SIZE
from pulsenet.wire.messages import (
    GetRoster,
    GetShares,
    PushProbe,
    PushReply,
    PushShare,
    Refusal,
    RosterReply,
    SharesReply,
)
from pulsenet.wire.schema import decode_value

MakeDesk = Callable[..., Any]
PEER = make_key("peer")
PART = PartSlice(compute_digest(b"part"), 10, 2, 0)
MEAN = PartSlice(compute_digest(b"mean"), 10, 2, 0)


def test_contributors_are_bits_in_the_rosters_order() -> None:
    members = tuple(sorted(make_key(str(index)) for index in range(11)))
    bits = write_contributors({members[0], members[9]}, members)
    assert bits == b"\x80\x40"

    class Mean:
        contributors = bits

    assert read_contributors(Mean(), members) == (members[0], members[9])  # type: ignore[arg-type]


def test_who_is_away_counts_as_lost_after_the_grace() -> None:
    reach = Reach(Courier())
    reach.handle(PeerConnected(PEER, (), outbound=True), 0.0)
    assert reach.is_here(PEER)
    assert not reach.is_lost(PEER, 100.0, 0.0)
    reach.handle(PeerLost(PEER, "closed"), 10.0)
    reach.handle(PeerLost(PEER, "closed"), 11.0)
    assert not reach.is_lost(PEER, 10.0 + GRACE_SECONDS / 2, 0.0)
    assert reach.is_lost(PEER, 10.0 + GRACE_SECONDS, 0.0)
    # Not before the training process waits, and somebody never seen not before the grace either.
    assert not reach.is_lost(PEER, 60.0, 59.0)
    assert not reach.is_lost(make_key("nobody"), 1.0, 0.0)
    reach.handle(PeerConnected(PEER, (), outbound=True), 70.0)
    assert reach.is_here(PEER)


def make_exchange(round_index: int, stand: Stand) -> Exchange:
    return Exchange(round_index, 2, PEER, stand, PART, MEAN, (), b"share")


def test_a_journal_is_read_back_as_it_was_saved() -> None:
    journal = Journal(None)
    journal.open(5, PART.blob_id)
    journal.note(make_exchange(4, Stand.OWED))
    journal.track(5, PART.blob_id)
    again = Journal(journal.save(()).value)
    assert (again.round_index, again.roster, again.blob_count) == (5, PART.blob_id, 1)
    (owed,) = again.exchanges(Stand.OWED)
    assert owed.debt.name == DebtName(4, Job.MIX2)
    with pytest.raises(StorageError):
        Journal(b"rubbish")


def test_a_journal_forgets_the_oldest_and_says_from_where_it_knows() -> None:
    journal = Journal(None)
    for index in range(TAKEN_MAX + 3):
        assert journal.note(make_exchange(index, Stand.TAKEN)) == []
    assert len(journal.exchanges(Stand.TAKEN)) == TAKEN_MAX
    assert journal.known_from == 3
    gone = [journal.note(make_exchange(1000 + index, Stand.ANSWERED)) for index in range(DEBTS_MAX + 2)]
    assert [[each.round_index for each in lost] for lost in gone if lost] == [[1000], [1001]]


def test_blobs_are_released_once_nothing_needs_them() -> None:
    journal = Journal(None)
    other = compute_digest(b"other")
    for blob_id in (PART.blob_id, MEAN.blob_id, other):
        journal.track(1, blob_id)
    journal.note(make_exchange(1, Stand.ANSWERED))
    assert journal.release_before(2, set()) == (other,)
    journal.drop(1, 2)
    assert journal.release_before(2, {PART.blob_id}) == (MEAN.blob_id,)
    journal.track(7, PART.blob_id)
    assert journal.release_before(7, set()) == ()


def test_shares_by_a_roster_that_was_replaced_are_dropped_when_the_round_opens(make_desk: MakeDesk) -> None:
    desk = make_desk(0)
    known = desk.convene()
    inbox = Inbox()
    opened = []
    for roster in (known.digest, bytes(32)):
        signed = decode_signed(desk.share(desk.keys[1], PART, round_index=3, roster=roster))
        share = decode_value(Share, signed.payload)
        opened.append(share)
        assert inbox.add(share, record_digest(signed), b"", 0) == ""
    # The second took the place of the first, which was signed for another roster.
    assert inbox.find(3, 1, ShareKind.PART, 0, desk.keys[1]) == (opened[1], b"")
    inbox.note_heard(desk.keys[1], 3)
    assert (inbox.heard_max(8), inbox.heard_max(3)) == (3, 0)
    inbox.open(3, known.digest, frozenset())
    assert len(inbox) == 0
    assert inbox.heard_max(8) == 0


def push_some(count: int) -> tuple[Outbox, Courier, list[Any]]:
    courier = Courier()
    outbox = Outbox(courier)
    keys = [PeerId(bytes([index]) * 32) for index in range(count)]
    courier.connected |= set(keys)
    for key in keys:
        outbox.add(key, PART.blob_id, b"record", 1, 0.0)
        outbox.add(key, PART.blob_id, b"record", 1, 0.0)
    return outbox, courier, outbox.pump(0.0)


def test_pushes_in_flight_are_bounded_and_end_when_judged() -> None:
    outbox, _, sent = push_some(PUSHES_IN_FLIGHT_MAX + 5)
    assert len(sent) == PUSHES_IN_FLIGHT_MAX
    assert len(outbox) == PUSHES_IN_FLIGHT_MAX + 5
    first = sent[0]
    outcome = outbox.handle(ReplyReceived(first.request_id, first.peer_id, PushReply(True, "")), 0.0)
    assert outcome is not None
    assert (outcome.receiver, outcome.code) == (first.peer_id, "")
    assert outbox.handle(ReplyReceived(first.request_id, first.peer_id, PushReply(True, "")), 0.0) is None
    assert len(outbox.pump(0.0)) == 1


def test_a_push_goes_on_until_it_is_judged_or_its_time_is_over() -> None:
    outbox, _, sent = push_some(1)
    (request,) = sent
    for reply in (Refusal("busy", "", 7000), PushReply(False, "roster")):
        assert isinstance(request, SendRequest)
        outbox.handle(ReplyReceived(request.request_id, request.peer_id, reply), 0.0)
        (request,) = outbox.pump(20.0)
    # The shell may never answer.
    wake = outbox.next_wake(20.0)
    assert wake is not None
    (request,) = outbox.pump(wake)
    outbox.handle(RequestFailed(request.request_id, request.peer_id, "timeout"), wake)
    assert outbox.pump(PUSH_SECONDS_MAX) == []
    assert len(outbox) == 0
    outbox.add(PEER, PART.blob_id, b"record", 1, 0.0)
    outbox.forget_before(2)
    assert len(outbox) == 0


def test_questions_are_shown_and_answered(make_desk: MakeDesk) -> None:
    desk = make_desk(0)
    desk.convene()
    assert event_of(GetRoster(4), PEER) == PresenceSeen(PEER, 4)
    assert event_of(GetRoster(None), PEER) is None
    assert event_of(PushShare(b"x"), PEER) == ShareSeen(b"x", PEER)
    assert event_of(PushProbe(b"x"), PEER) == ProbeSeen(b"x", PEER)
    assert event_of(GetShares(None, 0, 0), PEER) is None
    both = (desk.ledger, desk.rosters)
    reply = respond_to_mixing(GetRoster(4), PEER, *both, None)
    assert reply == RosterReply((desk.vote(),), desk.rosters.records())
    assert respond_to_mixing(PushShare(b"x"), PEER, *both, None) == PushReply(False, "unexpected")
    assert respond_to_mixing(PushProbe(b"x"), PEER, *both, desk.machine) == PushReply(False, "unexpected")
    assert respond_to_mixing(GetShares(0, 1, 0), PEER, *both, None) == SharesReply(None, 0, False, ())
    assert respond_to_mixing(PushShare(b"x"), PEER, *both, desk.machine) == PushReply(True, "")
    # Before it opened a round, a member may yet take part in any.
    assert respond_to_mixing(GetShares(3, 1, 0), PEER, *both, desk.machine) == SharesReply(None, 0, True, ())
    assert respond_to_mixing(GetShares(3, 7, 0), PEER, *both, desk.machine) == SharesReply(None, 0, False, ())


def test_a_joiner_asks_takes_whole_states_and_looks_on_where_one_is_bad(make_desk: MakeDesk) -> None:
    desk = make_desk(0, 3)
    desk.convene()
    desk.connect()
    desk.tell(MixingAttached(None, SIZE))
    asked = [e for e in desk.find(SendRequest) if isinstance(e.message, GetShares)]
    assert sorted(e.peer_id for e in asked) == desk.keys[1:]
    z = {key: desk.part(np.full(SIZE, 1.0 + place), 3) for place, key in enumerate(desk.keys)}
    for request in asked:
        key = request.peer_id
        record = desk.share(key, z[key], round_index=2 + desk.keys.index(key), job=1)
        desk.tell(ReplyReceived(request.request_id, key, SharesReply(4, 0, False, (record,))))
    desk.serve()
    (start,) = desk.find(StartMixing)
    assert (start.round_index, start.is_consensus) == (5, False)
    assert start.parts[0].blob_id == z[desk.keys[2]].blob_id
    desk.effects = []
    desk.tell(AdoptFailed("decode"))
    desk.serve()
    (start,) = desk.find(StartMixing)
    assert start.parts[0].blob_id == z[desk.keys[1]].blob_id


def let_go(desk: Any) -> set[bytes]:
    """Return the blobs that were released so far."""
    return {blob_id for effect in desk.find(Release) for blob_id in effect.blob_ids}


def test_states_that_a_joiner_fetched_are_let_go_once_it_is_in_rounds(make_desk: MakeDesk) -> None:
    """They are as large as the model, whether they were taken or not."""
    desk = make_desk(0, 3)
    desk.convene()
    desk.connect()
    desk.tell(MixingAttached(None, SIZE))
    states = set()
    for request in [e for e in desk.find(SendRequest) if isinstance(e.message, GetShares)]:
        key = request.peer_id
        z = desk.part(np.full(SIZE, 1.0 + desk.keys.index(key)), 3)
        states.add(z.blob_id)
        record = desk.share(key, z, round_index=2 + desk.keys.index(key), job=1)
        desk.tell(ReplyReceived(request.request_id, key, SharesReply(4, 0, False, (record,))))
    desk.serve()
    desk.tell(AdoptFailed("decode"))
    desk.serve()
    (_, start) = desk.find(StartMixing)
    assert states == set(Journal(desk.store.state[MIXING_KEY]).blob_ids), "a node that is killed goes on from there"
    assert let_go(desk) == set()
    for round_index in range(start.round_index, start.round_index + 3):
        desk.tell(RoundWanted(round_index))
    assert let_go(desk) == states


def test_what_is_kept_of_a_round_that_is_over_is_let_go_too(make_desk: MakeDesk) -> None:
    """It was made durable for good before this machine heard of it, and came too late."""
    desk = make_desk().begin()
    desk.open(1)
    late = [desk.part(np.full(SIZE, 3.0 + place), 0, store=desk.store) for place in range(3)]
    desk.tell(PartStored(0, Job.MIX1, (late[0],)))
    desk.tell(PartsCombined(77, late[1].blob_id, 10, 0))
    desk.tell(StateStored(1 << 40, late[2]))
    for round_index in range(2, 5):
        desk.tell(RoundWanted(round_index))
    assert let_go(desk) == {part.blob_id for part in late}


def test_a_joiner_follows_nobody_beyond_the_rosters(make_desk: MakeDesk) -> None:
    desk = make_desk(0, 3)
    desk.convene()
    desk.connect()
    desk.tell(MixingAttached(None, SIZE))
    asked = [e for e in desk.find(SendRequest) if isinstance(e.message, GetShares)]
    for request, told in zip(asked, (5, 1 << 40), strict=True):
        record = desk.share(request.peer_id, desk.part(np.ones(SIZE), 2), round_index=2)
        desk.tell(ReplyReceived(request.request_id, request.peer_id, SharesReply(told, 0, False, (record,))))
    desk.serve()
    (start,) = desk.find(StartMixing)
    assert start.round_index == 5


def test_a_joiner_that_could_not_fetch_a_state_chooses_from_new_offers(make_desk: MakeDesk) -> None:
    desk = make_desk(0, 3)
    desk.convene(round_count=64)
    desk.connect()
    desk.tell(MixingAttached(None, SIZE))

    def offer(round_index: int) -> set[bytes]:
        """Let everybody who is asked offer a state of a round; return their blobs."""
        blob_ids = set()
        asked = [e for e in desk.find(SendRequest) if isinstance(e.message, GetShares)]
        desk.effects = [e for e in desk.effects if e not in asked]
        for request in asked:
            part = desk.part(np.full(SIZE, 1.0 + desk.keys.index(request.peer_id)), round_index)
            record = desk.share(request.peer_id, part, round_index=round_index)
            desk.tell(ReplyReceived(request.request_id, request.peer_id, SharesReply(round_index, 0, False, (record,))))
            blob_ids.add(part.blob_id)
        return blob_ids

    assert len(offer(2)) == 2
    desk.wait(121.0)
    # By now both have gone on, and released what they offered.
    desk.wait(3.0)
    fresh = offer(40)
    assert len(fresh) == 2
    desk.serve()
    (start,) = desk.find(StartMixing)
    assert start.parts[0].blob_id in fresh


def test_a_joiner_refuses_states_that_nobody_signed_or_that_are_too_large(make_desk: MakeDesk) -> None:
    desk = make_desk(0)
    desk.convene()
    desk.connect()
    desk.tell(MixingAttached(None, SIZE))
    (request,) = [e for e in desk.find(SendRequest) if isinstance(e.message, GetShares)]
    other, part = desk.keys[1], desk.part(np.ones(SIZE))
    for record, code in (
        (desk.share(other, part, round_index=2, signer=desk.stranger), "untrusted"),
        (desk.share(other, part, round_index=2, job=2), "unexpected"),
        (desk.share(other, part, round_index=2, element_count=1 << 30, encoded_size_bytes=1 << 31), None),
        (desk.share(other, part, round_index=2, roster=bytes(32)), None),
    ):
        desk.tell(ReplyReceived(request.request_id, other, SharesReply(2, 0, False, (record,))))
        assert code is None or Count("rejected", code) in desk.effects
        desk.effects = []
        desk.wait(3.0)
        (request,) = [e for e in desk.find(SendRequest) if isinstance(e.message, GetShares)]
    assert desk.find(StartMixing) == []
    # While others are in rounds it waits; not for ever.
    desk.wait(900.0)
    assert desk.find(StartMixing) == [StartMixing(2)]


def test_one_that_looks_for_a_state_names_no_round_and_waits_a_little_for_others(make_desk: MakeDesk) -> None:
    desk = make_desk(0).begin()
    asker, question = desk.keys[1], GetShares(None, 0, 0)
    assert desk.machine.reply_shares(question, asker).round_index == 0
    desk.tell(MixingLost())
    desk.effects = []
    desk.tell(MixingAttached(None, SIZE))
    assert desk.machine.reply_shares(question, asker).round_index is None
    (request,) = [e for e in desk.find(SendRequest) if isinstance(e.message, GetShares)]
    desk.tell(ReplyReceived(request.request_id, asker, SharesReply(None, 0, False, ())))
    assert desk.find(StartMixing) == [], "it was in a round, so others may be who are not connected yet"
    desk.wait(ALONE_SECONDS)
    assert desk.find(StartMixing) == [StartMixing(1)]


def test_whoever_is_alone_begins_by_itself(make_desk: MakeDesk) -> None:
    alone = make_desk(0, 1)
    alone.tell(MixingAttached(None, SIZE))
    assert alone.find(StartMixing) == [StartMixing(0)]
    unheard = make_desk(0, 2)
    unheard.tell(MixingAttached(None, SIZE))
    assert unheard.find(StartMixing) == []
    unheard.wait(10.0)
    assert unheard.find(StartMixing) == [StartMixing(0)]
