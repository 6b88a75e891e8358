"""Find changed elements by their bits, at about the speed memory can be read.

Words of 64 bits are compared first; single elements are looked at only where a word differs.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pulsenet.codec.changes import Bits, Indices
from pulsenet.errors import LocalProtocolError
from pulsenet.tensors.jit import compile_loop

_WORD_SIZE_BYTES: Final = 8
_GROUP_WORDS: Final = 8
"""Words whose flags, a byte each, make one word."""

_TILE_WORDS: Final = 8192
"""64 KiB of each view, so that later sieves find them in the cache."""

_PART_ELEMENTS: Final = 1 << 19
"""Searched by one call: the buffer for its positions stays below the size at which numpy asks for huge pages."""

Words = npt.NDArray[np.uint64]


@compile_loop
def _find_in_words(old_words: Words, new_words: Words, old: Bits, new: Bits, out: npt.NDArray[np.uint32]) -> int:
    """Write the positions of elements that differ, in whole groups of words; count them.

    Three sieves, tile by tile: groups that differ, words of those, elements of those. Each writes every candidate
    and moves on only if it differs: changes lie at random, so a branch on them would often be mispredicted. Indices
    are unsigned or start at 0, which spares numba the question whether they count from the end.
    """
    flags = np.empty(_TILE_WORDS, np.uint8)
    flags_of_groups = flags.view(np.uint64)
    groups, words = np.empty(_TILE_WORDS, np.uint32), np.empty(_TILE_WORDS, np.uint32)
    lane_count = old.size // old_words.size if old_words.size else 0
    count = 0
    for start in range(0, old_words.size, _TILE_WORDS):
        end = min(start + _TILE_WORDS, old_words.size)
        old_tile, new_tile = old_words[start:end], new_words[start:end]
        for i in range(old_tile.size):
            flags[i] = old_tile[i] != new_tile[i]
        kept_groups = 0
        for group in range(old_tile.size // _GROUP_WORDS):
            groups[kept_groups] = group * _GROUP_WORDS
            kept_groups += flags_of_groups[group] != 0
        kept_words = 0
        for k in range(kept_groups):
            first = np.int64(groups[k])
            for i in range(_GROUP_WORDS):
                words[kept_words] = first + i
                kept_words += flags[first + i]
        old_part, new_part = old[start * lane_count : end * lane_count], new[start * lane_count : end * lane_count]
        for k in range(kept_words):
            first = np.int64(words[k]) * lane_count
            for lane in range(lane_count):
                out[count] = start * lane_count + first + lane
                count += old_part[first + lane] != new_part[first + lane]
    return count


@compile_loop
def _find_in_elements(old: Bits, new: Bits, start: int, out: npt.NDArray[np.uint32], count: int) -> int:
    """Go on from element ``start`` one by one; return the count so far."""
    for i in range(start, old.size):
        if old[i] != new[i]:
            out[count] = i
            count += 1
    return count


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
    if size <= _PART_ELEMENTS:
        return _find_in_part(old_view, new_view).astype(_index_dtype(size), copy=False)
    found = []
    for start in range(0, size, _PART_ELEMENTS):
        end = start + _PART_ELEMENTS
        local = _find_in_part(old_view[start:end], new_view[start:end])
        found.append(local.astype(_index_dtype(size)) + _index_dtype(size).type(start))
    return np.concatenate(found)


def _find_in_part(old: Bits, new: Bits) -> npt.NDArray[np.uint32]:
    # Pages of this buffer that no change reaches are never touched, so its size costs nothing.
    # One place more, because the sieves write a candidate before they know whether it differs.
    out = np.empty(old.size + 1, np.uint32)
    element_size = old.dtype.itemsize
    group_size_bytes = _WORD_SIZE_BYTES * _GROUP_WORDS
    whole = old.size * element_size // group_size_bytes * group_size_bytes // element_size
    old_words, new_words = _as_words(old[:whole]), _as_words(new[:whole])
    count = 0
    if old_words is None or new_words is None:
        whole = 0
    else:
        count = _find_in_words(old_words, new_words, old[:whole], new[:whole], out)
    count = _find_in_elements(old, new, whole, out, count)
    return out[:count].copy()


def _as_words(view: Bits) -> npt.NDArray[np.uint64] | None:
    """Return ``view`` as aligned 64-bit words, or ``None`` where its memory does not allow it."""
    if not view.flags.c_contiguous:
        return None
    words = view.view(np.uint64)
    return words if words.flags.aligned else None


def _index_dtype(element_count: int) -> np.dtype[Any]:
    return np.dtype(np.uint32) if element_count < 1 << 32 else np.dtype(np.uint64)
