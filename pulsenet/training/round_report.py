"""What a training loop hears of each exchange."""

from __future__ import annotations

from dataclasses import dataclass

from pulsenet.training.exchange import Outcome


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What one exchange did to this trainer."""

    round_index: int
    """The round this trainer is in now."""
    outcome: Outcome
    reason: str
    """Stable code, unless counted."""
    contributor_count: int
    """Contributions in the newest round stepped; 0 if none was."""
    sent_count: int
    """Entries of the own contribution."""
    element_count: int
    payload_size_bytes: int
    """Of the own contribution as it travels; 0 within one process."""
    contribution_norm: float
    residual_norm: float
    """After the round."""
    resynced: bool
    """Too many rounds were missed, or the state was not the run's: the residual was given up."""

    @property
    def density(self) -> float:
        """Sent entries over all entries."""
        return self.sent_count / self.element_count if self.element_count else 0.0
