"""The inner optimizer's state of one tensor, as bytes: under ``ddp`` it is part of what all trainers agree on.

It stands where other algorithms have the outer momentum, in the state root and in state anchors (SPEC outer, section
10).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from pulsenet.codec.stream import PieceSource
from pulsenet.errors import LocalProtocolError, RemoteProtocolError
from pulsenet.outer.floats import FP32s, check_flat

SLOTS_MAX: Final = 16
"""Arrays that an optimizer keeps for one tensor; Adam has three."""

NAME_SIZE_BYTES_MAX: Final = 64
DIMENSIONS_MAX: Final = 16

_COUNT: Final = struct.Struct("<H")
_NAME_SIZE: Final = struct.Struct("<H")
_FP32: Final = np.dtype("<f4")

StateBytes = npt.NDArray[np.uint8]
"""Flat."""


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """One array that an optimizer keeps for a tensor, such as Adam's second moments or its step count."""

    name: str
    shape: tuple[int, ...]
    """Empty for a single number."""
    values: FP32s
    """Flat, row-major."""


def encode_slots(slots: Sequence[Slot]) -> StateBytes:
    """Return the bytes of a tensor's slots, in any order given.

    Raises:
        LocalProtocolError: more or longer names than fit, a name twice, or values that do not fill their shape.
    """
    ordered = sorted(slots, key=lambda slot: slot.name.encode())
    names = [slot.name.encode() for slot in ordered]
    if len(ordered) > SLOTS_MAX or len(set(names)) < len(names):
        raise LocalProtocolError(f"{len(ordered)} slots of one tensor: {[slot.name for slot in ordered]}")
    pieces = [_COUNT.pack(len(ordered))]
    for name, slot in zip(names, ordered, strict=True):
        if not 1 <= len(name) <= NAME_SIZE_BYTES_MAX or len(slot.shape) > DIMENSIONS_MAX:
            raise LocalProtocolError(f"a slot named {slot.name!r} with {len(slot.shape)} dimensions")
        check_flat(slot.values, math.prod(slot.shape))
        pieces += [_NAME_SIZE.pack(len(name)), name, struct.pack(f"<B{len(slot.shape)}Q", len(slot.shape), *slot.shape)]
        pieces.append(slot.values.astype(_FP32, copy=False).tobytes())
    return np.frombuffer(b"".join(pieces), np.uint8)


def decode_slots(data: StateBytes, element_count: int) -> tuple[Slot, ...]:
    """Return the slots in ``data``, ascending by name.

    Args:
        data: All of a tensor's state.
        element_count: Elements of the tensor; no slot has more.

    Raises:
        RemoteProtocolError: ``state-slots``: anything that :func:`encode_slots` does not write.
    """
    source = PieceSource([data.data], "state-slots")
    (count,) = _unpack(source, _COUNT)
    if count > SLOTS_MAX:
        raise RemoteProtocolError("state-slots", f"{count} slots")
    slots = [_read_slot(source, element_count) for _ in range(count)]
    names = [slot.name.encode() for slot in slots]
    if sorted(set(names)) != names or not source.is_at_end():
        raise RemoteProtocolError("state-slots", f"{[slot.name for slot in slots]}, or bytes after them")
    return tuple(slots)


def compute_slots_size_max(element_count: int) -> int:
    """Return the most bytes that the state of a tensor with so many elements may have."""
    head = _NAME_SIZE.size + NAME_SIZE_BYTES_MAX + 1 + 8 * DIMENSIONS_MAX
    return _COUNT.size + SLOTS_MAX * (head + _FP32.itemsize * max(1, element_count))


def _read_slot(source: PieceSource, element_count: int) -> Slot:
    (name_size_bytes,) = _unpack(source, _NAME_SIZE)
    if not 1 <= name_size_bytes <= NAME_SIZE_BYTES_MAX:
        raise RemoteProtocolError("state-slots", f"a name of {name_size_bytes} bytes")
    try:
        name = source.take(name_size_bytes).decode()
    except UnicodeDecodeError as error:
        raise RemoteProtocolError("state-slots", "a name that is no UTF-8") from error
    (dimension_count,) = _unpack(source, struct.Struct("<B"))
    if dimension_count > DIMENSIONS_MAX:
        raise RemoteProtocolError("state-slots", f"{name}: {dimension_count} dimensions")
    shape = _unpack(source, struct.Struct(f"<{dimension_count}Q"))
    size = math.prod(shape)
    # A dimension of 0 makes any others fit.
    if max(size, *shape, 0) > max(1, element_count):
        raise RemoteProtocolError("state-slots", f"{name}: {size} values for {element_count} elements")
    values = np.frombuffer(source.take(_FP32.itemsize * size), _FP32)
    return Slot(name, shape, values.astype(np.float32, copy=False))


def _unpack(source: PieceSource, layout: struct.Struct) -> tuple[int, ...]:
    return layout.unpack(source.take(layout.size))
