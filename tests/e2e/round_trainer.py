"""A small training process that takes part in rounds, started by tests: an ordinary loop and a checkpoint a round.

It prints a line of JSON for each round: index, state root, what became of its contribution.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch

import pulsenet.training
from pulsenet.errors import UnavailableError
from pulsenet.training import OuterOptimizer, RoundReport


def make_model() -> torch.nn.Module:
    """Return the model that every trainer of the test starts from."""
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32, bias=False))


def tell(**fields: object) -> None:
    """Print a line for the test."""
    print(json.dumps(fields), flush=True)


def save(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, sync: OuterOptimizer) -> None:
    """Replace the checkpoint; a kill in between leaves the one before."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rounds": sync.state_dict()}
    torch.save(state, path.with_suffix(".partial"))
    os.replace(path.with_suffix(".partial"), path)


def main() -> None:
    """Train until the round that the goal names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--goal", type=Path, required=True, help="file with the round to end at, once it exists")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    exchange = pulsenet.training.join_rounds(data_dir=arguments.data_dir)
    assert exchange is not None

    def on_round(report: RoundReport) -> None:
        tell(round_index=report.round_index, root=sync.state_root.hex(), outcome=str(report.outcome))

    sync = OuterOptimizer(model, optimizer, exchange=exchange, on_round=on_round, warmup_steps=0)
    if arguments.checkpoint.exists():
        saved = torch.load(arguments.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        sync.load_state_dict(saved["rounds"])
        tell(resumed_at=sync.round_index)
    caught_up = sync.catch_up()
    tell(caught_up=caught_up, round_index=sync.round_index, root=sync.state_root.hex())
    data = torch.Generator().manual_seed(arguments.seed)
    while not arguments.goal.exists() or sync.round_index < int(arguments.goal.read_text()):
        inputs = torch.randn(16, 32, generator=data)
        torch.nn.functional.mse_loss(model(inputs), inputs.roll(1, dims=1)).backward()
        optimizer.step()
        before = sync.round_index
        while True:
            try:
                sync.step()
                break
            except UnavailableError as error:
                tell(waits=str(error))
        optimizer.zero_grad()
        if sync.round_index != before:
            save(arguments.checkpoint, model, optimizer, sync)
    tell(done=sync.round_index, root=sync.state_root.hex())
    exchange.close()


if __name__ == "__main__":
    main()
