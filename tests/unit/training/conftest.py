"""Trainers of one process for the tests of the rounds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pulsenet.outer.settings import OuterSettings
from pulsenet.training.exchange import Exchange
from pulsenet.training.local_exchange import LocalExchange
from pulsenet.training.outer_optimizer import OuterOptimizer, RoundReport

sys.path.insert(0, str(Path(__file__).parents[2] / "shell" / "rounds"))

from small_trainers import run_at_once

INNER_STEPS = 3


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of trainers share the cores; torch's own would fight them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(4)
    return torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 5)).to(dtype)


@dataclass(eq=False)
class Trainer:
    """A model, its optimizer and its rounds; data come from (seed, inner step), so that work can be repeated."""

    exchange: Exchange
    seed: int = 0
    dtype: torch.dtype = torch.float32
    learning_rate: float = 3e-3
    options: dict[str, Any] = field(default_factory=dict)
    reports: list[RoundReport] = field(default_factory=list)
    steps_done: int = 0

    def __post_init__(self) -> None:
        self.model = make_model(self.dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.learning_rate, betas=(0.9, 0.95))
        self.sync = OuterOptimizer(self.model, self.optimizer, exchange=self.exchange, **self.options)

    def train_step(self) -> None:
        generator = torch.Generator().manual_seed(self.seed * 100_003 + self.steps_done)
        batch = torch.randn(8, 12, generator=generator).to(self.dtype)
        target = batch[:, :5].float().sin()
        torch.nn.functional.mse_loss(self.model(batch).float(), target).backward()
        self.optimizer.step()
        self.steps_done += 1
        report = self.sync.step()
        if report is not None:
            self.reports.append(report)
        self.optimizer.zero_grad()

    def run_rounds(self, count: int) -> None:
        end = self.sync.round_index + count
        while self.sync.round_index < end:
            self.train_step()

    def checkpoint(self) -> dict[str, Any]:
        """As a file would hold it: nothing shared with the trainer."""
        parts = {"model": self.model, "optimizer": self.optimizer, "sync": self.sync}
        saved = {name: _copy(part.state_dict()) for name, part in parts.items()}
        return {**saved, "steps_done": self.steps_done}

    def restore(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.sync.load_state_dict(_copy(saved["sync"]))
        self.steps_done = saved["steps_done"]

    def bits(self) -> list[bytes]:
        """All there is: theta, residual, momentum, masters and compute weights."""
        state = self.sync.state
        tensors = [*state.theta, *state.residual, *state.momentum, *self.model.parameters()]
        return [tensor.detach().contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors]


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copy(one) for key, one in value.items()}
    return [_copy(one) for one in value] if isinstance(value, list) else value


@pytest.fixture
def lone() -> Callable[..., Trainer]:
    """Make a trainer that is a whole run."""

    def make(settings: OuterSettings | None = None, **fields: Any) -> Trainer:
        settings = OuterSettings(inner_steps=INNER_STEPS) if settings is None else settings
        return Trainer(LocalExchange(settings, 1).member(0), **fields)

    return make


@dataclass(eq=False)
class Swarm:
    """Trainers with different data in one process, a thread each."""

    exchange: LocalExchange
    trainers: dict[int, Trainer]

    def run(self, work: Callable[[Trainer], None], members: list[int] | None = None) -> None:
        """Do ``work`` on every listed trainer at once; the first error is raised here."""
        chosen = [self.trainers[index] for index in (self.trainers if members is None else members)]
        run_at_once([partial(work, trainer) for trainer in chosen])

    def run_rounds(self, count: int, members: list[int] | None = None) -> None:
        self.run(lambda trainer: trainer.run_rounds(count), members)

    def thetas(self) -> set[bytes]:
        return {
            b"".join(one.numpy().tobytes() for one in (*trainer.sync.state.theta, *trainer.sync.state.momentum))
            for trainer in self.trainers.values()
        }


@pytest.fixture
def make_swarm() -> Callable[..., Swarm]:
    """Make ``count`` trainers; further fields go to :class:`LocalExchange`."""

    def make(
        count: int,
        *,
        settings: dict[str, Any] | None = None,
        options: Any = None,
        learning_rate: float = 3e-3,
        **fields: Any,
    ) -> Swarm:
        chosen = OuterSettings(**{"inner_steps": INNER_STEPS, **(settings or {})})
        exchange = LocalExchange(chosen, count, timeout_seconds=20.0, **fields)
        trainers = {
            index: Trainer(
                exchange.member(index), seed=index + 1, learning_rate=learning_rate, options=dict(options or {})
            )
            for index in range(count)
        }
        return Swarm(exchange, trainers)

    return make
