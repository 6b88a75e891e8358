"""The world of members that mix: it mixes, bears a crash, tells the same story again, and its checkers look."""

from __future__ import annotations

import pytest

from pulsenet.node.events import Event
from pulsenet.node.mixing.effects import CombineParts
from pulsenet.outer.mixing.settings import MixingSettings, MixingVariant
from pulsenet.testing.mixing_node import MixingNode
from pulsenet.testing.mixing_world import MixingWorld
from pulsenet.testing.network import Faults

LIMIT_SECONDS = 400.0


def play(seed: int, variant: MixingVariant, faults: Faults | None = None) -> MixingWorld:
    """Mix two rounds, crash a member and bring it back, then mix two more."""
    settings = MixingSettings(variant=variant, probe_interval=1, disagreement_max=0.01)
    faults = faults or Faults()
    world = MixingWorld(
        seed,
        settings,
        authority_count=1,
        trainer_count=4,
        step=0.5,
        spread=1.0,
        inner_seconds=(1.0, 2.0),
        faults=faults,
    )
    world.run_rounds(2, LIMIT_SECONDS)
    crashed = world.members[-1]
    world.crash(crashed)
    world.run_for(20.0)
    world.start(crashed)
    crashed.attach_training()
    world.run_rounds(2, LIMIT_SECONDS)
    return world


@pytest.mark.parametrize("variant", list(MixingVariant))
def test_members_mix_and_one_that_crashed_comes_back(variant: MixingVariant) -> None:
    world = play(3, variant)
    assert all(member.is_up for member in world.members)
    assert world.round_index >= 4
    assert 0.0 < world.utilization <= 1.0
    assert any(not ready.is_alone for _, ready, _ in world.waits)


def test_the_same_seed_tells_the_same_story() -> None:
    faults = Faults(drop_per_mille=20, lose_per_mille=20, duplicate_per_mille=50, flip_per_mille=20)
    first, second = (play(5, MixingVariant.LOCAL_M1_M2, faults) for _ in range(2))
    assert first.describe() == second.describe()
    assert [(ready.reason, since) for _, ready, since in first.waits] == [
        (ready.reason, since) for _, ready, since in second.waits
    ]
    assert first.describe() != play(6, MixingVariant.LOCAL_M1_M2, faults).describe()


def test_a_mean_that_comes_after_its_training_process_died_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    world = MixingWorld(3, MixingSettings(variant=MixingVariant.GLOBAL_M1), authority_count=1, trainer_count=1)
    judge, judged = world.mixing_checker.note_combined, []

    def note(member: MixingNode, order: CombineParts, answer: Event) -> None:
        judged.append((member, order, answer))
        judge(member, order, answer)

    monkeypatch.setattr(world.mixing_checker, "note_combined", note)
    world.run_until(lambda: bool(judged), 60.0)
    member, order, answer = judged[-1]
    member.kill_training()
    judge(member, order, answer)
