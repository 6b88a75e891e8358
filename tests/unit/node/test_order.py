"""Machines hear of an event in one order, in the daemon and in the simulator."""

from __future__ import annotations

from typing import Any

import pytest

from pulsenet.ids import PeerId
from pulsenet.node.order import arrange
from pulsenet.outer.mixing.settings import MixingSettings
from pulsenet.testing.fakes import verify
from pulsenet.testing.mixing_world import MixingWorld
from pulsenet.testing.rounds_world import RoundsWorld
from pulsenet.testing.simulation import Simulation
from pulsenet.testing.versions_world import VersionsWorld
from pulsenet.testing.world import World


def make_swarm(seed: int) -> World:
    world = World(seed)
    for role in ("trainer", "inferencer"):
        world.add_node(role, role)
    return world


def make_mixers(seed: int) -> MixingWorld:
    return MixingWorld(seed, MixingSettings())


@pytest.mark.parametrize(
    ("make_world", "orders"),
    [
        (make_swarm, {("mesh", "trainer", "mender"), ("mesh", "follower")}),
        (VersionsWorld, {("mesh", "trainer", "coordinator", "rounds", "listener"), ("mesh", "follower", "onlooker")}),
        (RoundsWorld, {("coordinator", "rounds")}),
        (make_mixers, {("mixing", "convener")}),
    ],
)
def test_simulated_nodes_hand_events_to_their_machines_in_order(make_world: Any, orders: set[tuple[str, ...]]) -> None:
    world: Simulation[Any] = make_world(1)
    assert orders <= {tuple(node.machines) for node in world.nodes.values()}
    for node in world.nodes.values():
        backwards = dict(reversed(node.machines.items()))
        assert list(arrange(backwards).items()) == list(node.machines.items())


def test_the_newest_head_is_verified_once_by_a_node() -> None:
    """Though its mesh and its follower both hear of it, by a push and from the directory."""
    world = make_swarm(1)
    (node,) = [node for node in world.nodes.values() if node.versions.role == "inferencer"]
    checked: list[bytes] = []

    def check(peer_id: PeerId, message: bytes, signature: bytes) -> bool:
        checked.append(message)
        return verify(peer_id, message, signature)

    node.trust._verify = check
    world.publish_and_wait()
    world.run_for(30.0)
    assert node.trust.head_record is not None
    assert sum(node.trust.head_record.payload in message for message in checked) == 1
