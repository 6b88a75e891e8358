"""Trains the language models of bench_gossip.py: every variant of a seed at once, all trainers stacked in one batch.

On one core small models spend most of their time on calls, so the weights of all trainers of all variants lie in one
tensor per parameter and are trained by one call. No trainer's numbers depend on the others beside it but by rounding.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from gossip_rounds import GossipRounds, Tensors
from outer_tasks import BETAS, Task

from pulsenet.outer.mixing.disagreement import choose_bins, fill_bins, js_distance, mean_squared_distance
from pulsenet.outer.mixing.settings import Job, MixingSettings, MixingVariant
from pulsenet.outer.mixing.subset import choose_default_subset
from pulsenet.tensors.params import TensorSpec, make_table
from pulsenet.training.snapshot import cast_to_bf16

EVALUATE_ROWS: Final = 64
"""Held-out rows in one call."""
PROBE_ROWS: Final = 4
"""Of the held-out set: 256 tokens."""


@dataclass(frozen=True, slots=True)
class SwarmPlan:
    """What all runs have in common."""

    members: int
    inner_steps: int
    rounds: int
    batch_size: int
    warmup_steps: int
    """First inner steps, in which the learning rate rises."""
    look_interval: int
    """Rounds between looks at loss and disagreement."""
    bin_count: int
    """Tokens with a bin of their own in a probe."""

    def rate_factor(self, step: int) -> float:
        """Return what the inner learning rate is multiplied by in an inner step, from 1."""
        return min(1.0, step / max(1, self.warmup_steps))


@dataclass(slots=True)
class GossipFigures:
    """One way to mix on one seed."""

    name: str
    seed: int
    element_count: int
    rounds: list[int] = field(default_factory=list)
    """Rounds done at each look."""
    losses: list[float] = field(default_factory=list)
    """Held-out loss of what would be published, nats: the consensus, or the mean of everyone's own."""
    own_losses: list[float] = field(default_factory=list)
    """Of everyone's own outer iterate, mean."""
    distances: list[float] = field(default_factory=list)
    """Mean squared distance between trainers after the inner steps, by round."""
    js_true: list[float] = field(default_factory=list)
    """Jensen-Shannon distance of predictions after the inner steps, by look but the first."""
    js_bound: list[float] = field(default_factory=list)
    """The same from the bins that trainers would send."""
    payload_size_bytes: dict[str, float] = field(default_factory=dict)
    """A round, by job."""
    payload_ratio: dict[str, float] = field(default_factory=dict)
    """Dense FP32 of the whole model over that."""
    density: dict[str, float] = field(default_factory=dict)
    """What the gate passed of what it looked at."""
    subset_share: float = 1.0
    """Of the elements, in Mix2."""
    seconds: float = 0.0
    """Of all runs of the stack over their number."""


class Stack:
    """Models of one shape, trained together.

    Args:
        model: Their shape and start.
        count: How many.
        rate: Of AdamW.
    """

    def __init__(self, model: Any, count: int, rate: float) -> None:
        self._model = model
        model.config._attn_implementation = "eager"
        self.names = sorted((name for name, _ in model.named_parameters()), key=str.encode)
        parameters = dict(model.named_parameters())
        self.table = make_table(TensorSpec(name, "F32", tuple(parameters[name].shape)) for name in self.names)
        self.start: Tensors = [parameters[name].detach().numpy().reshape(-1).copy() for name in self.names]
        self._masters = {
            name: parameters[name].detach().repeat(count, *[1] * parameters[name].dim()).clone() for name in self.names
        }
        self._optimizer = torch.optim.AdamW(list(self._masters.values()), lr=rate, betas=BETAS, weight_decay=0.0)
        self._rate = rate
        self._gradient = torch.func.vmap(torch.func.grad(self._loss))
        self._predict = torch.func.vmap(self._logits, in_dims=(0, None))

    def row(self, place: int) -> Tensors:
        """Return a model's masters, flat; they share the stack's memory."""
        return [self._masters[name][place].numpy().reshape(-1) for name in self.names]

    def step(self, ids: torch.Tensor, rate_factor: float) -> None:
        """Do an inner step of every model on its own rows, (models, rows, width); on the BF16 cast of the masters."""
        compute = {name: cast_to_bf16(master).float() for name, master in self._masters.items()}
        gradients = self._gradient(compute, ids)
        for name, master in self._masters.items():
            master.grad = gradients[name]
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * rate_factor
        self._optimizer.step()

    def evaluate(self, models: Sequence[Tensors], ids: torch.Tensor) -> list[float]:
        """Return the loss of the compute weights of each model on the same rows, nats."""
        totals = np.zeros(len(models))
        for rows in ids.split(EVALUATE_ROWS):
            logits = self.predict(models, rows)[:, :, :-1]
            wanted = rows[:, 1:].expand(len(models), -1, -1)
            losses = torch.nn.functional.cross_entropy(logits.flatten(0, 2), wanted.reshape(-1), reduction="none").view(
                len(models), -1
            )
            totals += losses.double().sum(dim=1).numpy()
        found: list[float] = (totals / (ids.shape[0] * (ids.shape[1] - 1))).tolist()
        return found

    def predict(self, models: Sequence[Tensors], ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of each model, (models, rows, width, vocabulary)."""
        stacked = {}
        for index, name in enumerate(self.names):
            values = torch.from_numpy(np.stack([model[index] for model in models]))
            stacked[name] = cast_to_bf16(values).float().view(len(models), *self._masters[name].shape[1:])
        with torch.no_grad():
            logits: torch.Tensor = self._predict(stacked, ids)
        return logits

    def _logits(self, parameters: Mapping[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        call = torch.func.functional_call
        logits: torch.Tensor = call(self._model, dict(parameters), (ids,), {"use_cache": False}).logits
        return logits.float()

    def _loss(self, parameters: Mapping[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        logits = self._logits(parameters, ids)[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class GossipSwarm:
    """All ways to mix on one seed.

    Args:
        task: Gives the batches; trainer i's are the same whatever the way to mix.
        start: Model that all begin with.
        runs: Settings by the name they are reported under.
        seed: Of shards and matchings.
        plan: Sizes.
    """

    def __init__(self, task: Task, start: Any, runs: Mapping[str, MixingSettings], seed: int, plan: SwarmPlan) -> None:
        self._task, self._seed, self._plan = task, seed, plan
        self._stack = Stack(start, len(runs) * plan.members, task.learning_rate)
        table = self._stack.table
        subsets = {name: choose_default_subset(table, settings.subset_ratio) for name, settings in runs.items()}
        self._runs = {
            name: GossipRounds(
                settings,
                table,
                self._stack.start,
                plan.members,
                seed=seed,
                subset=subsets[name],
                measures_payload=True,
            )
            for name, settings in runs.items()
        }
        self.figures = {name: GossipFigures(name, seed, table.element_count) for name in runs}
        for name, settings in runs.items():
            if settings.variant.mixes_subset:
                count = sum(table.tensors[index].element_count for index in subsets[name])
                self.figures[name].subset_share = count / table.element_count
        self._places = {
            name: range(place * plan.members, (place + 1) * plan.members) for place, name in enumerate(runs)
        }
        self._held_out = task.draw_held_out()[0]

    def train(self) -> list[GossipFigures]:
        """Run all rounds and return what was found, in the order of the runs."""
        started = time.process_time()
        plan = self._plan
        self._look(0)
        for done in range(1, plan.rounds + 1):
            for rounds in self._runs.values():
                rounds.open()
            for step in range((done - 1) * plan.inner_steps + 1, done * plan.inner_steps + 1):
                self._stack.step(self._draw(step), plan.rate_factor(step))
            is_look = done % plan.look_interval == 0 or done == plan.rounds
            for name, rounds in self._runs.items():
                self._close(name, rounds, is_look=is_look)
            if is_look:
                self._look(done)
        for name, rounds in self._runs.items():
            self._report_payloads(self.figures[name], rounds)
            self.figures[name].seconds = (time.process_time() - started) / len(self._runs)
        return list(self.figures.values())

    def _draw(self, step: int) -> torch.Tensor:
        shards = [
            self._task.draw(((self._seed * 1_000 + member) << 20) + step, self._plan.batch_size)[0]
            for member in range(self._plan.members)
        ]
        return torch.stack(shards).repeat(len(self._runs), 1, 1)

    def _close(self, name: str, rounds: GossipRounds, *, is_look: bool) -> None:
        rows = [self._stack.row(place) for place in self._places[name]]
        figures = self.figures[name]
        figures.distances.append(mean_squared_distance(rows))
        if is_look:
            true, bound = self._compare_predictions(rows, rounds)
            figures.js_true.append(true)
            figures.js_bound.append(bound)
        rounds.close(rows)
        for row, member in zip(rows, rounds.members, strict=True):
            for values, iterate in zip(row, member.iterate, strict=True):
                values[:] = iterate

    def _compare_predictions(self, rows: Sequence[Tensors], rounds: GossipRounds) -> tuple[float, float]:
        """Return the Jensen-Shannon distance of the trainers, true and as their probes would show it."""
        mean = [
            np.mean(tensors, axis=0, dtype=np.float32)
            for tensors in zip(*(m.mixed for m in rounds.members), strict=True)
        ]
        logits = self._stack.predict([*rows, mean], self._held_out[:PROBE_ROWS])
        probabilities = torch.softmax(logits.double(), dim=-1).flatten(1, 2).numpy()
        bins = choose_bins(probabilities[-1], self._plan.bin_count)
        binned: list[npt.NDArray[np.float64]] = [fill_bins(own, bins) for own in probabilities[:-1]]
        pairs = list(itertools.combinations(range(len(rows)), 2))
        true = float(np.mean([js_distance(probabilities[a], probabilities[b]).mean() for a, b in pairs]))
        return true, float(np.mean([js_distance(binned[a], binned[b]).mean() for a, b in pairs]))

    def _look(self, done: int) -> None:
        for name, rounds in self._runs.items():
            figures, published = self.figures[name], rounds.publish()
            own = [member.iterate for member in rounds.members]
            shows_own = rounds.settings.variant is not MixingVariant.DILOCO
            losses = self._stack.evaluate(
                [*published, *(own if shows_own and len(published) == 1 else [])], self._held_out
            )
            figures.rounds.append(done)
            figures.losses.append(float(np.mean(losses[: len(published)])))
            figures.own_losses.append(float(np.mean(losses[-len(own) :] if shows_own else losses)))

    def _report_payloads(self, figures: GossipFigures, rounds: GossipRounds) -> None:
        whole = 4.0 * figures.element_count
        for job in Job:
            payload = rounds.payloads[job]
            if payload.size_bytes:
                name = job.name.lower()
                figures.payload_size_bytes[name] = payload.size_bytes / self._plan.rounds
                figures.payload_ratio[name] = whole * self._plan.rounds / payload.size_bytes
                if payload.gated_element_count:
                    figures.density[name] = payload.gated_entry_count / payload.gated_element_count
