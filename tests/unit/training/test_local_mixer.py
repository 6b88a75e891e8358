"""Mixing within one process, apart from training: groups, waiting, who is given up, who begins where."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from pulsenet.errors import ConfigError
from pulsenet.outer.contribution import Entries
from pulsenet.outer.mixing.settings import Job, MixingSettings, MixingVariant
from pulsenet.outer.self_test import SELF_TEST_DIGEST
from pulsenet.tensors.params import TensorSpec, make_table
from pulsenet.training.local_mixer import LocalMixer, LocalMixing

TABLE = make_table([TensorSpec("a", "F32", (4,))])


def make_mixing(count: int, variant: MixingVariant = MixingVariant.GLOBAL_M1, **fields: object) -> LocalMixing:
    return LocalMixing(MixingSettings(variant=variant, roster_rounds=2), count, **fields)  # type: ignore[arg-type]


def hand_over(mixer: LocalMixer, value: float, job: Job = Job.MIX1) -> None:
    mixer.open(TABLE, SELF_TEST_DIGEST)
    mixer.begin_round(0)
    mixer.start(job, [[Entries(0, None, np.full(4, value, np.float32))]])


def ask(mixer: LocalMixer) -> float:
    mixed = mixer.result(Job.MIX1)
    assert mixed.sections is not None
    return float(mixed.sections[0][0][0])


def test_a_member_waits_for_its_group() -> None:
    mixing = make_mixing(2)
    first, second = mixing.member(0), mixing.member(1)
    hand_over(first, 1.0)
    found: list[float] = []
    waiting = threading.Thread(target=lambda: found.append(ask(first)))
    waiting.start()
    hand_over(second, 3.0)
    waiting.join(30)
    assert found == [2.0]
    assert ask(second) == 2.0


def test_nobody_waits_for_who_has_left() -> None:
    mixing = make_mixing(3)
    members = [mixing.member(index) for index in range(3)]
    for member, value in zip(members[:2], (1.0, 3.0), strict=True):
        hand_over(member, value)
    members[2].close()
    assert [ask(member) for member in members[:2]] == [2.0, 2.0]
    assert members[0].result(Job.MIX1).reason == "lost"


def test_what_a_member_left_behind_still_counts() -> None:
    mixing = make_mixing(2)
    members = [mixing.member(index) for index in range(2)]
    for member, value in zip(members, (1.0, 3.0), strict=True):
        hand_over(member, value)
    mixing.leave(1)
    assert ask(members[0]) == 2.0


def test_whoever_is_too_late_is_given_up_by_all() -> None:
    mixing = make_mixing(3, job_seconds=0.01)
    members = [mixing.member(index) for index in range(3)]
    for member, value in zip(members[:2], (1.0, 3.0), strict=True):
        hand_over(member, value)
    assert ask(members[0]) == 2.0
    hand_over(members[2], 99.0)
    assert ask(members[1]) == 2.0, "the same parts for every survivor"


def test_vectors_of_old_rounds_are_let_go() -> None:
    mixing = make_mixing(2)
    late = mixing.member(1)
    hand_over(late, 3.0)
    mixing.member(0).begin_round(5)
    mixed = late.result(Job.MIX1)
    assert (mixed.sections, mixed.contributor_count, mixed.reason) == (None, 1, "late")


def test_a_result_cannot_be_written_to() -> None:
    mixing = make_mixing(1)
    member = mixing.member(0)
    hand_over(member, 1.0)
    mixed = member.result(Job.MIX1)
    assert mixed.sections is not None
    with pytest.raises(ValueError, match="read-only"):
        mixed.sections[0][0][0] = 2.0
    assert (mixed.contributor_count, mixed.reason) == (1, ""), "alone because there is nobody else"


def test_whoever_is_far_behind_takes_the_mean_over_and_others_do_not() -> None:
    mixing = make_mixing(2)
    assert mixing.locate(None).adoption is None, "the first has nobody to take from"
    for index, value in enumerate((1.0, 3.0)):
        hand_over(mixing.member(index), value)
    assert ask(mixing.member(0)) == 2.0
    mixing.begin_round(3)
    assert mixing.locate(1).adoption is None
    assert mixing.locate(1).round_index == 3
    for held in (0, None):
        adoption = mixing.locate(held).adoption
        assert adoption is not None
        assert adoption.is_consensus
        assert adoption.values[0].tolist() == [2.0] * 4


def test_what_pairs_agree_on_is_no_consensus() -> None:
    mixing = make_mixing(2, MixingVariant.LOCAL_M1_M2)
    for index, value in enumerate((1.0, 3.0)):
        hand_over(mixing.member(index), value)
    ask(mixing.member(0))
    mixing.begin_round(9)
    adoption = mixing.locate(None).adoption
    assert adoption is not None
    assert not adoption.is_consensus


def test_a_member_that_was_not_there_when_the_round_opened_is_alone_in_it() -> None:
    mixing = make_mixing(1)
    hand_over(mixing.member(0), 1.0)
    mixing.join(1)
    hand_over(mixing.member(1), 5.0)
    assert ask(mixing.member(1)) == 5.0
    assert ask(mixing.member(0)) == 1.0


def test_a_gate_is_refused() -> None:
    with pytest.raises(ConfigError, match="mixing_gate"):
        LocalMixing(MixingSettings(mixing_gate=True), 2)
