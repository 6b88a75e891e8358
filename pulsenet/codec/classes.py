"""Exponent classes: who stays the same between two changes of one size of weight (SPEC codec, "Classes").

Whether a weight changes depends on its exponent, which both sides know from the old bits. Elements of one class are
counted among themselves: the *gap* of a change is how many unchanged elements of its class went by since the class's
last change. Loops go span by span: the classes of 512 elements become one mask a class and 64 elements, and counting is
counting their bits, whatever the classes are. Every loop has a numpy twin that defines it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from pulsenet.tensors.floats import Bits, FloatFormat
from pulsenet.tensors.jit import compile_loop
from pulsenet.tensors.lanes import KIND_COUNT, LANE_COUNT, SPAN, WORD_COUNT, count_ones, find_lowest, split_span

UInt8s = npt.NDArray[np.uint8]
UInt16s = npt.NDArray[np.uint16]
UInt32s = npt.NDArray[np.uint32]
UInt64s = npt.NDArray[np.uint64]
Int64s = npt.NDArray[np.int64]

CLASS_COUNT: Final = KIND_COUNT
"""Classes of a format: one a binade from its top downward; all above share the first, all below the last."""

_DENSE_DIVISOR: Final = 64
"""Where more than one element in so many changed, finding each place costs more than to walk through all elements."""

_LANE_STRIDE: Final = 32
"""Distance of two lanes of counters; at least ``CLASS_COUNT``."""

_NO_CLASS: Final = 0xFF
"""Fills up the last span."""

_NEVER: Final = 1 << 40
"""More than any block has elements."""

_TILE: Final = 8 * SPAN
"""Elements that are classified together: enough that all of it was stored before the first is looked at."""

_EVEN_BYTES: Final = 0x00FF00FF00FF00FF

_FIELDS_OF_CLASSES: Final = np.zeros(4, np.uint16)
"""In the place of a format's fields: the elements are classes already."""


@compile_loop
def _classify_loop(bits: Bits, fields: UInt16s, out: UInt8s) -> None:
    # All in 16 bits, and a shift that is plainly below 16: vectors then hold the most elements.
    shift, mask, top, exponent_min = fields[0] & 15, fields[1], fields[2], fields[3]
    for i in range(bits.size):
        exponent = np.uint16(bits[i] >> shift) & mask
        out[i] = top - max(min(exponent, top), exponent_min)


def classify_twin(old: Bits, number_format: FloatFormat) -> UInt8s:
    """Define :func:`classify` in numpy."""
    exponents = (old >> old.dtype.type(number_format.mantissa_bits)).astype(np.int64) & number_format.exponent_mask
    classes: UInt8s = np.clip(_find_top(number_format) - exponents, 0, CLASS_COUNT - 1).astype(np.uint8)
    return classes


def classify(old: Bits, number_format: FloatFormat) -> UInt8s:
    """Return the class of each element, from 0 for the largest magnitudes."""
    out = np.empty(old.size, np.uint8)
    _classify_loop(upper_half(old), list_fields(number_format), out)
    return out


def upper_half(bits: Bits) -> Bits:
    """Return the lower 16 bits of each element, shifted there where it has more: they hold the exponent."""
    return bits >> 16 if bits.dtype.itemsize > 2 else bits


def list_fields(number_format: FloatFormat) -> UInt16s:
    """Return the shift, the mask, and the largest and smallest exponent that classes tell apart."""
    dropped_bits = 16 if number_format.element_bits > 16 else 0
    top = _find_top(number_format)
    shift, exponent_min = number_format.mantissa_bits - dropped_bits, max(top - CLASS_COUNT + 1, 0)
    return np.array([shift, number_format.exponent_mask, top, exponent_min], np.uint16)


def _find_top(number_format: FloatFormat) -> int:
    """Return the exponent field of class 0: weights of 8 bits are scaled to fill their format, others are below 2."""
    return number_format.exponent_mask if number_format.element_bits == 8 else number_format.exponent_bias


@compile_loop
def _read_classes_loop(bits: Bits, fields: UInt16s, out: UInt8s) -> None:
    """Write the classes of elements, which may be classes already."""
    if fields[1] == 0:
        for i in range(bits.size):
            out[i] = bits[i]
    else:
        _classify_loop(bits, fields, out)


@compile_loop
def _read_tile(bits: Bits, start: int, fields: UInt16s, tile: UInt8s) -> int:
    """Write the classes of a tile, which starts at ``start``; fill up its last span; return how many there are."""
    part = bits[start : start + tile.size]
    _read_classes_loop(part, fields, tile)
    count = (part.size + SPAN - 1) // SPAN
    for i in range(part.size, count * SPAN):
        tile[i] = _NO_CLASS
    return count


@compile_loop
def _sum_bytes(packed: int) -> int:
    """Return the sum of eight bytes of at most 64 each."""
    pairs = (packed & _EVEN_BYTES) + (packed >> 8 & _EVEN_BYTES)
    pairs += pairs >> 32
    return (pairs + (pairs >> 16)) & 0xFFFF


@compile_loop
def count_gaps_loop(
    bits: Bits, fields: UInt16s, positions: UInt32s, changed: Bits, gaps: UInt32s, order: UInt32s, starts: Int64s
) -> None:
    """Write the gaps and the order of changes at ``positions``, where the elements are ``changed``.

    ``starts`` is zero before and then as :func:`count_gaps` returns it.
    """
    rows = np.empty(positions.size, np.uint8)
    _read_classes_loop(changed, fields, rows)
    for i in range(rows.size):
        starts[np.int64(rows[i]) + 1] += 1
    for row in range(CLASS_COUNT):
        starts[row + 1] += starts[row]
    cursor = starts.copy()
    tile, masks = np.empty(_TILE, np.uint8), np.empty((CLASS_COUNT, WORD_COUNT), np.uint64)
    counts = np.empty(CLASS_COUNT, np.int64)
    # Members of each class since its last change, up to the end of the span at hand.
    passed = np.zeros(CLASS_COUNT, np.int64)
    i = 0
    for tile_start in range(0, bits.size, _TILE):
        for k in range(_read_tile(bits, tile_start, fields, tile)):
            start = tile_start + k * SPAN
            split_span(tile, k * SPAN, masks, counts)
            # A number of rows that compilers do not know: knowing it they unroll the loop and use no vectors.
            for row in range(counts.size):
                passed[row] += _sum_bytes(counts[row])
            while i < positions.size and int(positions[i]) < start + SPAN:
                offset, row = int(positions[i]) - start, int(rows[i])
                word = offset // LANE_COUNT
                later = masks[row, word] >> np.uint64(offset % LANE_COUNT) >> np.uint64(1)
                ahead = count_ones(later) + _sum_bytes(counts[row] >> 8 * word >> 8)
                at = cursor[row]
                gaps[at] = passed[row] - ahead - 1
                order[at] = i
                passed[row] = ahead
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
    return _count_gaps(classes, _FIELDS_OF_CLASSES, positions, classes.take(positions))


def count_float_gaps(
    old: Bits, number_format: FloatFormat, positions: UInt32s, old_bits: Bits
) -> tuple[UInt32s, UInt32s, Int64s]:
    """Return what :func:`count_gaps` returns for the classes of ``old``, without keeping them.

    Args:
        old: All elements of the block, at least up to the last change.
        number_format: Their format.
        positions: Ascending positions of the changes.
        old_bits: The elements there.
    """
    halves = upper_half(old[: int(positions[-1]) + 1])
    return _count_gaps(halves, list_fields(number_format), positions, upper_half(old_bits))


def _count_gaps(bits: Bits, fields: UInt16s, positions: UInt32s, changed: Bits) -> tuple[UInt32s, UInt32s, Int64s]:
    gaps, order = np.empty(positions.size, np.uint32), np.empty(positions.size, np.uint32)
    starts = np.zeros(CLASS_COUNT + 1, np.int64)
    count_gaps_loop(bits, fields, positions, changed, gaps, order, starts)
    return gaps, order, starts


@compile_loop
def _find_in_span(masks: UInt64s, counts: Int64s, row: int, rank: int) -> int:
    """Return the offset of the member of a class that ``rank`` others precede."""
    packed = counts[row]
    passed, word, before = 0, 0, 0
    for end in range(1, WORD_COUNT):
        passed += packed >> 8 * (end - 1) & 0xFF
        word, before = (end, passed) if passed <= rank else (word, before)
    mask, offset, left = masks[row, word], 0, int(rank) - before
    width = LANE_COUNT // 2
    while width > 0:
        below = count_ones(mask & ((np.uint64(1) << np.uint64(width)) - np.uint64(1)))
        skips = below <= left
        left -= below if skips else 0
        mask = mask >> np.uint64(width) if skips else mask
        offset += width if skips else 0
        width >>= 1
    return word * LANE_COUNT + offset


@compile_loop
def _append_sorted(
    near: Int64s, near_sources: Int64s, count: int, start: int, positions: UInt32s, sources: UInt32s
) -> None:
    """Write the few offsets found in a span from index ``start`` on, in ascending order."""
    # Each counts those below it. Its branches depend on the number of offsets alone, which is known long before them.
    for i in range(count):
        below = 0
        for j in range(count):
            below += near[j] < near[i]
        positions[start + below] = near[i]
        sources[start + below] = near_sources[i]


@compile_loop
def _search_members_loop(
    bits: Bits, fields: UInt16s, gaps: UInt32s, starts: Int64s, positions: UInt32s, sources: UInt32s
) -> int:
    cursor = starts.copy()
    tile, masks = np.empty(_TILE, np.uint8), np.empty((CLASS_COUNT, WORD_COUNT), np.uint64)
    counts = np.empty(CLASS_COUNT, np.int64)
    # Members of each class that are still to pass before its next change.
    left = np.full(CLASS_COUNT, _NEVER, np.int64)
    for row in range(CLASS_COUNT):
        if starts[row] < starts[row + 1]:
            left[row] = gaps[starts[row]]
    near, near_sources = np.empty(SPAN, np.int64), np.empty(SPAN, np.int64)
    found = 0
    for tile_start in range(0, bits.size, _TILE):
        for k in range(_read_tile(bits, tile_start, fields, tile)):
            start = tile_start + k * SPAN
            split_span(tile, k * SPAN, masks, counts)
            # Which rows have a change here is no branch: it could not be predicted.
            due = np.uint64(0)
            for row in range(counts.size):
                left[row] -= _sum_bytes(counts[row])
            for row in range(counts.size):
                due |= np.uint64(left[row] < 0) << np.uint64(row)
            count = 0
            while due != np.uint64(0):
                row = find_lowest(due)
                due &= due - np.uint64(1)
                rank = left[row] + _sum_bytes(counts[row])
                while left[row] < 0:
                    at = cursor[row]
                    near[count] = start + _find_in_span(masks, counts, row, rank)
                    near_sources[count] = at
                    count += 1
                    cursor[row] = at + 1
                    step = np.int64(gaps[at + 1]) + 1 if at + 1 < starts[row + 1] else np.int64(_NEVER)
                    rank += step
                    left[row] += step
            _append_sorted(near, near_sources, count, found, positions, sources)
            found += count
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
    return _find_members(classes, _FIELDS_OF_CLASSES, gaps, starts)


def find_float_members(
    old: Bits, number_format: FloatFormat, gaps: UInt32s, starts: Int64s
) -> tuple[UInt32s, UInt32s] | None:
    """Undo :func:`count_float_gaps`: do as :func:`find_members` for the classes of ``old``, without keeping them."""
    return _find_members(upper_half(old), list_fields(number_format), gaps, starts)


@compile_loop
def find_members_loop(
    bits: Bits, fields: UInt16s, gaps: UInt32s, starts: Int64s, positions: UInt32s, sources: UInt32s
) -> int:
    """Write where the changes are and which gap each has; return how many were found."""
    if gaps.size * _DENSE_DIVISOR <= bits.size:
        return _search_members_loop(bits, fields, gaps, starts, positions, sources)
    classes = np.empty(bits.size, np.uint8)
    _read_classes_loop(bits, fields, classes)
    return _walk_members_loop(classes, gaps, starts, positions, sources)


def _find_members(bits: Bits, fields: UInt16s, gaps: UInt32s, starts: Int64s) -> tuple[UInt32s, UInt32s] | None:
    positions, sources = np.empty(gaps.size, np.uint32), np.empty(gaps.size, np.uint32)
    found = find_members_loop(bits, fields, gaps, starts, positions, sources)
    return (positions, sources) if found == gaps.size else None
