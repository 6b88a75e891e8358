"""The table of a trainer's phases."""

from __future__ import annotations

import pytest

from pulsenet.node.rounds_phase import TRANSITIONS, Phase, Step, follow


def test_every_phase_can_be_reached_and_left() -> None:
    assert {phase for phase, _ in TRANSITIONS} == set(Phase)
    assert set(TRANSITIONS.values()) == set(Phase)
    assert {step for _, step in TRANSITIONS} == set(Step)


def test_a_training_process_may_die_at_any_time() -> None:
    assert all(follow(phase, Step.LOST) is Phase.IDLE for phase in Phase)


def test_state_moves_only_after_a_final_receipt_was_gathered() -> None:
    before = {phase for (phase, _), after in TRANSITIONS.items() if after is Phase.STEPPING}
    assert before == {Phase.GATHERING}
    assert {step for (_, step), after in TRANSITIONS.items() if after is Phase.GATHERING} == {Step.FINAL, Step.FAILED}


def test_only_a_stored_contribution_is_pending() -> None:
    assert {step for (_, step), after in TRANSITIONS.items() if after is Phase.PENDING} == {Step.STORED}


def test_what_is_not_in_the_table_does_not_happen() -> None:
    with pytest.raises(AssertionError, match="final in storing"):
        follow(Phase.STORING, Step.FINAL)
