"""Each checker catches what it is there for, and names the seed."""

from __future__ import annotations

import pytest

from pulsenet.ids import Digest, Version
from pulsenet.testing.checkers import (
    BuffersStayWithinLimits,
    EqualVersionEqualRoot,
    NothingUnverifiedIsStored,
    SimulationError,
    VersionsOnlyRise,
)
from pulsenet.testing.node import SimNode
from pulsenet.testing.world import World


def settled() -> tuple[World, SimNode]:
    world = World(9)
    world.add_node("trainer", "trainer")
    node = world.add_node("inferencer", "inferencer")
    world.add_node("seed", "seed")
    for _ in range(3):
        world.publish_and_wait()
    world.run_until(world.is_settled, 60.0)
    return world, node


def test_a_version_that_falls_is_caught() -> None:
    world, node = settled()
    checker = VersionsOnlyRise()
    checker.check(world)
    assert node.versions.follower is not None
    node.versions.follower._engine.version = Version(0, 1)
    with pytest.raises(SimulationError, match=r"inferencer went from 0\.3 back to 0\.1 .*simulation seed 9"):
        checker.check(world)


def test_a_mirror_with_other_bits_is_caught() -> None:
    world, node = settled()
    node.versions.hands.mirror.flip_bit(world.chance)
    with pytest.raises(SimulationError, match="other bits"):
        EqualVersionEqualRoot().check(world)


def test_an_engine_with_another_version_or_other_bits_is_caught() -> None:
    world, node = settled()
    EqualVersionEqualRoot().check(world)
    node.versions.hands.engine.root = Digest(b"x" * 32)
    with pytest.raises(SimulationError, match="other bits"):
        EqualVersionEqualRoot().check(world)
    node.versions.hands.engine.version = Version(0, 2)
    with pytest.raises(SimulationError, match="its engine holds"):
        EqualVersionEqualRoot().check(world)


def test_a_damaged_stored_chunk_is_caught() -> None:
    world, node = settled()
    digest = next(iter(node.store.chunks))
    node.store.chunks[digest] = b"damaged"
    with pytest.raises(SimulationError, match="not chunk"):
        NothingUnverifiedIsStored().check(world)


def test_too_much_in_flight_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    world, _ = settled()
    BuffersStayWithinLimits().check(world)
    monkeypatch.setattr("pulsenet.testing.checkers.CHUNKS_IN_FLIGHT_MAX", -1)
    with pytest.raises(SimulationError, match="in flight"):
        BuffersStayWithinLimits().check(world)
