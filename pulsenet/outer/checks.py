"""Is a contribution fit to be counted? The same checks before sending and after receiving (SPEC outer, "Checks")."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from pulsenet.errors import LocalProtocolError
from pulsenet.ids import Digest
from pulsenet.outer.contribution import Contribution, Entries
from pulsenet.outer.floats import FP32s
from pulsenet.tensors.jit import compile_loop
from pulsenet.tensors.params import ParameterTable

SCALE_MIN: Final = np.float32(2.0**-149)
"""Least FP32 value above 0: no member of a receipt may be scaled to nothing."""


class FaultCode(StrEnum):
    """Stable reasons for which content is refused (SPEC, "Error codes")."""

    ROUND = "round"
    """Of another round than the one that is open."""
    BASE = "base"
    """Starts from another state: its sender diverged, or lags."""
    SHAPE = "shape"
    """Tensors, positions or counts that the table does not have, or sparse where dense is asked for."""
    FINITE = "finite"
    """A NaN or an infinity."""
    NORM = "norm"
    """Euclidean norm above the run's limit."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a contribution is refused."""

    code: FaultCode
    detail: str
    """The offending value, for a person."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What every contribution of the open round must be."""

    table: ParameterTable
    round_index: int
    state_root: Digest
    is_dense: bool
    """All elements of all tensors (``diloco``), or only gated ones."""
    norm_max: float
    """Largest Euclidean norm; also keeps sums far from FP32's range."""


def find_fault(contribution: Contribution, expected: Expected) -> Fault | None:
    """Return the first thing that is wrong with ``contribution``, ``None`` if it may be counted."""
    fault = _base_fault(expected, contribution.round_index, contribution.state_root)
    if fault is not None:
        return fault
    tensors = expected.table.tensors
    if len(contribution.entries) != len(tensors) or contribution.inner_step_count < 1:
        return Fault(
            FaultCode.SHAPE,
            f"{len(contribution.entries)} of {len(tensors)} tensors after {contribution.inner_step_count} inner steps",
        )
    for tensor_index, entries in enumerate(contribution.entries):
        detail = _shape_fault(entries, tensor_index, tensors[tensor_index].element_count, expected.is_dense)
        if detail is not None:
            return Fault(FaultCode.SHAPE, f"{tensors[tensor_index].name}: {detail}")
    for tensor_index, entries in enumerate(contribution.entries):
        if not bool(np.isfinite(entries.values).all()):
            return Fault(FaultCode.FINITE, tensors[tensor_index].name)
    return _norm_fault(compute_norm(contribution), expected)


class ContentCheck:
    """The checks of :func:`find_fault` for a contribution that is decoded part by part, never held whole.

    Args:
        expected: What it must be.
        round_index: Its own, as are the next two.
        state_root: Root of the state it starts from.
        inner_step_count: Inner steps taken since that state.
    """

    def __init__(self, expected: Expected, *, round_index: int, state_root: Digest, inner_step_count: int) -> None:
        self._expected = expected
        self._fault = _base_fault(expected, round_index, state_root)
        if self._fault is None and inner_step_count < 1:
            self._fault = Fault(FaultCode.SHAPE, f"after {inner_step_count} inner steps")
        self._not_finite: Fault | None = None
        self._counts = [0] * len(expected.table.tensors)
        self._sum = 0.0

    @property
    def entry_count(self) -> int:
        """Entries taken so far."""
        return sum(self._counts)

    @property
    def norm(self) -> float:
        """Euclidean norm of what was taken so far, as :func:`compute_norm` of the whole."""
        return math.sqrt(self._sum)

    def take(self, tensor_index: int, values: FP32s) -> None:
        """Take the next values; parts come ascending by tensor and position, as the codec yields them."""
        self._counts[tensor_index] += values.size
        self._sum = float(_sum_squares(values, self._sum))
        if self._not_finite is None and not bool(np.isfinite(values).all()):
            self._not_finite = Fault(FaultCode.FINITE, self._expected.table.tensors[tensor_index].name)

    def finish(self) -> Fault | None:
        """Return the first thing that is wrong with the whole, ``None`` if it may be counted."""
        if self._fault is None and self._expected.is_dense:
            for spec, count in zip(self._expected.table.tensors, self._counts, strict=True):
                if count != spec.element_count:
                    return Fault(FaultCode.SHAPE, f"{spec.name}: {count} values for {spec.element_count} elements")
        return self._fault or self._not_finite or _norm_fault(self.norm, self._expected)


def sum_squares_twin(values: FP32s, start: float) -> float:
    """Define the order of the norm's sum: FP64, one square and one addition at a time."""
    total = start
    for value in values.tolist():
        total += value * value
    return total


@compile_loop
def _sum_squares(values: FP32s, start: float) -> float:
    total = start
    for i in range(values.size):
        value = np.float64(values[i])
        total += value * value
    return total


def compute_norm(contribution: Contribution) -> float:
    """Return the Euclidean norm of all sent values: an FP64 sum in table and position order, then its root."""
    total = 0.0
    for entries in contribution.entries:
        total = float(_sum_squares(entries.values, total))
    return math.sqrt(total)


def compute_scales(norms: Sequence[float], *, clip_norm_ratio: float) -> list[np.float32]:
    """Return the scale of each contribution: 1, or what cuts its norm to a multiple of the round's median norm.

    Args:
        norms: Of the contributions to be listed, in any fixed order; rounded to FP32, as their records carry them.
        clip_norm_ratio: At least 1; 0 clips nothing.

    Raises:
        LocalProtocolError: a multiple that would clip the median itself.
    """
    if clip_norm_ratio == 0.0:
        return [np.float32(1.0)] * len(norms)
    if not clip_norm_ratio >= 1.0:
        raise LocalProtocolError(f"clipping to {clip_norm_ratio} medians would clip every contribution")
    rounded = [float(np.float32(norm)) for norm in norms]
    ranked = sorted(rounded)
    middle = len(ranked) // 2
    median = ranked[middle] if len(ranked) % 2 else (ranked[middle - 1] + ranked[middle]) / 2 if ranked else 0.0
    limit = clip_norm_ratio * median
    # Where most send nothing the median is 0: one that does send is then not an outlier to be silenced.
    return [max(np.float32(limit / norm), SCALE_MIN) if limit and norm > limit else np.float32(1.0) for norm in rounded]


def _base_fault(expected: Expected, round_index: int, state_root: Digest) -> Fault | None:
    if round_index != expected.round_index:
        return Fault(FaultCode.ROUND, f"{round_index}, not {expected.round_index}")
    if state_root != expected.state_root:
        return Fault(FaultCode.BASE, f"{state_root.hex()}, not {expected.state_root.hex()}")
    return None


def _norm_fault(norm: float, expected: Expected) -> Fault | None:
    return Fault(FaultCode.NORM, f"{norm:g}, at most {expected.norm_max:g}") if norm > expected.norm_max else None


def _shape_fault(entries: Entries, tensor_index: int, element_count: int, is_dense: bool) -> str | None:
    if entries.tensor_index != tensor_index:
        return f"entries of tensor {entries.tensor_index} in place of {tensor_index}"
    if (entries.indices is None) != is_dense:
        return "dense where sparse is agreed" if entries.indices is None else "sparse where dense is agreed"
    if entries.indices is None:
        return None if len(entries) == element_count else f"{len(entries)} values for {element_count} elements"
    indices: npt.NDArray[np.unsignedinteger] = entries.indices
    if indices.size and (int(indices[-1]) >= element_count or not bool(np.all(indices[1:] > indices[:-1]))):
        return f"positions not ascending inside {element_count} elements"
    return None
