"""Named scenarios of versions that rounds make: the leader dies at every phase of a publish, and others go on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pulsenet.chain.records import Kind
from pulsenet.ids import Digest, Version
from pulsenet.node.published import STATE_KEY
from pulsenet.node.trainer_phase import Phase
from pulsenet.testing.versions_node import VersionsNode
from pulsenet.testing.versions_world import VersionsWorld

LIMIT_SECONDS = 120.0


def make_world(seed: int = 1, **changes: int) -> VersionsWorld:
    """Three authorities that train, a plain trainer and an inferencer; some rounds are behind them."""
    world = VersionsWorld(seed, **changes)
    world.wait_for_round(3, LIMIT_SECONDS)
    return world


def leader_of(world: VersionsWorld) -> VersionsNode:
    world.run_until(lambda: world.leader is not None, LIMIT_SECONDS)
    leader = world.leader
    assert leader is not None
    return leader


def phase_of(node: VersionsNode) -> Phase | None:
    return None if node.versions.trainer is None else node.versions.trainer.phase


def has_committed_unsaid(world: VersionsWorld, node: VersionsNode) -> bool:
    """Say whether the disk holds a version of which nobody heard, the node's own machine included."""
    assert node.versions.trainer is not None
    committed = node.versions.hands.mirror.version
    return committed is not None and committed != world.newest and node.versions.trainer.phase is Phase.COMMITTING


PHASES: dict[str, Callable[[VersionsWorld, VersionsNode], bool]] = {
    "while its trainer hands over": lambda world, node: node.ledger.next_round_index > 4,
    "while it encodes": lambda world, node: phase_of(node) is Phase.ENCODING,
    "before its commit": lambda world, node: (
        phase_of(node) is Phase.COMMITTING and not has_committed_unsaid(world, node)
    ),
    "after its commit, before it announces": has_committed_unsaid,
    "after it announced": lambda world, node: world.heads[-1][1].version > Version(0, 5),
}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))])
@pytest.mark.parametrize("phase", PHASES)
def test_the_leader_is_killed(phase: str, seed: int) -> None:
    """A-PUB-1 with rounds: what it had not announced, another authority announces, with the same bits."""
    world = make_world(seed)
    leader = leader_of(world)
    world.run_until(lambda: PHASES[phase](world, leader), LIMIT_SECONDS)
    term, newest = world.heads[-1][1].term, world.newest
    assert newest is not None
    world.crash(leader)
    world.wait_for_round(newest.number + 3, LIMIT_SECONDS)
    key, head = world.heads[-1]
    assert key != leader.peer_id
    assert head.term > term
    assert head.version.epoch == 0
    said = [known.version for _, known in world.heads if known.term == head.term]
    assert said == sorted(said)
    world.start(leader)
    world.wait_for_round(head.version.number + 3, LIMIT_SECONDS)
    assert {head.version.epoch for _, head in world.heads} == {0}
    assert all(node.versions.hands.swaps == sorted(node.versions.hands.swaps) for node in world.followers)


def test_a_take_over_costs_followers_patches_and_no_anchor() -> None:
    world = make_world()
    (follower,) = world.followers
    before = {manifest.blob_id for manifest in follower.store.manifests().values() if manifest.kind is Kind.ANCHOR}
    leader = leader_of(world)
    world.crash(leader)
    assert world.newest is not None
    world.wait_for_round(world.newest.number + 3, LIMIT_SECONDS)
    after = {manifest.blob_id for manifest in follower.store.manifests().values() if manifest.kind is Kind.ANCHOR}
    assert after == before
    assert ("rejected", "fork") not in follower.counts


def patches_of(node: VersionsNode) -> dict[int, Digest]:
    assert node.versions.trainer is not None
    assert node.versions.trainer.state is not None
    retained = node.versions.trainer.state.retained
    return {item.entry.version.number: item.blob_id for item in retained if item.entry.kind is Kind.PATCH}


def test_a_standby_has_the_leaders_patches_and_serves_them() -> None:
    world = make_world()
    leader = leader_of(world)
    number = world.round_index + 1
    world.run_until(lambda: all(number in patches_of(node) for node in world.publishers), LIMIT_SECONDS)
    assert len({patches_of(node)[number] for node in world.publishers}) == 1
    late = world.add_inferencer("late")
    world.part(late, leader)
    follower = late.versions.follower
    assert follower is not None
    world.run_until(lambda: follower.applied_version == world.newest, LIMIT_SECONDS)


def test_a_leader_cut_off_publishes_nothing_that_others_contradict() -> None:
    world = make_world()
    leader = leader_of(world)
    others = [node for node in world.publishers if node is not leader]
    for node in others:
        world.part(leader, node)
    world.run_until(lambda: world.heads[-1][0] != leader.peer_id, LIMIT_SECONDS)
    assert world.newest is not None
    world.wait_for_round(world.newest.number + 2, LIMIT_SECONDS)
    world.heal()
    world.wait_for_round(world.newest.number + 3, LIMIT_SECONDS)
    publisher = leader.versions.trainer
    assert publisher is not None
    world.run_until(lambda: publisher.state is not None and publisher.state.version.number >= 6, LIMIT_SECONDS)
    assert {head.version.epoch for _, head in world.heads} == {0}


def test_rounds_that_were_not_handed_over_are_spanned_by_skips() -> None:
    world = VersionsWorld(4, left_out_per_mille=500)
    world.wait_for_round(12, LIMIT_SECONDS)
    kinds = {manifest.kind for node in world.followers for manifest in node.store.manifests().values()}
    assert Kind.SKIP in kinds
    assert world.is_followed()


def test_a_plain_trainer_is_told_before_it_copies_a_weight() -> None:
    world = make_world()
    trainer = world.node("trainer 0")
    assert isinstance(trainer, VersionsNode)
    assert world.refusals["not_publisher"] >= 3
    assert trainer.versions.refused == []
    assert not trainer.log


def test_a_standby_whose_weights_rot_adopts_nothing_and_comes_back() -> None:
    world = make_world()
    leader = leader_of(world)
    standby = next(node for node in world.publishers if node is not leader)
    assert standby.training.state is not None
    standby.training.state.theta = standby.training.state.theta + np.float32(1)
    standby.is_damaged = True
    world.run_until(lambda: ("rejected", "diverged") in standby.counts, LIMIT_SECONDS)
    world.run_until(lambda: not standby.is_damaged, LIMIT_SECONDS)
    assert world.newest is not None
    world.wait_for_round(world.newest.number + 2, LIMIT_SECONDS)
    world.crash(leader)
    world.wait_for_round(world.newest.number + 2, LIMIT_SECONDS)
    assert {head.version.epoch for _, head in world.heads} == {0}


def test_a_lone_authority_goes_on_after_a_restart() -> None:
    world = VersionsWorld(2, authority_count=1, trainer_count=1)
    world.wait_for_round(3, LIMIT_SECONDS)
    (lone,) = world.publishers
    world.crash(lone)
    world.start(lone)
    world.wait_for_round(6, LIMIT_SECONDS)
    assert {head.term for _, head in world.heads} == {1, 2}
    assert {head.version.epoch for _, head in world.heads} == {0}


def test_an_authority_that_lost_its_publishers_state_starts_over_in_the_same_epoch() -> None:
    world = make_world()
    leader = leader_of(world)
    standby = next(node for node in world.publishers if node is not leader)
    world.crash(standby)
    del standby.store.state[STATE_KEY]
    standby.store.records = {
        digest: record for digest, record in standby.store.records.items() if digest not in standby.store.manifests()
    }
    world.start(standby)
    assert world.newest is not None
    world.wait_for_round(world.newest.number + 3, LIMIT_SECONDS)
    world.crash(leader)
    world.wait_for_round(world.newest.number + 3, LIMIT_SECONDS)
    assert {head.version.epoch for _, head in world.heads} == {0}
