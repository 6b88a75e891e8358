"""The toy of bench_gossip.py: a slope without curvature, plain SGD and noise, where the theory is exact."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from gossip_rounds import GossipRounds

from pulsenet.outer.mixing.bound import distance_ratio
from pulsenet.outer.mixing.disagreement import mean_squared_distance
from pulsenet.outer.mixing.settings import MixingSettings, MixingVariant
from pulsenet.tensors.params import ParameterTable, TensorSpec

VARIANTS: Final = (
    MixingVariant.DILOCO,
    MixingVariant.GLOBAL_M1,
    MixingVariant.GLOBAL_M1_LOCAL_M2,
    MixingVariant.LOCAL_M1_M2,
)
STEP: Final = np.float32(0.01)
"""Inner learning rate (eta); ratios do not depend on it."""


@dataclass(frozen=True, slots=True)
class ToyPlan:
    """Sizes of a toy run."""

    members: int = 8
    inner_steps: int = 8
    rounds: int = 400
    settle_rounds: int = 80
    """First rounds, not counted: distances grow to where mixing holds them."""
    elements: int = 2_000


@dataclass(frozen=True, slots=True)
class ToyRow:
    """One setting of the outer optimiser."""

    learning_rate: float
    momentum_factor: float
    mixes_momentum: bool
    ratios: dict[str, float]
    """Mean squared distance at the end of the inner steps over DiLoCo's, by variant."""
    errors: dict[str, float]
    """Of the ratios, one standard error: from 10 spans of rounds."""
    bounds: dict[str, float]
    """Of the theory, which is for no momentum."""


def run_toy(settings: MixingSettings, plan: ToyPlan, seed: int) -> list[float]:
    """Return the mean squared distance between trainers after the inner steps of each counted round."""
    generator = np.random.default_rng(seed)
    table = ParameterTable((TensorSpec("w", "F32", (plan.elements,)),))
    rounds = GossipRounds(settings, table, [np.zeros(plan.elements, np.float32)], plan.members, seed=seed)
    distances = []
    for round_index in range(plan.rounds):
        rounds.open()
        locals_ = []
        for member in rounds.members:
            now = member.iterate[0].copy()
            for _ in range(plan.inner_steps):
                # The slope is the same everywhere; noise of variance 1 an element comes on top.
                now -= STEP * (np.float32(0.1) + generator.standard_normal(plan.elements, np.float32))
            locals_.append([now])
        if round_index >= plan.settle_rounds:
            distances.append(mean_squared_distance(locals_))
        rounds.close(locals_)
    return distances


def measure_ratios(
    plan: ToyPlan, *, learning_rate: float, momentum_factor: float, mixes_momentum: bool = False, seed: int = 0
) -> ToyRow:
    """Return how far apart each variant's trainers are, over DiLoCo's."""
    base = MixingSettings(
        variant=MixingVariant.DILOCO,
        inner_steps=plan.inner_steps,
        learning_rate=learning_rate,
        momentum_factor=momentum_factor,
    )
    found = {}
    for variant in VARIANTS:
        mixes = mixes_momentum and variant is not MixingVariant.DILOCO
        found[variant.value] = run_toy(replace(base, variant=variant, mixes_momentum=mixes), plan, seed)
    reference = float(np.mean(found[MixingVariant.DILOCO.value]))
    spans = {
        name: [float(np.mean(span)) / reference for span in np.array_split(values, 10)]
        for name, values in found.items()
    }
    return ToyRow(
        learning_rate=learning_rate,
        momentum_factor=momentum_factor,
        mixes_momentum=mixes_momentum,
        ratios={name: float(np.mean(values)) for name, values in spans.items()},
        errors={name: float(np.std(values, ddof=1)) / len(values) ** 0.5 for name, values in spans.items()},
        bounds={
            variant.value: distance_ratio(variant, plan.members, outer_learning_rate=learning_rate)
            for variant in VARIANTS
        },
    )


def run_toys(plan: ToyPlan) -> list[ToyRow]:
    """Return what is reported: without momentum at two outer learning rates, with momentum, and with it mixed."""
    return [
        measure_ratios(plan, learning_rate=1.0, momentum_factor=0.0),
        measure_ratios(plan, learning_rate=0.7, momentum_factor=0.0),
        measure_ratios(plan, learning_rate=0.7, momentum_factor=0.9),
        measure_ratios(plan, learning_rate=0.7, momentum_factor=0.9, mixes_momentum=True),
    ]
