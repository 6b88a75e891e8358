"""The *tight* codec of one block: gaps among elements of one exponent class, as Rice codes (SPEC codec, "Tight").

Smallest of the relative codecs and the slowest: both sides walk the old bits of the whole block. All of it is one call
of a compiled loop, because threads queue up where Python runs. The loops it calls live in ``classes``, ``values`` and
``rice``; numba's cache of this file does not see changes there, so after one of them touch this file too.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from pulsenet import limits
from pulsenet.codec.classes import (
    CLASS_COUNT,
    classify_twin,
    count_gaps_loop,
    count_gaps_twin,
    find_members_loop,
    list_fields,
    upper_half,
)
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
    plan_loop,
    plan_stream_twin,
    read_stream_loop,
    write_stream_loop,
    write_stream_twin,
)
from pulsenet.codec.values import measure_steps_loop, measure_steps_twin, take_steps_loop
from pulsenet.codec.varint import BodyReader, encode_varint
from pulsenet.errors import PatchMismatchError, RemoteProtocolError
from pulsenet.tensors.floats import Bits, FloatFormat
from pulsenet.tensors.jit import compile_loop

UInt8s = npt.NDArray[np.uint8]
UInt16s = npt.NDArray[np.uint16]
UInt32s = npt.NDArray[np.uint32]
Int64s = npt.NDArray[np.int64]

_HEAD_SIZE_BYTES_MAX: Final = 16 + 12 * CLASS_COUNT
"""Counts are below 2^21 and take three bytes, so a class takes nine."""

_MODE_SHIFT: Final = 5
"""A class's first byte holds the parameter of its gaps below this bit, and the mode of its steps above."""


@compile_loop
def _encode_loop(
    bits: Bits, fields: UInt16s, positions: UInt32s, changed: Bits, old_bits: Bits, new_bits: Bits, element_bits: int
) -> UInt8s:
    gaps, order = np.empty(positions.size, np.uint32), np.empty(positions.size, np.uint32)
    starts = np.zeros(CLASS_COUNT + 1, np.int64)
    count_gaps_loop(bits, fields, positions, changed, gaps, order, starts)
    ups, extras = np.empty(positions.size, np.uint8), np.empty(positions.size, np.uint32)
    measure_steps_loop(old_bits, new_bits, order, element_bits, ups, extras)
    plans = np.empty((CLASS_COUNT, PLAN_COLUMNS), np.int64)
    stream_size_bytes = (plan_loop(gaps, extras, starts, plans) + 7) >> 3
    body = np.zeros(_HEAD_SIZE_BYTES_MAX + stream_size_bytes, np.uint8)
    head_size_bytes = _write_head_loop(positions.size, plans, body)
    body = body[: head_size_bytes + stream_size_bytes]
    write_stream_loop(gaps, ups, extras, starts, plans, body[head_size_bytes:])
    return body


def encode_tight_twin(
    number_format: FloatFormat, old: Bits, positions: UInt32s, old_bits: Bits, new_bits: Bits
) -> bytes:
    """Define :func:`encode_tight` in numpy."""
    gaps, order, starts = count_gaps_twin(classify_twin(old, number_format), positions)
    ups, extras = measure_steps_twin(old_bits, new_bits, order)
    plans, size_bits = plan_stream_twin(gaps, extras, starts)
    stream = write_stream_twin(gaps, ups, extras, starts, plans, size_bits)
    return encode_head_twin(positions.size, plans) + stream.tobytes()


def encode_tight(number_format: FloatFormat, old: Bits, positions: UInt32s, old_bits: Bits, new_bits: Bits) -> bytes:
    """Return the *tight* body of at least one change.

    Args:
        old: All elements of the block.
        positions: Ascending positions of the changes.
        old_bits: The elements there.
        new_bits: What they become: other bits.
    """
    bits, changed = upper_half(old[: int(positions[-1]) + 1]), upper_half(old_bits)
    fields = list_fields(number_format)
    return _encode_loop(bits, fields, positions, changed, old_bits, new_bits, number_format.element_bits).tobytes()


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


_BAD_HEAD, _STREAM_ENDS, _GAPS_BEYOND, _STEPS_BEYOND, _STREAM_GOES_ON, _CLASS_TOO_SMALL = range(-6, 0)
"""What :func:`_decode_loop` returns instead of the count of changes."""


@compile_loop
def _decode_loop(
    body: UInt8s, old: Bits, bits: Bits, fields: UInt16s, element_bits: int
) -> tuple[int, UInt32s, Bits, Bits]:
    nothing, no_bits = np.empty(0, np.uint32), np.empty(0, old.dtype)
    plans = np.zeros((CLASS_COUNT, PLAN_COLUMNS), np.int64)
    head_size_bytes = _read_head_loop(body, old.size, plans)
    if head_size_bytes < 0:
        return _BAD_HEAD, nothing, no_bits, no_bits
    starts = np.zeros(CLASS_COUNT + 1, np.int64)
    for row in range(CLASS_COUNT):
        starts[row + 1] = starts[row] + plans[row, COUNT]
    count = starts[CLASS_COUNT]
    gaps, ups, extras = np.empty(count, np.uint32), np.empty(count, np.uint8), np.zeros(count, np.uint32)
    stream = body[head_size_bytes:]
    extra_max = (1 << (element_bits - 1)) - 1
    end_bit = read_stream_loop(stream, plans, limits.BLOCK_ELEMENTS - 1, extra_max, gaps, ups, extras)
    passed = np.int64(count)
    for i in range(count if end_bit >= 0 else 0):
        passed += np.int64(gaps[i])
    if end_bit == ENDS_EARLY:
        return _STREAM_ENDS, nothing, no_bits, no_bits
    if end_bit == GAP_BEYOND or passed > old.size:
        return _GAPS_BEYOND, nothing, no_bits, no_bits
    if end_bit < 0:
        return _STEPS_BEYOND, nothing, no_bits, no_bits
    if (end_bit + 7) >> 3 != stream.size or (end_bit & 7 and stream[stream.size - 1] >> (end_bit & 7)):
        return _STREAM_GOES_ON, nothing, no_bits, no_bits
    positions, sources = np.empty(count, np.uint32), np.empty(count, np.uint32)
    if find_members_loop(bits, fields, gaps, starts, positions, sources) != count:
        return _CLASS_TOO_SMALL, nothing, no_bits, no_bits
    old_bits, new_bits = np.empty(count, old.dtype), np.empty(count, old.dtype)
    for i in range(count):
        old_bits[i] = old[positions[i]]
    take_steps_loop(old_bits, ups, extras, sources, element_bits, new_bits)
    return count, positions, old_bits, new_bits


def decode_tight(number_format: FloatFormat, reader: BodyReader, old: Bits) -> tuple[UInt32s, Bits, Bits]:
    """Return the ascending positions of a *tight* body's changes, and the old and the new bits there.

    Raises:
        RemoteProtocolError: the body breaks the specification, whatever ``old`` is: ``patch-count``, ``patch-gaps``,
            ``patch-values``, ``patch-trailing``, ``patch-varint`` or ``patch-truncated``.
        PatchMismatchError: ``old`` has fewer elements of a class than the body goes through.
    """
    body = np.frombuffer(reader.take_rest(), np.uint8)
    outcome, positions, old_bits, new_bits = _decode_loop(
        body, old, upper_half(old), list_fields(number_format), number_format.element_bits
    )
    if outcome == _BAD_HEAD:
        # Looked at again, slowly, to say what is wrong with it.
        read_head_twin(body, old.size)
    if outcome == _STREAM_ENDS:
        raise RemoteProtocolError("patch-truncated", "the stream ends inside a code")
    if outcome == _GAPS_BEYOND:
        raise RemoteProtocolError("patch-gaps", f"gaps go through more than {old.size} elements")
    if outcome == _STEPS_BEYOND:
        raise RemoteProtocolError("patch-values", "a step beyond its bound, or exceptions beyond their class")
    if outcome == _STREAM_GOES_ON:
        raise RemoteProtocolError("patch-trailing", "bits after the last code")
    if outcome == _CLASS_TOO_SMALL:
        raise PatchMismatchError("a class of the old elements is smaller than the patch says")
    assert outcome == positions.size
    return positions, old_bits, new_bits


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
    if not 0 < plan[COUNT] <= count_max or offset == body.size:
        return -1
    plan[MODE], plan[GAP_PARAMETER] = body[offset] >> _MODE_SHIFT, body[offset] & PARAMETER_MAX
    offset += 1
    if plan[MODE] == STEPS_ARE_SPARSE:
        plan[EXCEPTIONS], offset = _read_number(body, offset)
        if not 0 < plan[EXCEPTIONS] <= plan[COUNT] or offset == body.size:
            return -1
        plan[RANK_PARAMETER] = body[offset]
        offset += 1
    if plan[MODE] == STEPS_ARE_SPARSE or plan[MODE] == STEPS_ARE_RICE:
        if offset == body.size:
            return -1
        plan[SIZE_PARAMETER] = body[offset]
        offset += 1
    elif plan[MODE] != STEPS_ARE_ONES:
        return -1
    return offset if max(plan[RANK_PARAMETER], plan[SIZE_PARAMETER]) <= PARAMETER_MAX else -1


@compile_loop
def _read_head_loop(body: UInt8s, element_count: int, plans: Int64s) -> int:
    count, offset = _read_number(body, 0)
    present, offset = _read_number(body, offset)
    # Of a number that is none, -1, the upper bits are set too.
    if not 0 < count <= element_count or present >> CLASS_COUNT:
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
