"""The checkers of versions find what they are there for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pulsenet.chain.records import Head
from pulsenet.chain.signing import decode_signed, seal
from pulsenet.ids import Version, compute_digest
from pulsenet.node.effects import DialPeer
from pulsenet.testing.checkers import SimulationError
from pulsenet.testing.fakes import make_key, make_sign
from pulsenet.testing.toy_training import start_state
from pulsenet.testing.versions_node import VersionsNode, cast_weights
from pulsenet.testing.versions_world import VersionsWorld
from pulsenet.testing.weights import compute_root_of

OTHER = compute_digest(b"other bits")


@pytest.fixture
def world() -> VersionsWorld:
    """One authority that has announced a version."""
    made = VersionsWorld(1, authority_count=1, trainer_count=1)
    made.wait_for_round(1, 60.0)
    return made


def announcement(world: VersionsWorld, node: VersionsNode, **changes: object) -> None:
    head = replace(world.heads[-1][1], **changes)  # type: ignore[arg-type]
    world.note_head(node, seal(head, make_sign(node.peer_id), node.peer_id))


def test_weights_follow_from_the_outer_state_alone() -> None:
    first, second = start_state(), start_state()
    assert cast_weights(first) == cast_weights(second)
    second.round_index += 1
    assert compute_root_of(cast_weights(first)) != compute_root_of(cast_weights(second))


def test_a_version_with_two_roots_or_other_weights_is_found(world: VersionsWorld) -> None:
    newest = world.newest
    assert newest is not None
    world.note_version(newest, world.versions[newest])
    with pytest.raises(SimulationError, match="two roots"):
        world.note_version(newest, OTHER)
    with pytest.raises(SimulationError, match="other weights than its round gave"):
        world.note_version(Version(0, 99), OTHER)


def test_who_does_not_lead_or_says_what_is_not_is_found(world: VersionsWorld) -> None:
    (node,) = world.publishers
    announcement(world, node)
    with pytest.raises(SimulationError, match="a root it does not have"):
        announcement(world, node, root=OTHER)
    (follower,) = world.followers
    with pytest.raises(SimulationError, match="does not lead"):
        announcement(world, follower)
    world.heads.append((make_key("another"), world.heads[-1][1]))
    with pytest.raises(SimulationError, match="two nodes announce in term"):
        announcement(world, node)


def test_a_fork_anywhere_is_found(world: VersionsWorld) -> None:
    (follower,) = world.followers
    head = world.heads[-1][1]
    (node,) = world.publishers
    signed = [seal(replace(head, root=root), make_sign(node.peer_id), node.peer_id) for root in (head.root, OTHER)]
    follower.trust.accept_fork_proof(*signed)
    with pytest.raises(SimulationError, match="sees a fork"):
        world.run_for(5.0)


def test_damaged_weights_may_be_committed_while_nobody_hears_of_them(world: VersionsWorld) -> None:
    (node,) = world.publishers
    assert node.training.state is not None
    node.training.state.theta = node.training.state.theta + 1
    node.is_damaged = True
    root = compute_root_of(cast_weights(node.training.state))
    world.hand_over(node)
    world.note_version(Version(0, 99), root)
    assert Version(0, 99) not in world.versions


def test_a_dial_reaches_who_is_up_and_nobody_else(world: VersionsWorld) -> None:
    (node,), (follower,) = world.publishers, world.followers
    assert node.peer_id in follower.versions.mesh.connected
    world.crash(node)
    world.run_for(1.0)
    world.dial(follower, DialPeer(node.peer_id, ()))
    world.run_for(1.0)
    assert node.peer_id not in follower.versions.mesh.connected
    world.start(node)
    world.run_for(1.0)
    assert node.peer_id in follower.versions.mesh.connected


def test_heads_are_what_was_announced(world: VersionsWorld) -> None:
    key, head = world.heads[-1]
    record = world.directory.heads[key]
    assert decode_signed(record).type == Head.TYPE
    assert world.newest == head.version
    assert world.leader is world.publishers[0]
