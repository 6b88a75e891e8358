"""Rice codes, and the bit stream of *tight* that is made of them (SPEC codec, "Rice codes", "Tight").

The code of v with parameter k is v // 2^k zeros, a one, then the k low bits of v; bits fill bytes from the lowest.
Every loop has a numpy twin of the same signature that defines it. Loops that call each other live in one file where
they can, because numba's cache does not see changes in another: after a change here touch ``tight.py``.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pulsenet.codec.varint import encode_varint
from pulsenet.tensors.jit import compile_loop

UInt8s = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]
Numbers = npt.NDArray[Any]
"""Flat array of unsigned integers of up to 32 bits."""

PARAMETER_MAX: Final = 31
"""Numbers are below 2^32."""


_TRAILING_ZEROS: Final = np.array([8, *((byte & -byte).bit_length() - 1 for byte in range(1, 256))], np.uint8)
"""How many zeros each byte starts with, from the lowest bit."""


@compile_loop
def _size_bits_loop(values: Numbers, parameter: int) -> int:
    zeros = np.int64(0)
    for i in range(values.size):
        zeros += np.int64(values[i]) >> parameter
    return int(zeros) + (parameter + 1) * values.size


@compile_loop
def _choose_loop(values: Numbers) -> tuple[int, int]:
    total = np.int64(0)
    for i in range(values.size):
        total += np.int64(values[i])
    parameter = 0
    while parameter < PARAMETER_MAX and values.size << (parameter + 1) <= total:
        parameter += 1
    # The size is convex in the parameter (each step up saves no more than the last), so walking down a slope from
    # anywhere ends at the least.
    size_bits = _size_bits_loop(values, parameter)
    while parameter < PARAMETER_MAX:
        other = _size_bits_loop(values, parameter + 1)
        if other >= size_bits:
            break
        parameter += 1
        size_bits = other
    while parameter > 0:
        other = _size_bits_loop(values, parameter - 1)
        if other > size_bits:
            break
        parameter -= 1
        size_bits = other
    return parameter, size_bits


def choose_parameter_twin(values: Numbers) -> tuple[int, int]:
    """Define :func:`choose_parameter` in numpy."""
    wide = values.astype(np.int64)
    sizes = [int((wide >> parameter).sum()) + (parameter + 1) * wide.size for parameter in range(PARAMETER_MAX + 1)]
    size_bits = min(sizes)
    return sizes.index(size_bits), size_bits


def choose_parameter(values: Numbers) -> tuple[int, int]:
    """Return the smallest parameter with which ``values`` take the fewest bits, and those bits."""
    parameter, size_bits = _choose_loop(values)
    return int(parameter), int(size_bits)


@compile_loop
def _write_loop(values: Numbers, parameter: int, out: UInt8s, start_bit: int) -> int:
    bit = start_bit
    mask = (1 << parameter) - 1
    for i in range(values.size):
        value = int(values[i])
        bit += value >> parameter
        # The one and the low bits, 32 at most: with those that a byte holds already they fit into five.
        code = (1 | (value & mask) << 1) << (bit & 7)
        offset = bit >> 3
        bit += parameter + 1
        ahead = out[offset : offset + 5]
        code |= int(ahead[0])
        if ahead.size == 5:
            # Of known length: compilers store it at once.
            for k in range(5):
                ahead[k] = code >> 8 * k & 0xFF
        else:
            for k in range(ahead.size):
                ahead[k] = code >> 8 * k & 0xFF
    return bit


def write_codes_twin(values: Numbers, parameter: int, out: UInt8s, start_bit: int) -> int:
    """Define :func:`write_codes` in numpy."""
    wide = values.astype(np.int64)
    zeros = wide >> parameter
    ones = start_bit + np.cumsum(zeros + 1 + parameter) - 1 - parameter
    end_bit = int(ones[-1]) + 1 + parameter if ones.size else start_bit
    bits = np.unpackbits(out, bitorder="little")
    bits[start_bit:end_bit] = 0
    bits[ones] = 1
    for bit in range(parameter):
        bits[ones + 1 + bit] = wide >> bit & 1
    out[:] = np.packbits(bits, bitorder="little")
    return end_bit


def write_codes(values: Numbers, parameter: int, out: UInt8s, start_bit: int) -> int:
    """Write the codes of ``values`` from bit ``start_bit`` of ``out``, which is zero from there; return the end bit.

    ``out`` is long enough: see :func:`choose_parameter`.
    """
    return int(_write_loop(values, parameter, out, start_bit))


@compile_loop
def _read_slowly(data: UInt8s, bit: int, parameter: int) -> tuple[int, int]:
    """Return one number and its end bit, or -1 where ``data`` ends inside the code."""
    size_bits = data.size * 8
    zeros = 0
    while bit < size_bits and np.int64(data[bit >> 3]) >> (bit & 7) & 1 == 0:
        bit += 1
        zeros += 1
    bit += 1
    if bit + parameter > size_bits:
        return 0, -1
    low = 0
    for i in range(parameter):
        low |= (int(data[bit >> 3]) >> (bit & 7) & 1) << i
        bit += 1
    return zeros << parameter | low, bit


@compile_loop
def _read_loop(data: UInt8s, start_bit: int, parameter: int, value_max: int, out: Numbers) -> int:
    """Return the end bit; -1 where ``data`` ends inside a code, -2 for a value above ``value_max``."""
    # Without a compiler these are numpy's integers, which the window of 64 bits does not fit into.
    bit, parameter = int(start_bit), int(parameter)
    mask = (1 << parameter) - 1
    for i in range(out.size):
        offset = bit >> 3
        zeros = 8
        window = 0
        if offset + 8 <= data.size:
            # Eight bytes, which compilers load at once: at least 57 bits of the stream from here on.
            ahead = data[offset : offset + 8]
            for k in range(8):
                window |= int(ahead[k]) << (8 * k)
            window >>= bit & 7
            zeros = int(_TRAILING_ZEROS[np.uint8(window & 0xFF)])
        if zeros < 8:
            value = zeros << parameter | (window >> (zeros + 1)) & mask
            bit += zeros + 1 + parameter
        else:
            value, bit = _read_slowly(data, bit, parameter)
            if bit < 0:
                return -1
        if value > value_max:
            return -2
        out[i] = value
    return bit


def read_codes_twin(data: UInt8s, start_bit: int, parameter: int, value_max: int, out: Numbers) -> int:
    """Define :func:`read_codes` in numpy, one code at a time."""
    bits = np.unpackbits(data, bitorder="little")
    bit = start_bit
    for i in range(out.size):
        ones = np.flatnonzero(bits[bit:])
        if ones.size == 0 or bit + int(ones[0]) + 1 + parameter > bits.size:
            return -1
        zeros = int(ones[0])
        bit += zeros + 1
        value = (zeros << parameter) + sum(int(bits[bit + low]) << low for low in range(parameter))
        if value > value_max:
            return -2
        out[i] = value
        bit += parameter
    return bit


def read_codes(data: UInt8s, start_bit: int, parameter: int, value_max: int, out: Numbers) -> int:
    """Fill ``out`` with the numbers whose codes start at bit ``start_bit`` of ``data``; never read past its end.

    Returns:
        The end bit; -1 where ``data`` ends inside a code, -2 for a number above ``value_max``.
    """
    return int(_read_loop(data, start_bit, parameter, value_max, out))


@compile_loop
def _write_bits_loop(bits: UInt8s, out: UInt8s, start_bit: int) -> int:
    end_bit = start_bit + bits.size
    offset, pending, held = start_bit >> 3, 0, start_bit & 7
    for i in range(bits.size):
        pending |= int(bits[i]) << held
        held += 1
        if held == 8:
            out[offset] |= pending
            offset, pending, held = offset + 1, 0, 0
    if held:
        out[offset] |= pending
    return end_bit


def write_bits_twin(bits: UInt8s, out: UInt8s, start_bit: int) -> int:
    """Define :func:`write_bits` in numpy."""
    whole = np.unpackbits(out, bitorder="little")
    whole[start_bit : start_bit + bits.size] = bits
    out[:] = np.packbits(whole, bitorder="little")
    return start_bit + bits.size


def write_bits(bits: UInt8s, out: UInt8s, start_bit: int) -> int:
    """Write single bits (0 or 1) from bit ``start_bit`` of ``out``, which is zero from there; return the end bit."""
    return int(_write_bits_loop(bits, out, start_bit))


@compile_loop
def _read_bits_loop(data: UInt8s, start_bit: int, out: UInt8s) -> None:
    for i in range(out.size):
        at = start_bit + i
        out[i] = np.int64(data[at >> 3]) >> (at & 7) & 1


def read_bits_twin(data: UInt8s, start_bit: int, out: UInt8s) -> int:
    """Define :func:`read_bits` in numpy."""
    bits = np.unpackbits(data, bitorder="little")[start_bit : start_bit + out.size]
    if bits.size < out.size:
        return -1
    out[:] = bits
    return start_bit + out.size


def read_bits(data: UInt8s, start_bit: int, out: UInt8s) -> int:
    """Fill ``out`` with single bits from bit ``start_bit`` on; return the end bit, or -1 where ``data`` ends before."""
    end_bit = start_bit + out.size
    if end_bit > data.size * 8:
        return -1
    _read_bits_loop(data, start_bit, out)
    return end_bit


# The stream of a block: for each class its gaps, its directions, and what its step sizes need.

PLAN_COLUMNS: Final = 6
COUNT, GAP_PARAMETER, MODE, EXCEPTIONS, RANK_PARAMETER, SIZE_PARAMETER = range(PLAN_COLUMNS)
"""Columns of a plan, an int64 array with one row a class: what the head of a body says about it."""

STEPS_ARE_ONES, STEPS_ARE_SPARSE, STEPS_ARE_RICE = range(3)
"""Modes: every step is one up or down; which steps are larger, then by how much; each size less 1."""

ENDS_EARLY, GAP_BEYOND, SIZE_BEYOND = -1, -2, -3
"""What :func:`read_stream` returns instead of an end bit."""


@compile_loop
def _list_exceptions_loop(extras: Numbers, rank_gaps: Numbers, rests: Numbers) -> int:
    count = 0
    expected = 0
    for i in range(extras.size):
        if extras[i] != 0:
            rank_gaps[count] = i - expected
            rests[count] = extras[i] - 1
            count += 1
            expected = i + 1
    return count


@compile_loop
def plan_loop(gaps: Numbers, extras: Numbers, starts: Int64s, plans: Int64s) -> int:
    """Fill in ``plans`` as :func:`plan_stream` returns them; return the bits of the stream."""
    rank_gaps = np.empty(gaps.size, np.uint32)
    rests = np.empty(gaps.size, np.uint32)
    total_bits = 0
    for row in range(starts.size - 1):
        start, end = starts[row], starts[row + 1]
        plans[row, :] = 0
        if start == end:
            continue
        plans[row, COUNT] = end - start
        plans[row, GAP_PARAMETER], size_bits = _choose_loop(gaps[start:end])
        total_bits += size_bits + end - start
        count = _list_exceptions_loop(extras[start:end], rank_gaps, rests)
        if count == 0:
            continue
        rank_parameter, rank_bits = _choose_loop(rank_gaps[:count])
        rest_parameter, rest_bits = _choose_loop(rests[:count])
        size_parameter, rice_bits = _choose_loop(extras[start:end])
        # The head spends three to five bytes on the exceptions, one on the other mode.
        head_bits = 16 + 8 * (1 + (count >= 1 << 7) + (count >= 1 << 14))
        if rank_bits + rest_bits + head_bits <= rice_bits + 8:
            plans[row, MODE] = STEPS_ARE_SPARSE
            plans[row, EXCEPTIONS] = count
            plans[row, RANK_PARAMETER] = rank_parameter
            plans[row, SIZE_PARAMETER] = rest_parameter
            total_bits += rank_bits + rest_bits
        else:
            plans[row, MODE] = STEPS_ARE_RICE
            plans[row, SIZE_PARAMETER] = size_parameter
            total_bits += rice_bits
    return total_bits


def plan_stream_twin(gaps: Numbers, extras: Numbers, starts: Int64s) -> tuple[Int64s, int]:
    """Define :func:`plan_stream` in numpy."""
    plans = np.zeros((starts.size - 1, PLAN_COLUMNS), np.int64)
    total_bits = 0
    for row in np.flatnonzero(np.diff(starts)):
        own = slice(int(starts[row]), int(starts[row + 1]))
        parameter, size_bits = choose_parameter_twin(gaps[own])
        plans[row, COUNT], plans[row, GAP_PARAMETER] = gaps[own].size, parameter
        total_bits += size_bits + gaps[own].size
        exceptions = np.flatnonzero(extras[own])
        if exceptions.size == 0:
            continue
        rank_parameter, rank_bits = choose_parameter_twin(np.diff(exceptions, prepend=-1) - 1)
        rest_parameter, rest_bits = choose_parameter_twin(extras[own][exceptions] - 1)
        size_parameter, rice_bits = choose_parameter_twin(extras[own])
        head_bits = 16 + 8 * len(encode_varint(exceptions.size))
        if rank_bits + rest_bits + head_bits <= rice_bits + 8:
            plans[row, MODE:] = STEPS_ARE_SPARSE, exceptions.size, rank_parameter, rest_parameter
            total_bits += rank_bits + rest_bits
        else:
            plans[row, MODE:] = STEPS_ARE_RICE, 0, 0, size_parameter
            total_bits += rice_bits
    return plans, total_bits


def plan_stream(gaps: Numbers, extras: Numbers, starts: Int64s) -> tuple[Int64s, int]:
    """Return for each class the smallest way to write it, and the bits that all take together.

    Args:
        gaps: Ordered by class.
        extras: Step sizes less 1, in the same order; fewer than 2^21 of them.
        starts: The numbers of class c are those from ``starts[c]`` up to ``starts[c + 1]``.
    """
    plans = np.empty((starts.size - 1, PLAN_COLUMNS), np.int64)
    return plans, int(plan_loop(gaps, extras, starts, plans))


@compile_loop
def write_stream_loop(gaps: Numbers, ups: UInt8s, extras: Numbers, starts: Int64s, plans: Int64s, out: UInt8s) -> int:
    """Write the stream of :func:`write_stream` into zeros; return its bits."""
    rank_gaps = np.empty(gaps.size, np.uint32)
    rests = np.empty(gaps.size, np.uint32)
    bit = 0
    for row in range(starts.size - 1):
        start, end = starts[row], starts[row + 1]
        bit = _write_loop(gaps[start:end], plans[row, GAP_PARAMETER], out, bit)
        bit = _write_bits_loop(ups[start:end], out, bit)
        if plans[row, MODE] == STEPS_ARE_SPARSE:
            count = _list_exceptions_loop(extras[start:end], rank_gaps, rests)
            bit = _write_loop(rank_gaps[:count], plans[row, RANK_PARAMETER], out, bit)
            bit = _write_loop(rests[:count], plans[row, SIZE_PARAMETER], out, bit)
        elif plans[row, MODE] == STEPS_ARE_RICE:
            bit = _write_loop(extras[start:end], plans[row, SIZE_PARAMETER], out, bit)
    return bit


def write_stream_twin(
    gaps: Numbers, ups: UInt8s, extras: Numbers, starts: Int64s, plans: Int64s, size_bits: int
) -> UInt8s:
    """Define :func:`write_stream` in numpy."""
    out = np.zeros(-(-size_bits // 8), np.uint8)
    bit = 0
    for row in range(starts.size - 1):
        own = slice(int(starts[row]), int(starts[row + 1]))
        _, gap_parameter, mode, _, rank_parameter, size_parameter = plans[row].tolist()
        bit = write_codes_twin(gaps[own], gap_parameter, out, bit)
        bit = write_bits_twin(ups[own], out, bit)
        if mode == STEPS_ARE_SPARSE:
            exceptions = np.flatnonzero(extras[own])
            bit = write_codes_twin(np.diff(exceptions, prepend=-1) - 1, rank_parameter, out, bit)
            bit = write_codes_twin(extras[own][exceptions] - 1, size_parameter, out, bit)
        elif mode == STEPS_ARE_RICE:
            bit = write_codes_twin(extras[own], size_parameter, out, bit)
    return out


def write_stream(gaps: Numbers, ups: UInt8s, extras: Numbers, starts: Int64s, plans: Int64s, size_bits: int) -> UInt8s:
    """Return the stream that ``plans`` describe; the arguments are those of :func:`plan_stream` and its results.

    Args:
        ups: 1 for a step up, 0 for one down, in the same order.
    """
    out = np.zeros(-(-size_bits // 8), np.uint8)
    end_bit = write_stream_loop(gaps, ups, extras, starts, plans, out)
    assert end_bit == size_bits
    return out


@compile_loop
def read_stream_loop(
    stream: UInt8s, plans: Int64s, gap_max: int, extra_max: int, gaps: Numbers, ups: UInt8s, extras: Numbers
) -> int:
    """Fill in what :func:`read_stream` returns, ``extras`` being zeros; return its first result."""
    rank_gaps = np.empty(gaps.size, np.uint32)
    rests = np.empty(gaps.size, np.uint32)
    bit = 0
    start = 0
    for row in range(plans.shape[0]):
        count = plans[row, COUNT]
        end = start + count
        bit = _read_loop(stream, bit, plans[row, GAP_PARAMETER], gap_max, gaps[start:end])
        if bit < 0:
            return bit
        if bit + count > stream.size * 8:
            return ENDS_EARLY
        _read_bits_loop(stream, bit, ups[start:end])
        bit += count
        if plans[row, MODE] == STEPS_ARE_RICE:
            bit = _read_loop(stream, bit, plans[row, SIZE_PARAMETER], extra_max, extras[start:end])
        elif plans[row, MODE] == STEPS_ARE_SPARSE:
            count = plans[row, EXCEPTIONS]
            bit = _read_loop(stream, bit, plans[row, RANK_PARAMETER], end - start - 1, rank_gaps[:count])
            if bit >= 0:
                bit = _read_loop(stream, bit, plans[row, SIZE_PARAMETER], extra_max - 1, rests[:count])
            rank = np.int64(start)
            for i in range(count if bit >= 0 else 0):
                rank += np.int64(rank_gaps[i])
                if rank >= end:
                    return SIZE_BEYOND
                extras[rank] = rests[i] + 1
                rank += 1
        if bit < 0:
            return ENDS_EARLY if bit == ENDS_EARLY else SIZE_BEYOND
        start = end
    return bit


def read_stream_twin(
    stream: UInt8s, plans: Int64s, gap_max: int, extra_max: int
) -> tuple[int, Numbers, UInt8s, Numbers]:
    """Define :func:`read_stream` in numpy."""
    count = int(plans[:, COUNT].sum())
    gaps, ups, extras = np.zeros(count, np.uint32), np.zeros(count, np.uint8), np.zeros(count, np.uint32)
    bit, end = 0, 0
    for own_count, gap_parameter, mode, exceptions, rank_parameter, size_parameter in plans.tolist():
        own = slice(end, end + own_count)
        end += own_count
        bit = read_codes_twin(stream, bit, gap_parameter, gap_max, gaps[own])
        bit = bit if bit < 0 else read_bits_twin(stream, bit, ups[own])
        if bit < 0:
            return bit, gaps, ups, extras
        if mode == STEPS_ARE_RICE:
            bit = read_codes_twin(stream, bit, size_parameter, extra_max, extras[own])
        elif mode == STEPS_ARE_SPARSE:
            rank_gaps, rests = np.zeros(exceptions, np.uint32), np.zeros(exceptions, np.uint32)
            bit = read_codes_twin(stream, bit, rank_parameter, own_count - 1, rank_gaps)
            bit = bit if bit < 0 else read_codes_twin(stream, bit, size_parameter, extra_max - 1, rests)
            ranks = np.cumsum(rank_gaps.astype(np.int64) + 1) - 1
            if bit >= 0 and ranks[-1] >= own_count:
                return SIZE_BEYOND, gaps, ups, extras
            if bit >= 0:
                extras[own][ranks] = rests + 1
        if bit < 0:
            return (ENDS_EARLY if bit == ENDS_EARLY else SIZE_BEYOND), gaps, ups, extras
    return bit, gaps, ups, extras


def read_stream(stream: UInt8s, plans: Int64s, gap_max: int, extra_max: int) -> tuple[int, Numbers, UInt8s, Numbers]:
    """Undo :func:`write_stream`, never reading past the end of ``stream``.

    Args:
        plans: From a head that was checked: counts of exceptions do not exceed their class's, modes are known.
        gap_max: Largest gap that is let through.
        extra_max: Largest step size less 1 that is let through, at least 1.

    Returns:
        (end bit, gaps, ups, extras). Instead of an end bit: ``ENDS_EARLY`` where the stream ends inside a code,
        ``GAP_BEYOND`` for a gap above its bound, ``SIZE_BEYOND`` for a step size above its bound or exceptions
        beyond the last change of their class; the arrays then mean nothing.
    """
    count = int(plans[:, COUNT].sum())
    gaps, ups, extras = np.zeros(count, np.uint32), np.zeros(count, np.uint8), np.zeros(count, np.uint32)
    return int(read_stream_loop(stream, plans, gap_max, extra_max, gaps, ups, extras)), gaps, ups, extras
