"""Entries of a pseudo-gradient as seen from the FP32 weights both sides hold (SPEC codec, "Reach", "Places").

What passes the gate moves a weight over the edge of its BF16 rounding cell. So whether an entry is there depends on
how far its weight is from the nearest edge, and its value, in the weight's own last places, is at least that far.
Integers only: every FP32 value comes back bit for bit. Every loop has a numpy twin of the same signature.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

from pulsenet.codec.classes import CLASS_COUNT
from pulsenet.tensors.jit import compile_loop

UInt8s = npt.NDArray[np.uint8]
UInt32s = npt.NDArray[np.uint32]

HALF_CELL: Final = 1 << 15
"""Half a BF16 rounding cell in last places of FP32: no weight is farther from the nearest edge."""

REACH_MAX: Final = 2 * (0xFF + 16)
"""Largest reach of a weight: see :func:`measure_reach`."""

_NUMBER_END: Final = 1 << 32


@cache
def _distance_reaches() -> UInt8s:
    """Return for each distance in last places, 0 to ``HALF_CELL``, how many half octaves it is above half a place."""
    # The float's exponent and its first mantissa bit, side by side: exact, because the distances are below 2^24.
    reaches = (np.arange(HALF_CELL + 1, dtype=np.float32).view(np.uint32) >> np.uint32(22)).astype(np.int64) - 252
    return np.maximum(reaches, 0).astype(np.uint8)


@compile_loop
def _measure_reach_loop(theta: UInt32s, distance_reaches: UInt8s, out: npt.NDArray[np.uint16]) -> None:
    for i in range(theta.size):
        bits = np.int64(theta[i])
        exponent = max((bits >> 23) & 0xFF, np.int64(1))
        out[i] = np.int64(distance_reaches[abs((bits & 0xFFFF) - HALF_CELL)]) + 2 * exponent


def measure_reach_twin(theta: UInt32s) -> npt.NDArray[np.uint16]:
    """Define :func:`measure_reach` in numpy."""
    distances = np.abs((theta & np.uint32(0xFFFF)).astype(np.int64) - HALF_CELL)
    lengths = np.zeros(theta.size, np.int64)
    for bit in range(16):
        lengths += distances >> bit > 0
    halves = np.where(lengths > 1, distances >> np.maximum(lengths - 2, 0) & 1, 0)
    exponents = np.maximum(theta >> np.uint32(23) & np.uint32(0xFF), 1).astype(np.int64)
    reaches: npt.NDArray[np.uint16] = (2 * lengths + halves + 2 * exponents).astype(np.uint16)
    return reaches


def measure_reach(theta: UInt32s) -> npt.NDArray[np.uint16]:
    """Return how far each weight is from the nearest edge of its BF16 rounding cell, on a scale of half octaves.

    The distance d in last places of FP32 counts as twice its bit length, plus its second highest bit; twice the
    exponent field (at least 1) is added, so that the scale is that of the distance itself.
    """
    out = np.empty(theta.size, np.uint16)
    _measure_reach_loop(theta, _distance_reaches(), out)
    return out


def classify_reach(reaches: npt.NDArray[np.uint16], top: int) -> UInt8s:
    """Return classes from 0 for a reach of ``top`` and more, one a half octave downward, the last for all below."""
    classes: UInt8s = np.clip(top - reaches.astype(np.int16), 0, CLASS_COUNT - 1).astype(np.uint8)
    return classes


@compile_loop
def _measure_values_loop(theta: UInt32s, values: UInt32s, numbers: UInt32s, aways: UInt8s, escapes: UInt32s) -> int:
    count = 0
    for i in range(theta.size):
        weight, value = np.int64(theta[i]), np.int64(values[i])
        exponent = (value >> 23) & 0xFF
        mantissa = value & 0x7FFFFF
        if exponent > 0:
            mantissa |= 0x800000
        shift = max(exponent, np.int64(1)) - max((weight >> 23) & 0xFF, np.int64(1))
        # The value in last places of the weight; -1 where it is no whole number of them, or too many.
        places = np.int64(-1)
        if exponent < 0xFF:
            if mantissa == 0:
                places = np.int64(0)
            elif 0 <= shift <= 8:
                places = mantissa << shift
            elif -24 < shift < 0 and mantissa & ((1 << -shift) - 1) == 0:
                places = mantissa >> -shift
        low = weight & 0xFFFF
        # Subtracting a value of the other sign moves the weight away from zero: up in its bits.
        is_away = ((weight ^ value) >> 31 == 1) != (low < HALF_CELL)
        distance = abs(low - HALF_CELL)
        if is_away:
            distance = 2 * HALF_CELL - distance
        number = places - distance
        if places >= _NUMBER_END or number < 0:
            escapes[count] = i
            count += 1
        numbers[i] = number if 0 <= number < _NUMBER_END else np.int64(0)
        aways[i] = is_away
    return count


def measure_values_twin(theta: UInt32s, values: UInt32s) -> tuple[UInt32s, UInt8s, UInt32s]:
    """Define :func:`measure_values` in numpy."""
    weights, wide = theta.astype(np.int64), values.astype(np.int64)
    exponents = wide >> 23 & 0xFF
    mantissas = (wide & 0x7FFFFF) | np.where(exponents > 0, 0x800000, 0)
    shifts = np.maximum(exponents, 1) - np.maximum(weights >> 23 & 0xFF, 1)
    left, right = np.clip(shifts, 0, 9), np.clip(-shifts, 0, 24)
    places = np.where(shifts >= 0, mantissas << left, mantissas >> right)
    is_whole = (mantissas == 0) | ((shifts <= 8) & ((shifts >= 0) | (mantissas >> right << right == mantissas)))
    lows = weights & 0xFFFF
    aways = ((weights ^ wide) >> 31 == 1) != (lows < HALF_CELL)
    distances = np.abs(lows - HALF_CELL)
    numbers = places - np.where(aways, 2 * HALF_CELL - distances, distances)
    is_regular = is_whole & (exponents < 0xFF) & (places < _NUMBER_END) & (numbers >= 0)
    return (
        np.where(is_regular, numbers, 0).astype(np.uint32),
        aways.astype(np.uint8),
        np.flatnonzero(~is_regular).astype(np.uint32),
    )


def measure_values(theta: UInt32s, values: UInt32s) -> tuple[UInt32s, UInt8s, UInt32s]:
    """Return (numbers, aways, escapes) of values that are subtracted from weights; all are FP32 bits.

    A number counts by how many last places of the weight a value goes beyond an edge of its BF16 rounding cell:
    the nearest, or the other one where ``aways`` is 1. Escapes are the ranks, ascending, of values that are no such
    number below 2^32; their numbers and aways mean nothing.
    """
    numbers, aways = np.empty(theta.size, np.uint32), np.empty(theta.size, np.uint8)
    escapes = np.empty(theta.size, np.uint32)
    count = _measure_values_loop(theta, values, numbers, aways, escapes)
    return numbers, aways, escapes[:count].copy()


@compile_loop
def _restore_values_loop(theta: UInt32s, numbers: UInt32s, aways: UInt8s, out: UInt32s) -> bool:
    for i in range(theta.size):
        weight = np.int64(theta[i])
        low = weight & 0xFFFF
        distance = abs(low - HALF_CELL)
        if aways[i]:
            distance = 2 * HALF_CELL - distance
        places = np.int64(numbers[i]) + distance
        exponent = max((weight >> 23) & 0xFF, np.int64(1))
        while places >= 1 << 24:
            if places & 1:
                return False
            places >>= 1
            exponent += 1
        while 0 < places < 1 << 23 and exponent > 1:
            places <<= 1
            exponent -= 1
        if places < 1 << 23:
            exponent = np.int64(0)
        if exponent >= 0xFF:
            return False
        is_other_sign = (aways[i] == 1) != (low < HALF_CELL)
        sign = (weight >> 31) ^ (1 if is_other_sign else 0)
        out[i] = sign << 31 | exponent << 23 | (places & 0x7FFFFF)
    return True


def restore_values_twin(theta: UInt32s, numbers: UInt32s, aways: UInt8s) -> UInt32s | None:
    """Define :func:`restore_values` with Python's integers."""
    restored = []
    for weight, number, away in zip(theta.tolist(), numbers.tolist(), aways.tolist(), strict=True):
        low = weight & 0xFFFF
        distance = abs(low - HALF_CELL)
        places = number + (2 * HALF_CELL - distance if away else distance)
        # Move the number so that it has 24 bits, or as few as the smallest exponent leaves it.
        exponent = max(weight >> 23 & 0xFF, 1)
        raised = max(places.bit_length() - 24, 1 - exponent)
        if raised > 0 and places & ((1 << raised) - 1):
            return None
        places = places >> raised if raised > 0 else places << -raised
        exponent = exponent + raised if places >> 23 else 0
        if exponent >= 0xFF:
            return None
        sign = weight >> 31 ^ (bool(away) != (low < HALF_CELL))
        restored.append(sign << 31 | exponent << 23 | (places & 0x7FFFFF))
    return np.array(restored, np.uint32)


def restore_values(theta: UInt32s, numbers: UInt32s, aways: UInt8s) -> UInt32s | None:
    """Undo :func:`measure_values` where nothing escapes; ``None`` if a number stands for no finite FP32 value."""
    out = np.empty(theta.size, np.uint32)
    return out if _restore_values_loop(theta, numbers, aways, out) else None
