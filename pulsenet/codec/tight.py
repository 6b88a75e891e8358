"""The *tight* codec of one block: gaps among elements of one exponent class, as Rice codes (SPEC codec, "Tight").

Smallest of the relative codecs and the slowest: both sides walk the old bits of the whole block.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from pulsenet import limits
from pulsenet.codec.classes import CLASS_COUNT, classify, count_gaps, find_members
from pulsenet.codec.rice import (
    COUNT,
    ENDS_EARLY,
    GAP_BEYOND,
    PARAMETER_MAX,
    PLAN_COLUMNS,
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

UInt32s = npt.NDArray[np.uint32]
Int64s = npt.NDArray[np.int64]

_MODE_SHIFT: Final = 5
"""A class's first byte holds the parameter of its gaps below this bit, and the mode of its steps above."""


def encode_tight(number_format: FloatFormat, old: Bits, positions: UInt32s, new_bits: Bits) -> bytes:
    """Return the *tight* body of at least one change.

    Args:
        old: All elements of the block.
        positions: Ascending positions of the changes.
        new_bits: The bits there; they differ from the old ones.
    """
    classes = classify(old[: int(positions[-1]) + 1], number_format)
    gaps, order, starts = count_gaps(classes, positions)
    ups, extras = measure_steps(old.take(positions).take(order), new_bits.take(order))
    plans, size_bits = plan_stream(gaps, extras, starts)
    stream = write_stream(gaps, ups, extras, starts, plans, size_bits)
    return _encode_head(positions.size, plans.tolist()) + stream.tobytes()


def _encode_head(count: int, plans: list[list[int]]) -> bytes:
    head = bytearray(encode_varint(count))
    head += encode_varint(sum(1 << row for row, plan in enumerate(plans) if plan[COUNT]))
    for own_count, gap_parameter, mode, exceptions, rank_parameter, size_parameter in plans:
        if own_count:
            head += encode_varint(own_count)
            head.append(mode << _MODE_SHIFT | gap_parameter)
        if mode == STEPS_ARE_SPARSE:
            head += encode_varint(exceptions)
            head.append(rank_parameter)
        if mode != STEPS_ARE_ONES:
            head.append(size_parameter)
    return bytes(head)


def decode_tight(number_format: FloatFormat, reader: BodyReader, old: Bits) -> tuple[UInt32s, Bits]:
    """Return the ascending positions and the new bits of a *tight* body's changes.

    Raises:
        RemoteProtocolError: the body breaks the specification, whatever ``old`` is: ``patch-count``, ``patch-gaps``,
            ``patch-values``, ``patch-trailing``, ``patch-varint`` or ``patch-truncated``.
        PatchMismatchError: ``old`` has fewer elements of a class than the body goes through.
    """
    plans = _read_head(reader, old.size)
    stream = np.frombuffer(reader.take_rest(), np.uint8)
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
    found = find_members(classify(old, number_format), gaps, starts)
    if found is None:
        raise PatchMismatchError("a class of the old elements is smaller than the patch says")
    positions, sources = found
    return positions, take_steps(old.take(positions), ups.take(sources), extras.take(sources))


def _read_head(reader: BodyReader, element_count: int) -> Int64s:
    count = reader.read_varint()
    if not 0 < count <= element_count:
        raise RemoteProtocolError("patch-count", f"{count} changes among {element_count} elements")
    present = reader.read_varint()
    if present >> CLASS_COUNT:
        raise RemoteProtocolError("patch-values", f"classes {present:#x}")
    plans = [_read_plan(reader, count) if present >> row & 1 else [0] * PLAN_COLUMNS for row in range(CLASS_COUNT)]
    if sum(plan[COUNT] for plan in plans) != count:
        raise RemoteProtocolError("patch-count", f"{count} changes, but another number in the classes")
    return np.array(plans, np.int64)


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
