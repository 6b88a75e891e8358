"""The baseline algorithm ``ddp``: trainers share gradients before every inner step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from pulsenet.errors import UnavailableError
from pulsenet.ids import Digest
from pulsenet.outer.contribution import Contribution, Entries
from pulsenet.training.exchange import Exchange, FinalRound, Outcome

STATE_ROOT: Final = Digest(bytes(32))
"""Stands in gradient contributions: there is no outer state to start from."""


def share_gradients(exchange: Exchange, masters: Sequence[torch.Tensor], *, step_index: int) -> None:
    """Replace the gradients of the masters by their mean over all trainers.

    Raises:
        UnavailableError: the own gradients were not counted; the masters would drift from the others'.
    """
    entries = []
    for index, local in enumerate(masters):
        gradient = torch.zeros_like(local) if local.grad is None else local.grad
        flat = gradient.detach().float().reshape(-1).cpu().numpy()
        entries.append(Entries(index, None, flat.copy()))
    result = exchange.submit(Contribution(step_index, STATE_ROOT, 1, tuple(entries)))
    first = next(iter(result.rounds), None)
    aggregate = first.aggregate if isinstance(first, FinalRound) else None
    if result.outcome is not Outcome.COUNTED or aggregate is None:
        raise UnavailableError(f"the gradient exchange of step {step_index} was {result.outcome}")
    for index, local in enumerate(masters):
        mean = torch.from_numpy(aggregate.entries(index).values)
        local.grad = mean.view(local.shape).to(local.device)
