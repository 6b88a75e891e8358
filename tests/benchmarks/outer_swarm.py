"""Trains one swarm for bench_outer.py: the real OuterOptimizer over LocalExchange, a thread a trainer."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from outer_tasks import BETAS, Batch, Task, compute_loss

from pulsenet.outer.blob import encode_blob
from pulsenet.outer.flush import FlushPlan
from pulsenet.outer.settings import MANTISSA_BITS
from pulsenet.training import Algorithm, LocalExchange, OuterOptimizer, OuterSettings
from pulsenet.training.exchange import FinalRound
from pulsenet.training.snapshot import cast_to_bf16
from pulsenetd.demo.models import copy_module

FP32_SIZE_BYTES: Final = 4

CONTROLS: Final = {"delayed": Algorithm.DILOCO, "unflushed": Algorithm.PULSELOCO}
"""Runs that change one thing of the algorithm beside them."""

SIZE_EDGES: Final = (0.0, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, math.inf)
"""Of a weight's magnitude: each class has BF16 steps twice as large as the one below."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What all runs have in common."""

    trainers: int
    inner_steps: int
    rounds: int
    batch_size: int
    evaluate_interval: int
    """Rounds between two looks at the held-out loss; the start and the last round are looked at too."""
    delay_rounds: int = 0
    """Of the control ``delayed``."""
    flush_interval: int = 0
    """Of PULSELoCo; the control ``unflushed`` has 0."""
    flush_mantissa_bits: int = MANTISSA_BITS
    anneal_rounds: int = 0
    """Last rounds, in which the inner learning rate falls to nothing in a straight line."""

    def rate_factor(self, step: int) -> float:
        """Return what the inner learning rate is multiplied by in an inner step, from 1."""
        steps_left = self.rounds * self.inner_steps - step
        return min(1.0, (steps_left + 1) / max(1, self.anneal_rounds * self.inner_steps))


@dataclass(frozen=True, slots=True)
class SizeRow:
    """How often weights of one size were sent by the first trainer."""

    low: float
    """Smallest magnitude, at the end."""
    share: float
    """Such weights over all."""
    density: float
    """Of them, sent in a round, mean of all rounds."""
    never_sent: float
    """Of them, sent in no round."""


@dataclass(slots=True)
class RunFigures:
    """One algorithm on one seed."""

    algorithm: str
    seed: int
    element_count: int
    """Parameters."""
    rounds: list[int] = field(default_factory=list)
    """Rounds done at each look at the held-out loss, from 0."""
    losses: list[float] = field(default_factory=list)
    """Of the compute weights that a version would hold, nats."""
    densities: list[float] = field(default_factory=list)
    """Sent entries over all, mean over trainers, by round."""
    gated_densities: list[float] = field(default_factory=list)
    """Of PULSELoCo: what passed the gate over what did not pass whole, the first trainer's, by round."""
    payload_ratios: list[float] = field(default_factory=list)
    """Dense FP32 over the first trainer's encoded contribution, by round."""
    payload_size_bytes: float = math.nan
    """That contribution's size, mean of all rounds."""
    residual_norms: list[float] = field(default_factory=list)
    """The first trainer's, after each round."""
    loss_applied: float = math.nan
    """After the last round, if everyone's residual were sent at once and the momentum it gives had run out."""
    sizes: list[SizeRow] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def loss(self) -> float:
        """After the last round."""
        return self.losses[-1]


class DelayedExchange(LocalExchange):
    """DiLoCo whose aggregates are applied some rounds late: the delay of a gate without the gate.

    Args:
        settings: Of DiLoCo.
        member_count: Trainers.
        delay_rounds: From a contribution's round to the one whose aggregate it is in; until then nothing moves.
    """

    def __init__(self, settings: OuterSettings, member_count: int, *, delay_rounds: int) -> None:
        super().__init__(settings, member_count)
        self._delay_rounds = delay_rounds

    def final_rounds(self, member: int, round_index: int) -> tuple[FinalRound, ...]:
        """Return the closed rounds with the aggregates of others."""
        found = []
        for final in super().final_rounds(member, round_index):
            source = final.round_index - self._delay_rounds
            aggregate = super().final_rounds(member, source)[0].aggregate if source >= 0 else None
            found.append(replace(final, aggregate=aggregate))
        return tuple(found)


class ComputeView:
    """A model's compute weights: BF16 values, held and computed on in FP32, because CPUs emulate BF16 products."""

    def __init__(self, masters: Any) -> None:
        self._masters = masters
        self.model = copy_module(masters, torch.float32)

    def cast(self) -> None:
        """Follow the masters."""
        with torch.no_grad():
            for mine, master in zip(self.model.parameters(), self._masters.parameters(), strict=True):
                mine.copy_(cast_to_bf16(master.detach()))

    def move_gradients(self) -> None:
        """Hand the gradients to the masters."""
        for mine, master in zip(self.model.parameters(), self._masters.parameters(), strict=True):
            master.grad, mine.grad = mine.grad, None

    def evaluate(self, held_out: Batch) -> float:
        """Return the loss of the compute weights."""
        self.cast()
        with torch.no_grad():
            return float(compute_loss(self.model, *held_out))


class Swarm:
    """All trainers of one run.

    Args:
        task: Gives the batches; trainer i's are the same under every algorithm.
        start: Model that all trainers start from; stays as it is.
        algorithm: How they share: an :class:`Algorithm`, ``delayed`` for :class:`DelayedExchange`, or ``unflushed`` for
            PULSELoCo without flushes.
        seed: Of the shards.
        plan: Sizes.
    """

    def __init__(self, task: Task, start: Any, algorithm: str, seed: int, plan: Plan) -> None:
        element_count = sum(parameter.numel() for parameter in start.parameters())
        self.figures = RunFigures(algorithm, seed, element_count)
        self._task = task
        self._algorithm = CONTROLS.get(algorithm) or Algorithm(algorithm)
        self._seed = seed
        self._plan = plan
        settings = OuterSettings(algorithm=self._algorithm, inner_steps=plan.inner_steps)
        if self._algorithm is Algorithm.PULSELOCO and algorithm != "unflushed" and plan.flush_interval:
            settings = replace(
                settings, flush_interval=plan.flush_interval, flush_mantissa_bits=plan.flush_mantissa_bits
            )
        self._settings = settings
        self._delay_rounds = plan.delay_rounds if algorithm == "delayed" else 0
        self._exchange = DelayedExchange(settings, plan.trainers, delay_rounds=self._delay_rounds)
        self._models = [copy_module(start, torch.float32) for _ in range(plan.trainers)]
        self._held_out = task.draw_held_out()
        self._reports: list[list[Any]] = [[] for _ in self._models]
        self._syncs: dict[int, OuterOptimizer] = {}
        self._sizes: list[int] = []
        self._sent_counts: list[npt.NDArray[np.int32]] = []
        """Rounds in which the first trainer sent each entry, by tensor."""
        self._errors: list[BaseException] = []
        self._turn = threading.Lock()
        """One trainer computes at a time: on few cores, threads that fight for the interpreter only lose time."""

    def train(self) -> RunFigures:
        """Run all rounds.

        Raises:
            BaseException: what the first trainer that failed raised.
        """
        started = time.process_time()
        threads = [threading.Thread(target=self._run_trainer, args=(index,)) for index in range(self._plan.trainers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]
        figures = self.figures
        dense_size_bytes = figures.element_count * FP32_SIZE_BYTES
        if self._algorithm is not Algorithm.DDP:
            figures.densities = np.mean([[one.density for one in row] for row in self._reports], axis=0).tolist()
            figures.residual_norms = [one.residual_norm for one in self._reports[0]]
        if self._algorithm is Algorithm.PULSELOCO:
            figures.loss_applied = self._apply_residuals()
            figures.sizes = self._count_by_size()
        figures.payload_ratios = [dense_size_bytes / size for size in self._sizes]
        figures.payload_size_bytes = float(np.mean(self._sizes)) if self._sizes else float(dense_size_bytes)
        figures.seconds = time.process_time() - started
        return figures

    def _run_trainer(self, index: int) -> None:
        try:
            self._train_one(index)
        except BaseException as error:
            self._errors.append(error)
            self._exchange.leave(index)

    def _train_one(self, index: int) -> None:
        plan, model = self._plan, self._models[index]
        view = ComputeView(model)
        # No weight decay: over these few small steps it would be noise.
        optimizer = torch.optim.AdamW(model.parameters(), lr=self._task.learning_rate, betas=BETAS, weight_decay=0.0)
        sync = OuterOptimizer(model, optimizer, exchange=self._exchange.member(index))
        self._syncs[index] = sync
        if index == 0:
            self._look(view, 0)
            if self._algorithm is Algorithm.PULSELOCO:
                # The first trainer stands for all: their contributions differ in content, hardly in size.
                sync.begin_round = self._measured(sync)  # type: ignore[method-assign]
        for step in range(1, plan.rounds * plan.inner_steps + 1):
            batch = self._task.draw(((self._seed * 1_000 + index) << 20) + step, plan.batch_size)
            with self._turn:
                view.cast()
                compute_loss(view.model, *batch).backward()
                view.move_gradients()
            for group in optimizer.param_groups:
                group["lr"] = self._task.learning_rate * plan.rate_factor(step)
            optimizer.step()
            report = sync.step()
            optimizer.zero_grad()
            if report is not None:
                self._reports[index].append(report)
            if index == 0 and step % plan.inner_steps == 0:
                done = step // plan.inner_steps
                self._forget_rounds(done)
                if done % plan.evaluate_interval == 0 or done == plan.rounds:
                    self._look(view, done)

    def _forget_rounds(self, rounds_done: int) -> None:
        """Drop contributions that nobody will read: the exchange keeps every round, dense ones of 4 B a parameter."""
        # Whoever has submitted to the newest closed round, so everyone, has stepped the one before it.
        old = rounds_done - 2 - self._delay_rounds
        if old >= 0 and self._algorithm is not Algorithm.DDP:
            self._exchange.rounds[old].counted.clear()

    def _look(self, view: ComputeView, rounds_done: int) -> None:
        with self._turn:
            self.figures.rounds.append(rounds_done)
            self.figures.losses.append(view.evaluate(self._held_out))

    def _measured(self, sync: OuterOptimizer) -> Callable[[], Any]:
        """Return ``sync.begin_round`` with a note of what each contribution holds and of its encoded size."""
        begin = sync.begin_round
        self._sent_counts = [np.zeros(values.numel(), np.int32) for values in sync.state.theta]
        flushes = FlushPlan(sync.state.table, self._settings)

        def wrapped() -> Any:
            contribution = begin()
            assert contribution is not None
            theta = [values.numpy() for values in sync.state.theta]
            self._sizes.append(sum(len(piece) for piece in encode_blob(contribution, sync.state.table, theta)))
            whole_count = 0
            for entries in contribution.entries:
                self._sent_counts[entries.tensor_index][entries.indices] += 1
                parts = flushes.of(entries.tensor_index, contribution.round_index).parts
                whole_count += sum(part.stop - part.start for part in parts)
            gated_count = self.figures.element_count - whole_count
            self.figures.gated_densities.append((contribution.sent_count - whole_count) / max(1, gated_count))
            return contribution

        return wrapped

    def _apply_residuals(self) -> float:
        """Return the loss of theta without what is held back, moved as far as the outer optimizer would in the end."""
        gain = self._settings.learning_rate / (1.0 - self._settings.momentum_factor)
        model = copy_module(self._models[0], torch.float32)
        with torch.no_grad():
            # The order of the table is not the model's.
            parameters = dict(model.named_parameters())
            for index, spec in enumerate(self._syncs[0].state.table.tensors):
                held = sum(sync.state.residual[index] for sync in self._syncs.values()) / len(self._syncs)
                parameters[spec.name].sub_((gain * held).view(parameters[spec.name].shape))
        return ComputeView(model).evaluate(self._held_out)

    def _count_by_size(self) -> list[SizeRow]:
        sizes = np.concatenate([np.abs(values.numpy()) for values in self._syncs[0].state.theta])
        sent = np.concatenate(self._sent_counts)
        rows = []
        for low, high in itertools.pairwise(SIZE_EDGES):
            found = sent[(sizes >= low) & (sizes < high)]
            if found.size:
                density = float(found.mean()) / self._plan.rounds
                rows.append(SizeRow(low, found.size / sent.size, density, float(np.mean(found == 0))))
        return rows
