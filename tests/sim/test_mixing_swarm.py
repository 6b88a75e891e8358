"""Members that mix under drawn faults: rules hold after every event, and once faults stop everybody mixes again."""

from __future__ import annotations

import pytest

from pulsenet.outer.mixing.settings import MixingSettings, MixingVariant
from pulsenet.testing.fakes import Chance
from pulsenet.testing.mixing_world import MixingWorld
from pulsenet.testing.network import Faults

HEAL_SECONDS_MAX = 400.0
"""Virtual time in which every member goes through three rounds after faults stop."""


def draw_faults(chance: Chance) -> Faults:
    return Faults(
        latency_seconds_min=0.001,
        latency_seconds_max=chance.between(0.01, 0.5),
        drop_per_mille=chance(80),
        close_per_mille=chance(80),
        lose_per_mille=chance(60),
        duplicate_per_mille=chance(80),
        delay_per_mille=chance(50),
        flip_per_mille=chance(50),
    )


def make_world(seed: int) -> MixingWorld:
    chance = Chance(seed ^ 0xC0FFEE)
    variant = list(MixingVariant)[chance(5)] if chance(2) else MixingVariant.LOCAL_M1_M2
    settings = MixingSettings(
        variant=variant, mix2_wait_seconds=3 + chance(28), mix1_wait_seconds=2 + chance(9), roster_rounds=2 + chance(8)
    )
    authority_count = (1, 2, 3, 3)[chance(4)]
    return MixingWorld(
        seed,
        settings,
        authority_count=authority_count,
        trainer_count=1 + chance(6),
        joiner_count=chance(2),
        faults=draw_faults(chance),
        step=0.5,
        spread=float(chance(2)),
        inner_seconds=(0.5, 0.5 + chance(12)),
    )


def run_story(seed: int, step_count: int = 40) -> MixingWorld:
    """Crash, stop, kill, part and fill disks at random; then heal, and wait until everybody mixes again."""
    chance = Chance(seed ^ 0x5EED)
    world = make_world(seed)
    members = world.members
    for _ in range(step_count):
        world.run_for(chance.between(0.05, 12.0))
        member, other = members[chance(len(members))], members[chance(len(members))]
        match chance(12):
            case 0 | 1 if member.is_up:
                world.crash(member)
            case 2 | 3 if member.is_up:
                world.stop_daemon(member)
            case 4 | 5 | 6 | 7 if not member.is_up:
                world.start(member)
            case 4 if member.toy is not None:
                member.kill_training()
            case 5 if member.toy is None:
                member.attach_training()
            case 8 if member is not other:
                world.part(member, other)
            case 9:
                member.is_full = not member.is_full
            case 10:
                world.heal()
            case _:
                pass
    world.heal()
    for member in members:
        if not member.is_up:
            world.start(member)
        if member.toy is None:
            member.attach_training()
    world.run_rounds(3, HEAL_SECONDS_MAX)
    return world


@pytest.mark.parametrize("seed", [3, 8, 28, 31, 45])
def test_rules_hold_under_faults_and_everybody_mixes_once_they_stop(seed: int) -> None:
    run_story(seed)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(100, 112))
def test_rules_hold_under_many_more_faults(seed: int) -> None:
    run_story(seed)


def test_the_same_seed_gives_the_same_run() -> None:
    assert run_story(12, 10).trace_digest == run_story(12, 10).trace_digest
