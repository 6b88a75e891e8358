"""Steps of one in the ordered integer of 16-bit floats, and the exceptions (SPEC codec, "Plain").

Every loop has a numpy twin of the same signature that defines it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pulsenet.tensors.bf16 import from_ordered, to_ordered
from pulsenet.tensors.jit import compile_loop

UInt8s = npt.NDArray[np.uint8]
UInt16s = npt.NDArray[np.uint16]
UInt32s = npt.NDArray[np.uint32]


@compile_loop
def _split_steps_loop(old_bits: UInt16s, new_bits: UInt16s, ups: UInt8s, exceptions: UInt32s) -> int:
    count = 0
    for i in range(old_bits.size):
        old, new = int(old_bits[i]), int(new_bits[i])
        old_ordered = 0xFFFF - old if old >= 0x8000 else old | 0x8000
        new_ordered = 0xFFFF - new if new >= 0x8000 else new | 0x8000
        step = (new_ordered - old_ordered) & 0xFFFF
        if step == 1:
            ups[i >> 3] |= 1 << (i & 7)
        elif step != 0xFFFF:
            exceptions[count] = i
            count += 1
    return count


def split_steps_twin(old_bits: UInt16s, new_bits: UInt16s) -> tuple[UInt8s, UInt32s]:
    """Define :func:`split_steps` in numpy."""
    steps = to_ordered(new_bits) - to_ordered(old_bits)
    ups = np.packbits(steps == 1, bitorder="little")
    return ups, np.flatnonzero((steps != 1) & (steps != 0xFFFF)).astype(np.uint32)


def split_steps(old_bits: UInt16s, new_bits: UInt16s) -> tuple[UInt8s, UInt32s]:
    """Return the step bits of the changes (1 is up, 8 to a byte, lowest bit first) and the ranks of exceptions.

    Steps wrap: the value after the largest pattern is the smallest. An exception's bit is 0.
    """
    ups = np.zeros(-(-old_bits.size // 8), np.uint8)
    exceptions = np.empty(old_bits.size, np.uint32)
    count = _split_steps_loop(old_bits, new_bits, ups, exceptions)
    return ups, exceptions[:count].copy()


@compile_loop
def _join_steps_loop(old_bits: UInt16s, ups: UInt8s, out: UInt16s) -> None:
    for i in range(old_bits.size):
        old = int(old_bits[i])
        ordered = 0xFFFF - old if old >= 0x8000 else old | 0x8000
        step = 1 if (int(ups[i >> 3]) >> (i & 7)) & 1 else -1
        ordered = (ordered + step) & 0xFFFF
        out[i] = ordered & 0x7FFF if ordered >= 0x8000 else 0xFFFF - ordered


def join_steps_twin(old_bits: UInt16s, ups: UInt8s) -> UInt16s:
    """Define :func:`join_steps` in numpy."""
    up = np.unpackbits(ups, count=old_bits.size, bitorder="little")
    return from_ordered(to_ordered(old_bits) + np.where(up == 1, 1, 0xFFFF).astype(np.uint16))


def join_steps(old_bits: UInt16s, ups: UInt8s) -> UInt16s:
    """Return the bits one step above or below ``old_bits``; the caller then sets the exceptions."""
    out = np.empty(old_bits.size, np.uint16)
    _join_steps_loop(old_bits, ups, out)
    return out
