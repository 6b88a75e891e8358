"""Probes in a simulated run: trainers that drift apart widen the subset by roster, and everybody mixes what it says."""

from __future__ import annotations

import pytest

from pulsenet.node.mixing import measuring
from pulsenet.node.mixing.pair import PairWork
from pulsenet.outer.mixing.settings import MixingSettings, MixingVariant
from pulsenet.testing.checkers import SimulationError
from pulsenet.testing.mixing_world import MixingWorld
from pulsenet.testing.network import Faults

ROUND_SECONDS_MAX = 60.0
FAR, NEAR = 3.0, 0.05
"""Steps of training processes after which they predict other words, and after which they hardly differ."""


def make_world(
    seed: int, variant: MixingVariant = MixingVariant.GLOBAL_M1_LOCAL_M2_SUBSET, **changes: object
) -> MixingWorld:
    settings = MixingSettings(
        variant=variant, probe_interval=2, disagreement_max=0.25, subset_ratio=0.25, roster_rounds=4
    )
    counts = {"authority_count": 1, "trainer_count": 3, "inner_seconds": (1.0, 1.0), "step": NEAR, **changes}
    return MixingWorld(seed, settings, **counts)  # type: ignore[arg-type]


def set_step(world: MixingWorld, step: float) -> None:
    world.step = step
    for member in world.members:
        if member.toy is not None:
            member.toy.step = step


def subset_of(world: MixingWorld) -> tuple[int, ...]:
    """Return the subset that every live member's roster of the round names."""
    found = {known.roster.subset for m in world.members if m.is_up and (known := m.rosters.find(world.round_index))}
    assert len(found) == 1
    return found.pop()


def test_the_subset_follows_the_distance_both_ways_and_everybody_mixes_it() -> None:
    world = make_world(1)
    world.run_rounds(4, 4 * ROUND_SECONDS_MAX)
    assert subset_of(world) == (0,), "by name: the embeddings"
    assert {distance < 0.125 for _, distance in world.comparisons[1:]} == {True}
    set_step(world, FAR)
    world.run_until(lambda: len(subset_of(world)) == 2, 12 * ROUND_SECONDS_MAX)
    assert max(distance for _, distance in world.comparisons) > 0.25
    set_step(world, NEAR)
    world.run_until(lambda: len(subset_of(world)) == 1, 20 * ROUND_SECONDS_MAX)
    rounds = [round_index for round_index, _ in world.comparisons]
    assert rounds == sorted(set(rounds)), "each probe is compared once"
    assert all(round_index % 2 == 0 for round_index in rounds)


def test_every_member_is_told_the_newest_distance_by_the_roster() -> None:
    world = make_world(2, MixingVariant.GLOBAL_M1)
    world.run_rounds(9, 9 * ROUND_SECONDS_MAX)
    told = dict(world.comparisons)
    for member in world.members:
        round_index = member.reports["disagreement_round"]
        assert isinstance(round_index, int)
        assert member.reports["disagreement"] == pytest.approx(told[round_index], rel=1e-6)


def test_pairs_alone_compare_with_whom_they_share_a_mean() -> None:
    world = make_world(3, MixingVariant.LOCAL_M1_M2)
    world.run_rounds(5, 5 * ROUND_SECONDS_MAX)
    assert world.comparisons
    assert all(("probes", "alone") not in member.counts for member in world.members)


def test_the_next_coordinator_goes_on_with_the_subset() -> None:
    world = make_world(4, authority_count=3, trainer_count=1, step=FAR)
    world.run_until(lambda: world.round_index > 3 and len(subset_of(world)) > 1, 20 * ROUND_SECONDS_MAX)
    before = len(subset_of(world))
    first = next(m for m in world.members if m.convener is not None and m.convener.is_leading(world.now))
    world.crash(first)
    world.run_for(90.0)
    newest = max((m.rosters.newest for m in world.members if m.is_up and m.rosters.newest), key=lambda k: k.roster.term)
    assert newest.roster.term > 1
    assert len(newest.roster.subset) >= before


@pytest.mark.parametrize("round_count", [12, pytest.param(40, marks=pytest.mark.nightly)])
def test_lost_messages_and_a_silent_member_cost_a_measurement_at_most(round_count: int) -> None:
    faults = Faults(latency_seconds_min=0.01, latency_seconds_max=0.2, drop_per_mille=80, duplicate_per_mille=50)
    world = make_world(5, faults=faults, step=FAR)
    world.run_rounds(3, 3 * ROUND_SECONDS_MAX)
    silent = world.node("trainer 1")
    assert silent.toy is not None
    silent.toy.is_mute = True
    count = len(world.comparisons)
    world.run_rounds(round_count, round_count * ROUND_SECONDS_MAX)
    assert len(world.comparisons) > count, "it is waited for, but not for ever"


def test_a_member_that_mixes_another_subset_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = PairWork.__init__

    def take_all(work: PairWork, *arguments: object, **fields: object) -> None:
        original(work, *arguments, **{**fields, "subset": (0, 1, 2, 3)})  # type: ignore[arg-type]

    monkeypatch.setattr(PairWork, "__init__", take_all)
    with pytest.raises(SimulationError, match=r"mixes \(0, 1, 2, 3\), its roster says \(0,\)"):
        make_world(6).run_rounds(2, 2 * ROUND_SECONDS_MAX)


def test_a_coordinator_that_widens_without_a_reason_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "adapt_subset", lambda *arguments, **fields: (0, 1))
    with pytest.raises(SimulationError, match=r"\(0,\) became \(0, 1\)"):
        make_world(7).run_rounds(8, 8 * ROUND_SECONDS_MAX)
