"""The ranks of one trainer under ``torch.distributed``: rank 0 takes part in the rounds, the others follow it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import TypeVar

import torch

from pulsenet.errors import UnavailableError

Shared = TypeVar("Shared")


@dataclass(frozen=True, slots=True)
class RankNews:
    """What the other ranks must know of a round that rank 0 took part in."""

    failed: bool
    """Rank 0 raised."""
    restarted: bool
    """Masters were overwritten by theta."""
    reset: bool
    """The inner optimizer is to forget its state."""
    round_index: int
    inner_step: int
    extra_inner_steps: int = 0
    """Beyond those of a round, until the next try to contribute."""
    has_caught_up: bool = True
    """Whether the next call asks no more where the run is."""
    is_unsettled: bool = False
    """Whether the next call finishes an exchange that broke off."""

    def check_finished(self) -> None:
        """Raise what the other ranks raise with rank 0.

        Raises:
            UnavailableError: it could not finish.
        """
        if self.failed:
            raise UnavailableError("rank 0 could not finish the round; its own error says why")


def is_distributed() -> bool:
    """Tell whether this process is one of several ranks."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def is_first_rank() -> bool:
    """Tell whether this process takes part in the rounds."""
    return not is_distributed() or torch.distributed.get_rank() == 0


def share_object(value: Shared) -> Shared:
    """Return rank 0's value; every rank calls it, as a process alone may."""
    holder = [value]
    if is_distributed():
        torch.distributed.broadcast_object_list(holder, src=0)
    return holder[0]


def share_news(news: RankNews | None, tensors: Sequence[torch.Tensor]) -> RankNews:
    """Send rank 0's news and masters to the other ranks, if there are any; every rank calls it, rank 0 with ``news``.

    Args:
        news: ``None`` on the ranks that receive.
        tensors: The masters, overwritten on the ranks that receive.
    """
    numbers = [0] * len(fields(RankNews))
    if news is not None:
        if not is_distributed():
            return news
        numbers = [int(number) for number in astuple(news)]
    device = tensors[0].device
    header = torch.tensor(numbers, dtype=torch.int64, device=device)
    torch.distributed.broadcast(header, src=0)
    failed, restarted, reset, round_index, inner_step, extra, has_caught_up, is_unsettled = header.tolist()
    if restarted:
        with torch.no_grad():
            for tensor in tensors:
                values = tensor.detach()
                whole = values if values.is_contiguous() else values.contiguous()
                torch.distributed.broadcast(whole, src=0)
                if whole is not values:
                    values.copy_(whole)
    return RankNews(
        bool(failed),
        bool(restarted),
        bool(reset),
        round_index,
        inner_step,
        extra,
        bool(has_caught_up),
        bool(is_unsettled),
    )
