"""Named scenarios of the rounds, each on real machines with a toy training process."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from pulsenet.node.effects import Fate
from pulsenet.node.patience import AGAIN_ROUNDS, MISSED_MAX
from pulsenet.node.rounds_phase import Phase
from pulsenet.testing.rounds_node import RoundsNode
from pulsenet.testing.rounds_world import RoundsWorld

ROUND_SECONDS_MAX = 30.0
"""Virtual time in which a round ends among live trainers."""

TAKE_OVER_SECONDS_MAX = 60.0


def root_of(node: RoundsNode) -> bytes | None:
    return None if node.rounds is None else node.rounds.state_root


def assert_equal_states(world: RoundsWorld) -> None:
    world.run_until(world.is_settled, TAKE_OVER_SECONDS_MAX)
    roots = {root_of(node) for node in world.nodes.values() if node.is_up and node.is_training}
    assert len(roots) == 1
    assert None not in roots


def test_every_trainer_counts_in_every_round_of_a_calm_swarm() -> None:
    world = RoundsWorld(1)
    world.run_rounds(5, 5 * ROUND_SECONDS_MAX)
    assert_equal_states(world)
    assert [len(world.receipts[index].members) for index in range(1, 5)] == [4] * 4
    assert [receipt.term for receipt in world.receipts.values()] == [1] * 5


@pytest.mark.parametrize("tenths", range(2, 60, 6))
def test_a_trainer_that_dies_in_a_round_counts_fully_or_not_at_all(tenths: int) -> None:
    """A-LOC-4: killed at any time of a round; the divisor is the number counted, survivors stay bit-equal."""
    world = RoundsWorld(2, authority_count=3, trainer_count=1)
    world.run_rounds(2, 2 * ROUND_SECONDS_MAX)
    world.run_for(tenths / 10)
    world.crash(world.node("trainer 0"))
    world.run_rounds(2, 2 * ROUND_SECONDS_MAX)
    assert_equal_states(world)
    assert len(world.receipts[world.round_index - 1].members) == 3
    world.start(world.node("trainer 0"))
    world.run_rounds(3, 3 * ROUND_SECONDS_MAX)
    assert_equal_states(world)
    assert len(world.receipts[world.round_index - 1].members) == 4


@pytest.mark.parametrize("tenths", range(2, 80, 8))
def test_a_coordinator_that_dies_in_a_round_is_replaced_and_nothing_is_undone(tenths: int) -> None:
    world = RoundsWorld(3)
    world.run_rounds(2, 2 * ROUND_SECONDS_MAX)
    world.run_for(tenths / 10)
    first = world.node("authority 0")
    assert first.coordinator is not None
    assert first.coordinator.is_leading(world.now)
    world.crash(first)
    world.run_rounds(2, TAKE_OVER_SECONDS_MAX + 2 * ROUND_SECONDS_MAX)
    assert_equal_states(world)
    assert world.receipts[world.round_index - 1].term > 1
    world.start(first)
    world.run_rounds(2, 3 * ROUND_SECONDS_MAX)
    assert_equal_states(world)


def test_a_daemon_whose_training_process_is_gone_costs_some_rounds_their_wait_and_not_all() -> None:
    world = RoundsWorld(1, constants={"contribution_wait_seconds": 100})
    world.run_rounds(2, 2 * ROUND_SECONDS_MAX)
    mute = world.node("trainer 0")
    mute.kill_training()
    world.run_rounds(MISSED_MAX, MISSED_MAX * (100.0 + ROUND_SECONDS_MAX))
    world.run_rounds(5, 5 * ROUND_SECONDS_MAX)
    back_at = world.round_index
    mute.attach_training()
    world.run_rounds(AGAIN_ROUNDS, 100.0 + AGAIN_ROUNDS * ROUND_SECONDS_MAX)
    counted = [any(m.peer_id == mute.peer_id for m in world.receipts[index].members) for index in world.receipts]
    assert not any(counted[back_at - 3 : back_at])
    assert all(counted[-3:]), "it is counted again, and waited for"
    assert_equal_states(world)


def test_with_two_authorities_nobody_takes_over() -> None:
    world = RoundsWorld(4, authority_count=2)
    world.run_rounds(1, ROUND_SECONDS_MAX)
    first, second = world.node("authority 0"), world.node("authority 1")
    world.crash(first)
    round_index = second.ledger.next_round_index
    world.run_for(300.0)
    assert second.coordinator is not None
    assert not second.coordinator.is_leading(world.now)
    assert second.ledger.next_round_index <= round_index + 1
    assert second.counts.get(("votes", "stood"), 0) == 0
    world.start(first)
    world.run_rounds(2, 3 * ROUND_SECONDS_MAX)
    assert_equal_states(world)


def test_an_authority_that_only_votes_never_stands() -> None:
    world = RoundsWorld(5, authority_count=3, voter_count=1)
    voter = world.node("authority 2")
    world.run_rounds(1, ROUND_SECONDS_MAX)
    world.crash(world.node("authority 0"))
    world.run_rounds(2, TAKE_OVER_SECONDS_MAX + 2 * ROUND_SECONDS_MAX)
    assert voter.rounds is None
    assert voter.counts.get(("votes", "stood"), 0) == 0
    assert_equal_states(world)


def test_an_authority_that_only_votes_lets_old_contributions_go() -> None:
    world = RoundsWorld(5, authority_count=3, voter_count=1)
    voter = world.node("authority 2")
    world.run_rounds(40, 40 * ROUND_SECONDS_MAX)
    assert voter.ledger.final(10) is None
    assert len(voter.store.lists) <= 3 * 20, "three contributions a round, back to the older of two state anchors"
    assert voter.ledger.next_round_index >= world.round_index - 1


def test_a_coordinator_cut_off_from_most_authorities_closes_nothing() -> None:
    world = RoundsWorld(6, authority_count=5, trainer_count=1)
    world.run_rounds(1, ROUND_SECONDS_MAX)
    first = world.node("authority 0")
    for index in (2, 3, 4):
        world.part(first, world.node(f"authority {index}"))
    world.run_for(60.0)
    known = first.ledger.next_round_index
    assert first.coordinator is not None
    assert not first.coordinator.is_leading(world.now)
    assert world.round_index >= known
    world.heal()
    world.run_rounds(2, TAKE_OVER_SECONDS_MAX + 2 * ROUND_SECONDS_MAX)
    assert_equal_states(world)


def test_a_joiner_loads_the_newest_anchor_and_replays() -> None:
    world = RoundsWorld(7, joiner_count=1)
    world.run_rounds(6, 6 * ROUND_SECONDS_MAX)
    joiner = world.node("joiner 0")
    world.start(joiner)
    world.run_until(lambda: joiner.rounds is not None and joiner.rounds.phase is Phase.PENDING, ROUND_SECONDS_MAX)
    assert joiner.counts["contributions", Fate.MISSED] + joiner.counts.get(("contributions", Fate.DROPPED), 0) < 6
    world.run_rounds(2, 2 * ROUND_SECONDS_MAX)
    assert_equal_states(world)
    assert joiner.counts["contributions", Fate.COUNTED] >= 1


def test_a_joiner_waits_for_a_busy_donor_with_a_reason_and_an_estimate() -> None:
    """A-CHK-6, first half: the only donor is in an outer step of 60 s."""
    world = RoundsWorld(8, authority_count=1, trainer_count=0, joiner_count=1)
    world.run_rounds(5, 5 * ROUND_SECONDS_MAX)
    donor, joiner = world.node("authority 0"), world.node("joiner 0")
    donor.busy_until = world.now + 60.0
    world.start(joiner)
    world.run_for(20.0)
    assert joiner.rounds is not None
    assert joiner.rounds.phase is Phase.JOINING
    assert joiner.reports["rounds_reason"] == "busy"
    wait_seconds = joiner.reports["rounds_wait_seconds"]
    assert isinstance(wait_seconds, float)
    assert 30.0 < wait_seconds <= 60.0
    world.run_for(40.0 - 1e-9)
    world.run_until(lambda: root_of(joiner) is not None, 10.0)


@pytest.mark.parametrize("hundredths", range(4, 60, 8))
def test_a_joiner_survives_the_death_of_its_donor(hundredths: int) -> None:
    """A-CHK-6, second half: a state anchor that ends early is never restored; another source is used."""
    world = RoundsWorld(9, trainer_count=0, joiner_count=1)
    world.run_rounds(5, 5 * ROUND_SECONDS_MAX)
    joiner = world.node("joiner 0")
    world.start(joiner)
    world.run_for(hundredths / 100)
    world.crash(world.node("authority 0"))
    world.run_until(lambda: root_of(joiner) is not None, ROUND_SECONDS_MAX)
    world.run_rounds(2, TAKE_OVER_SECONDS_MAX + 2 * ROUND_SECONDS_MAX)
    assert_equal_states(world)
    assert ("rejected", "decode") not in joiner.counts


def test_a_trainer_restored_from_an_old_checkpoint_counts_nothing_twice() -> None:
    """Resume at round r of a swarm at q: what was sent and counted meanwhile leaves the residual."""
    world = RoundsWorld(10, constants={"state_anchor_interval": 50, "missed_rounds_max": 100})
    trainer = world.node("trainer 0")
    world.run_until(lambda: trainer.rounds is not None and trainer.rounds.round_index == 10, 40 * ROUND_SECONDS_MAX)
    backup = copy.deepcopy(trainer.disk)
    backup.stored.clear()
    assert backup.state is not None
    before = backup.state.residual.copy()
    world.run_until(lambda: trainer.rounds is not None and trainer.rounds.round_index == 13, 9 * ROUND_SECONDS_MAX)
    world.crash(trainer)
    # The training disk goes back to round 10; what is lost with it is the owner's choice, and booked as such.
    trainer.keeps_books = False
    trainer.disk = backup
    world.start(trainer)
    world.run_until(lambda: trainer.rounds is not None and trainer.rounds.round_index == 13, 3 * ROUND_SECONDS_MAX)
    assert trainer.training.state is not None
    residual = trainer.training.state.residual
    counted = [world.receipts[index] for index in (10, 11, 12)]
    sent = np.zeros(residual.shape, bool)
    for receipt in counted:
        for member in receipt.members:
            if member.peer_id == trainer.peer_id:
                sent |= world.content(member.contribution_digest) != 0
    assert sent.any()
    assert (residual[sent] == 0).all()
    assert (residual[~sent] == before[~sent]).all()
    world.run_rounds(1, ROUND_SECONDS_MAX)
    assert_equal_states(world)


@pytest.mark.parametrize("tenths", range(0, 40, 10))
def test_a_lone_run_killed_and_resumed_is_bit_equal_to_an_uninterrupted_one(tenths: int) -> None:
    """A-LOC-3: killed at round 10, at any time of it."""
    roots = []
    for is_killed in (False, True):
        world = RoundsWorld(11, authority_count=1, trainer_count=0)
        node = world.node("authority 0")
        world.run_rounds(10, 10 * ROUND_SECONDS_MAX)
        if is_killed:
            world.run_for(tenths / 10)
            world.crash(node)
            world.run_for(1.0)
            world.start(node)
        world.run_until(lambda node=node: node.rounds is not None and node.rounds.round_index >= 20, 600.0)  # type: ignore[misc]
        receipt = world.receipts[19]
        assert len(receipt.members) == 1
        roots.append(receipt.base_state_root)
    assert roots[0] == roots[1]


@pytest.mark.parametrize("poison", ["finite", "norm"])
def test_bad_content_is_rejected_and_poisons_nobody(poison: str) -> None:
    """A-LOC-6: NaN of one trainer; the others are averaged, and its residual is as before."""
    world = RoundsWorld(12)
    world.run_rounds(2, 2 * ROUND_SECONDS_MAX)
    bad = world.node("trainer 0")
    bad.training.poison = poison
    world.run_rounds(2, 2 * ROUND_SECONDS_MAX)
    bad.training.poison = ""
    rejections = [rejection for receipt in world.receipts.values() for rejection in receipt.rejected]
    assert {(rejection.peer_id, rejection.reason) for rejection in rejections} == {(bad.peer_id, poison)}
    world.run_rounds(3, 3 * ROUND_SECONDS_MAX)
    assert bad.counts["contributions", Fate.REJECTED] >= 1
    assert bad.peer_id in [member.peer_id for member in world.receipts[world.round_index - 1].members]
    assert_equal_states(world)


def test_a_trainer_whose_state_diverged_finds_out_and_restores() -> None:
    world = RoundsWorld(13)
    world.run_rounds(5, 5 * ROUND_SECONDS_MAX)
    bad = world.node("trainer 0")
    assert bad.rounds is not None
    world.run_until(lambda: bad.rounds is not None and bad.rounds.phase is Phase.TRAINING, ROUND_SECONDS_MAX)
    bad.is_damaged = True
    bad.training.flip_bit()
    world.run_rounds(3, 5 * ROUND_SECONDS_MAX)
    world.run_until(lambda: not bad.is_damaged, 2 * ROUND_SECONDS_MAX)
    assert bad.counts["wasted_inner_steps", "diverged"] == 1
    assert_equal_states(world)


@pytest.mark.parametrize(("seed", "round_count"), [(1, 5), (1, 8), (2, 7), (3, 5)])
def test_a_coordinator_whose_state_diverged_gives_way_and_restores(seed: int, round_count: int) -> None:
    """With a state anchor at that round and without: one flipped bit stops no run and costs nobody else a round."""
    world = RoundsWorld(seed, constants={"state_anchor_interval": 4})
    world.run_rounds(round_count, round_count * ROUND_SECONDS_MAX)

    def find_leader() -> RoundsNode | None:
        nodes = [node for node in world.nodes.values() if node.coordinator is not None]
        return next((node for node in nodes if node.coordinator and node.coordinator.is_leading(world.now)), None)

    def is_training() -> bool:
        leader = find_leader()
        return leader is not None and leader.rounds is not None and leader.rounds.phase is Phase.TRAINING

    world.run_until(is_training, ROUND_SECONDS_MAX)
    bad = find_leader()
    assert bad is not None
    bad.is_damaged = True
    bad.training.flip_bit()
    world.run_rounds(3, 3 * ROUND_SECONDS_MAX)
    world.run_until(lambda: not bad.is_damaged, ROUND_SECONDS_MAX)
    assert bad.counts["wasted_inner_steps", "diverged"] == 1
    assert [n.name for n in world.nodes.values() if ("wasted_inner_steps", "diverged") in n.counts] == [bad.name]
    assert_equal_states(world)


def test_a_residual_is_dropped_after_too_many_missed_rounds_and_counted() -> None:
    world = RoundsWorld(14, constants={"missed_rounds_max": 2, "state_anchor_interval": 50})
    world.run_rounds(1, ROUND_SECONDS_MAX)
    trainer = world.node("trainer 0")
    world.run_until(lambda: trainer.rounds is not None and trainer.rounds.phase is Phase.TRAINING, ROUND_SECONDS_MAX)
    world.crash(trainer)
    world.run_rounds(3, 3 * ROUND_SECONDS_MAX)
    world.start(trainer)
    world.run_rounds(2, 2 * ROUND_SECONDS_MAX)
    assert_equal_states(world)
    assert trainer.counts["contributions", Fate.DROPPED] == 1
    assert trainer.counts["wasted_inner_steps", Fate.DROPPED] == 1


def test_a_missed_round_folds_everything_back() -> None:
    """The contribution is stored but reaches nobody; the checkers see it again in the residual, then counted."""
    world = RoundsWorld(15, constants={"missed_rounds_max": 5})
    trainer = world.node("trainer 0")
    world.run_rounds(1, ROUND_SECONDS_MAX)
    for other in world.nodes.values():
        if other is not trainer:
            world.part(trainer, other)
    world.run_for(2.0)
    world.run_rounds(2, 2 * ROUND_SECONDS_MAX)
    world.heal()
    world.run_rounds(2, 3 * ROUND_SECONDS_MAX)
    assert_equal_states(world)
    assert trainer.counts["contributions", Fate.MISSED] >= 1
    assert ("contributions", Fate.DROPPED) not in trainer.counts


def test_while_no_coordinator_is_heard_inner_steps_go_on_up_to_a_bound() -> None:
    world = RoundsWorld(16, authority_count=1, trainer_count=1)
    world.run_rounds(1, ROUND_SECONDS_MAX)
    trainer = world.node("trainer 0")
    world.run_until(lambda: trainer.rounds is not None and trainer.rounds.phase is Phase.TRAINING, ROUND_SECONDS_MAX)
    world.crash(world.node("authority 0"))
    world.run_for(120.0)
    assert trainer.rounds is not None
    assert trainer.rounds.phase is Phase.PENDING
    world.start(world.node("authority 0"))
    world.run_rounds(2, 3 * ROUND_SECONDS_MAX)
    assert_equal_states(world)


def test_old_receipts_and_their_blobs_are_let_go() -> None:
    world = RoundsWorld(17, authority_count=1, trainer_count=1, constants={"state_anchor_interval": 2})
    sizes = []
    for _ in range(4):
        world.run_rounds(4, 4 * ROUND_SECONDS_MAX)
        sizes.append(len(world.node("authority 0").store.lists))
    # Two anchors are kept for their rounds; contributions go with the receipts that list them.
    assert sizes[-1] - sizes[-2] <= 4
    assert world.node("authority 0").ledger.final(0) is None
