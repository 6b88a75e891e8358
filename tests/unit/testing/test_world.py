"""The simulated world keeps time, delivers, crashes and says when it is stuck."""

from __future__ import annotations

import pytest

from pulsenet.ids import Version
from pulsenet.testing.checkers import SimulationError
from pulsenet.testing.network import Faults
from pulsenet.testing.world import World


def small_world(seed: int = 1) -> World:
    world = World(seed)
    world.add_node("trainer", "trainer")
    world.add_node("inferencer", "inferencer")
    return world


def test_a_version_reaches_everybody() -> None:
    world = small_world()
    assert world.publish_and_wait() == Version(0, 1)
    world.run_until(world.is_settled, 30.0)
    assert "engine 0.1" in world.describe()
    assert world.newest == Version(0, 1)


def test_time_passes_although_nothing_happens() -> None:
    world = World(1)
    world.run_for(100.0)
    assert world.now == 100.0
    assert world.event_count == 0
    assert not world.is_settled()


def test_the_same_seed_gives_the_same_trace() -> None:
    traces = []
    for seed in (5, 5, 6):
        world = small_world(seed)
        world.publish_and_wait()
        world.run_for(20.0)
        traces.append(world.trace_digest)
    assert traces[0] == traces[1] != traces[2]


def test_what_cannot_happen_in_time_names_the_seed() -> None:
    world = small_world(7)
    with pytest.raises(SimulationError, match=r"not done after 5\.0 s.*simulation seed 7"):
        world.run_until(lambda: False, 5.0)


def test_a_world_with_endless_events_is_called_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulsenet.testing.world.World.events_max", 10)
    world = small_world()
    with pytest.raises(SimulationError, match="more than 10 events"):
        world.run_for(100.0)


def test_a_crash_loses_what_was_under_way_and_peers_notice() -> None:
    world = small_world()
    world.publish_and_wait()
    world.run_until(world.is_settled, 30.0)
    trainer = world.nodes[world.trainer_key]
    world.crash(trainer)
    assert not trainer.is_up
    assert "trainer down" in world.describe()
    world.run_for(5.0)
    inferencer = next(node for node in world.nodes.values() if node.versions.role == "inferencer")
    assert inferencer.reports["fetch_sources"] == 0
    world.start(trainer)
    world.run_for(60.0)
    assert inferencer.reports["fetch_sources"] == 1


def test_healing_ends_every_fault() -> None:
    world = World(1, faults=Faults(drop_per_mille=1000))
    world.add_node("trainer", "trainer")
    node = world.add_node("inferencer", "inferencer")
    world.network.partitions.add((node.peer_id, world.trainer_key))
    world.network.silent.add(world.trainer_key)
    world.network.liars.add(world.trainer_key)
    world.publish()
    world.run_for(30.0)
    assert not world.is_settled()
    world.heal()
    world.run_until(world.is_settled, 200.0)
