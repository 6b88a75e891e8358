"""Several slices with one owner: earlier ones are summed and shown while later ones are still on their way."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from pulsenet.chain.records import Share, ShareKind
from pulsenet.chain.signing import decode_signed
from pulsenet.ids import PeerId
from pulsenet.node.effects import SendRequest
from pulsenet.node.mixing.effects import MixReady
from pulsenet.outer.mixing import pairing
from pulsenet.outer.mixing.settings import Job, MixingVariant
from pulsenet.testing.toy_mixing import read_values
from pulsenet.wire.messages import GetShares
from pulsenet.wire.schema import decode_value

COUNT = 4
"""Two members, two slices each."""


@pytest.fixture(autouse=True)
def _two_slices_an_owner(monkeypatch: pytest.MonkeyPatch, _one_slice_an_owner: None) -> None:
    monkeypatch.setattr(pairing, "SLICES_PER_OWNER_MAX", 2)


def begin(make_desk: Any, **changes: Any) -> Any:
    return make_desk(0, 2, MixingVariant.GLOBAL_M1, **changes).begin(
        *(np.full(2, float(place)) for place in range(COUNT))
    )


def push_part(desk: Any, place: int) -> str:
    other = desk.keys[1]
    return desk.push(other, desk.share(other, desk.part(np.full(2, 9.0 + place)), slice_count=COUNT, slice_index=place))


def push_mean(desk: Any, place: int) -> str:
    other = desk.keys[1]
    part = desk.part(np.full(2, 5.0 + place))
    fields = {"kind": ShareKind.MEAN, "slice_count": COUNT, "slice_index": place, "contributors": b"\xc0"}
    return desk.push(other, desk.share(other, part, **fields))


@pytest.mark.parametrize(("member_count", "slices"), [(1, 4), (2, 8), (3, 12), (8, 32), (9, 27), (16, 32), (33, 33)])
def test_owners_have_up_to_four_slices_while_there_are_few_in_all(
    monkeypatch: pytest.MonkeyPatch, member_count: int, slices: int
) -> None:
    monkeypatch.setattr(pairing, "SLICES_PER_OWNER_MAX", 4)
    assert pairing.count_slices(member_count) == slices


@pytest.mark.parametrize("member_count", [1, 2, 3, 8, 9, 16, 33])
@pytest.mark.parametrize("block_count", [1, 7, 8, 64])
def test_owners_own_alike_however_few_blocks_there_are(
    monkeypatch: pytest.MonkeyPatch, member_count: int, block_count: int
) -> None:
    monkeypatch.setattr(pairing, "SLICES_PER_OWNER_MAX", 4)
    count, members = pairing.count_slices(member_count), [PeerId(bytes([place]) * 32) for place in range(member_count)]
    owned = Counter(pairing.find_owner(block * count // block_count, members) for block in range(block_count))
    sizes = [owned[member] for member in members]
    assert max(sizes) - min(sizes) <= 1


def test_each_owner_is_shown_its_own_slices_and_no_others(make_desk: Any) -> None:
    desk = begin(make_desk)
    shown = [(peer, share.slice_index, share.slice_count) for peer, share in desk.pushed(ShareKind.PART)]
    assert shown == [(desk.keys[1], 2, COUNT), (desk.keys[1], 3, COUNT)]


def test_a_slice_is_summed_and_shown_while_another_is_not_there(make_desk: Any) -> None:
    desk = begin(make_desk)
    assert push_part(desk, 1) == ""
    desk.serve()
    desk.work()
    (mean,) = [share for _, share in desk.pushed(ShareKind.MEAN)]
    assert (mean.slice_index, read_values(desk.store, mean).tolist()) == (1, [5.5, 5.5])
    assert push_part(desk, 0) == ""
    desk.serve()
    desk.work()
    assert [share.slice_index for _, share in desk.pushed(ShareKind.MEAN)] == [1, 0]


def test_a_part_of_somebody_elses_slice_is_not_taken(make_desk: Any) -> None:
    desk = begin(make_desk)
    assert push_part(desk, 2) == "unexpected"
    assert push_mean(desk, 1) == "unexpected"


def test_the_result_has_every_slice_that_came(make_desk: Any) -> None:
    desk = begin(make_desk)
    push_part(desk, 0)
    push_part(desk, 1)
    push_mean(desk, 2)
    desk.serve()
    desk.work()
    desk.work()
    desk.wait(desk.settings.mix1_wait_seconds)
    (ready,) = desk.find(MixReady)
    assert [piece.mean is not None for piece in ready.slices] == [True, True, True, False]
    assert ready.reason == "late"


def test_who_waits_asks_for_one_slice_of_two(make_desk: Any) -> None:
    desk = begin(make_desk)
    push_part(desk, 0)
    push_mean(desk, 2)
    push_mean(desk, 3)
    desk.serve()
    desk.work()
    desk.effects = []
    desk.wait(3.0)
    asked = [effect.message for effect in desk.find(SendRequest) if isinstance(effect.message, GetShares)]
    assert asked == [GetShares(0, int(Job.MIX1), 0)]
    push_part(desk, 1)
    desk.serve()
    desk.work()
    (ready,) = desk.find(MixReady)
    assert all(piece.mean is not None for piece in ready.slices)


def test_an_owner_that_was_asked_answers_with_all_its_slices(make_desk: Any) -> None:
    desk = begin(make_desk)
    push_part(desk, 1)
    desk.serve()
    desk.work()
    reply = desk.machine.reply_shares(GetShares(0, int(Job.MIX1), 0), desk.keys[1])
    shares = [decode_value(Share, decode_signed(record).payload) for record in reply.shares]
    assert [(share.kind, share.slice_index) for share in shares] == [
        (ShareKind.PART, 2),
        (ShareKind.PART, 3),
        (ShareKind.MEAN, 1),
    ]
