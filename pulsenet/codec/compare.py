"""Find changed elements by their bits, at about the speed memory can be read.

Tile by tile: a mask for each 64 elements, which the processor makes of vectors; then a sieve of the masks that are not
zero; then their bits. A tile's elements are still in the nearest cache when they are picked.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pulsenet.codec.changes import Bits, Indices
from pulsenet.errors import LocalProtocolError
from pulsenet.tensors.jit import compile_loop
from pulsenet.tensors.lanes import LANE_COUNT, find_differences, find_lowest
from pulsenet.tensors.params import index_dtype

_TILE_ELEMENTS: Final = 2048
"""Elements of one pass. So few that the processor reads the next tile from memory while it still sieves this one."""

_MASKS: Final = _TILE_ELEMENTS // LANE_COUNT

_FOUND_MAX: Final = 1 << 14
"""Positions found by one call: a buffer for all that may differ would be as large as the views."""


@compile_loop
def _sieve_tile(old: Bits, new: Bits, start: int, end: int, masks: npt.NDArray[Any], kept: npt.NDArray[Any]) -> int:
    """Write the masks of a tile, all of its elements, and which of them are not zero; return how many."""
    count = 0
    # Every number is written, and the next one over it unless it counts: a branch would often be mispredicted.
    # Indices are unsigned, so that none is looked at for being negative.
    for at, first in enumerate(range(start, end, LANE_COUNT)):
        mask = find_differences(old, new, first)
        masks[np.uint64(at)] = mask
        kept[np.uint64(count)] = at
        count += mask != np.uint64(0)
    return count


@compile_loop
def _find_loop(old: Bits, new: Bits, start: int, out: Indices) -> tuple[int, int]:
    """Write the positions of elements from ``start`` on that differ; return their count and where to go on."""
    masks, kept = np.empty(_MASKS, np.uint64), np.empty(_MASKS, np.int64)
    whole_end = old.size // LANE_COUNT * LANE_COUNT
    count = 0
    while start < old.size and count + _TILE_ELEMENTS + LANE_COUNT <= out.size:
        end = min(start + _TILE_ELEMENTS, whole_end)
        for k in range(_sieve_tile(old, new, start, end, masks, kept)):
            at = kept[np.uint64(k)]
            mask, first = masks[np.uint64(at)], start + at * LANE_COUNT
            while mask != np.uint64(0):
                out[np.uint64(count)] = first + find_lowest(mask)
                mask &= mask - np.uint64(1)
                count += 1
        start += _TILE_ELEMENTS
        if start >= whole_end:
            for position in range(whole_end, old.size):
                out[count] = position
                count += old[position] != new[position]
            start = old.size
    return count, start


@compile_loop
def _list_loop(old: Bits, new: Bits, start: int, out: Indices, old_bits: Bits, new_bits: Bits) -> tuple[int, int]:
    """Do as :func:`_find_loop`, and write the elements' bits too."""
    masks, kept = np.empty(_MASKS, np.uint64), np.empty(_MASKS, np.int64)
    whole_end = old.size // LANE_COUNT * LANE_COUNT
    count = 0
    while start < old.size and count + _TILE_ELEMENTS + LANE_COUNT <= out.size:
        end = min(start + _TILE_ELEMENTS, whole_end)
        for k in range(_sieve_tile(old, new, start, end, masks, kept)):
            at = kept[np.uint64(k)]
            mask, first = masks[np.uint64(at)], start + at * LANE_COUNT
            while mask != np.uint64(0):
                source, to = np.uint64(first + find_lowest(mask)), np.uint64(count)
                out[to], old_bits[to], new_bits[to] = source, old[source], new[source]
                mask &= mask - np.uint64(1)
                count += 1
        start += _TILE_ELEMENTS
        if start >= whole_end:
            for position in range(whole_end, old.size):
                out[count], old_bits[count], new_bits[count] = position, old[position], new[position]
                count += old[position] != new[position]
            start = old.size
    return count, start


def find_changes_twin(old_view: Bits, new_view: Bits) -> Indices:
    """Define :func:`find_changes` in numpy."""
    return np.flatnonzero(old_view != new_view).astype(index_dtype(old_view.size))


def find_changes(old_view: Bits, new_view: Bits) -> Indices:
    """Return the positions where two flat views of one tensor differ in bits, ascending.

    Returns:
        uint32, or uint64 when the views have 2^32 elements and more.

    Raises:
        LocalProtocolError: views of different lengths or dtypes, or not flat unsigned integers.
    """
    size = _check_views(old_view, new_view)
    out = np.empty(min(size, _FOUND_MAX) + _TILE_ELEMENTS + LANE_COUNT, index_dtype(size))
    found = []
    start = 0
    while start < size:
        count, start = _find_loop(old_view, new_view, start, out)
        found.append(out[:count].copy())
    return found[0] if len(found) == 1 else np.concatenate([out[:0], *found])


def list_changes_twin(old_view: Bits, new_view: Bits) -> tuple[Indices, Bits, Bits]:
    """Define :func:`list_changes` in numpy."""
    positions = find_changes_twin(old_view, new_view)
    return positions, old_view[positions], new_view[positions]


def list_changes(old_view: Bits, new_view: Bits) -> tuple[Indices, Bits, Bits]:
    """Return the positions as :func:`find_changes`, and the old and the new bits there.

    Faster than to look the bits up afterwards, when they have left the caches.

    Raises:
        LocalProtocolError: as :func:`find_changes`.
    """
    size = _check_views(old_view, new_view)
    room = min(size, _FOUND_MAX) + _TILE_ELEMENTS + LANE_COUNT
    out = (np.empty(room, index_dtype(size)), np.empty(room, old_view.dtype), np.empty(room, old_view.dtype))
    count, start = _list_loop(old_view, new_view, 0, *out)
    found = [tuple(array[:count].copy() for array in out)]
    while start < size:
        count, start = _list_loop(old_view, new_view, start, *out)
        found.append(tuple(array[:count].copy() for array in out))
    positions, old_bits, new_bits = found[0] if len(found) == 1 else map(np.concatenate, zip(*found, strict=True))
    return positions, old_bits, new_bits


def _check_views(old_view: Bits, new_view: Bits) -> int:
    """Return the size of views that can be compared."""
    if old_view.dtype != new_view.dtype or old_view.shape != new_view.shape or old_view.ndim != 1:
        raise LocalProtocolError(
            f"views differ: {old_view.dtype} {old_view.shape} and {new_view.dtype} {new_view.shape}"
        )
    if old_view.dtype.kind != "u":
        raise LocalProtocolError(f"views hold unsigned bits, not {old_view.dtype}")
    return int(old_view.size)
