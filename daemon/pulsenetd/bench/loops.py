"""Compiled loops that only benchmarks need; each has a numpy twin of one line in its tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pulsenet.tensors.jit import compile_loop

Bits = npt.NDArray[Any]
Words = npt.NDArray[np.uint64]


@compile_loop
def read_both(old: Words, new: Words) -> np.uint64:
    """Return all words of both arrays, or-ed: reads everything and does the least with it."""
    seen = np.uint64(0)
    for i in range(old.size):
        seen |= old[i] ^ new[i]
    return seen


@compile_loop
def count_classes(bits: Bits, shift: int, mask: int, counts: npt.NDArray[np.int64]) -> None:
    """Add to ``counts`` how many elements have each value of ``(bits >> shift) & mask``."""
    for i in range(bits.size):
        counts[(int(bits[i]) >> shift) & mask] += 1


@compile_loop
def write_values(view: Bits, indices: npt.NDArray[Any], bits: Bits) -> None:
    """Set ``view[indices] = bits``, faster than numpy does."""
    for i in range(indices.size):
        view[indices[i]] = bits[i]


@compile_loop
def join_gaps(gaps: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
    """Write the positions that gaps lead to, the first counted from the start."""
    position = -1
    for i in range(gaps.size):
        position += int(gaps[i]) + 1
        out[i] = position
