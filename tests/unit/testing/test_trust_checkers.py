"""Each checker finds what it is for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pulsenet.ids import Digest, Version, compute_digest
from pulsenet.testing.checkers import Checker, SimulationError
from pulsenet.testing.node import SimNode
from pulsenet.testing.trust_checkers import (
    RECORDS_MAX,
    TRUST_CHECKERS,
    BeliefsOnlyMoveForward,
    NothingForeignIsStored,
    OnlyWhatWasPublishedIsBelieved,
    StaleIsSaid,
)
from pulsenet.testing.world import World


@pytest.fixture
def stage() -> tuple[World, SimNode]:
    """A follower at version 2, checked all the way."""
    world = World(1, checkers=TRUST_CHECKERS)
    world.add_node("trainer", "trainer")
    node = world.add_node("follower", "inferencer")
    for _ in range(2):
        world.publish_and_wait()
        world.run_until(world.is_settled, 60.0)
    return world, node


def expect(checker: Checker, world: World, node: SimNode, text: str) -> None:
    with pytest.raises(SimulationError, match=text):
        checker.check_node(world, node)


def test_a_head_that_nobody_published_is_found(stage: tuple[World, SimNode]) -> None:
    world, node = stage
    OnlyWhatWasPublishedIsBelieved().check(world)
    world.versions[Version(0, 2)] = compute_digest(b"other weights")
    expect(OnlyWhatWasPublishedIsBelieved(), world, node, "nobody published")


def test_a_head_that_falls_is_found(stage: tuple[World, SimNode]) -> None:
    world, node = stage
    checker = BeliefsOnlyMoveForward()
    checker.check(world)
    assert node.trust.head is not None
    assert node.trust.head_record is not None
    node.trust._head = (replace(node.trust.head, version=Version(0, 1)), node.trust.head_record)
    expect(checker, world, node, "taken back")
    node.trust._head = None
    expect(checker, world, node, "taken back")


def test_a_node_that_keeps_a_freeze_to_itself_is_found(stage: tuple[World, SimNode]) -> None:
    world, node = stage
    checker = StaleIsSaid()
    checker.check(world)
    world.clock.now += 1_000.0
    expect(checker, world, node, "frozen for")
    node.reports["stale"] = True
    checker.check_node(world, node)


def test_what_nobody_published_is_found_in_a_store(stage: tuple[World, SimNode]) -> None:
    world, node = stage
    checker = NothingForeignIsStored()
    checker.check(world)
    node.store.chunks[compute_digest(b"junk")] = b"junk"
    expect(checker, world, node, "a chunk that nobody published")
    for index in range(RECORDS_MAX):
        node.store.records[Digest(index.to_bytes(32, "big"))] = b""
    expect(checker, world, node, "records")
