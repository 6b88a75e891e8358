"""The checkers of the rounds see what they are there for: each rule, broken on purpose, is found out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pulsenet.chain.records import Vote
from pulsenet.node.effects import Fate, StepState
from pulsenet.testing.checkers import SimulationError
from pulsenet.testing.rounds_world import RoundsWorld
from pulsenet.testing.toy_training import ToyTraining


def run_broken(monkeypatch: pytest.MonkeyPatch, change: Callable[[ToyTraining, StepState], Any]) -> None:
    """Run a few rounds in which training processes do what ``change`` makes of their orders."""
    step = ToyTraining.step
    monkeypatch.setattr(ToyTraining, "step", lambda training, order: step(training, change(training, order)))
    RoundsWorld(1).run_rounds(3, 90.0)


def test_a_counted_contribution_that_is_folded_back_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SimulationError, match="counted"):
        run_broken(monkeypatch, lambda training, order: replace(order, fate=Fate.MISSED))


def test_a_missed_round_that_drops_its_work_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(training: ToyTraining, order: StepState) -> StepState:
        training.disk.stored.pop(order.round_index, None)
        training.local = 0 * training.local
        return replace(order, fate=Fate.MISSED)

    with pytest.raises(SimulationError, match="made"):
        run_broken(monkeypatch, forget)


def test_one_trainer_that_leaves_a_member_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave_out(training: ToyTraining, order: StepState) -> StepState:
        first = order.members[0][0].peer_id
        return order if training._peer_id == first else replace(order, members=order.members[1:])

    with pytest.raises(SimulationError, match="another state"):
        run_broken(monkeypatch, leave_out)


def test_a_damaged_state_is_seen() -> None:
    world = RoundsWorld(1)
    world.run_rounds(1, 30.0)
    world.node("trainer 0").training.flip_bit()
    with pytest.raises(SimulationError, match="another state"):
        world.run_for(5.0)


def test_a_second_vote_is_seen() -> None:
    world = RoundsWorld(1)
    world.run_rounds(1, 30.0)
    voter, other = world.node("authority 1"), world.node("authority 2")
    checker = world._checker
    checker.note_vote(voter.peer_id, Vote(voter.trust.run_id, 0, 77, other.peer_id, None))
    with pytest.raises(SimulationError, match="voted twice"):
        checker.note_vote(voter.peer_id, Vote(voter.trust.run_id, 0, 77, voter.peer_id, None))
