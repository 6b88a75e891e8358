"""Windows: which elements of a published tensor lie where in the memory of an engine.

An engine may hold a tensor transposed, cut to its shard, or fused with others. All of that is one strided view on the
published tensor and one on the engine's memory, of equal sizes: a window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pulsenet.errors import StructureError

Indices = npt.NDArray[Any]
Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Window:
    """A strided view on a tensor and one on a memory, element for element; made by :func:`make_window`.

    All numbers count elements. Dimensions go from the largest source stride to the smallest.
    """

    source_offset: int
    """First element of the published tensor, in row-major order."""
    target_offset: int
    """First element of the memory."""
    sizes: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]

    @property
    def element_count(self) -> int:
        """How many elements of the tensor lie in this window."""
        return math.prod(self.sizes)

    def route(self, indices: Indices) -> tuple[Indices, Positions]:
        """Find which of these elements lie in the window, and where in the memory.

        Args:
            indices: Flat row-major positions in the tensor, ascending.

        Returns:
            Positions in ``indices`` of those inside, ascending, and their positions in the memory.
        """
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.sizes, self.source_strides, strict=True))
        bounds = np.array([self.source_offset, self.source_offset + span], dtype=np.uint64)
        first, end = (int(place) for place in np.searchsorted(indices, bounds.astype(indices.dtype)))
        if bounds[1] > np.iinfo(indices.dtype).max:
            end = indices.size
        rest = indices[first:end].astype(np.int64) - self.source_offset
        target = np.full(rest.size, self.target_offset, dtype=np.int64)
        inside = np.ones(rest.size, dtype=np.bool_)
        for size, source_stride, target_stride in zip(
            self.sizes, self.source_strides, self.target_strides, strict=True
        ):
            step, rest = (rest, np.zeros_like(rest)) if source_stride == 1 else np.divmod(rest, source_stride)
            inside &= step < size
            target += step * target_stride
        inside &= rest == 0
        chosen = np.flatnonzero(inside)
        return chosen + first, target[chosen]


def make_window(
    *,
    source_offset: int,
    source_strides: Sequence[int],
    target_offset: int,
    target_strides: Sequence[int],
    sizes: Sequence[int],
) -> Window | None:
    """Return the window of two views of equal sizes, in as few dimensions as it takes; ``None`` if it is empty.

    Raises:
        StructureError: An element of the tensor would go to two places, or two elements to one.
    """
    if math.prod(sizes) == 0:
        return None
    dimensions = [
        list(dimension) for dimension in zip(sizes, source_strides, target_strides, strict=True) if dimension[0] > 1
    ]
    _check_nested([(size, target) for size, _, target in dimensions], "two elements share one place")
    _check_nested([(size, source) for size, source, _ in dimensions], "one element has two places")
    dimensions.sort(key=lambda dimension: -dimension[1])
    merged: list[list[int]] = []
    for size, source, target in dimensions:
        if merged and merged[-1][1] == source * size and merged[-1][2] == target * size:
            merged[-1] = [merged[-1][0] * size, source, target]
        else:
            merged.append([size, source, target])
    return Window(
        source_offset=source_offset,
        target_offset=target_offset,
        sizes=tuple(size for size, _, _ in merged),
        source_strides=tuple(source for _, source, _ in merged),
        target_strides=tuple(target for _, _, target in merged),
    )


def _check_nested(dimensions: list[tuple[int, int]], fault: str) -> None:
    """Refuse a view that touches an element twice, or whose strides are not those of nested blocks."""
    below = 1
    for size, stride in sorted(dimensions, key=lambda dimension: dimension[1]):
        if stride < below:
            raise StructureError(f"a view of sizes and strides {dimensions}: {fault}")
        below = size * stride


def find_uncovered(element_count: int, windows: Sequence[Window]) -> int:
    """Return how many elements of a tensor lie in none of these windows."""
    if any(window.element_count == element_count for window in windows):
        return 0
    views = [(window.source_offset, window.sizes, window.source_strides) for window in windows]
    owners, unit = _paint(element_count, views, range(len(windows)))
    return int(np.count_nonzero(owners == _NOBODY)) * unit


def find_shared(element_count: int, windows: Sequence[tuple[int, Window]]) -> tuple[int, int] | None:
    """Return two owners of one element of a memory, if there are any.

    Args:
        element_count: Elements of the memory.
        windows: (owner, window); windows of one owner may overlap.
    """
    if len({owner for owner, _ in windows}) < 2:
        return None
    views = [(window.target_offset, window.sizes, window.target_strides) for _, window in windows]
    owners = [owner for owner, _ in windows]
    painted, _ = _paint(element_count, views, owners)
    # What was painted over later belongs to somebody else now.
    unit = element_count // painted.size
    for (offset, sizes, strides), owner in zip(views, owners, strict=True):
        cells = _cells(painted, unit, offset, sizes, strides)
        others = cells[cells != owner]
        if others.size:
            return owner, int(others[0])
    return None


_View = tuple[int, tuple[int, ...], tuple[int, ...]]
_NOBODY = -1


def _paint(element_count: int, views: Sequence[_View], owners: Sequence[int]) -> tuple[npt.NDArray[np.int32], int]:
    """Write each view's owner over its elements, in units that no view divides: rows of a matrix, or parts of rows.

    Returns:
        The owner of every unit, and the elements of a unit.
    """
    unit = element_count
    for offset, sizes, strides in views:
        runs = [size for size, stride in zip(sizes, strides, strict=True) if stride == 1] or [1]
        unit = math.gcd(unit, offset, *runs, *(stride for stride in strides if stride != 1))
    unit = max(unit, 1)
    painted = np.full(element_count // unit, _NOBODY, dtype=np.int32)
    for (offset, sizes, strides), owner in zip(views, owners, strict=True):
        _cells(painted, unit, offset, sizes, strides)[...] = owner
    return painted, unit


def _cells(
    painted: npt.NDArray[np.int32], unit: int, offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> npt.NDArray[np.int32]:
    """Return the units of a view."""
    cell_sizes = [size // unit if stride == 1 else size for size, stride in zip(sizes, strides, strict=True)]
    cell_strides = [stride if stride == 1 else stride // unit for stride in strides]
    return np.lib.stride_tricks.as_strided(
        painted[offset // unit :], cell_sizes, [stride * painted.itemsize for stride in cell_strides], writeable=True
    )
