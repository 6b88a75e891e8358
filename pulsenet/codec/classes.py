"""Exponent classes: who stays the same between two changes of one size of weight (SPEC codec, "Classes").

Whether a weight changes depends on its exponent, which both sides know from the old bits. Elements of one class are
counted among themselves: the *gap* of a change is how many unchanged elements of its class went by since the class's
last change. Every loop has a numpy twin of the same signature that defines it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from pulsenet.tensors.floats import Bits, FloatFormat
from pulsenet.tensors.jit import compile_loop

UInt8s = npt.NDArray[np.uint8]
UInt32s = npt.NDArray[np.uint32]
Int64s = npt.NDArray[np.int64]

CLASS_COUNT: Final = 20
"""Classes of a format: one a binade from 1.0 downward; all above share the first, all below the last."""

_LANE: Final = 32
"""Distance of two lanes of counters; at least ``CLASS_COUNT``."""

_NEVER: Final = 1 << 40
"""More than any block has elements."""


@compile_loop
def _classify_loop(old: Bits, shift: int, mask: int, bias: int, out: UInt8s) -> None:
    for i in range(old.size):
        exponent = (np.int64(old[i]) >> shift) & mask
        below_one = bias - exponent
        out[i] = 0 if below_one < 0 else CLASS_COUNT - 1 if below_one >= CLASS_COUNT else below_one


def classify_twin(old: Bits, number_format: FloatFormat) -> UInt8s:
    """Define :func:`classify` in numpy."""
    exponents = (old >> old.dtype.type(number_format.mantissa_bits)).astype(np.int64) & number_format.exponent_mask
    classes: UInt8s = np.clip(number_format.exponent_bias - exponents, 0, CLASS_COUNT - 1).astype(np.uint8)
    return classes


def classify(old: Bits, number_format: FloatFormat) -> UInt8s:
    """Return the class of each element, from 0 for magnitudes of 1 and more."""
    out = np.empty(old.size, np.uint8)
    _classify_loop(old, number_format.mantissa_bits, number_format.exponent_mask, number_format.exponent_bias, out)
    return out


@compile_loop
def _count_gaps_loop(classes: UInt8s, positions: UInt32s, gaps: UInt32s, order: UInt32s, starts: Int64s) -> None:
    for i in range(positions.size):
        starts[np.int64(classes[positions[i]]) + 1] += 1
    for row in range(CLASS_COUNT):
        starts[row + 1] += starts[row]
    cursor = starts.copy()
    # Four lanes of counters: an increment need not wait for the one before, even in the same class.
    counters = np.zeros(4 * _LANE, np.int32)
    start = np.int64(0)
    for i in range(positions.size):
        position = np.int64(positions[i])
        j = start
        while j + 4 <= position:
            counters[classes[j]] += 1
            counters[_LANE + classes[j + 1]] += 1
            counters[2 * _LANE + classes[j + 2]] += 1
            counters[3 * _LANE + classes[j + 3]] += 1
            j += 4
        while j < position:
            counters[classes[j]] += 1
            j += 1
        at = np.int64(classes[position])
        gap = np.int64(0)
        for lane in range(4):
            gap += counters[lane * _LANE + at]
            counters[lane * _LANE + at] = 0
        gaps[cursor[at]] = gap
        order[cursor[at]] = i
        cursor[at] += 1
        start = position + 1


def count_gaps_twin(classes: UInt8s, positions: UInt32s) -> tuple[UInt32s, UInt32s, Int64s]:
    """Define :func:`count_gaps` in numpy."""
    own = classes[positions]
    order = np.argsort(own, kind="stable")
    starts = np.concatenate(([0], np.cumsum(np.bincount(own, minlength=CLASS_COUNT))))
    gaps = np.zeros(positions.size, np.uint32)
    for row in range(CLASS_COUNT):
        chosen = slice(starts[row], starts[row + 1])
        ranks = np.searchsorted(np.flatnonzero(classes == row), positions[order[chosen]])
        gaps[chosen] = np.diff(ranks, prepend=-1) - 1
    return gaps, order.astype(np.uint32), starts.astype(np.int64)


def count_gaps(classes: UInt8s, positions: UInt32s) -> tuple[UInt32s, UInt32s, Int64s]:
    """Return (gaps, order, starts): the gaps of changes at ascending ``positions``, ordered by class.

    ``gaps[i]`` is that of ``positions[order[i]]``; class c has those from ``starts[c]`` up to ``starts[c + 1]``,
    ascending by position.
    """
    gaps, order = np.empty(positions.size, np.uint32), np.empty(positions.size, np.uint32)
    starts = np.zeros(CLASS_COUNT + 1, np.int64)
    _count_gaps_loop(classes, positions, gaps, order, starts)
    return gaps, order, starts


@compile_loop
def _find_members_loop(classes: UInt8s, gaps: UInt32s, starts: Int64s, positions: UInt32s, sources: UInt32s) -> int:
    # What is left of a gap is the sum of two lanes: even elements count down one, odd elements the other, so that a
    # run of one class does not wait for its own last store.
    left = np.zeros(2 * _LANE, np.int64)
    cursor = np.zeros(_LANE, np.int64)
    for row in range(CLASS_COUNT):
        cursor[row] = starts[row]
        left[row] = np.int64(gaps[cursor[row]]) if cursor[row] < starts[row + 1] else np.int64(_NEVER)
    found = 0
    element = 0
    while element < classes.size and found < positions.size:
        at = np.int64(classes[element])
        value = left[at] - 1
        left[at] = value
        if value + left[_LANE + at] < 0:
            positions[found] = element
            sources[found] = cursor[at]
            found += 1
            cursor[at] += 1
            left[at] = np.int64(gaps[cursor[at]]) if cursor[at] < starts[at + 1] else np.int64(_NEVER)
            left[_LANE + at] = 0
        element += 1
        if element == classes.size:
            break
        at = np.int64(classes[element])
        value = left[_LANE + at] - 1
        left[_LANE + at] = value
        if value + left[at] < 0:
            positions[found] = element
            sources[found] = cursor[at]
            found += 1
            cursor[at] += 1
            left[at] = np.int64(gaps[cursor[at]]) if cursor[at] < starts[at + 1] else np.int64(_NEVER)
            left[_LANE + at] = 0
        element += 1
    return found


def find_members_twin(classes: UInt8s, gaps: UInt32s, starts: Int64s) -> tuple[UInt32s, UInt32s] | None:
    """Define :func:`find_members` in numpy."""
    positions = np.zeros(gaps.size, np.int64)
    for at in range(CLASS_COUNT):
        chosen = slice(int(starts[at]), int(starts[at + 1]))
        ranks = np.cumsum(gaps[chosen].astype(np.int64) + 1) - 1
        members = np.flatnonzero(classes == at)
        if ranks.size and ranks[-1] >= members.size:
            return None
        positions[chosen] = members[ranks]
    sources = np.argsort(positions, kind="stable")
    return positions[sources].astype(np.uint32), sources.astype(np.uint32)


def find_members(classes: UInt8s, gaps: UInt32s, starts: Int64s) -> tuple[UInt32s, UInt32s] | None:
    """Undo :func:`count_gaps`.

    Returns:
        The ascending positions of the changes, and for each the offset of its gap; ``None`` if some class has fewer
        elements than its gaps count.
    """
    positions, sources = np.empty(gaps.size, np.uint32), np.empty(gaps.size, np.uint32)
    found = _find_members_loop(classes, gaps, starts, positions, sources)
    return (positions, sources) if found == gaps.size else None
