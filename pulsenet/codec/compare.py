"""Find changed elements by their bits, at about the speed memory can be read.

The loop reads 64-bit words, eight at a time, and looks at single elements only where a word differs.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pulsenet import limits
from pulsenet.codec.changes import Bits, Indices
from pulsenet.errors import LocalProtocolError
from pulsenet.tensors.jit import compile_loop

_WORD_SIZE_BYTES: Final = 8


@compile_loop
def _find_in_words(
    old: npt.NDArray[np.uint64], new: npt.NDArray[np.uint64], element_bits: int, out: npt.NDArray[np.uint32]
) -> int:
    """Write the positions of elements that differ, little-endian words of 64 / ``element_bits`` each; count them."""
    lane_count = 64 // element_bits
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - element_bits)
    count = 0
    word_count = old.size
    start = 0
    while start < word_count:
        end = min(start + 8, word_count)
        differs = np.uint64(0)
        if end - start == 8:
            for i in range(8):
                differs |= old[start + i] ^ new[start + i]
        else:
            differs = np.uint64(1)
        if differs != np.uint64(0):
            for i in range(start, end):
                word = old[i] ^ new[i]
                if word != np.uint64(0):
                    for lane in range(lane_count):
                        if (word >> np.uint64(lane * element_bits)) & mask != np.uint64(0):
                            out[count] = i * lane_count + lane
                            count += 1
        start = end
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
    if size <= limits.BLOCK_ELEMENTS:
        return _find_in_block(old_view, new_view).astype(_index_dtype(size), copy=False)
    found = []
    for start in range(0, size, limits.BLOCK_ELEMENTS):
        end = start + limits.BLOCK_ELEMENTS
        local = _find_in_block(old_view[start:end], new_view[start:end])
        found.append(local.astype(_index_dtype(size)) + _index_dtype(size).type(start))
    return np.concatenate(found)


def _find_in_block(old: Bits, new: Bits) -> npt.NDArray[np.uint32]:
    # Pages of this buffer that no change reaches are never touched, so its size costs nothing.
    out = np.empty(old.size, np.uint32)
    element_size = old.dtype.itemsize
    whole = old.size * element_size // _WORD_SIZE_BYTES * _WORD_SIZE_BYTES // element_size
    old_words, new_words = _as_words(old[:whole]), _as_words(new[:whole])
    count = 0
    if old_words is None or new_words is None:
        whole = 0
    else:
        count = _find_in_words(old_words, new_words, element_size * 8, out)
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
