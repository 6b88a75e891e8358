"""What a trainer's part in the rounds is doing, and what may follow (SPEC section 6.9 and 6.10).

A phase changes only along this table; what is not in it does not happen.
"""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """Where the trainer of this node stands."""

    IDLE = "idle"
    """No training process is attached."""
    JOINING = "joining"
    """It holds no state that leads to the round that is due: a state anchor is being fetched."""
    RESTORING = "restoring"
    """The training process reads a state anchor."""
    TRAINING = "training"
    """Inner steps run."""
    STORING = "storing"
    """The contribution is being gated and stored."""
    PENDING = "pending"
    """The contribution is sent; only the final receipt of its round decides."""
    GATHERING = "gathering"
    """The final receipt is known; what it lists is being fetched."""
    STEPPING = "stepping"
    """The outer step runs."""


class Step(StrEnum):
    """What moves it on."""

    ATTACHED = "attached"
    LOST = "lost"
    FINAL = "final"
    WHOLE = "whole"
    DONE = "done"
    STORED = "stored"
    FAILED = "failed"
    ASTRAY = "astray"


TRANSITIONS: dict[tuple[Phase, Step], Phase] = {
    (Phase.IDLE, Step.ATTACHED): Phase.TRAINING,
    (Phase.IDLE, Step.STORED): Phase.PENDING,
    (Phase.IDLE, Step.ASTRAY): Phase.JOINING,
    (Phase.JOINING, Step.WHOLE): Phase.RESTORING,
    (Phase.RESTORING, Step.DONE): Phase.TRAINING,
    (Phase.RESTORING, Step.STORED): Phase.PENDING,
    (Phase.RESTORING, Step.FAILED): Phase.JOINING,
    (Phase.TRAINING, Step.DONE): Phase.STORING,
    (Phase.TRAINING, Step.FINAL): Phase.GATHERING,
    (Phase.TRAINING, Step.ASTRAY): Phase.JOINING,
    (Phase.STORING, Step.STORED): Phase.PENDING,
    (Phase.STORING, Step.FAILED): Phase.TRAINING,
    (Phase.PENDING, Step.FINAL): Phase.GATHERING,
    (Phase.PENDING, Step.ASTRAY): Phase.JOINING,
    (Phase.GATHERING, Step.WHOLE): Phase.STEPPING,
    (Phase.GATHERING, Step.ASTRAY): Phase.JOINING,
    (Phase.STEPPING, Step.DONE): Phase.TRAINING,
    (Phase.STEPPING, Step.STORED): Phase.PENDING,
    (Phase.STEPPING, Step.FAILED): Phase.GATHERING,
    **{(phase, Step.LOST): Phase.IDLE for phase in Phase},
}


def follow(phase: Phase, step: Step) -> Phase:
    """Return the phase that follows."""
    after = TRANSITIONS.get((phase, step))
    assert after is not None, f"{step} in {phase}"
    return after
