"""Steps in the ordered integer of float formats, modulo their width (SPEC codec, "Steps", "Plain", "Tight").

Every loop has a numpy twin of the same signature that defines it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pulsenet.tensors.floats import Bits, from_ordered, to_ordered
from pulsenet.tensors.jit import compile_loop

UInt8s = npt.NDArray[np.uint8]
UInt32s = npt.NDArray[np.uint32]


@compile_loop
def _split_steps_loop(old_bits: Bits, new_bits: Bits, element_bits: int, ups: UInt8s, exceptions: UInt32s) -> int:
    mask = (1 << element_bits) - 1
    sign = 1 << (element_bits - 1)
    count = 0
    for i in range(old_bits.size):
        old, new = np.int64(old_bits[i]), np.int64(new_bits[i])
        old_ordered = mask - old if old >= sign else old | sign
        new_ordered = mask - new if new >= sign else new | sign
        step = (new_ordered - old_ordered) & mask
        if step == 1:
            ups[i >> 3] |= 1 << (i & 7)
        elif step != mask:
            exceptions[count] = i
            count += 1
    return count


def split_steps_twin(old_bits: Bits, new_bits: Bits) -> tuple[UInt8s, UInt32s]:
    """Define :func:`split_steps` in numpy."""
    steps = to_ordered(new_bits) - to_ordered(old_bits)
    is_up, is_down = steps == 1, steps == np.iinfo(steps.dtype).max
    return np.packbits(is_up, bitorder="little"), np.flatnonzero(~is_up & ~is_down).astype(np.uint32)


def split_steps(old_bits: Bits, new_bits: Bits) -> tuple[UInt8s, UInt32s]:
    """Return the step bits of the changes (1 is up, 8 to a byte, lowest bit first) and the ranks of exceptions.

    Steps wrap: the value after the largest pattern is the smallest. An exception's bit is 0.
    """
    ups = np.zeros(-(-old_bits.size // 8), np.uint8)
    exceptions = np.empty(old_bits.size, np.uint32)
    count = _split_steps_loop(old_bits, new_bits, _element_bits(old_bits), ups, exceptions)
    return ups, exceptions[:count].copy()


@compile_loop
def _join_steps_loop(old_bits: Bits, ups: UInt8s, element_bits: int, out: Bits) -> None:
    mask = (1 << element_bits) - 1
    sign = 1 << (element_bits - 1)
    for i in range(old_bits.size):
        old = np.int64(old_bits[i])
        ordered = mask - old if old >= sign else old | sign
        step = 1 if (int(ups[i >> 3]) >> (i & 7)) & 1 else -1
        ordered = (ordered + step) & mask
        out[i] = ordered ^ sign if ordered >= sign else mask - ordered


def join_steps_twin(old_bits: Bits, ups: UInt8s) -> Bits:
    """Define :func:`join_steps` in numpy."""
    up = np.unpackbits(ups, count=old_bits.size, bitorder="little")
    down = np.iinfo(old_bits.dtype).max
    return from_ordered(to_ordered(old_bits) + np.where(up == 1, 1, down).astype(old_bits.dtype))


def join_steps(old_bits: Bits, ups: UInt8s) -> Bits:
    """Return the bits one step above or below ``old_bits``; the caller then sets the exceptions."""
    out = np.empty_like(old_bits)
    _join_steps_loop(old_bits, ups, _element_bits(old_bits), out)
    return out


@compile_loop
def measure_steps_loop(
    old_bits: Bits, new_bits: Bits, order: UInt32s, element_bits: int, ups: UInt8s, extras: UInt32s
) -> None:
    """Fill in what :func:`measure_steps` returns."""
    mask = (1 << element_bits) - 1
    sign = 1 << (element_bits - 1)
    for i in range(order.size):
        old, new = np.int64(old_bits[order[i]]), np.int64(new_bits[order[i]])
        old_ordered = mask - old if old >= sign else old | sign
        new_ordered = mask - new if new >= sign else new | sign
        step = (new_ordered - old_ordered) & mask
        # Half the width is as far up as down: it counts as up.
        if step <= sign:
            ups[i] = 1
            extras[i] = step - 1
        else:
            ups[i] = 0
            extras[i] = mask - step


def measure_steps_twin(old_bits: Bits, new_bits: Bits, order: UInt32s) -> tuple[UInt8s, UInt32s]:
    """Define :func:`measure_steps` in numpy."""
    steps = (to_ordered(new_bits[order]) - to_ordered(old_bits[order])).astype(np.int64)
    half = 1 << (_element_bits(old_bits) - 1)
    sizes = np.where(steps <= half, steps, 2 * half - steps)
    return (steps <= half).astype(np.uint8), (sizes - 1).astype(np.uint32)


def measure_steps(old_bits: Bits, new_bits: Bits, order: UInt32s) -> tuple[UInt8s, UInt32s]:
    """Return for each change whether its step is up (1) or down (0), and its size less 1.

    Args:
        old_bits: Bits of a float format of at most 32 bits.
        new_bits: Bits that all differ from ``old_bits``.
        order: Which change comes where in the results.
    """
    ups, extras = np.empty(order.size, np.uint8), np.empty(order.size, np.uint32)
    measure_steps_loop(old_bits, new_bits, order, _element_bits(old_bits), ups, extras)
    return ups, extras


@compile_loop
def take_steps_loop(
    old_bits: Bits, ups: UInt8s, extras: UInt32s, sources: UInt32s, element_bits: int, out: Bits
) -> None:
    """Write what :func:`take_steps` returns."""
    mask = (1 << element_bits) - 1
    sign = 1 << (element_bits - 1)
    for i in range(old_bits.size):
        old = np.int64(old_bits[i])
        ordered = mask - old if old >= sign else old | sign
        size = np.int64(extras[sources[i]]) + 1
        ordered = (ordered + size if ups[sources[i]] else ordered - size) & mask
        out[i] = ordered ^ sign if ordered >= sign else mask - ordered


def take_steps_twin(old_bits: Bits, ups: UInt8s, extras: UInt32s, sources: UInt32s) -> Bits:
    """Define :func:`take_steps` in numpy."""
    sizes = extras[sources].astype(np.int64) + 1
    ordered = to_ordered(old_bits).astype(np.int64) + np.where(ups[sources] == 1, sizes, -sizes)
    return from_ordered((ordered & np.iinfo(old_bits.dtype).max).astype(old_bits.dtype))


def take_steps(old_bits: Bits, ups: UInt8s, extras: UInt32s, sources: UInt32s) -> Bits:
    """Undo :func:`measure_steps`: return the new bits. Sizes of at most half the width never give the old ones.

    Args:
        old_bits: The bits that the steps start from.
        ups: As :func:`measure_steps` returned them; so are ``extras``.
        sources: Which of the steps is that of each element.
    """
    out = np.empty_like(old_bits)
    take_steps_loop(old_bits, ups, extras, sources, _element_bits(old_bits), out)
    return out


def _element_bits(bits: npt.NDArray[Any]) -> int:
    return bits.dtype.itemsize * 8
