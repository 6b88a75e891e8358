"""A small part of what an update wrote, kept to be compared after the commit: cheap enough for every update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pulsenet.errors import IntegrityError
from pulsenet.ids import Version
from pulsenet.serving.engine import EngineUpdate, RecordsUpdate

POSITIONS_PER_TENSOR_MAX: Final = 256
"""Compared of each tensor, or of each piece of its records, spread evenly."""

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Positions of one tensor and the bits that an update wrote there."""

    tensor_index: int
    indices: Array
    """Flat, row-major, ascending."""
    bits: Array
    """Unsigned integers of the element's width."""


def take_samples(update: EngineUpdate) -> list[Sample]:
    """Choose positions of all that an update writes; the result needs nothing of the update's memory."""
    samples = []
    if isinstance(update, RecordsUpdate):
        for changes in update.changes():
            step = -(-len(changes) // POSITIONS_PER_TENSOR_MAX) or 1
            indices, bits = changes.indices[::step].copy(), changes.new_bits[::step].copy()
            samples.append(Sample(changes.tensor_index, indices, bits))
        return samples
    for tensor_index, spec in enumerate(update.table.tensors):
        step = -(-spec.element_count // POSITIONS_PER_TENSOR_MAX) or 1
        indices = np.arange(0, spec.element_count, step, dtype=spec.index_dtype)
        bits = update.tensor_bytes(tensor_index).view(spec.bits_dtype)[::step].copy()
        samples.append(Sample(tensor_index, indices, bits))
    return samples


def check_samples(version: Version, samples: Sequence[Sample], count_other_bits: Callable[[Sample], int]) -> None:
    """Compare samples with what is there.

    Args:
        version: What was written.
        samples: What is expected.
        count_other_bits: Returns how many positions of a sample hold other bits.

    Raises:
        IntegrityError: Any does.
    """
    wrong_count = sum(map(count_other_bits, samples))
    if wrong_count:
        compared_count = sum(len(sample.indices) for sample in samples)
        raise IntegrityError(
            f"{wrong_count} of {compared_count} positions read back hold other bits than version {version} wrote: "
            "load it in full"
        )
