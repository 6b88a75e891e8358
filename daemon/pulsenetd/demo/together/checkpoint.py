"""A training process's own checkpoint: model, inner optimizer and rounds, replaced as one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pulsenet.training.callback import load_outer_state, save_outer_state

if TYPE_CHECKING:
    from pulsenet.training.gossip_optimizer import GossipOptimizer
    from pulsenet.training.outer_optimizer import OuterOptimizer

    Rounds = OuterOptimizer | GossipOptimizer


def save_checkpoint(
    path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, sync: OuterOptimizer | GossipOptimizer
) -> None:
    """Write everything the next life of this process needs; a crash leaves the file of before."""
    inner = optimizer.state_dict()
    # Names are text in a file of tensors.
    named = {"state": {str(index): held for index, held in inner["state"].items()}, "groups": inner["param_groups"]}
    save_outer_state({"model": model.state_dict(), "optimizer": named, "rounds": sync.state_dict()}, path)


def load_checkpoint(
    path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, sync: OuterOptimizer | GossipOptimizer
) -> bool:
    """Restore what :func:`save_checkpoint` wrote; return whether there was anything."""
    if not path.exists():
        return False
    held = load_outer_state(path)
    model.load_state_dict(held["model"])
    named = held["optimizer"]
    state = {int(index): values for index, values in named["state"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": named["groups"]})
    sync.load_state_dict(held["rounds"])
    return True
