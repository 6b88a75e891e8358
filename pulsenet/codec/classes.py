"""Exponent classes: who stays the same between two changes of one size of weight (SPEC codec, "Classes").

Whether a weight changes depends on its exponent, which both sides know from the old bits. Elements of one class are
counted among themselves: the *gap* of a change is how many unchanged elements of its class went by since the class's
last change. Loops count the members of one class in a group of elements with one vector compare, class after class:
faster than a counter for each class, stepped element by element. Every loop has a numpy twin of the same signature
that defines it.
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

_GROUP: Final = 64
"""Elements whose class is compared in one go: the bytes of the widest vectors, and a mask of one word."""

_LANES: Final = np.arange(_GROUP, dtype=np.uint8)

_SPAN: Final = 4 * _GROUP
"""Elements that are gone through class by class: enough to make up for starting with a class."""

_RARE_CLASS: Final = 14
"""Magnitudes below 2^-13: of trained weights one in a thousand, so that most spans have none from here on."""

_DENSE_DIVISOR: Final = 64
"""Where more than one element in so many changed, finding each place costs more than to walk through all elements."""

_LANE_STRIDE: Final = 32
"""Distance of two lanes of counters; at least ``CLASS_COUNT``."""

_NO_CLASS: Final = 0xFF
"""Fills up the last span."""

_NEVER: Final = 1 << 40
"""More than any block has elements."""


@compile_loop
def _classify_loop(old: Bits, fields: npt.NDArray[np.uint16], out: UInt8s) -> None:
    # All in 16 bits, and a shift that is plainly below 16: vectors then hold the most elements.
    shift, mask, bias, exponent_min = fields[0] & 15, fields[1], fields[2], fields[3]
    for i in range(old.size):
        exponent = np.uint16(old[i] >> shift) & mask
        out[i] = bias - max(min(exponent, bias), exponent_min)


def classify_twin(old: Bits, number_format: FloatFormat) -> UInt8s:
    """Define :func:`classify` in numpy."""
    exponents = (old >> old.dtype.type(number_format.mantissa_bits)).astype(np.int64) & number_format.exponent_mask
    classes: UInt8s = np.clip(number_format.exponent_bias - exponents, 0, CLASS_COUNT - 1).astype(np.uint8)
    return classes


def classify(old: Bits, number_format: FloatFormat) -> UInt8s:
    """Return the class of each element, from 0 for magnitudes of 1 and more."""
    # The upper half holds the exponent, of all formats.
    half, dropped_bits = (old >> 16, 16) if old.dtype.itemsize > 2 else (old, 0)
    bias = number_format.exponent_bias
    shift, exponent_min = number_format.mantissa_bits - dropped_bits, max(bias - CLASS_COUNT + 1, 0)
    fields = np.array([shift, number_format.exponent_mask, bias, exponent_min], np.uint16)
    out = np.empty(old.size, np.uint8)
    _classify_loop(half, fields, out)
    return out


@compile_loop
def _count_members(group: UInt8s, row: int) -> int:
    # A sum of 64 flags in a byte: compilers see the mask of a vector compare, and count its bits.
    count = np.uint8(0)
    for lane in range(_GROUP):
        count = np.uint8(count + (group[lane] == row))
    return int(count)


@compile_loop
def _count_members_from(group: UInt8s, row: int, start: int) -> int:
    count = np.uint8(0)
    first = np.uint8(start)
    for lane in range(_GROUP):
        count = np.uint8(count + ((group[lane] == row) & (_LANES[lane] >= first)))
    return int(count)


@compile_loop
def _find_member(group: UInt8s, row: int, count: int) -> int:
    """Return the last offset from which on there are ``count`` members."""
    # Every eighth, then every one between: nothing waits for a branch that cannot be predicted.
    eighth = 0
    for offset in range(8, _GROUP, 8):
        eighth = offset if _count_members_from(group, row, offset) >= count else eighth
    found = eighth
    for offset in range(1, 8):
        found = eighth + offset if _count_members_from(group, row, eighth + offset) >= count else found
    return found


@compile_loop
def _find_in_span(span: UInt8s, row: int, rank: int) -> int:
    """Return the offset of the member that ``rank`` others precede."""
    passed, start, before = 0, 0, 0
    for end in range(_GROUP, _SPAN, _GROUP):
        passed += _count_members(span[end - _GROUP : end], row)
        start, before = (end, passed) if passed <= rank else (start, before)
    group = span[start : start + _GROUP]
    return start + _find_member(group, row, _count_members(group, row) - (rank - before))


@compile_loop
def _count_in_span(span: UInt8s, row: int) -> int:
    count = 0
    for start in range(0, _SPAN, _GROUP):
        count += _count_members(span[start : start + _GROUP], row)
    return count


@compile_loop
def _count_in_span_from(span: UInt8s, row: int, first: int) -> int:
    count = 0
    for start in range(0, _SPAN, _GROUP):
        count += _count_members_from(span[start : start + _GROUP], row, min(max(first - start, 0), _GROUP))
    return count


@compile_loop
def _has_rare(span: UInt8s) -> bool:
    count = 0
    for start in range(0, _SPAN, _GROUP):
        group = span[start : start + _GROUP]
        rare = np.uint8(0)
        for lane in range(_GROUP):
            rare = np.uint8(rare + (group[lane] >= _RARE_CLASS))
        count += int(rare)
    return count > 0


@compile_loop
def _pad_last_span(classes: UInt8s) -> UInt8s:
    padded = np.full(_SPAN, _NO_CLASS, np.uint8)
    start = classes.size // _SPAN * _SPAN
    for i in range(start, classes.size):
        padded[i - start] = classes[i]
    return padded


@compile_loop
def _list_rows(starts: Int64s) -> tuple[UInt8s, int]:
    """Return the classes that have changes, ascending, and how many of them are not rare: others are not counted."""
    rows = np.empty(CLASS_COUNT, np.uint8)
    count, common_count = 0, 0
    for row in range(CLASS_COUNT):
        rows[count] = row
        count += starts[row] < starts[row + 1]
        common_count = count if row < _RARE_CLASS else common_count
    return rows[:count], common_count


@compile_loop
def _count_gaps_loop(classes: UInt8s, positions: UInt32s, gaps: UInt32s, order: UInt32s, starts: Int64s) -> None:
    for i in range(positions.size):
        starts[np.int64(classes[positions[i]]) + 1] += 1
    for row in range(CLASS_COUNT):
        starts[row + 1] += starts[row]
    rows, common_count = _list_rows(starts)
    cursor = starts.copy()
    last_span, whole_count = _pad_last_span(classes), classes.size // _SPAN
    # Members of each class since its last change, up to the end of the span at hand.
    passed = np.zeros(CLASS_COUNT, np.int64)
    i = 0
    for span_index in range(whole_count + 1):
        start = span_index * _SPAN
        span = classes[start : start + _SPAN] if span_index < whole_count else last_span
        for k in range(rows.size if _has_rare(span) else common_count):
            row = rows[k]
            passed[row] += _count_in_span(span, row)
        while i < positions.size and np.int64(positions[i]) < start + _SPAN:
            offset = int(positions[i]) - start
            row = span[offset]
            ahead = _count_in_span_from(span, row, offset)
            at = cursor[row]
            gaps[at] = passed[row] - ahead
            order[at] = i
            passed[row] = ahead - 1
            cursor[row] = at + 1
            i += 1


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
def _sort_last(positions: UInt32s, sources: UInt32s, start: int, end: int) -> None:
    """Sort positions from ``start`` up to ``end`` by insertion: they are as few as one span has changes."""
    for i in range(start + 1, end):
        position, source = positions[i], sources[i]
        j = i
        while j > start and positions[j - 1] > position:
            positions[j], sources[j] = positions[j - 1], sources[j - 1]
            j -= 1
        positions[j], sources[j] = position, source


@compile_loop
def _find_members_loop(classes: UInt8s, gaps: UInt32s, starts: Int64s, positions: UInt32s, sources: UInt32s) -> int:
    rows, common_count = _list_rows(starts)
    cursor = starts.copy()
    last_span, whole_count = _pad_last_span(classes), classes.size // _SPAN
    # Members of each class that are still to pass before its next change.
    left = np.full(CLASS_COUNT, _NEVER, np.int64)
    kept_rows, kept_members = np.empty(CLASS_COUNT + 1, np.uint8), np.empty(CLASS_COUNT + 1, np.int64)
    for k in range(rows.size):
        left[rows[k]] = gaps[starts[rows[k]]]
    found = 0
    for span_index in range(whole_count + 1):
        start = span_index * _SPAN
        span = classes[start : start + _SPAN] if span_index < whole_count else last_span
        # Rows are kept without a branch on whether they have a change here, which could not be predicted.
        kept = 0
        for k in range(rows.size if _has_rare(span) else common_count):
            row = rows[k]
            members = _count_in_span(span, row)
            has_change = left[row] < members
            kept_rows[kept], kept_members[kept] = row, members
            kept += has_change
            left[row] -= 0 if has_change else members
        found_before = found
        for k in range(kept):
            row, rank = kept_rows[k], left[kept_rows[k]]
            while rank < kept_members[k]:
                at = cursor[row]
                positions[found] = start + _find_in_span(span, row, rank)
                sources[found] = at
                found += 1
                cursor[row] = at + 1
                rank += np.int64(gaps[at + 1]) + 1 if at + 1 < starts[int(row) + 1] else _NEVER
            left[row] = rank - kept_members[k]
        if found - found_before > 1:
            _sort_last(positions, sources, found_before, found)
    return found


@compile_loop
def _walk_members_loop(classes: UInt8s, gaps: UInt32s, starts: Int64s, positions: UInt32s, sources: UInt32s) -> int:
    # What is left of a gap is the sum of two lanes: even elements count down one, odd elements the other, so that a
    # run of one class does not wait for its own last store.
    left = np.zeros(2 * _LANE_STRIDE, np.int64)
    cursor = np.zeros(_LANE_STRIDE, np.int64)
    for row in range(CLASS_COUNT):
        cursor[row] = starts[row]
        left[row] = np.int64(gaps[cursor[row]]) if cursor[row] < starts[row + 1] else np.int64(_NEVER)
    found = 0
    element = 0
    while element < classes.size and found < positions.size:
        at = np.int64(classes[element])
        value = left[at] - 1
        left[at] = value
        if value + left[_LANE_STRIDE + at] < 0:
            positions[found] = element
            sources[found] = cursor[at]
            found += 1
            cursor[at] += 1
            left[at] = np.int64(gaps[cursor[at]]) if cursor[at] < starts[at + 1] else np.int64(_NEVER)
            left[_LANE_STRIDE + at] = 0
        element += 1
        if element == classes.size:
            break
        at = np.int64(classes[element])
        value = left[_LANE_STRIDE + at] - 1
        left[_LANE_STRIDE + at] = value
        if value + left[at] < 0:
            positions[found] = element
            sources[found] = cursor[at]
            found += 1
            cursor[at] += 1
            left[at] = np.int64(gaps[cursor[at]]) if cursor[at] < starts[at + 1] else np.int64(_NEVER)
            left[_LANE_STRIDE + at] = 0
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
    is_dense = gaps.size * _DENSE_DIVISOR > classes.size
    loop = _walk_members_loop if is_dense else _find_members_loop
    found = loop(classes, gaps, starts, positions, sources)
    return (positions, sources) if found == gaps.size else None
