"""Trainers of a small model that meet in rounds, each in a thread of its own."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from pulsenet.outer.settings import Algorithm, OuterSettings
from pulsenet.training.exchange import Exchange
from pulsenet.training.local_exchange import LocalExchange
from pulsenet.training.outer_optimizer import OuterOptimizer, RoundReport


class Trainer:
    """A model and its rounds; data come from (seed, step)."""

    def __init__(self, exchange: Exchange, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(4)
        self.model = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 5))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.sync = OuterOptimizer(self.model, self.optimizer, exchange=exchange, **options)
        self.seed = seed
        self.steps_done = 0
        self.reports: list[RoundReport] = []

    def train_step(self) -> None:
        generator = torch.Generator().manual_seed(self.seed * 100_003 + self.steps_done)
        batch = torch.randn(8, 12, generator=generator)
        torch.nn.functional.mse_loss(self.model(batch), batch[:, :5].sin()).backward()
        self.optimizer.step()
        self.steps_done += 1
        self.note(self.sync.step())
        self.optimizer.zero_grad()

    def note(self, report: RoundReport | None) -> None:
        if report is not None:
            self.reports.append(report)

    def run_rounds(self, count: int) -> None:
        end = self.sync.round_index + count
        while self.sync.round_index < end:
            self.train_step()

    def checkpoint(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "sync": self.sync}
        return copy.deepcopy({name: part.state_dict() for name, part in parts.items()} | {"done": self.steps_done})

    def restore(self, saved: dict[str, Any]) -> None:
        saved = copy.deepcopy(saved)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.sync.load_state_dict(saved["sync"])
        self.steps_done = saved["done"]

    def bits(self) -> bytes:
        if self.sync.settings.algorithm is Algorithm.DDP:
            # Of masters and moments.
            return bytes(self.sync.state_root)
        state = self.sync.state
        return b"".join(one.numpy().tobytes() for one in (*state.theta, *state.residual, *state.momentum))

    def shared_bits(self) -> bytes:
        if self.sync.settings.algorithm is Algorithm.DDP:
            return bytes(self.sync.state_root)
        return b"".join(one.numpy().tobytes() for one in (*self.sync.state.theta, *self.sync.state.momentum))


def run_at_once(works: Sequence[Callable[[], object]], seconds: float = 60.0) -> None:
    """Do everything in a thread each; raise the first error."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    if errors:
        raise errors[0]


def run_rounds(trainers: Sequence[Trainer], count: int) -> None:
    """Let all trainers run so many rounds at once; raise the first error."""
    run_at_once([partial(trainer.run_rounds, count) for trainer in trainers])


def run_locally(count: int, rounds: int, settings: OuterSettings) -> list[bytes]:
    """Return the bits of the same trainers after rounds in one process."""
    swarm = LocalExchange(settings, count)
    trainers = [Trainer(swarm.member(index), seed=index) for index in range(count)]
    run_rounds(trainers, rounds)
    return [trainer.bits() for trainer in trainers]
