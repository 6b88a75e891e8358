"""A story is decided by its plan, says what happened, and turns whatever breaks into a violation."""

from __future__ import annotations

import pytest

from pulsenet.errors import UsageError
from pulsenet.node.inferencer import Inferencer
from pulsenet.testing import story
from pulsenet.testing.checkers import Checker, SimulationError, Swarm
from pulsenet.testing.faults import ALL_FAULTS, Fault
from pulsenet.testing.node import SimNode
from pulsenet.testing.story import Plan, Story, play

SMALL = Plan(1, node_count=4, steps=3)


def test_a_story_says_what_happened() -> None:
    outcome = play(Plan(3, node_count=6, steps=8))
    assert outcome.is_good
    assert outcome.versions >= 3
    assert outcome.event_count > 500
    assert outcome.publisher_payloads > 0.5
    assert outcome.virtual_seconds > outcome.heal_seconds > 0
    assert sum(outcome.troubles.values()) > 3
    assert len(outcome.trace_hash) == 64


def test_the_same_plan_plays_the_same_story() -> None:
    assert play(SMALL) == play(SMALL)
    assert play(SMALL).trace_hash != play(Plan(2, node_count=4, steps=3)).trace_hash


def test_a_plan_names_the_command_that_plays_it() -> None:
    assert SMALL.command == "pulsenet sim --seed 1 --nodes 4 --faults all --steps 3"
    plan = Plan(5, faults=frozenset({Fault.DROP, Fault.CRASH}))
    assert plan.command == "pulsenet sim --seed 5 --nodes 12 --faults drop,crash --steps 6"


@pytest.mark.parametrize(
    ("numbers", "named"),
    [((-1, 5, 1), "--seed"), ((1 << 64, 5, 1), "--seed"), ((1, 1, 1), "--nodes"), ((1, 5, -1), "--steps")],
)
def test_a_plan_outside_the_limits_is_refused(numbers: tuple[int, int, int], named: str) -> None:
    seed, node_count, steps = numbers
    with pytest.raises(UsageError, match=named):
        Plan(seed, node_count, ALL_FAULTS, steps)


class Grumbler(Checker):
    def check_node(self, swarm: Swarm, node: SimNode) -> None:
        raise SimulationError(swarm.seed, f"{node.name} displeases")


def test_a_broken_rule_is_in_the_outcome_with_its_seed() -> None:
    outcome = play(SMALL, checkers=(Grumbler,))
    assert not outcome.is_good
    assert not outcome.converged
    assert outcome.violations == ["trainer displeases (simulation seed 1)"]


def test_a_machine_that_breaks_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(*_: object) -> None:
        raise KeyError("lost")

    monkeypatch.setattr(Inferencer, "handle", break_down)
    assert play(SMALL).violations == ["KeyError: 'lost' (simulation seed 1)"]


def test_who_does_not_arrive_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(story, "HEAL_SECONDS_MAX", 60.0)
    monkeypatch.setattr(Inferencer, "_hand_over", lambda *_: [])
    outcome = play(SMALL)
    assert not outcome.converged
    assert outcome.violations == []
    assert "inferencer 0" in outcome.shortfall


def test_a_world_that_runs_wild_under_faults_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulsenet.testing.world.World.events_max", 50)
    assert "more than 50 events" in play(SMALL).violations[0]


def test_everybody_is_up_and_calm_after_the_faults() -> None:
    played = Story(Plan(4, node_count=8, steps=10))
    played.play()
    world = played.world
    assert all(node.is_up for node in world.nodes.values())
    assert not world.network.liars
    assert not world.network.islands
    assert world.is_settled()
