"""A small training process that takes part in rounds, started by tests: an ordinary loop and a checkpoint a round.

It prints a line of JSON for each exchange: round index, state root, the batch that was offered last and to which round,
and what became of it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch

import pulsenet
from pulsenet.errors import UnavailableError
from pulsenet.local.protocol import LocalMessage
from pulsenet.local.rounds_client import RoundsConnection
from pulsenet.training import GossipOptimizer, OuterOptimizer, RoundReport


def make_model() -> torch.nn.Module:
    """Return the model that every trainer of the test starts from."""
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32, bias=False))


def draw_batch(seed: int, index: int) -> torch.Tensor:
    """Return a batch that the seed and its number decide."""
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(seed * 1_000_003 + index))


def compute_loss(model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Return the loss that every trainer of the test lowers."""
    return torch.nn.functional.mse_loss(model(inputs), inputs.roll(1, dims=1))


def tell(**fields: object) -> None:
    """Print a line for the test."""
    print(json.dumps(fields), flush=True)


def pause_on_demand(directory: Path) -> None:
    """Hold this process up before or after it says something to its daemon, while a file of that name is there."""
    say = RoundsConnection.tell

    def wait_while(name: str) -> None:
        if (directory / name).exists():
            tell(paused=name)
            while (directory / name).exists():
                time.sleep(0.05)

    def say_slowly(connection: RoundsConnection, message: LocalMessage) -> None:
        wait_while(f"before-{type(message).__name__}")
        say(connection, message)
        wait_while(f"after-{type(message).__name__}")

    RoundsConnection.tell = say_slowly  # type: ignore[method-assign]


def save(
    path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, sync: OuterOptimizer | GossipOptimizer
) -> None:
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
    parser.add_argument("--pauses", type=Path, default=None, help="directory of the files that hold this process up")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="least time of an inner step")
    arguments = parser.parse_args()
    if arguments.pauses is not None:
        pause_on_demand(arguments.pauses)
    torch.set_num_threads(1)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    exchange = pulsenet.join_rounds(data_dir=arguments.data_dir)
    assert exchange is not None

    batch_index, before = -1, 0

    def on_round(report: RoundReport) -> None:
        tell(
            round_index=report.round_index,
            root=sync.state_root.hex(),
            outcome=str(report.outcome),
            contributors=report.contributor_count,
            offered=[before, batch_index],
        )

    sync = OuterOptimizer(model, optimizer, exchange=exchange, on_round=on_round, warmup_steps=0)
    if arguments.checkpoint.exists():
        saved = torch.load(arguments.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        sync.load_state_dict(saved["rounds"])
        tell(resumed_at=sync.round_index)
    caught_up = sync.catch_up()
    tell(caught_up=caught_up, round_index=sync.round_index, root=sync.state_root.hex())
    while not arguments.goal.exists() or sync.round_index < int(arguments.goal.read_text()):
        batch_index += 1
        ends_at = time.monotonic() + arguments.step_seconds
        compute_loss(model, draw_batch(arguments.seed, batch_index)).backward()
        optimizer.step()
        time.sleep(max(0.0, ends_at - time.monotonic()))
        before = sync.round_index
        if str(sync.settings.algorithm) == "ddp":
            tell(offers=[before, batch_index])
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
