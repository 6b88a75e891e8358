"""How few bits a change can take, knowing nothing but some statistics of the base version.

Two bounds, both from exact counts. *density*: only the share of changed elements is known. *exponent*: the share is
known for each exponent of the old value, which both sides hold. To each belongs the entropy of the *step*, the
difference of the ordered integers, alone or for each exponent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pulsenet import limits
from pulsenet.codec.compare import find_changes
from pulsenet.tensors.params import ParameterTable, Region
from pulsenetd.bench.loops import count_classes

EXPONENT_FIELDS: Final = {
    "BF16": (7, 0xFF),
    "F16": (10, 0x1F),
    "F32": (23, 0xFF),
    "F64": (52, 0x7FF),
    "F8_E4M3": (3, 0xF),
    "F8_E5M2": (2, 0x1F),
}
"""Shift and mask of the exponent by dtype; other dtypes are one class."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bits all changes of a pair take together; they add up over pairs."""

    changed_count: int
    density_bits: float
    """Positions knowing the density, plus steps."""
    exponent_bits: float
    """Positions and steps knowing the old exponents."""

    def __add__(self, other: Bounds) -> Bounds:
        return Bounds(
            self.changed_count + other.changed_count,
            self.density_bits + other.density_bits,
            self.exponent_bits + other.exponent_bits,
        )

    def per_change(self) -> dict[str, float]:
        """Return both bounds in bits per change; 0 without changes."""
        count = max(self.changed_count, 1)
        return {"density": self.density_bits / count, "exponent": self.exponent_bits / count}


def compute_bounds(table: ParameterTable, old_region: Region, new_region: Region) -> Bounds:
    """Return the bounds of the patch between two versions."""
    seen: dict[str, npt.NDArray[np.int64]] = {}
    changed: dict[str, npt.NDArray[np.int64]] = {}
    steps: dict[str, list[npt.NDArray[np.uint64]]] = {}
    classes: dict[str, list[npt.NDArray[np.uint64]]] = {}
    for tensor_index, spec in enumerate(table.tensors):
        shift, mask = EXPONENT_FIELDS.get(spec.dtype, (0, 0))
        counts = seen.setdefault(spec.dtype, np.zeros(mask + 1, np.int64))
        changed_counts = changed.setdefault(spec.dtype, np.zeros(mask + 1, np.int64))
        old, new = table.view(old_region, tensor_index), table.view(new_region, tensor_index)
        for start in range(0, old.size, limits.BLOCK_ELEMENTS):
            block = slice(start, start + limits.BLOCK_ELEMENTS)
            count_classes(old[block], shift, mask, counts)
            positions = find_changes(old[block], new[block])
            before, after = old[block][positions], new[block][positions]
            count_classes(before, shift, mask, changed_counts)
            steps.setdefault(spec.dtype, []).append(compute_steps(before, after, spec.dtype).astype(np.uint64))
            classes.setdefault(spec.dtype, []).append((before.astype(np.uint64) >> np.uint64(shift)) & np.uint64(mask))
    changed_count = sum(int(counts.sum()) for counts in changed.values())
    density_bits = position_bits(table.element_count, changed_count)
    exponent_bits = 0.0
    for dtype, counts in seen.items():
        exponent_bits += sum(position_bits(int(n), int(k)) for n, k in zip(counts, changed[dtype], strict=True))
        exponent_bits += _conditional_bits(steps.get(dtype, []), classes.get(dtype, []))
    density_bits += _pooled_bits(steps)
    return Bounds(changed_count, density_bits, exponent_bits)


def position_bits(element_count: int, changed_count: int) -> float:
    """Return the entropy of which elements changed, each independently at the density found."""
    if not 0 < changed_count < element_count:
        return 0.0
    share = changed_count / element_count
    return element_count * float(-share * np.log2(share) - (1 - share) * np.log2(1 - share))


def compute_steps(old_bits: npt.NDArray[Any], new_bits: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """Return new minus old, modulo the width: of the ordered integers for floats, of the bits for others."""
    if dtype in EXPONENT_FIELDS:
        old_bits, new_bits = _to_ordered(old_bits), _to_ordered(new_bits)
    steps: npt.NDArray[Any] = new_bits - old_bits
    return steps


def _to_ordered(bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    sign = bits.dtype.type(1 << (8 * bits.dtype.itemsize - 1))
    return np.where(bits >= sign, ~bits, bits | sign)


def _entropy_bits(counts: npt.NDArray[np.int64]) -> float:
    """Return the bits of all symbols together that occur so often."""
    total = int(counts.sum())
    if total == 0:
        return 0.0
    present = counts[counts > 0].astype(np.float64)
    return float(-(present * np.log2(present / total)).sum())


def _pooled_bits(steps: dict[str, list[npt.NDArray[np.uint64]]]) -> float:
    """Return the entropy of all steps, those of different dtypes being different symbols."""
    counts = [np.unique(np.concatenate(parts), return_counts=True)[1] for parts in steps.values()]
    return _entropy_bits(np.concatenate(counts)) if counts else 0.0


def _conditional_bits(steps: Iterable[npt.NDArray[np.uint64]], classes: Iterable[npt.NDArray[np.uint64]]) -> float:
    """Return the entropy of the steps, separately for each class."""
    step_parts, class_parts = list(steps), list(classes)
    if not step_parts:
        return 0.0
    all_steps, all_classes = np.concatenate(step_parts), np.concatenate(class_parts)
    total = 0.0
    for exponent in np.unique(all_classes):
        total += _entropy_bits(np.unique(all_steps[all_classes == exponent], return_counts=True)[1])
    return total
