"""Find changed elements by their bits, at about the speed memory can be read.

One pass writes for each element whether it differs, which vectorises; a second one looks at eight of them at once.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from pulsenet.codec.changes import Bits, Indices
from pulsenet.errors import LocalProtocolError
from pulsenet.tensors.jit import compile_loop

_TILE_ELEMENTS: Final = 1024
"""Elements of one pass. So few that the processor reads the next tile from memory while it still sieves this one."""

_GROUP_ELEMENTS: Final = 8
"""Elements whose flags, a byte each, make one word."""

_FOUND_MAX: Final = 1 << 16
"""Positions found by one call: a buffer for all that may differ would be as large as the views."""


@compile_loop
def _find_loop(old: Bits, new: Bits, start: int, out: Indices) -> tuple[int, int]:
    """Write the positions of elements from ``start`` on that differ; return their count and where to go on.

    Two sieves, tile by tile: groups with a difference, then elements of those. Each writes every candidate and moves
    on only if it differs: changes lie at random, so a branch on them would often be mispredicted.
    """
    flags = np.zeros(_TILE_ELEMENTS, np.uint8)
    flags_of_groups = flags.view(np.uint64)
    groups = np.empty(_TILE_ELEMENTS // _GROUP_ELEMENTS + 1, np.int64)
    count = 0
    while start < old.size and count + _TILE_ELEMENTS < out.size:
        end = min(start + _TILE_ELEMENTS, old.size)
        old_tile, new_tile = old[start:end], new[start:end]
        for i in range(old_tile.size):
            flags[i] = old_tile[i] != new_tile[i]
        # Only the last tile is shorter.
        flags[old_tile.size :] = 0
        kept = 0
        for group in range(flags_of_groups.size):
            groups[kept] = group * _GROUP_ELEMENTS
            kept += flags_of_groups[group] != 0
        for k in range(kept):
            first = groups[k]
            for i in range(_GROUP_ELEMENTS):
                out[count] = start + first + i
                count += 1 if flags[first + i] else 0
        start = end
    return count, start


def find_changes_twin(old_view: Bits, new_view: Bits) -> Indices:
    """Define :func:`find_changes` in numpy."""
    return np.flatnonzero(old_view != new_view).astype(_index_dtype(old_view.size))


def find_changes(old_view: Bits, new_view: Bits) -> Indices:
    """Return the positions where two flat views of one tensor differ in bits, ascending.

    Returns:
        uint32, or uint64 when the views have 2^32 elements and more.

    Raises:
        LocalProtocolError: views of different lengths or dtypes, or not flat unsigned integers.
    """
    if old_view.dtype != new_view.dtype or old_view.shape != new_view.shape or old_view.ndim != 1:
        raise LocalProtocolError(
            f"views differ: {old_view.dtype} {old_view.shape} and {new_view.dtype} {new_view.shape}"
        )
    if old_view.dtype.kind != "u":
        raise LocalProtocolError(f"views hold unsigned bits, not {old_view.dtype}")
    size = old_view.size
    # One place more than a tile can need, because the sieve writes a candidate before it knows whether it differs.
    out = np.empty(min(size, _FOUND_MAX) + _TILE_ELEMENTS + 1, _index_dtype(size))
    found = []
    start = 0
    while start < size:
        count, start = _find_loop(old_view, new_view, start, out)
        found.append(out[:count].copy())
    return found[0] if len(found) == 1 else np.concatenate([out[:0], *found])


def _index_dtype(element_count: int) -> np.dtype[Any]:
    return np.dtype(np.uint32) if element_count < 1 << 32 else np.dtype(np.uint64)
