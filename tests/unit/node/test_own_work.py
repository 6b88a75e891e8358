"""One contribution a round, and what receipts make of it."""

from __future__ import annotations

import pytest

from pulsenet.chain.records import Member, Receipt, Rejection
from pulsenet.errors import StorageError
from pulsenet.ids import PeerId, RunId, compute_digest
from pulsenet.node.effects import Fate
from pulsenet.node.own_work import OwnWork

ME, OTHER = PeerId(b"m" * 32), PeerId(b"o" * 32)
NAME = compute_digest(b"name")


def receipt(round_index: int, *, counted: bool = False, rejected: bool = False) -> Receipt:
    return Receipt(
        run_id=RunId(NAME),
        revision=0,
        term=1,
        coordinator=OTHER,
        round_index=round_index,
        base_state_root=NAME,
        previous=None,
        members=(Member(ME if counted else OTHER, NAME, 1),),
        rejected=(Rejection(ME, NAME, "finite"),) if rejected else (),
    )


def test_a_receipt_decides_the_fate() -> None:
    own = OwnWork(ME, 2)
    assert own.judge(receipt(3, counted=True)) is Fate.COUNTED
    assert own.judge(receipt(3, rejected=True)) is Fate.REJECTED
    assert own.judge(receipt(3)) is Fate.MISSED


def test_missed_rounds_in_a_row_end_in_a_dropped_residual() -> None:
    own = OwnWork(ME, 2)
    fates = []
    for index, counted in enumerate([False, True, False, False, False, False]):
        fate = own.judge(receipt(index, counted=counted))
        assert own.judge(receipt(index, counted=counted)) is fate, "asking twice changes nothing"
        own.note_settled(index, fate)
        fates.append(fate)
    assert fates == [Fate.MISSED, Fate.COUNTED, Fate.MISSED, Fate.DROPPED, Fate.MISSED, Fate.DROPPED]


def test_replaying_the_same_rounds_gives_the_same_fates() -> None:
    own = OwnWork(ME, 2)
    first = []
    for index in range(4):
        first.append(own.judge(receipt(index)))
        own.note_settled(index, first[-1])
    assert [own.judge(receipt(index)) for index in range(4)] == first


def test_a_rejection_is_no_missed_round() -> None:
    own = OwnWork(ME, 2)
    own.note_settled(0, Fate.MISSED)
    own.note_settled(1, own.judge(receipt(1, rejected=True)))
    assert own.judge(receipt(2)) is Fate.MISSED


def test_one_contribution_a_round_survives_a_restart() -> None:
    own = OwnWork(ME, 2)
    own.note_sent(4, NAME)
    own.note_settled(4, Fate.MISSED)
    with pytest.raises(AssertionError):
        own.note_sent(4, NAME)
    again = OwnWork(ME, 2, own.save().value)
    assert again.sent_to(4) == NAME
    assert again.sent_to(5) is None
    assert again.judge(receipt(5)) is Fate.DROPPED
    again.forget_before(6)
    assert again.sent_to(4) is None
    assert again.judge(receipt(5)) is Fate.MISSED


def test_damage_is_said_to_be_damage() -> None:
    with pytest.raises(StorageError, match="damaged"):
        OwnWork(ME, 2, b"\xc0")
