"""A training process's own checkpoint: model, inner optimizer and rounds, replaced as one file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pulsenet.training.outer_optimizer import OuterOptimizer


def save_checkpoint(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, sync: OuterOptimizer) -> None:
    """Write everything the next life of this process needs; a crash leaves the file of before."""
    held = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rounds": sync.state_dict()}
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save(held, file)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def load_checkpoint(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, sync: OuterOptimizer) -> bool:
    """Restore what :func:`save_checkpoint` wrote; return whether there was anything."""
    if not path.exists():
        return False
    held: dict[str, Any] = torch.load(path, weights_only=True)
    model.load_state_dict(held["model"])
    optimizer.load_state_dict(held["optimizer"])
    sync.load_state_dict(held["rounds"])
    return True
