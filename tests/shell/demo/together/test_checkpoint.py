"""A training process that dies goes on from its file."""

from pathlib import Path

import torch

from pulsenet.outer.settings import OuterSettings
from pulsenet.training import LocalExchange, OuterOptimizer
from pulsenetd.demo.together.checkpoint import load_checkpoint, save_checkpoint


def make_parts(swarm: LocalExchange) -> tuple[torch.nn.Module, torch.optim.Optimizer, OuterOptimizer]:
    torch.manual_seed(3)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, OuterOptimizer(model, optimizer, exchange=swarm.member(0))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, sync: OuterOptimizer, rounds: int) -> None:
    while sync.round_index < rounds:
        torch.manual_seed(100 * sync.round_index + sync.inner_step)
        optimizer.zero_grad()
        model(torch.randn(5, 8)).square().sum().backward()
        optimizer.step()
        sync.step()


def test_the_restored_process_goes_on_bit_by_bit(tmp_path: Path) -> None:
    path = tmp_path / "trainer.pt"
    swarm = LocalExchange(OuterSettings(inner_steps=2), 1)
    parts = make_parts(swarm)
    assert not load_checkpoint(path, *parts)
    train(*parts, rounds=3)
    save_checkpoint(path, *parts)
    train(*parts, rounds=5)

    again = make_parts(swarm)
    assert load_checkpoint(path, *again)
    assert again[2].round_index == 3
    assert [file.name for file in tmp_path.iterdir()] == ["trainer.pt"]
    again[2].catch_up()
    assert again[2].round_index == 5
    assert again[2].state_root == parts[2].state_root
