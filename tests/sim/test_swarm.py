"""Whole swarms under drawn faults: rules hold after every event, and once faults stop everybody is current."""

from __future__ import annotations

import pytest

from pulsenet.testing.fakes import Chance
from pulsenet.testing.network import draw_faults
from pulsenet.testing.world import World

HEAL_SECONDS_MAX = 240.0
"""Virtual time in which every live follower must be current after faults stop."""


def run_story(seed: int, step_count: int = 30) -> World:
    """Publish, crash, part and lie at random, then heal and wait until everybody is current."""
    chance = Chance(seed ^ 0x5EED)
    world = World(seed, faults=draw_faults(chance), anchor_interval=2 + chance(12))
    world.add_node("trainer", "trainer")
    for index in range(1 + chance(4)):
        node = world.add_node(f"inferencer {index}", "inferencer")
        node.skew_ms = chance(4000) - 2000
    for index in range(chance(3)):
        world.add_node(f"seed {index}", "seed")
    followers = [node for node in world.nodes.values() if node.follower is not None]
    for _ in range(step_count):
        world.publish(change_count=chance(60))
        world.run_for(chance.between(0.1, 8.0))
        node = followers[chance(len(followers))]
        match chance(8):
            case 0 if node.is_up:
                world.crash(node)
            case 1 if not node.is_up:
                world.start(node)
            case 2:
                world.network.partitions.add((node.peer_id, world.trainer_key))
            case 3:
                world.network.partitions.clear()
            case 4:
                world.network.liars.add(node.peer_id)
            case 5:
                world.network.silent.add(node.peer_id)
            case 6 if node.is_up and node.hands.mirror.region is not None:
                node.hands.mirror.flip_bit(chance)
    world.heal()
    for node in followers:
        if not node.is_up:
            world.start(node)
    world.publish_and_wait()
    world.run_until(world.is_settled, HEAL_SECONDS_MAX)
    return world


@pytest.mark.parametrize("seed", range(12))
def test_a_swarm_under_faults_ends_current_on_every_node(seed: int) -> None:
    world = run_story(seed)
    assert all(
        node.hands.engine.root == world.versions[world.newest]
        for node in world.nodes.values()
        if world.newest is not None and node.role == "inferencer"
    )


def test_the_same_seed_gives_the_same_trace() -> None:
    first, second, other = run_story(3, step_count=8), run_story(3, step_count=8), run_story(4, step_count=8)
    assert first.trace_digest == second.trace_digest
    assert first.trace_digest != other.trace_digest
