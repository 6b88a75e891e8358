"""The *tight* codec of one block: gaps among elements of one exponent class, as Rice codes (SPEC codec, "Tight").

Smallest of the relative codecs and the slowest: both sides walk the old bits of the whole block.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from pulsenet import limits
from pulsenet.codec.classes import CLASS_COUNT, count_float_gaps, find_float_members
from pulsenet.codec.rice import (
    COUNT,
    ENDS_EARLY,
    EXCEPTIONS,
    GAP_BEYOND,
    GAP_PARAMETER,
    MODE,
    PARAMETER_MAX,
    PLAN_COLUMNS,
    RANK_PARAMETER,
    SIZE_PARAMETER,
    STEPS_ARE_ONES,
    STEPS_ARE_RICE,
    STEPS_ARE_SPARSE,
    plan_stream,
    read_stream,
    write_stream,
)
from pulsenet.codec.values import measure_steps, take_steps
from pulsenet.codec.varint import BodyReader, encode_varint
from pulsenet.errors import PatchMismatchError, RemoteProtocolError
from pulsenet.tensors.floats import Bits, FloatFormat
from pulsenet.tensors.jit import compile_loop

UInt8s = npt.NDArray[np.uint8]
UInt32s = npt.NDArray[np.uint32]
Int64s = npt.NDArray[np.int64]

_HEAD_SIZE_BYTES_MAX: Final = 16 + 12 * CLASS_COUNT
"""Counts are below 2^21 and take three bytes, so a class takes nine."""

_MODE_SHIFT: Final = 5
"""A class's first byte holds the parameter of its gaps below this bit, and the mode of its steps above."""


def encode_tight(number_format: FloatFormat, old: Bits, positions: UInt32s, old_bits: Bits, new_bits: Bits) -> bytes:
    """Return the *tight* body of at least one change.

    Args:
        old: All elements of the block.
        positions: Ascending positions of the changes.
        old_bits: The elements there.
        new_bits: What they become: other bits.
    """
    gaps, order, starts = count_float_gaps(old, number_format, positions, old_bits)
    ups, extras = measure_steps(old_bits, new_bits, order)
    plans, size_bits = plan_stream(gaps, extras, starts)
    stream = write_stream(gaps, ups, extras, starts, plans, size_bits)
    return encode_head(positions.size, plans) + stream.tobytes()


@compile_loop
def _write_number(value: int, out: UInt8s, size: int) -> int:
    while value >= 0x80:
        out[size] = value & 0x7F | 0x80
        value >>= 7
        size += 1
    out[size] = value
    return size + 1


@compile_loop
def _write_head_loop(count: int, plans: Int64s, out: UInt8s) -> int:
    present = 0
    for row in range(CLASS_COUNT):
        present |= int(plans[row, COUNT] > 0) << row
    size = _write_number(present, out, _write_number(count, out, 0))
    for row in range(CLASS_COUNT):
        if plans[row, COUNT] == 0:
            continue
        mode = plans[row, MODE]
        size = _write_number(plans[row, COUNT], out, size)
        out[size] = mode << _MODE_SHIFT | plans[row, GAP_PARAMETER]
        size += 1
        if mode == STEPS_ARE_SPARSE:
            size = _write_number(plans[row, EXCEPTIONS], out, size)
            out[size] = plans[row, RANK_PARAMETER]
            size += 1
        if mode != STEPS_ARE_ONES:
            out[size] = plans[row, SIZE_PARAMETER]
            size += 1
    return size


def encode_head_twin(count: int, plans: Int64s) -> bytes:
    """Define :func:`encode_head` in Python."""
    head = bytearray(encode_varint(count))
    head += encode_varint(sum(1 << row for row, plan in enumerate(plans.tolist()) if plan[COUNT]))
    for own_count, gap_parameter, mode, exceptions, rank_parameter, size_parameter in plans.tolist():
        if own_count:
            head += encode_varint(own_count)
            head.append(mode << _MODE_SHIFT | gap_parameter)
        if mode == STEPS_ARE_SPARSE:
            head += encode_varint(exceptions)
            head.append(rank_parameter)
        if mode != STEPS_ARE_ONES:
            head.append(size_parameter)
    return bytes(head)


def encode_head(count: int, plans: Int64s) -> bytes:
    """Return what comes before the stream: how many changes there are, and the plans of the classes that have some."""
    out = np.empty(_HEAD_SIZE_BYTES_MAX, np.uint8)
    return out[: _write_head_loop(count, plans, out)].tobytes()


def decode_tight(number_format: FloatFormat, reader: BodyReader, old: Bits) -> tuple[UInt32s, Bits, Bits]:
    """Return the ascending positions of a *tight* body's changes, and the old and the new bits there.

    Raises:
        RemoteProtocolError: the body breaks the specification, whatever ``old`` is: ``patch-count``, ``patch-gaps``,
            ``patch-values``, ``patch-trailing``, ``patch-varint`` or ``patch-truncated``.
        PatchMismatchError: ``old`` has fewer elements of a class than the body goes through.
    """
    body = np.frombuffer(reader.take_rest(), np.uint8)
    plans, head_size_bytes = read_head(body, old.size)
    stream = body[head_size_bytes:]
    size_max = 1 << (number_format.element_bits - 1)
    end_bit, gaps, ups, extras = read_stream(stream, plans, limits.BLOCK_ELEMENTS - 1, size_max - 1)
    if end_bit == ENDS_EARLY:
        raise RemoteProtocolError("patch-truncated", "the stream ends inside a code")
    if end_bit == GAP_BEYOND or int(gaps.sum(dtype=np.int64)) + gaps.size > old.size:
        raise RemoteProtocolError("patch-gaps", f"gaps go through more than {old.size} elements")
    if end_bit < 0:
        raise RemoteProtocolError("patch-values", "a step beyond its bound, or exceptions beyond their class")
    if -(-end_bit // 8) != stream.size or (end_bit & 7 and int(stream[-1]) >> (end_bit & 7)):
        raise RemoteProtocolError("patch-trailing", f"{stream.size * 8 - end_bit} bits left, or one of them set")
    starts = np.zeros(CLASS_COUNT + 1, np.int64)
    np.cumsum(plans[:, COUNT], out=starts[1:])
    found = find_float_members(old, number_format, gaps, starts)
    if found is None:
        raise PatchMismatchError("a class of the old elements is smaller than the patch says")
    positions, sources = found
    old_bits = old.take(positions)
    return positions, old_bits, take_steps(old_bits, ups, extras, sources)


@compile_loop
def _read_number(body: UInt8s, offset: int) -> tuple[int, int]:
    """Return a number below 2^28 and where it ends; -1 for any other and for one that is not in its shortest form."""
    value, shift = 0, 0
    while offset < body.size and shift < 28:
        byte = int(body[offset])
        value |= (byte & 0x7F) << shift
        offset += 1
        if byte < 0x80:
            return (-1 if byte == 0 and shift > 0 else value), offset
        shift += 7
    return -1, offset


@compile_loop
def _read_plan_loop(body: UInt8s, offset: int, count_max: int, plan: Int64s) -> int:
    """Fill in one row of the plans and return where it ends; -1 for what :func:`read_head_twin` refuses."""
    plan[COUNT], offset = _read_number(body, offset)
    # The longest row has four bytes and a number more.
    if not 0 < plan[COUNT] <= count_max or offset + 8 > body.size:
        return -1
    plan[MODE], plan[GAP_PARAMETER] = body[offset] >> _MODE_SHIFT, body[offset] & PARAMETER_MAX
    offset += 1
    if plan[MODE] == STEPS_ARE_SPARSE:
        plan[EXCEPTIONS], offset = _read_number(body, offset)
        if not 0 < plan[EXCEPTIONS] <= plan[COUNT]:
            return -1
        plan[RANK_PARAMETER] = body[offset]
        offset += 1
    if plan[MODE] == STEPS_ARE_SPARSE or plan[MODE] == STEPS_ARE_RICE:
        plan[SIZE_PARAMETER] = body[offset]
        offset += 1
    elif plan[MODE] != STEPS_ARE_ONES:
        return -1
    return offset if max(plan[RANK_PARAMETER], plan[SIZE_PARAMETER]) <= PARAMETER_MAX else -1


@compile_loop
def _read_head_loop(body: UInt8s, element_count: int, plans: Int64s) -> int:
    count, offset = _read_number(body, 0)
    present, offset = _read_number(body, offset)
    if not 0 < count <= element_count or present < 0 or present >> CLASS_COUNT:
        return -1
    left = count
    for row in range(CLASS_COUNT):
        if present >> row & 1:
            offset = _read_plan_loop(body, offset, count, plans[row])
            if offset < 0:
                return -1
            left -= plans[row, COUNT]
    return offset if left == 0 else -1


def read_head_twin(body: UInt8s, element_count: int) -> tuple[Int64s, int]:
    """Define :func:`read_head` in Python."""
    reader = BodyReader(body.tobytes())
    count = reader.read_varint()
    if not 0 < count <= element_count:
        raise RemoteProtocolError("patch-count", f"{count} changes among {element_count} elements")
    present = reader.read_varint()
    if present >> CLASS_COUNT:
        raise RemoteProtocolError("patch-values", f"classes {present:#x}")
    plans = [_read_plan(reader, count) if present >> row & 1 else [0] * PLAN_COLUMNS for row in range(CLASS_COUNT)]
    if sum(plan[COUNT] for plan in plans) != count:
        raise RemoteProtocolError("patch-count", f"{count} changes, but another number in the classes")
    return np.array(plans, np.int64), body.size - len(reader.take_rest())


def read_head(body: UInt8s, element_count: int) -> tuple[Int64s, int]:
    """Return the plans of a body's classes and the size of its head.

    Raises:
        RemoteProtocolError: as :func:`decode_tight`.
    """
    plans = np.zeros((CLASS_COUNT, PLAN_COLUMNS), np.int64)
    size_bytes = int(_read_head_loop(body, element_count, plans))
    # What is not plainly well-formed is looked at again, slowly, to say what is wrong with it.
    return (plans, size_bytes) if size_bytes >= 0 else read_head_twin(body, element_count)


def _read_plan(reader: BodyReader, count_max: int) -> list[int]:
    count = reader.read_varint()
    if not 0 < count <= count_max:
        raise RemoteProtocolError("patch-count", f"{count} changes of a class among {count_max}")
    packed = reader.read_byte()
    mode, gap_parameter = packed >> _MODE_SHIFT, packed & PARAMETER_MAX
    exceptions, rank_parameter, size_parameter = 0, 0, 0
    if mode == STEPS_ARE_SPARSE:
        exceptions, rank_parameter, size_parameter = reader.read_varint(), reader.read_byte(), reader.read_byte()
        if not 0 < exceptions <= count:
            raise RemoteProtocolError("patch-count", f"{exceptions} exceptions among {count} changes")
    elif mode == STEPS_ARE_RICE:
        size_parameter = reader.read_byte()
    elif mode != STEPS_ARE_ONES:
        raise RemoteProtocolError("patch-values", f"step mode {mode}")
    if max(rank_parameter, size_parameter) > PARAMETER_MAX:
        raise RemoteProtocolError("patch-values", f"parameters {rank_parameter} and {size_parameter}")
    return [count, gap_parameter, mode, exceptions, rank_parameter, size_parameter]
