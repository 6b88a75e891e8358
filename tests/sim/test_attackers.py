"""The five classes of attack that The Update Framework names, each played by peers of the simulated swarm.

Half of those that a node meets are attackers. The rules hold after every event, and who hears one honest peer is
current although the attack goes on.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from pulsenet.chain.records import Descriptor, EpochRecord, SignedRecord
from pulsenet.chain.signing import Verify, open_record, record_digest, seal
from pulsenet.chain.trust import Trust
from pulsenet.ids import RunId, Version
from pulsenet.node.report import Reporter
from pulsenet.testing.attackers import Attack, Attacker, add_attacker, press
from pulsenet.testing.checkers import ALL_CHECKERS, SimulationError
from pulsenet.testing.fakes import make_key, make_sign
from pulsenet.testing.node import SimNode
from pulsenet.testing.trust_checkers import TRUST_CHECKERS
from pulsenet.testing.world import World
from pulsenet.wire.schema import decode_value

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 20))]
SETTLE_SECONDS = 60.0
ATTACKERS = 3


def make_world(seed: int, attack: Attack) -> tuple[World, list[SimNode], list[Attacker]]:
    """A publisher, three followers, and as many peers that attack from version 4 on."""
    world = World(seed, anchor_interval=4, checkers=TRUST_CHECKERS)
    world.add_node("trainer", "trainer")
    followers = [world.add_node(name, role) for name, role in (("a", "inferencer"), ("b", "inferencer"), ("c", "seed"))]
    attackers = [add_attacker(world, f"attacker {index}") for index in range(ATTACKERS)]
    for _ in range(4):
        world.publish_and_wait()
        world.run_until(world.is_settled, SETTLE_SECONDS)
    for attacker in attackers:
        attacker.start_attack(attack)
    return world, followers, attackers


def publish_under_attack(world: World, attackers: list[Attacker], version_count: int = 4) -> None:
    for _ in range(version_count):
        world.publish_and_wait()
        press(world, attackers, 10.0)


def newest_of(node: SimNode) -> Version | None:
    return None if node.trust.head is None else node.trust.head.version


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("attack", list(Attack))
def test_who_hears_one_honest_peer_is_current_while_attackers_go_on(attack: Attack, seed: int) -> None:
    """A-AUTH-1, A-AUTH-2, A-AUTH-4, A-AUTH-6, A-CHAIN-6, A-MSG-1, A-CHK-3."""
    world, followers, attackers = make_world(seed, attack)
    publish_under_attack(world, attackers)
    late = world.add_node("late", "inferencer")
    press(world, attackers, SETTLE_SECONDS)
    for node in (*followers, late):
        assert newest_of(node) == world.newest
    assert all(
        node.versions.hands.engine.version == world.newest
        for node in (*followers, late)
        if node.versions.role == "inferencer"
    )
    assert all(attacker.lie_count > 0 for attacker in attackers)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("attack", [Attack.ROLLBACK, Attack.MIX_AND_MATCH, Attack.FAST_FORWARD, Attack.ENDLESS])
def test_what_was_refused_is_refused_after_a_restart(attack: Attack, seed: int) -> None:
    """A-CHAIN-6, A-AUTH-4: nobody but attackers answers a node that comes back from its disk."""
    world, followers, attackers = make_world(seed, attack)
    world.publish_and_wait()
    world.run_until(world.is_settled, SETTLE_SECONDS)
    victim = followers[0]
    eclipse(world, victim, attackers)
    world.crash(victim)
    world.start(victim)
    press(world, attackers, 60.0)
    assert newest_of(victim) == world.newest == Version(0, 5)
    assert victim.versions.hands.engine.version in (None, Version(0, 5))


def eclipse(world: World, victim: SimNode, attackers: list[Attacker]) -> None:
    """Let a node reach attackers only, and the directory no more."""
    world.network.islands = {node.peer_id: 1 for node in (victim, *attackers)}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_that_meets_only_attackers_says_that_it_is_frozen(seed: int) -> None:
    """A-AUTH-5: valid for 300 s at most, then stale; the first honest peer ends it."""
    world, followers, attackers = make_world(seed, Attack.FREEZE)
    victim, frozen_at = followers[0], world.newest
    eclipse(world, victim, attackers)
    for _ in range(8):
        world.publish_and_wait()
        press(world, attackers, 60.0)
    assert newest_of(victim) == frozen_at
    assert victim.reports["stale"] is True
    assert victim.reports["publisher_seen"] is False
    assert victim.reports["version_lag"] is None
    world.network.islands = {}
    press(world, attackers, SETTLE_SECONDS)
    assert victim.versions.hands.engine.version == world.newest != frozen_at
    assert victim.reports["stale"] is False


@pytest.mark.parametrize("seed", SEEDS)
def test_a_leaked_key_that_ran_ahead_is_passed_by_the_owners_without_a_wiped_disk(seed: int) -> None:
    """Fast-forward with a real authority's key: everybody believes in the greatest number, and comes back."""
    world = World(seed, anchor_interval=4, checkers=ALL_CHECKERS)
    first = world.add_node("trainer", "trainer")
    followers = [world.add_node(name, "inferencer") for name in ("a", "b")]
    attacker = add_attacker(world, "thief")
    for _ in range(3):
        world.publish_and_wait()
        world.run_until(world.is_settled, SETTLE_SECONDS)
    attacker.start_attack(Attack.FAST_FORWARD, leaked_key=world.trainer_key)
    press(world, [attacker], 30.0)
    assert all(newest_of(node).number == (1 << 63) - 1 for node in followers)
    world.crash(first)
    attacker.attack = None

    revision, order = make_orders(world)
    world.trainer_key = make_key("successor")
    successor = world.add_node("successor", "trainer")
    for record in (revision, order):
        successor.store.put_record(record)
    successor.trust.accept_descriptor(revision)
    successor.trust.accept_epoch(order)
    world.run_for(30.0)
    for _ in range(2):
        world.publish_and_wait(60.0)
        world.run_for(30.0)
    world.run_until(world.is_settled, SETTLE_SECONDS)
    assert world.newest == Version(1, 5)
    for node in followers:
        assert newest_of(node) == Version(1, 5)
        assert node.versions.hands.engine.root == world.versions[Version(1, 5)]
        assert node.life == 1
    press(world, [attacker], 10.0)
    attacker.start_attack(Attack.FAST_FORWARD, leaked_key=make_key("trainer"))
    press(world, [attacker], 30.0)
    assert all(newest_of(node) == Version(1, 5) for node in followers)


def make_orders(world: World) -> tuple[SignedRecord, SignedRecord]:
    """The owner's revision that replaces the leaked key, and the order that says where the run goes on."""
    owner, keys = make_key("owner"), (make_key("successor"),)
    genesis = decode_value(Descriptor, world.genesis.payload)
    run_id = RunId(record_digest(world.genesis))
    revised = replace(genesis, revision=1, previous=run_id, authorities=keys, trainers=keys)
    kept = Version(0, 3)
    order = EpochRecord(run_id, 1, 1, kept, world.versions[kept], 4, "the key leaked")
    return seal(revised, make_sign(owner), owner), seal(order, make_sign(owner), owner)


def test_a_node_that_takes_older_heads_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trust, "_check_not_older", lambda self, version: None)
    with pytest.raises(SimulationError, match="taken back"):
        publish_under_attack(*make_world(0, Attack.ROLLBACK)[::2])


def test_a_node_that_believes_any_key_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_of_anybody(
        cls: type, signed: SignedRecord, verify: Verify, *, run_id: RunId, signers: object = None
    ) -> object:
        return open_record(cls, signed, verify, run_id=run_id)

    world, _, attackers = make_world(0, Attack.FAST_FORWARD)
    monkeypatch.setattr("pulsenet.chain.trust.open_record", open_of_anybody)
    with pytest.raises(SimulationError, match="which nobody published"):
        publish_under_attack(world, attackers)


def test_a_node_that_never_doubts_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    world, followers, attackers = make_world(0, Attack.FREEZE)
    honest = Reporter._fields
    monkeypatch.setattr(
        Reporter, "_fields", lambda self, one, two, is_seen, now_ms: honest(self, one, two, True, now_ms)
    )
    eclipse(world, followers[0], attackers)
    with pytest.raises(SimulationError, match="says nothing"):
        press(world, attackers, 500.0)
