"""How the trainers of the demonstration train together. Imports nothing heavy: the command itself reads this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ALGORITHMS: Final = {"pulseloco": "PULSELoCo", "gossip": "Factored Gossip DiLoCo"}
"""What ``--algorithm`` takes, and what it is called."""
INNER_STEPS: Final = 8
KILL_IN_ROUND: Final = 2
"""The round in which one trainer and its node are killed, after some of its inner steps."""
RETURN_IN_ROUND: Final = 4
"""The round of the others in which they are started again."""
ROUNDS_DEFAULT: Final = 12
ROUNDS_MIN: Final = RETURN_IN_ROUND + 2
"""A trainer that returns is seen to contribute again."""
TRAINERS_MIN: Final = 2
TRAINERS_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class TogetherSettings:
    """How one model is trained by several trainers."""

    name: str
    title: str
    element_count: int
    batch_size: int
    """Sums in one inner step of one trainer."""
    operand_max: int
    learning_rate: float
    threads_max: int
    """Threads one training process computes with, at most."""


SETTINGS: Final = {
    "smollm2": TogetherSettings(
        name="smollm2",
        title="SmolLM2-135M-Instruct",
        element_count=134_515_008,
        batch_size=4,
        operand_max=99,
        learning_rate=3e-6,
        threads_max=16,
    ),
    "tiny": TogetherSettings(
        name="tiny",
        title="tiny Llama",
        element_count=2_365_440,
        batch_size=16,
        operand_max=49,
        learning_rate=2e-7,
        threads_max=1,
    ),
}
"""Models by the name that ``--model`` takes."""
