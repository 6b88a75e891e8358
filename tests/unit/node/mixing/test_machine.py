"""What a member does about honest and hostile partners, step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pulsenet.chain.records import ShareKind
from pulsenet.chain.rules import STATE_JOB
from pulsenet.node.effects import Count, Report, SaveState, SendRequest, SetTimer, StoreChunk, StrikePeer
from pulsenet.node.events import ReplyReceived, RequestFailed, StoreFailed, TimerFired
from pulsenet.node.mixing.effects import CheckMean, CombineParts, MixReady, OpenRound, StartMixing
from pulsenet.node.mixing.events import (
    CombineFailed,
    DebtName,
    MixingAttached,
    MixingLost,
    PartFailed,
    PartStored,
    ResultWanted,
    RosterSeen,
    RoundWanted,
)
from pulsenet.node.mixing.journal import MIXING_KEY, Journal, Stand
from pulsenet.node.mixing.machine import FIRST_ROSTER_SECONDS, ROSTER_SECONDS
from pulsenet.outer.mixing.settings import Job, MixingVariant
from pulsenet.testing.toy_mixing import SIZE, read_values
from pulsenet.testing.toy_training import write_blob
from pulsenet.wire.messages import GetShares, SharesReply

MakeDesk = Callable[..., Any]
ONES, TWOS = np.ones(SIZE), np.full(SIZE, 2.0)


def test_the_lower_key_offers_takes_and_says_so(make_desk: MakeDesk) -> None:
    desk = make_desk(0).begin(ONES)
    assert [(peer, share.kind) for peer, share in desk.pushed()] == [(desk.other, ShareKind.PART)]
    assert desk.push(desk.other, desk.share(desk.other, desk.part(TWOS))) == ""
    desk.serve()
    assert desk.find(MixReady) == []
    desk.work()
    (ready,) = desk.find(MixReady)
    assert not ready.is_alone
    assert (read_values(desk.store, ready.slices[0].mean) == 1.5).all()
    desk.judge("")
    assert desk.machine.stands() == {(0, 1): Stand.TAKEN}
    reply = desk.machine.reply_shares(GetShares(0, 1, 0), desk.other)
    assert not reply.is_open
    assert len(reply.shares) == 1


def answer(make_desk: MakeDesk) -> Any:
    """The upper key's member that answered an offer."""
    desk = make_desk(1).begin(ONES)
    desk.push(desk.other, desk.share(desk.other, desk.part(TWOS)))
    desk.serve()
    desk.work()
    assert [share.kind for _, share in desk.pushed()] == [ShareKind.HINT, ShareKind.PART]
    assert desk.machine.stands() == {(0, 1): Stand.ANSWERED}
    assert desk.find(MixReady) == []
    return desk


def taken(desk: Any) -> bytes:
    mean = desk.part(np.full(SIZE, 1.5))
    record: bytes = desk.share(desk.other, mean, kind=ShareKind.TAKEN)
    return record


def test_the_upper_key_answers_and_takes_when_it_hears_that_the_other_did(make_desk: MakeDesk) -> None:
    desk = answer(make_desk)
    assert desk.push(desk.other, taken(desk)) == ""
    (ready,) = desk.find(MixReady)
    assert not ready.is_alone
    assert desk.machine.stands() == {}


def test_an_answer_whose_end_is_not_heard_is_a_debt_once_the_other_says_that_it_took(make_desk: MakeDesk) -> None:
    desk = answer(make_desk)
    desk.wait(10.0)
    (ready,) = desk.find(MixReady)
    assert (ready.is_alone, ready.reason) == (True, "late")
    (asked,) = [e for e in desk.find(SendRequest) if isinstance(e.message, GetShares) and e.message.job == 1][-1:]
    reply = SharesReply(0, 0, False, (taken(desk),))

    desk.tell(ReplyReceived(asked.request_id, desk.other, reply))
    assert desk.machine.stands() == {(0, 1): Stand.OWED}
    desk.effects = []
    desk.tell(RoundWanted(1))
    (opened,) = desk.find(OpenRound)
    (debt,) = opened.mix1.debts
    assert debt.name == DebtName(0, Job.MIX1)
    assert (read_values(desk.store, debt.mean) - read_values(desk.store, debt.own) == 0.5).all()
    desk.tell(PartStored(1, Job.MIX1, (desk.part(ONES, 1, 1, desk.store),), (debt.name,)))
    assert desk.machine.stands() == {}


def test_a_late_word_that_the_other_took_is_a_debt_too(make_desk: MakeDesk) -> None:
    desk = answer(make_desk)
    desk.wait(10.0)
    assert desk.push(desk.other, taken(desk)) == ""
    desk.wait(0.1)
    assert desk.machine.stands() == {(0, 1): Stand.OWED}


def test_a_word_that_comes_a_round_late_is_a_debt_too(make_desk: MakeDesk) -> None:
    desk = answer(make_desk)
    desk.wait(10.0)
    desk.tell(RoundWanted(1))
    assert desk.push(desk.other, taken(desk)) == ""
    assert desk.machine.stands() == {(0, 1): Stand.OWED}
    assert desk.find(Count)[-1] == Count("debts", "owed")


@pytest.mark.parametrize(
    ("is_open", "known_from", "stands", "label"),
    [(True, 0, {(0, 1): Stand.ANSWERED}, None), (False, 0, {}, "void"), (False, 1, {}, "forgotten")],
)
def test_an_exchange_the_other_did_not_take_leaves_nothing(
    make_desk: MakeDesk, is_open: bool, known_from: int, stands: dict[Any, Any], label: str | None
) -> None:

    desk = answer(make_desk)
    desk.wait(10.0)
    asked = [e for e in desk.find(SendRequest) if isinstance(e.message, GetShares)][-1]
    desk.tell(ReplyReceived(asked.request_id, desk.other, SharesReply(0, known_from, is_open, ())))
    assert desk.machine.stands() == stands
    assert label is None or Count("debts", label) in desk.effects


def test_a_partner_whose_round_is_over_is_not_waited_for(make_desk: MakeDesk) -> None:
    lower = make_desk(0).begin(ONES)
    lower.judge("round")
    assert [ready.reason for ready in lower.find(MixReady)] == ["over"]
    upper = answer(make_desk)
    upper.judge("round")
    assert [ready.reason for ready in upper.find(MixReady)] == ["over"]
    assert upper.machine.stands() == {}


def test_a_partner_that_calls_an_answer_a_second_one_leaves_the_exchange_as_it_is(make_desk: MakeDesk) -> None:
    desk = make_desk(1).begin(ONES)
    desk.push(desk.other, desk.share(desk.other, desk.part(TWOS)))
    desk.serve()
    desk.work()
    assert [share.kind for _, share in desk.pushed()] == [ShareKind.HINT, ShareKind.PART]
    desk.judge("duplicate")
    assert desk.find(MixReady) == []
    assert desk.machine.stands() == {(0, 1): Stand.ANSWERED}


def test_a_partner_that_cannot_be_reached_is_waited_for_briefly(make_desk: MakeDesk) -> None:
    desk = make_desk(0).begin(ONES)
    desk.lose(desk.other)
    desk.wait(1.0)
    assert desk.find(MixReady) == []
    desk.wait(1.5)
    assert [ready.reason for ready in desk.find(MixReady)] == ["lost"]
    # What comes afterwards is too late, for good.
    assert desk.push(desk.other, desk.share(desk.other, desk.part(TWOS))) == "round"


def test_after_its_wait_a_member_keeps_its_own_and_says_that_the_job_is_closed(make_desk: MakeDesk) -> None:
    desk = make_desk(0).begin(ONES)
    desk.wait(9.9)
    assert desk.find(MixReady) == []
    desk.wait(0.2)
    assert [(ready.reason, ready.is_alone) for ready in desk.find(MixReady)] == [("late", True)]
    reply = desk.machine.reply_shares(GetShares(0, 1, 0), desk.other)
    assert (reply.is_open, [len(reply.shares)]) == (False, [1])
    # Also in its next life.
    restart(desk)
    assert not desk.machine.reply_shares(GetShares(0, 1, 0), desk.other).is_open
    assert desk.push(desk.other, desk.share(desk.other, desk.part(TWOS))) == "round"


# Restarts in a round: it is over here, and what was agreed to in it stands


def restart(desk: Any) -> None:
    """Let the machine begin again from the disk, and the others be connected."""
    desk.make_machine(desk.store.state[MIXING_KEY])
    desk.effects = []
    desk.connect()


def test_a_side_that_took_says_so_after_a_restart(make_desk: MakeDesk) -> None:
    desk = make_desk(0).begin(ONES)
    desk.push(desk.other, desk.share(desk.other, desk.part(TWOS)))
    desk.serve()
    desk.work()
    before = desk.machine.reply_shares(GetShares(0, 1, 0), desk.other)
    restart(desk)
    after = desk.machine.reply_shares(GetShares(0, 1, 0), desk.other)
    assert (after.is_open, after.shares) == (False, before.shares)
    assert len(after.shares) == 1
    # What the other said before it heard of that is answered as in the life before.
    assert desk.push(desk.other, desk.share(desk.other, desk.part(TWOS))) == ""
    assert desk.machine.stands() == {(0, 1): Stand.TAKEN}


@pytest.mark.parametrize("is_attached", [False, True])
def test_a_side_that_had_not_taken_takes_nothing_after_a_restart(make_desk: MakeDesk, is_attached: bool) -> None:
    desk = make_desk(0).begin(ONES)
    restart(desk)
    if is_attached:
        desk.tell(MixingAttached(1, SIZE))
    reply = desk.machine.reply_shares(GetShares(0, 1, 0), desk.other)
    assert (reply.is_open, reply.shares) == (False, ())
    # Whoever answers hears at once that it need not wait.
    assert desk.push(desk.other, desk.share(desk.other, desk.part(TWOS))) == "round"
    desk.hand_over(ONES)
    assert [(ready.slices, ready.reason) for ready in desk.find(MixReady)] == [((), "")]
    assert desk.pushed() == []


def test_a_round_is_over_with_its_training_process_too(make_desk: MakeDesk) -> None:
    desk = make_desk(0).begin(ONES)
    assert desk.machine.reply_shares(GetShares(0, 1, 0), desk.other).is_open
    desk.tell(MixingLost())
    assert not desk.machine.reply_shares(GetShares(0, 1, 0), desk.other).is_open
    assert desk.push(desk.other, desk.share(desk.other, desk.part(TWOS))) == "round"


def test_an_answer_is_said_again_after_a_restart_and_no_other_vector_is_shown(make_desk: MakeDesk) -> None:
    desk = answer(make_desk)
    before = desk.machine.reply_shares(GetShares(0, 1, 0), desk.other).shares
    restart(desk)
    assert desk.machine.reply_shares(GetShares(0, 1, 0), desk.other).shares == before
    assert len(before) == 1
    desk.tell(MixingAttached(1, SIZE))
    desk.hand_over(TWOS)
    assert desk.pushed() == []
    assert desk.machine.stands() == {(0, 1): Stand.ANSWERED}
    assert desk.machine.reply_shares(GetShares(0, 1, 0), desk.other).shares == before


def test_after_a_restart_an_answer_is_asked_after_at_once_and_is_a_debt_of_the_next_round(make_desk: MakeDesk) -> None:
    desk = answer(make_desk)
    restart(desk)
    desk.tell(MixingAttached(1, SIZE))
    (asked,) = [e for e in desk.find(SendRequest) if e.message == GetShares(0, 1, 0)]
    desk.tell(ReplyReceived(asked.request_id, desk.other, SharesReply(0, 0, False, (taken(desk),))))
    assert desk.machine.stands() == {(0, 1): Stand.OWED}
    desk.tell(RoundWanted(1))
    (opened,) = desk.find(OpenRound)
    assert [debt.name for debt in opened.mix1.debts] == [DebtName(0, Job.MIX1)]


def test_a_word_that_the_other_took_is_a_debt_after_a_restart_too(make_desk: MakeDesk) -> None:
    desk = answer(make_desk)
    restart(desk)
    assert desk.push(desk.other, taken(desk)) == ""
    assert desk.machine.stands() == {(0, 1): Stand.OWED}
    assert Count("debts", "owed") in desk.effects


def test_a_share_by_a_roster_that_a_newer_one_takes_over_from_is_not_mixed(make_desk: MakeDesk) -> None:
    desk = make_desk(0).begin()
    old = desk.rosters.find(5)
    desk.convene(number=2, first_round=4)
    record = desk.share(desk.other, desk.part(TWOS), round_index=5, roster=old.digest)
    assert desk.push(desk.other, record) == "roster"


# Ahead of the others


def open_alone(desk: Any, round_index: int) -> OpenRound:
    desk.effects = []
    desk.tell(RoundWanted(round_index))
    desk.wait(ROSTER_SECONDS + 0.1)
    (opened,) = desk.find(OpenRound)
    return opened


def test_who_is_beyond_every_roster_goes_back_to_the_first_round_that_it_did_not_mix_in(make_desk: MakeDesk) -> None:
    desk = make_desk(0)
    desk.convene()
    desk.connect()
    desk.open(3)
    opened = open_alone(desk, 20)
    assert (opened.round_index, opened.is_listed) == (4, True)
    # Others told of a later one meanwhile, and then the run went on.
    desk.push(desk.other, desk.share(desk.other, desk.part(TWOS), round_index=6))
    assert open_alone(desk, 20).round_index == 6
    desk.convene(number=2, first_round=10)
    assert open_alone(desk, 20).round_index == 10


def test_rounds_of_nobody_are_no_promise_and_those_of_a_roster_are(make_desk: MakeDesk) -> None:
    desk = make_desk(0)
    desk.connect()
    desk.open(0)
    desk.wait(FIRST_ROSTER_SECONDS + 0.1)
    assert open_alone(desk, 30).is_listed is False
    assert desk.machine.round_index == 30
    desk.convene(first_round=2)
    assert open_alone(desk, 31).round_index == 2
    # Until the roster is used up: none of its rounds is opened twice.
    assert open_alone(desk, 9).round_index == 9
    opened = open_alone(desk, 31)
    assert (opened.round_index, opened.is_listed) == (31, False)


def test_nobody_goes_back_where_nobody_is(make_desk: MakeDesk) -> None:
    desk = make_desk(0)
    desk.convene()
    desk.open(3)
    opened = open_alone(desk, 20)
    assert (opened.round_index, opened.is_listed) == (20, False)


# Hostile partners


def test_shares_that_are_not_for_this_round_or_member_are_refused(make_desk: MakeDesk) -> None:
    desk = make_desk(0, 4)
    known = desk.convene()
    desk.connect()
    desk.open(2)
    partner = desk.partner(2, Job.MIX1)
    third = next(key for key in desk.keys if key not in (desk.me, partner))
    part = desk.part(TWOS)
    for code, peer, record in (
        ("roster", partner, desk.share(partner, part, round_index=2, roster=bytes(32))),
        ("untrusted", partner, desk.share(desk.stranger, part, round_index=2)),
        ("untrusted", partner, desk.share(partner, part, round_index=2, signer=third)),
        ("mismatch", partner, desk.share(partner, part, round_index=8, roster=known.digest)),
        ("mismatch", partner, desk.share(partner, part, round_index=2, slice_count=3)),
        ("round", partner, desk.share(partner, part, round_index=1)),
        ("unexpected", third, desk.share(third, part, round_index=2)),
        ("unexpected", partner, desk.share(partner, part, round_index=2, job=0)),
        ("unexpected", partner, desk.share(partner, part, round_index=2, slice_count=4)),
        ("schema", partner, b"rubbish"),
        ("", partner, desk.share(partner, part, round_index=2)),
        ("", partner, desk.share(partner, part, round_index=2)),
        ("duplicate", partner, desk.share(partner, desk.part(ONES), round_index=2)),
    ):
        assert desk.push(peer, record) == code, code
    assert StrikePeer(partner, "schema") in desk.effects


def test_shares_of_rounds_to_come_are_kept_of_the_two_newest(make_desk: MakeDesk) -> None:
    desk = make_desk(0).begin()
    codes = [desk.push(desk.other, desk.share(desk.other, desk.part(TWOS), round_index=index)) for index in (3, 4, 1)]
    assert codes == ["", "", "early"]
    assert desk.push(desk.other, desk.share(desk.other, desk.part(TWOS), round_index=5)) == ""
    assert desk.push(desk.other, desk.share(desk.other, desk.part(TWOS), round_index=0)) == ""


@pytest.mark.parametrize(
    ("values", "changes", "code"),
    [
        (np.full(SIZE, np.nan), {}, "finite"),
        (np.full(SIZE, 1e30), {}, "norm"),
        (np.ones(SIZE - 1), {"element_count": SIZE}, "shape"),
        (np.ones(SIZE + 1), {}, "shape"),
        (TWOS, {"encoded_size_bytes": 5}, "chunk-list"),
    ],
)
def test_a_part_that_may_not_be_mixed_is_mixed_by_nobody(
    make_desk: MakeDesk, values: Any, changes: dict[str, Any], code: str
) -> None:
    desk = make_desk(0).begin(ONES)
    assert desk.push(desk.other, desk.share(desk.other, desk.part(values), **changes)) == ""
    desk.serve()
    desk.work()
    assert [(ready.reason, ready.is_alone) for ready in desk.find(MixReady)] == [("refused", True)]
    assert StrikePeer(desk.other, code) in desk.effects


def test_a_part_that_is_no_vector_is_mixed_by_nobody(make_desk: MakeDesk) -> None:

    desk = make_desk(0).begin(ONES)
    good = desk.part(TWOS)
    blob_id, size_bytes = write_blob(desk.others, b"rubbish of some length")
    record = desk.share(desk.other, good, blob_id=blob_id, encoded_size_bytes=size_bytes)
    desk.push(desk.other, record)
    desk.serve()
    desk.work()
    assert StrikePeer(desk.other, "decode") in desk.effects
    assert [ready.reason for ready in desk.find(MixReady)] == ["refused"]


def test_a_node_that_cannot_combine_keeps_its_own(make_desk: MakeDesk) -> None:
    desk = make_desk(0).begin(ONES)
    desk.push(desk.other, desk.share(desk.other, desk.part(TWOS)))
    desk.serve()
    (order,) = desk.find(CombineParts)
    desk.tell(CombineFailed(order.number, "enospc"))
    assert [ready.reason for ready in desk.find(MixReady)] == ["store"]


def test_a_node_whose_own_part_is_bad_blames_nobody(make_desk: MakeDesk) -> None:
    desk = make_desk(0).begin(ONES)
    desk.push(desk.other, desk.share(desk.other, desk.part(TWOS)))
    desk.serve()
    (order,) = desk.find(CombineParts)
    desk.tell(CombineFailed(order.number, "finite", ((desk.me, "finite"),)))
    assert [ready.reason for ready in desk.find(MixReady)] == ["refused"]
    assert desk.find(StrikePeer) == []


# The training process, and rounds


def test_without_a_vector_nothing_is_shown_or_taken(make_desk: MakeDesk) -> None:
    desk = make_desk(0).begin()
    desk.tell(PartFailed(0, Job.MIX1, "finite"))
    desk.tell(ResultWanted(0, Job.MIX1))
    assert [(ready.slices, ready.reason) for ready in desk.find(MixReady)] == [((), "part")]
    assert desk.pushed() == []


def test_results_of_rounds_that_are_over_are_empty(make_desk: MakeDesk) -> None:
    desk = make_desk(0).begin(ONES)
    desk.effects = []
    desk.tell(ResultWanted(7, Job.MIX1))
    assert [(ready.round_index, ready.reason, ready.slices) for ready in desk.find(MixReady)] == [(7, "over", ())]


def test_the_opening_waits_for_a_first_roster_and_not_for_one_that_does_not_come(make_desk: MakeDesk) -> None:
    desk = make_desk(0)
    desk.connect()
    desk.open()
    assert desk.find(OpenRound) == []
    desk.wait(15.0)
    (opened,) = desk.find(OpenRound)
    assert not opened.is_listed
    assert not opened.mix1.is_mixed
    desk.effects = []
    desk.tell(RoundWanted(1))
    assert [opened.round_index for opened in desk.find(OpenRound)] == [1]


def test_who_gave_up_hope_waits_again_once_a_roster_was_seen(make_desk: MakeDesk) -> None:
    desk = make_desk(0)
    desk.connect()
    desk.open()
    desk.wait(15.0)
    desk.tell(RosterSeen(b"judged by another machine of this node"))
    desk.effects = []
    desk.tell(RoundWanted(1))
    assert desk.find(OpenRound) == []
    desk.convene()
    desk.wait(0.0)
    assert [opened.is_listed for opened in desk.find(OpenRound)] == [True]


def test_a_straggler_opens_the_newest_round_that_a_member_shared_in(make_desk: MakeDesk) -> None:
    desk = make_desk(0).begin()
    desk.push(desk.other, desk.share(desk.other, desk.part(TWOS), round_index=5))
    desk.effects = []
    desk.tell(RoundWanted(1))
    assert [opened.round_index for opened in desk.find(OpenRound)] == [5]
    # No round is opened twice, whatever a checkpoint says.
    desk.tell(MixingLost())
    desk.effects = []
    desk.tell(MixingAttached(1, SIZE))
    assert desk.find(StartMixing) == [StartMixing(6)]


def test_what_the_disk_refused_is_ordered_again(make_desk: MakeDesk) -> None:
    desk = make_desk(0).begin(ONES)
    desk.push(desk.other, desk.share(desk.other, desk.part(TWOS)))
    desk.serve()
    desk.work()
    (ready,) = desk.find(MixReady)
    desk.effects = []
    desk.tell(StoreFailed(None, "enospc"))
    assert desk.find(SaveState) == []
    assert desk.machine.reply_shares(GetShares(0, 1, 0), desk.other).shares == ()
    desk.wait(5.0)
    assert desk.find(MixReady) == [ready]
    assert desk.find(SaveState)
    assert desk.machine.reply_shares(GetShares(0, 1, 0), desk.other).shares != ()


def test_without_a_training_process_what_the_disk_refused_is_only_stored_again(make_desk: MakeDesk) -> None:
    desk = make_desk(0)
    known = desk.convene()
    desk.tell(TimerFired())
    stored = desk.store.state.pop(MIXING_KEY)
    desk.tell(StoreFailed(None, "enospc"))
    desk.effects = []
    desk.wait(5.0)
    assert desk.store.state[MIXING_KEY] == stored
    assert desk.find(OpenRound) + desk.find(StartMixing) + desk.find(MixReady) == []
    assert known.record in Journal(stored).stored_rosters


def test_a_disk_that_refuses_puts_off_no_wait_that_ends_sooner(make_desk: MakeDesk) -> None:
    """Found by a seed of the simulator: a trainer waited 1.7 s longer than it had promised."""
    desk = make_desk(0).begin(ONES)
    at = desk.find(SetTimer)[-1].at
    desk.now = at - 0.5
    desk.tell(StoreFailed(None, "enospc"))
    assert desk.find(SetTimer)[-1].at == at
    desk.effects = []
    desk.wait(0.5)
    assert desk.find(SaveState), "the disk is asked again, too"


def test_a_push_that_fails_is_sent_again(make_desk: MakeDesk) -> None:
    desk = make_desk(0).begin(ONES)
    (request,) = [e for e in desk.find(SendRequest) if e.message.__class__.__name__ == "PushShare"]
    desk.effects = []
    desk.tell(RequestFailed(request.request_id, request.peer_id, "timeout"))
    desk.wait(2.0)
    assert len(desk.pushed()) == 1


# Global means


def begin_globally(make_desk: MakeDesk, place: int = 0, **changes: Any) -> Any:
    return make_desk(place, 3, MixingVariant.GLOBAL_M1, **changes).begin(np.ones(3), np.ones(3), np.ones(2))


def test_an_owner_sums_everybodys_parts_and_shows_the_mean(make_desk: MakeDesk) -> None:
    desk = begin_globally(make_desk)
    assert sorted((peer, share.slice_index) for peer, share in desk.pushed()) == [(desk.keys[1], 1), (desk.keys[2], 2)]
    for key, value in zip(desk.keys[1:], (4.0, 7.0), strict=True):
        assert desk.push(key, desk.share(key, desk.part(np.full(3, value)), slice_count=3)) == ""
    desk.serve()
    desk.work()
    means = desk.pushed(ShareKind.MEAN)
    assert [peer for peer, _ in means] == desk.keys[1:]
    assert means[0][1].contributors == b"\xe0"
    assert (read_values(desk.store, means[0][1]) == 4.0).all()


def test_an_owner_makes_do_with_the_parts_that_came_in_half_its_wait(make_desk: MakeDesk) -> None:
    desk = begin_globally(make_desk)
    desk.push(desk.keys[1], desk.share(desk.keys[1], desk.part(np.full(3, 4.0)), slice_count=3))
    desk.serve()
    assert desk.find(CombineParts) == []
    desk.wait(5.0)
    desk.work()
    assert desk.pushed(ShareKind.MEAN)[0][1].contributors == b"\xc0"


def test_a_bad_part_is_left_out_of_a_mean(make_desk: MakeDesk) -> None:
    desk = begin_globally(make_desk)
    desk.push(desk.keys[1], desk.share(desk.keys[1], desk.part(np.full(3, np.inf)), slice_count=3))
    desk.push(desk.keys[2], desk.share(desk.keys[2], desk.part(np.full(3, 7.0)), slice_count=3))
    desk.serve()
    desk.work()
    desk.work()
    assert StrikePeer(desk.keys[1], "finite") in desk.effects
    assert desk.pushed(ShareKind.MEAN)[0][1].contributors == b"\xa0"


@pytest.mark.parametrize(("value", "is_taken"), [(5.0, True), (np.nan, False)])
def test_a_mean_is_taken_if_it_may_be(make_desk: MakeDesk, value: float, is_taken: bool) -> None:
    desk = begin_globally(make_desk)
    for place in (1, 2):
        size = 3 if place == 1 else 2
        part = desk.part(np.full(size, value if place == 1 else 6.0))
        record = desk.share(
            desk.keys[place], part, kind=ShareKind.MEAN, slice_count=3, slice_index=place, contributors=b"\xe0"
        )
        assert desk.push(desk.keys[place], record) == ""
    desk.serve()
    desk.work()
    desk.wait(10.0)
    (ready,) = desk.find(MixReady)
    assert [piece.mean is not None for piece in ready.slices] == [False, is_taken, True]
    assert (StrikePeer(desk.keys[1], "finite") in desk.effects) is not is_taken


def test_a_mean_of_another_shape_is_not_even_fetched(make_desk: MakeDesk) -> None:
    desk = begin_globally(make_desk)
    part = desk.part(np.full(5, 1.0))
    record = desk.share(desk.keys[1], part, kind=ShareKind.MEAN, slice_count=3, slice_index=1, contributors=b"\xe0")
    desk.push(desk.keys[1], record)
    assert StrikePeer(desk.keys[1], "shape") in desk.effects
    mine = desk.share(desk.keys[2], part, kind=ShareKind.MEAN, slice_count=3, slice_index=1, contributors=b"\xe0")
    assert desk.push(desk.keys[2], mine) == "unexpected"


def test_an_owner_signs_one_mean_whatever_happens_to_it(make_desk: MakeDesk) -> None:
    desk = begin_globally(make_desk)
    desk.push(desk.keys[1], desk.share(desk.keys[1], desk.part(np.full(3, 4.0)), slice_count=3))
    desk.serve()
    desk.wait(5.0)
    desk.work()
    assert len(desk.pushed(ShareKind.MEAN)) == 2
    restart(desk)
    desk.tell(MixingAttached(0, SIZE))
    # Its next life opens the round after.
    assert desk.find(StartMixing) == [StartMixing(1)]
    desk.hand_over(np.ones(3), np.ones(3), np.ones(2))
    assert desk.push(desk.keys[2], desk.share(desk.keys[2], desk.part(np.full(3, 7.0)), slice_count=3)) == "round"
    desk.serve()
    assert desk.find(CombineParts) + desk.pushed() == []


def test_the_mean_of_one_round_is_not_that_of_the_next(make_desk: MakeDesk) -> None:
    desk = begin_globally(make_desk)
    for round_index in (0, 1):
        part = desk.part(np.full(3, 4.0), round_index)
        assert desk.push(desk.keys[1], desk.share(desk.keys[1], part, slice_count=3, round_index=round_index)) == ""
        desk.serve()
        desk.wait(5.0)
        assert [order.round_index for order in desk.find(CombineParts)] == [round_index]
        desk.work()
        desk.tell(RoundWanted(round_index + 1))
        desk.hand_over(np.ones(3), np.ones(3), np.ones(2), round_index=round_index + 1)


def test_a_mean_that_comes_when_the_wait_is_over_is_not_fetched_or_checked(make_desk: MakeDesk) -> None:
    desk = begin_globally(make_desk)
    desk.wait(10.0)
    assert len(desk.find(MixReady)) == 1
    desk.effects = []
    fields = {"kind": ShareKind.MEAN, "slice_count": 3, "slice_index": 1, "contributors": b"\xe0"}
    assert desk.push(desk.keys[1], desk.share(desk.keys[1], desk.part(np.full(3, 5.0)), **fields)) == ""
    desk.serve()
    assert desk.find(CheckMean) + desk.find(StoreChunk) == []


def test_a_joiner_is_offered_no_means_while_one_of_them_is_not_made(make_desk: MakeDesk) -> None:
    desk = begin_globally(make_desk)
    assert desk.machine.reply_shares(GetShares(None, STATE_JOB, 0), desk.keys[1]).shares == ()
    for key in desk.keys[1:]:
        desk.push(key, desk.share(key, desk.part(np.full(3, 4.0)), slice_count=3))
    for place, size in ((1, 3), (2, 2)):
        key = desk.keys[place]
        fields = {"kind": ShareKind.MEAN, "slice_count": 3, "slice_index": place, "contributors": b"\xe0"}
        desk.push(key, desk.share(key, desk.part(np.full(size, 5.0)), **fields))
    desk.serve()
    desk.work()
    desk.work()
    assert len(desk.machine.reply_shares(GetShares(None, STATE_JOB, 0), desk.keys[1]).shares) == 3


def test_gated_parts_combine_only_with_parts_of_the_same_base(make_desk: MakeDesk) -> None:
    root, other_root = bytes([1]) * 32, bytes([2]) * 32
    desk = make_desk(0, 3, MixingVariant.GLOBAL_M1, mixing_gate=True)
    desk.convene()
    desk.connect()
    desk.open(1)
    parts = tuple(desk.part(np.ones(size), 1, 1, desk.store) for size in (3, 3, 2))
    desk.tell(PartStored(1, Job.MIX1, parts, (), other_root))
    desk.tell(ResultWanted(1, Job.MIX1))
    for key in desk.keys[1:]:
        part = desk.part(np.full(3, float(key[0])), 1)
        desk.push(key, desk.share(key, part, slice_count=3, round_index=1, mixed_root=root))
    desk.serve()
    (order,) = desk.find(CombineParts)
    assert order.mixed_root == root
    assert ("mixing_other_roots", 2) in desk.find(Report)[-1].fields
    assert [part.peer_id for part in order.parts] == desk.keys[1:]
    part = desk.part(np.ones(3), 1)
    changes = {"kind": ShareKind.MEAN, "slice_count": 3, "slice_index": 1, "contributors": b"\xe0"}
    desk.push(desk.keys[1], desk.share(desk.keys[1], part, round_index=1, mixed_root=root, **changes))
    assert Count("mixing_slices", "other-base") in desk.effects
