"""What comes late, twice, or to the wrong one: nothing is mixed by it, and nobody waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pulsenet.chain.records import Share, ShareKind
from pulsenet.chain.signing import decode_signed
from pulsenet.ids import PeerId, compute_digest
from pulsenet.node.courier import Courier
from pulsenet.node.effects import Count, Effect, SendRequest
from pulsenet.node.events import PeerConnected, PeerLost, ReplyReceived, RequestFailed, StoreFailed, TermSeen
from pulsenet.node.ledger_machine import STORE_RETRY_SECONDS
from pulsenet.node.mixing.debts import ASK_SECONDS, Debts
from pulsenet.node.mixing.effects import CheckMean, CombineParts, MixReady, StartMixing, StoreState
from pulsenet.node.mixing.events import (
    AdoptFailed,
    CombineFailed,
    DebtName,
    MeanChecked,
    MixingAttached,
    PartFailed,
    PartSlice,
    PartStored,
    ResultWanted,
    StateStored,
)
from pulsenet.node.mixing.journal import Exchange, Journal, Stand
from pulsenet.node.mixing.reach import GRACE_SECONDS, Reach
from pulsenet.outer.mixing.settings import Job, MixingVariant
from pulsenet.testing.fakes import make_key
from pulsenet.testing.toy_mixing import SIZE, read_values
from pulsenet.wire.messages import GetChunkList, GetRoster, GetShares, PushReply, RosterReply, SharesReply
from pulsenet.wire.schema import decode_value

MakeDesk = Callable[..., Any]
PEER, OTHER = make_key("peer"), make_key("other")
PART = PartSlice(compute_digest(b"part"), 10, 2, 0)


def shares_of(records: tuple[bytes, ...]) -> list[Share]:
    return [decode_value(Share, decode_signed(record).payload) for record in records]


def begin_globally(make_desk: MakeDesk, place: int = 0, **changes: Any) -> Any:
    """One of three whose vector is handed over in slices of 3, 3 and 2."""
    return make_desk(place, 3, variant=MixingVariant.GLOBAL_M1, **changes).begin(np.ones(3), np.ones(3), np.ones(2))


class Book:
    """Debts over a journal that holds one exchange that was answered and not taken."""

    def __init__(self, stand: Stand = Stand.ANSWERED) -> None:
        self.journal, self.courier = Journal(None), Courier()
        self.journal.open(5, None)
        self.exchange = Exchange(4, 2, PEER, stand, PART, PART, (), b"share")
        self.journal.note(self.exchange)
        self.debts = Debts(self.journal, self.courier)
        self.courier.connected.add(PEER)

    def ask(self, now: float) -> list[Effect]:
        return self.debts.ask(now, {}, 5)

    def stands(self) -> list[Stand]:
        return list(self.journal.stands().values())


class TestDebts:
    def test_only_what_is_owed_is_settled(self) -> None:
        book = Book()
        assert book.debts.settle((DebtName(4, Job.MIX2), DebtName(3, Job.MIX2))) == []
        assert book.stands() == [Stand.ANSWERED]

    def test_only_the_partner_says_that_it_took(self, make_desk: MakeDesk) -> None:
        desk, book = make_desk(), Book()
        (share,) = shares_of((desk.share(desk.keys[1], PART, kind=ShareKind.TAKEN, round_index=4, job=2),))
        assert book.debts.take_taken(share) == []
        assert book.stands() == [Stand.ANSWERED]

    @pytest.mark.parametrize("answer", ["failed", "odd"])
    def test_a_question_without_an_answer_is_asked_again(self, answer: str) -> None:
        book = Book()
        (request,) = book.ask(0.0)
        assert isinstance(request, SendRequest)
        event: Any = RequestFailed(request.request_id, PEER, "timeout")
        if answer == "odd":
            event = ReplyReceived(request.request_id, PEER, PushReply(True, ""))
        assert book.debts.handle(event, 1.0) == []
        assert book.ask(1.0 + ASK_SECONDS / 2) == []
        assert len(book.ask(1.0 + ASK_SECONDS)) == 1

    def test_an_answer_about_what_was_settled_meanwhile_settles_nothing_more(self) -> None:
        book = Book()
        (request,) = book.ask(0.0)
        assert isinstance(request, SendRequest)
        book.journal.turn(book.exchange, Stand.OWED)
        reply = SharesReply(9, 0, False, ())
        assert book.debts.handle(ReplyReceived(request.request_id, PEER, reply), 1.0) == []
        assert book.stands() == [Stand.OWED]

    def test_who_comes_again_is_asked_at_once_and_nobody_else(self) -> None:
        book = Book()
        (request,) = book.ask(0.0)
        assert isinstance(request, SendRequest)
        book.debts.handle(RequestFailed(request.request_id, PEER, "closed"), 1.0)
        book.debts.note_connected(OTHER)
        assert book.ask(1.1) == []
        book.debts.note_connected(PEER)
        assert len(book.ask(1.1)) == 1

    def test_what_is_not_there_is_dropped_without_a_word_to_the_disk(self) -> None:
        book = Book()
        book.journal.save(())
        book.journal.drop(1, 1)
        assert not book.journal.is_changed


def test_of_thousands_that_left_the_first_are_forgotten() -> None:
    reach = Reach(Courier())
    keys = [PeerId(number.to_bytes(32, "big")) for number in range(4_098)]
    for key in keys:
        reach.handle(PeerConnected(key, (), outbound=True), 0.0)
        reach.handle(PeerLost(key, "closed"), 50.0)
    assert [reach.lost_at(key, 1.0) for key in keys[:2]] == [1.0 + GRACE_SECONDS] * 2
    assert reach.lost_at(keys[2], 1.0) == 50.0 + GRACE_SECONDS


class TestMembers:
    def test_who_is_not_on_the_roster_mixes_nothing_and_waits_for_nobody(self, make_desk: MakeDesk) -> None:
        desk = make_desk(0, 3)
        desk.convene(members=tuple(desk.keys[1:]))
        desk.connect()
        desk.open()
        for round_index in (0, 1):
            record = desk.share(desk.keys[1], desk.part(np.ones(SIZE)), round_index=round_index)
            assert desk.push(desk.keys[1], record) == "unexpected"
        desk.hand_over(np.ones(SIZE))
        (ready,) = desk.find(MixReady)
        assert (ready.slices, ready.reason) == ((), "")

    def test_the_only_member_mixes_with_nobody(self, make_desk: MakeDesk) -> None:
        desk = make_desk(0, 1).begin()
        desk.hand_over(np.ones(SIZE))
        (ready,) = desk.find(MixReady)
        assert (ready.slices, ready.reason) == ((), "")

    def test_rosters_come_as_an_answer_and_bad_ones_are_counted(self, make_desk: MakeDesk) -> None:
        desk = make_desk(0)
        desk.tell(MixingAttached(0, SIZE))
        desk.connect()
        desk.wait(3.0)
        request = next(e for e in desk.find(SendRequest) if isinstance(e.message, GetRoster))
        good, bad = desk.roster(), desk.roster(number=2, members=tuple(sorted((*desk.keys, desk.stranger))))
        desk.tell(ReplyReceived(request.request_id, request.peer_id, RosterReply((desk.vote(),), (good, bad))))
        assert Count("rejected", "untrusted") in desk.effects
        assert desk.rosters.records() == (good,)
        desk.wait(60.0)
        again = [e for e in desk.find(SendRequest) if isinstance(e.message, GetRoster)][-1]
        desk.tell(ReplyReceived(again.request_id, again.peer_id, RosterReply((), (good,))))
        assert desk.rosters.records() == (good,)


class TestParts:
    def test_a_second_vector_and_a_second_wish_change_nothing(self, make_desk: MakeDesk) -> None:
        desk = make_desk().begin()
        desk.hand_over(np.ones(SIZE))
        before = [share.blob_id for _, share in desk.pushed()]
        desk.hand_over(np.full(SIZE, 9.0))
        desk.tell(PartFailed(0, Job.MIX1, "full"))
        assert [share.blob_id for _, share in desk.pushed()] == before
        assert desk.find(MixReady) == []

    def test_a_vector_in_another_number_of_slices_is_none(self, make_desk: MakeDesk) -> None:
        desk = make_desk().begin()
        desk.tell(PartStored(0, Job.MIX1, (PART, PART), ()))
        assert desk.pushed() == []

    def test_a_vector_of_all_comes_once(self, make_desk: MakeDesk) -> None:
        desk = begin_globally(make_desk)
        before = len(desk.pushed())
        desk.hand_over(np.ones(3), np.ones(3), np.ones(2))
        assert len(desk.pushed()) == before

    def test_without_a_vector_a_mean_of_all_is_waited_for_to_the_end_only(self, make_desk: MakeDesk) -> None:
        desk = make_desk(0, 3, variant=MixingVariant.GLOBAL_M1).begin()
        desk.tell(ResultWanted(0, Job.MIX1))
        desk.wait(5.0)
        assert desk.find(MixReady) == []
        desk.wait(5.0)
        (ready,) = desk.find(MixReady)
        assert (ready.slices, ready.reason) == ((), "part")


class TestMeansOfAll:
    def give_parts(self, desk: Any, size: int = 3) -> None:
        for key in desk.keys:
            if key != desk.me:
                desk.push(key, desk.share(key, desk.part(np.full(size, 4.0)), slice_count=3))
        desk.serve()

    def give_mean(self, desk: Any, place: int = 1) -> None:
        part = desk.part(np.full(3 if place < 2 else 2, 2.0))
        changes = {"kind": ShareKind.MEAN, "slice_count": 3, "slice_index": place, "contributors": b"\xe0"}
        assert desk.push(desk.keys[place], desk.share(desk.keys[place], part, **changes)) == ""
        desk.serve()

    def test_an_answer_to_no_order_means_nothing(self, make_desk: MakeDesk) -> None:
        desk = begin_globally(make_desk)
        desk.tell(MeanChecked(99, ""))
        desk.tell(CombineFailed(99, ()))
        assert desk.find(MixReady) == []

    def test_an_owner_that_cannot_combine_gives_up_and_takes_no_part_any_more(self, make_desk: MakeDesk) -> None:
        desk = begin_globally(make_desk)
        self.give_parts(desk)
        (order,) = desk.find(CombineParts)
        desk.tell(CombineFailed(order.number, ()))
        assert desk.pushed(ShareKind.MEAN) == []
        late = desk.share(desk.keys[1], desk.part(np.full(3, 5.0)), slice_count=3)
        assert desk.push(desk.keys[1], late) == "round"

    def test_a_part_of_another_shape_is_refused_and_blamed(self, make_desk: MakeDesk) -> None:
        desk = begin_globally(make_desk)
        self.give_parts(desk, size=5)
        assert desk.effects.count(Count("rejected", "shape")) == 2

    def test_orders_that_a_full_disk_swallowed_are_given_again(self, make_desk: MakeDesk) -> None:
        desk = begin_globally(make_desk)
        self.give_parts(desk)
        self.give_mean(desk)
        orders = [e for e in desk.effects if isinstance(e, CombineParts | CheckMean)]
        assert {type(order) for order in orders} == {CombineParts, CheckMean}
        desk.effects = []
        desk.tell(StoreFailed(None, "enospc"))
        desk.wait(STORE_RETRY_SECONDS)
        assert [e for e in desk.effects if isinstance(e, CombineParts | CheckMean)] == orders

    def test_a_joiner_is_offered_the_mean_once_all_of_it_is_known(self, make_desk: MakeDesk) -> None:
        desk = begin_globally(make_desk)
        asked = GetShares(None, 0, 0)
        self.give_parts(desk)
        desk.work()
        self.give_mean(desk, 1)
        desk.work()
        assert desk.machine.reply_shares(asked, desk.stranger).shares == (), "a slice is not here"
        self.give_mean(desk, 2)
        desk.work()
        shares = shares_of(desk.machine.reply_shares(asked, desk.stranger).shares)
        assert [(share.kind, share.slice_index, share.peer_id) for share in shares] == [
            (ShareKind.MEAN, place, key) for place, key in enumerate(desk.keys)
        ]
        rest = desk.machine.reply_shares(GetShares(None, 0, 2), desk.stranger).shares
        assert shares_of(rest) == shares[2:]


class TestStatesForJoiners:
    def test_a_pair_offers_its_own_vector(self, make_desk: MakeDesk) -> None:
        desk = make_desk().begin()
        desk.hand_over(np.ones(SIZE))
        (share,) = shares_of(desk.machine.reply_shares(GetShares(None, 0, 0), desk.stranger).shares)
        assert (share.kind, share.job, share.peer_id) == (ShareKind.PART, 1, desk.me)
        assert (read_values(desk.store, share) == 1.0).all()

    def test_without_anything_to_offer_a_state_is_stored_once_a_round(self, make_desk: MakeDesk) -> None:
        desk = make_desk().begin()
        asked = GetShares(None, 0, 0)
        for _ in range(2):
            assert desk.machine.reply_shares(asked, desk.stranger).shares == ()
            desk.wait(0.1)
        assert len(desk.find(StoreState)) == 1
        desk.tell(StateStored(0, desk.part(np.full(SIZE, 3.0), store=desk.store)))
        (share,) = shares_of(desk.machine.reply_shares(asked, desk.stranger).shares)
        assert (share.job, share.round_index, share.slice_count) == (0, 0, 1)
        desk.open(1)
        desk.machine.reply_shares(asked, desk.stranger)
        desk.wait(0.1)
        assert len(desk.find(StoreState)) == 1, "a state of the round before is new enough"

    def test_a_state_that_nobody_could_tell_from_a_strangers_is_not_offered(self, make_desk: MakeDesk) -> None:
        desk = make_desk(0, 3)
        desk.tell(StateStored(0, PART))
        desk.convene(members=tuple(desk.keys[1:]))
        desk.tell(StateStored(0, PART))
        assert desk.machine.reply_shares(GetShares(None, 0, 0), desk.stranger).shares == ()

    def test_a_round_that_is_over_takes_nothing(self, make_desk: MakeDesk) -> None:
        desk = make_desk().begin()
        desk.open(1)
        assert not desk.machine.reply_shares(GetShares(0, 1, 0), desk.keys[1]).is_open
        assert desk.machine.reply_shares(GetShares(1, 1, 0), desk.keys[1]).is_open
        desk.hand_over(np.ones(SIZE), round_index=1)
        assert desk.machine.reply_shares(GetShares(1, 1, 0), desk.stranger).shares == (), "no member asked"


class TestJoiners:
    def join(self, make_desk: MakeDesk) -> tuple[Any, list[Any]]:
        desk = make_desk(0, 3)
        desk.convene()
        desk.connect()
        desk.tell(MixingAttached(None, SIZE))
        return desk, [e for e in desk.find(SendRequest) if isinstance(e.message, GetShares)]

    def test_a_joiner_whose_question_fails_asks_again(self, make_desk: MakeDesk) -> None:
        desk, asked = self.join(make_desk)
        desk.effects = []
        for request in asked:
            desk.tell(RequestFailed(request.request_id, request.peer_id, "timeout"))
        desk.wait(30.0)
        assert [e for e in desk.find(SendRequest) if isinstance(e.message, GetShares)] or desk.find(StartMixing)

    def test_a_mean_of_which_a_slice_lacks_is_asked_on_for(self, make_desk: MakeDesk) -> None:
        desk = make_desk(0, 3, MixingVariant.GLOBAL_M1)
        desk.convene()
        desk.connect()
        desk.tell(MixingAttached(None, SIZE))
        (request, *_) = [e for e in desk.find(SendRequest) if isinstance(e.message, GetShares)]
        changes = {"kind": ShareKind.MEAN, "slice_count": 3, "contributors": b"\xe0", "round_index": 2}
        records = [
            desk.share(key, desk.part(np.full(3 if place < 2 else 2, 1.0), 2), slice_index=place, **changes)
            for place, key in enumerate(desk.keys)
        ]
        desk.effects = []
        first = SharesReply(3, 0, False, tuple(records[:2]))
        desk.tell(ReplyReceived(request.request_id, request.peer_id, first))
        again = [e for e in desk.find(SendRequest) if isinstance(e.message, GetShares) and e.peer_id == request.peer_id]
        assert [e.message for e in again] == [GetShares(None, 0, 2)]
        last = SharesReply(3, 0, False, tuple(records[2:]))
        desk.tell(ReplyReceived(again[0].request_id, request.peer_id, last))
        desk.wait(30.0)
        desk.serve()
        (start,) = desk.find(StartMixing)
        assert start.is_consensus
        assert len(start.parts) == 3


def test_a_joiner_that_has_chosen_nothing_yet_goes_on_looking(make_desk: MakeDesk) -> None:
    desk = make_desk(0, 3)
    desk.convene()
    desk.connect()
    desk.tell(MixingAttached(None, SIZE))
    asked = [e for e in desk.find(SendRequest) if isinstance(e.message, GetShares)]
    desk.tell(AdoptFailed("decode"))
    for request in asked:
        record = desk.share(request.peer_id, desk.part(np.ones(SIZE), 2), round_index=2)
        desk.tell(ReplyReceived(request.request_id, request.peer_id, SharesReply(3, 0, False, (record,))))
    desk.serve()
    (start,) = desk.find(StartMixing)
    assert start.round_index == 3
    desk.wait(1.0)
    assert desk.find(StartMixing) == [start]


class TestEndsOfAJob:
    def test_a_word_of_the_partner_after_the_end_ends_nothing_twice(self, make_desk: MakeDesk) -> None:
        desk = make_desk().begin()
        desk.hand_over(np.ones(SIZE))
        desk.judge("round")
        (ready,) = desk.find(MixReady)
        assert ready.reason == "over"
        desk.judge("round")
        assert desk.find(MixReady) == [ready]

    def test_a_part_of_another_size_is_not_fetched(self, make_desk: MakeDesk) -> None:
        desk = make_desk().begin()
        desk.hand_over(np.ones(SIZE))
        part = desk.part(np.ones(SIZE + 1))
        desk.push(desk.keys[1], desk.share(desk.keys[1], part))
        asked = [e.message for e in desk.find(SendRequest) if isinstance(e.message, GetChunkList)]
        assert part.blob_id not in [message.blob_id for message in asked]

    def test_a_word_on_a_slice_changes_nothing_of_a_mean_of_all(self, make_desk: MakeDesk) -> None:
        desk = begin_globally(make_desk)
        desk.judge("round")
        assert desk.find(MixReady) == []
        desk.tell(ResultWanted(0, Job.MIX1))
        desk.tell(ResultWanted(0, Job.MIX1))
        desk.wait(10.0)
        assert len(desk.find(MixReady)) == 1


class TestMachine:
    def test_who_names_an_unknown_roster_is_asked_for_it(self, make_desk: MakeDesk) -> None:
        desk = make_desk(0, 3).begin()
        desk.wait(5.0)
        desk.effects = []
        key = desk.keys[1]
        assert desk.push(key, desk.share(key, desk.part(np.ones(SIZE)), roster=bytes(32))) == "roster"
        desk.wait(5.0)
        assert key in [e.peer_id for e in desk.find(SendRequest) if e.message == GetRoster(None)]

    def test_a_share_of_a_job_that_the_run_does_not_mix_is_for_nobody(self, make_desk: MakeDesk) -> None:
        desk = begin_globally(make_desk)
        key = desk.keys[1]
        record = desk.share(key, desk.part(np.ones(3)), job=2, slice_count=3)
        assert desk.push(key, record) == "unexpected"

    def test_the_order_to_begin_is_given_again_after_a_full_disk(self, make_desk: MakeDesk) -> None:
        desk = make_desk(0)
        desk.convene()
        desk.tell(MixingAttached(0, SIZE))
        (order,) = desk.find(StartMixing)
        desk.effects = []
        desk.tell(StoreFailed(None, "enospc"))
        desk.wait(STORE_RETRY_SECONDS)
        assert desk.find(StartMixing) == [order]

    def test_a_term_that_is_heard_of_is_known(self, make_desk: MakeDesk) -> None:
        desk = make_desk(0)
        desk.tell(TermSeen((desk.vote(),), desk.coordinator))
        assert desk.ledger.mandate is not None
        assert desk.ledger.mandate.coordinator == desk.coordinator
        assert desk.machine.works == {}
        assert desk.machine.kept_count == 0
