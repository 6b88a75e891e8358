"""How far apart trainers are in one round, told from what its means already brought: no byte more is sent.

A mean tells a member how far it is from it, and with that how far two members are from each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from pulsenet import limits
from pulsenet.outer.mixing.disagreement import estimate_pair_square
from pulsenet.outer.mixing.settings import MixingKind, MixingVariant
from pulsenet.tensors.params import ParameterTable
from pulsenet.training.mixer import Mixed

_SCORE_MAX: Final = float(np.finfo(np.float32).max)


@dataclass(slots=True)
class RoundMeasures:
    """Squares of one round, tensor by tensor.

    Args:
        variant: Of the run.
        table: FP32 masters.
        subset: Tensors of Mix2, ascending.
    """

    variant: MixingVariant
    table: ParameterTable
    subset: Sequence[int]
    delta_square: float = 0.0
    """Squared Euclidean norm of the own pseudo-gradient."""
    distance_square: float = 0.0
    """From the own z to the mean that Mix1 gave."""
    _distances: dict[int, float] = field(default_factory=dict)
    _gaps: dict[int, float] = field(default_factory=dict)

    def add(self, index: int, squares: tuple[float, float, float]) -> None:
        """Take in one tensor, as ``GossipState.step`` returns it."""
        self.delta_square += squares[0]
        self.distance_square += squares[1]
        self._distances[index], self._gaps[index] = squares[1], squares[2]

    def start_square(self, mix1: Mixed) -> float | None:
        """Return the mean squared distance between two trainers' z, over all tensors; ``None`` if no mean told."""
        if self.variant.mix1 is MixingKind.NONE or not _is_whole(mix1):
            return None
        return estimate_pair_square(self.distance_square, mix1.contributor_count)

    def noise_square(self, mix2: Mixed) -> float | None:
        """Return the same of what the inner steps of the round did, over the tensors of Mix2."""
        if self.variant.mix2 is MixingKind.NONE or not _is_whole(mix2):
            return None
        return estimate_pair_square(sum(self._gaps[index] for index in self.subset), mix2.contributor_count)

    def end_square(self, mix1: Mixed, mix2: Mixed) -> float | None:
        """Return the same of the weights after the inner steps, over the tensors of Mix2.

        It adds up what trainers began apart and what the inner steps did: they are taken not to depend on each other,
        as the bound takes them. Under ``diloco`` all begin from one z.
        """
        noise = self.noise_square(mix2)
        if noise is None or self.variant.mix1 is MixingKind.NONE:
            return noise
        if not _is_whole(mix1):
            return None
        began = sum(self._distances[index] for index in self.subset)
        return noise + estimate_pair_square(began, mix1.contributor_count)

    def scores(self, mix2: Mixed) -> bytes:
        """Return how far apart the two parts of Mix2 were: FP32 for each tensor of it, mean over its elements.

        Empty where Mix2 is of no subset, brought nothing, or takes more tensors than a record has room for.
        """
        if not self.variant.mixes_subset or not _is_whole(mix2) or len(self.subset) > limits.PROBE_SCORES_MAX:
            return b""
        counts = (max(1, self.table.tensors[index].element_count) for index in self.subset)
        values = [
            min(estimate_pair_square(self._gaps[index], 2) / count, _SCORE_MAX)
            for index, count in zip(self.subset, counts, strict=True)
        ]
        return np.array(values, "<f4").tobytes()


def _is_whole(mixed: Mixed) -> bool:
    return mixed.is_mixed and not mixed.reason and mixed.sections is not None
