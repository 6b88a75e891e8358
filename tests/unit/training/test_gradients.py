from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pulsenet.errors import UnavailableError
from pulsenet.outer.contribution import Contribution, Entries
from pulsenet.training.exchange import FinalRound, Outcome, RoundResult
from pulsenet.training.gradients import STATE_ROOT, share_gradients


class Halving:
    """An exchange in which somebody else always sends zeros."""

    def __init__(self, outcome: Outcome = Outcome.COUNTED) -> None:
        self.outcome = outcome
        self.seen: list[Contribution] = []

    def submit(self, contribution: Contribution) -> RoundResult:
        self.seen.append(contribution)
        aggregate: Any = SimpleNamespace(
            contributor_count=2,
            entries=lambda index: Entries(index, None, contribution.entries[index].values / np.float32(2)),
        )
        return RoundResult(self.outcome, (FinalRound(contribution.round_index, STATE_ROOT, aggregate),))


def test_every_gradient_becomes_the_mean_and_an_absent_one_counts_as_zero() -> None:
    moved, idle = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(3))
    moved.grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    exchange: Any = Halving()
    share_gradients(exchange, (moved, idle), step_index=7)
    assert moved.grad.tolist() == [[0.5, 1.0], [1.5, 2.0]]
    assert idle.grad is not None
    assert idle.grad.tolist() == [0.0, 0.0, 0.0]
    assert exchange.seen[0].round_index == 7


def test_gradients_that_were_not_counted_are_an_error() -> None:
    exchange: Any = Halving(Outcome.MISSED)
    with pytest.raises(UnavailableError, match="step 3 was missed"):
        share_gradients(exchange, (torch.nn.Parameter(torch.ones(1)),), step_index=3)
