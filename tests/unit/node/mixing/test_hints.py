"""A pair's hint: the lower key fetches and combines on it, and takes on the answer alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pulsenet.chain.records import ShareKind
from pulsenet.node.effects import Count, Release, SendRequest, StrikePeer
from pulsenet.node.events import ReplyReceived
from pulsenet.node.mixing.effects import CombineParts, MixReady
from pulsenet.node.mixing.events import MixingAttached, RoundWanted
from pulsenet.node.mixing.journal import MIXING_KEY, Stand
from pulsenet.outer.mixing.settings import Job, MixingVariant
from pulsenet.testing.toy_mixing import SIZE, read_values
from pulsenet.wire.messages import GetChunkList, GetShares, PushShare, SharesReply

MakeDesk = Callable[..., Any]
ONES, TWOS, FIVES = np.ones(SIZE), np.full(SIZE, 2.0), np.full(SIZE, 5.0)


def say(desk: Any, kind: ShareKind, values: Any = TWOS, **changes: Any) -> str:
    """Let the other one share a part, or hint at it; return the code of the answer."""
    code: str = desk.push(desk.other, desk.share(desk.other, desk.part(values), kind=kind, **changes))
    return code


def hinted(make_desk: MakeDesk) -> Any:
    """The lower key's member that combined on a hint."""
    desk = make_desk(0).begin(ONES)
    assert say(desk, ShareKind.HINT) == ""
    desk.serve()
    assert len(desk.find(CombineParts)) == 1
    desk.work()
    return desk


def asks_for(desk: Any, values: Any) -> bool:
    blob_id = desk.part(values).blob_id
    messages = [request.message for request in desk.find(SendRequest)]
    return any(isinstance(message, GetChunkList) and message.blob_id == blob_id for message in messages)


def test_the_upper_key_hints_at_its_part_as_soon_as_it_has_one(make_desk: MakeDesk) -> None:
    desk = make_desk(1).begin(ONES)
    ((peer, share),) = desk.pushed()
    assert (peer, share.kind, share.slice_count) == (desk.other, ShareKind.HINT, 1)
    assert (read_values(desk.store, share) == ONES).all()
    # It binds to nothing.
    assert desk.machine.stands() == {}
    say(desk, ShareKind.PART)
    desk.serve()
    desk.work()
    (_, part) = desk.pushed(ShareKind.PART)[0]
    assert (part.blob_id, part.norm_bits) == (share.blob_id, share.norm_bits)
    assert desk.machine.stands() == {(0, 1): Stand.ANSWERED}


def test_the_lower_key_fetches_and_combines_on_a_hint_and_takes_on_the_answer(make_desk: MakeDesk) -> None:
    desk = make_desk(0).begin(ONES)
    assert say(desk, ShareKind.HINT) == ""
    assert asks_for(desk, TWOS)
    desk.serve()
    desk.work()
    assert desk.find(MixReady) == []
    assert desk.pushed(ShareKind.TAKEN) == []
    assert desk.machine.stands() == {}
    desk.effects = []
    assert say(desk, ShareKind.PART) == ""
    (ready,) = desk.find(MixReady)
    assert (read_values(desk.store, ready.slices[0].mean) == 1.5).all()
    assert len(desk.pushed(ShareKind.TAKEN)) == 1
    assert desk.machine.stands() == {(0, 1): Stand.TAKEN}
    # What was fetched and combined before the answer is not fetched or combined again.
    assert desk.find(CombineParts) == []
    assert not asks_for(desk, TWOS)


def test_an_answer_that_comes_while_its_hint_is_fetched_or_combined_is_taken_in_the_end(make_desk: MakeDesk) -> None:
    desk = make_desk(0).begin(ONES)
    say(desk, ShareKind.HINT)
    say(desk, ShareKind.PART)
    desk.serve()
    assert len(desk.find(CombineParts)) == 1
    desk.work()
    assert [ready.is_alone for ready in desk.find(MixReady)] == [False]


def test_of_a_hint_and_an_answer_with_other_content_the_answer_counts(make_desk: MakeDesk) -> None:
    desk = hinted(make_desk)
    desk.effects = []
    assert say(desk, ShareKind.PART, FIVES) == ""
    assert desk.find(MixReady) == []
    assert asks_for(desk, FIVES)
    desk.serve()
    desk.work()
    (ready,) = desk.find(MixReady)
    assert (read_values(desk.store, ready.slices[0].mean) == 3.0).all()
    assert Count("rejected", "mismatch") in desk.effects
    # A hint promises nothing: it is no crime.
    assert desk.find(StrikePeer) == []


def test_other_content_counts_too_while_what_was_hinted_at_is_combined(make_desk: MakeDesk) -> None:
    desk = make_desk(0).begin(ONES)
    say(desk, ShareKind.HINT)
    desk.serve()
    assert len(desk.find(CombineParts)) == 1
    say(desk, ShareKind.PART, FIVES)
    desk.serve()
    desk.work()
    assert desk.find(MixReady) == []
    desk.serve()
    desk.work()
    (ready,) = desk.find(MixReady)
    assert (read_values(desk.store, ready.slices[0].mean) == 3.0).all()


def test_an_answer_of_another_size_than_its_hint_is_not_fetched(make_desk: MakeDesk) -> None:
    desk = make_desk(0).begin(ONES)
    say(desk, ShareKind.HINT)
    desk.serve()
    assert len(desk.find(CombineParts)) == 1
    longer = np.full(SIZE + 1, 2.0)
    assert say(desk, ShareKind.PART, longer) == ""
    assert not asks_for(desk, longer)
    desk.work()
    assert Count("rejected", "shape") in desk.effects
    assert [(ready.is_alone, ready.reason) for ready in desk.find(MixReady)] == [(True, "refused")]


def test_a_hint_that_comes_after_the_answer_changes_nothing(make_desk: MakeDesk) -> None:
    desk = make_desk(0).begin(ONES)
    say(desk, ShareKind.PART)
    assert say(desk, ShareKind.HINT, FIVES) == ""
    assert not asks_for(desk, FIVES)
    desk.serve()
    desk.work()
    (ready,) = desk.find(MixReady)
    assert (read_values(desk.store, ready.slices[0].mean) == 1.5).all()
    assert say(desk, ShareKind.HINT, FIVES) == ""


@pytest.mark.parametrize(
    ("values", "changes", "code"),
    [
        (np.full(SIZE, np.nan), {}, "finite"),
        (np.full(SIZE, 1e30), {}, "norm"),
        (np.ones(SIZE + 1), {}, "shape"),
        (TWOS, {"encoded_size_bytes": 5}, "chunk-list"),
    ],
)
def test_a_hint_at_a_part_that_may_not_be_mixed_ends_the_job(
    make_desk: MakeDesk, values: Any, changes: dict[str, Any], code: str
) -> None:
    desk = make_desk(0).begin(ONES)
    say(desk, ShareKind.HINT, values, **changes)
    desk.serve()
    desk.work()
    assert [(ready.reason, ready.is_alone) for ready in desk.find(MixReady)] == [("refused", True)]
    assert StrikePeer(desk.other, code) in desk.effects
    assert say(desk, ShareKind.PART) == "round"


def test_only_the_upper_key_of_the_pair_hints_and_once(make_desk: MakeDesk) -> None:
    upper = make_desk(1).begin(ONES)
    assert say(upper, ShareKind.HINT) == "unexpected"
    lower = make_desk(0).begin(ONES)
    assert say(lower, ShareKind.HINT) == ""
    assert say(lower, ShareKind.HINT) == ""
    assert say(lower, ShareKind.HINT, FIVES) == "duplicate"
    crowd = make_desk(0, member_count=4).begin(ONES)
    third = next(key for key in crowd.keys if key not in (crowd.me, crowd.partner(0, Job.MIX1)))
    assert crowd.push(third, crowd.share(third, crowd.part(TWOS), kind=ShareKind.HINT)) == "unexpected"


def test_nobody_hints_at_a_slice_of_a_mean_of_all(make_desk: MakeDesk) -> None:
    desk = make_desk(0, 3, MixingVariant.GLOBAL_M1).begin(np.ones(3), np.ones(3), np.ones(2))
    assert desk.pushed(ShareKind.HINT) == []
    assert desk.push(desk.keys[1], desk.share(desk.keys[1], desk.part(TWOS), kind=ShareKind.HINT)) == "unexpected"


def test_an_upper_key_that_dies_after_its_hint_costs_the_lower_its_wait(make_desk: MakeDesk) -> None:
    for is_noticed, seconds, reason in ((True, 2.5, "lost"), (False, 10.1, "late")):
        desk = hinted(make_desk)
        if is_noticed:
            desk.lose(desk.other)
        desk.wait(seconds)
        assert [(ready.is_alone, ready.reason) for ready in desk.find(MixReady)] == [(True, reason)]
        # It does not take later, whoever comes back.
        assert say(desk, ShareKind.PART) == "round"
        assert desk.machine.stands() == {}
        reply = desk.machine.reply_shares(GetShares(0, 1, 0), desk.other)
        assert not reply.is_open


def test_a_partner_that_has_no_use_for_a_hint_is_not_waited_for(make_desk: MakeDesk) -> None:
    desk = make_desk(1).begin(ONES)
    desk.judge("round")
    assert [(ready.is_alone, ready.reason) for ready in desk.find(MixReady)] == [(True, "over")]
    assert desk.machine.stands() == {}


@pytest.mark.parametrize("code", ["", "duplicate", "roster", "early"])
def test_any_other_word_on_a_hint_leaves_the_exchange_as_it_is(make_desk: MakeDesk, code: str) -> None:
    desk = make_desk(1).begin(ONES)
    desk.judge(code)
    assert desk.find(MixReady) == []
    say(desk, ShareKind.PART)
    desk.serve()
    desk.work()
    assert desk.machine.stands() == {(0, 1): Stand.ANSWERED}


def test_a_word_on_a_hint_that_comes_after_the_answer_voids_nothing(make_desk: MakeDesk) -> None:
    desk = make_desk(1).begin(ONES)
    (hint,) = [e for e in desk.find(SendRequest) if isinstance(e.message, PushShare)]
    say(desk, ShareKind.PART)
    desk.serve()
    desk.work()
    desk.effects = [hint]
    desk.judge("round")
    assert desk.find(MixReady) == []
    assert desk.machine.stands() == {(0, 1): Stand.ANSWERED}


def test_a_lower_key_that_restarts_before_the_round_asks_for_the_hint_again(make_desk: MakeDesk) -> None:
    upper = make_desk(1).begin(ONES)
    reply = upper.machine.reply_shares(GetShares(0, 1, 0), upper.other)
    hint = [share.kind for _, share in upper.pushed()]
    assert (hint, len(reply.shares)) == ([ShareKind.HINT], 1)

    lower = make_desk(0).begin(ONES)
    record = lower.share(lower.other, lower.part(TWOS, 1), kind=ShareKind.HINT, round_index=1)
    assert lower.push(lower.other, record) == "", "kept until the round opens, in this life"
    lower.make_machine(lower.store.state[MIXING_KEY])
    lower.effects = []
    lower.connect()
    lower.open(1)
    lower.hand_over(ONES, round_index=1)
    lower.wait(3.0)
    (asked,) = [e for e in lower.find(SendRequest) if e.message == GetShares(1, 1, 0)]
    lower.tell(ReplyReceived(asked.request_id, lower.other, SharesReply(1, 0, True, (record,))))
    assert lower.serve()
    # A hint is not all there is to hear: the answer is asked for too.
    lower.wait(3.0)
    assert [e for e in lower.find(SendRequest) if e.message == GetShares(1, 1, 0)]
    lower.work()
    assert lower.find(MixReady) == []
    lower.push(lower.other, lower.share(lower.other, lower.part(TWOS, 1), round_index=1))
    assert [ready.is_alone for ready in lower.find(MixReady)] == [False]


def test_a_hint_is_told_to_the_partner_alone(make_desk: MakeDesk) -> None:
    for place in range(4):
        desk = make_desk(place, member_count=4).begin(ONES)
        partner = desk.partner(0, Job.MIX1)
        told = {key: desk.machine.reply_shares(GetShares(0, 1, 0), key).shares for key in desk.keys if key != desk.me}
        assert [key for key, shares in told.items() if shares] == [partner]


def test_an_upper_key_that_restarts_hints_no_more(make_desk: MakeDesk) -> None:
    desk = make_desk(1).begin(ONES)
    desk.make_machine(desk.store.state[MIXING_KEY])
    desk.effects = []
    desk.connect()
    desk.tell(MixingAttached(1, SIZE))
    desk.hand_over(ONES)
    assert desk.pushed() == []
    reply = desk.machine.reply_shares(GetShares(0, 1, 0), desk.other)
    assert (reply.is_open, reply.shares) == (False, ())
    assert say(desk, ShareKind.PART) == "round"


@pytest.mark.parametrize("is_late", [False, True])
def test_what_a_hint_led_to_is_released_with_its_round(make_desk: MakeDesk, is_late: bool) -> None:
    desk = make_desk(0).begin(ONES)
    say(desk, ShareKind.HINT)
    desk.serve()
    if is_late:
        # The wait ends while the mean is made.
        desk.wait(11.0)
    desk.work()
    fetched = {desk.part(TWOS).blob_id, desk.part(np.full(SIZE, 1.5)).blob_id}
    assert fetched <= set(desk.store.lists)
    released: set[bytes] = set()
    for round_index in (1, 2):
        desk.wait(11.0)
        desk.effects = []
        desk.tell(RoundWanted(round_index))
        released |= {blob_id for release in desk.find(Release) for blob_id in release.blob_ids}
        assert all(release.spares_versions for release in desk.find(Release))
        desk.hand_over(ONES, round_index=round_index)
    assert fetched <= released
