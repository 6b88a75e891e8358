"""How other systems lay out a sparse update, so that every claim is measured against them in the same run.

They get the same compare, the same writes and the same frames (:mod:`pulsenet.codec.compress`) as our codecs, so
that the difference is the layout alone. All work tensor by tensor, as those systems do. A body starts with the
number of changes; what follows needs no old bits, except for *xor*.

* ``published``: gaps, in one byte where the tensor's largest gap allows it, else two, else four; the new values;
  both in byte planes, each plane one zstandard frame of level 1.
* ``index_value_zstd``: 32-bit indices, then the new values, one frame.
* ``xor_zstd``: the XOR of all values, in byte planes, each one frame.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pulsenet.codec.compare import find_changes
from pulsenet.codec.compress import PlaneEncoder, PlaneReader
from pulsenet.codec.varint import encode_varint
from pulsenet.tensors.params import TensorSpec
from pulsenetd.bench.loops import join_gaps, write_values

Bits = npt.NDArray[Any]

_GAP_DTYPES: Final = (np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.uint32), np.dtype(np.uint64))


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to write down a tensor's changes."""

    name: str
    encode: Callable[[TensorSpec, Bits, Bits], bytes]
    """From spec, old and new view to the body."""
    decode_into: Callable[[TensorSpec, bytes, Bits], None]
    """Turn a view that holds the old bits into the new ones, in place."""


def _encode_published(spec: TensorSpec, old: Bits, new: Bits) -> bytes:
    indices = find_changes(old, new)
    if indices.size == 0:
        return encode_varint(0)
    gaps = np.diff(indices, prepend=indices.dtype.type(0)) - indices.dtype.type(1)
    gaps[0] = indices[0]
    largest = int(gaps.max())
    dtype = next(dtype for dtype in _GAP_DTYPES if largest <= np.iinfo(dtype).max)
    encoder = PlaneEncoder()
    head = encode_varint(indices.size) + bytes([dtype.itemsize])
    return head + encoder.encode_integers(gaps.astype(dtype)) + encoder.encode_integers(new[indices])


def _decode_published(spec: TensorSpec, body: bytes, view: Bits) -> None:
    reader = PlaneReader(body)
    count = reader.read_varint()
    if count:
        gaps = reader.read_integers(size_bytes=reader.take(1)[0], count=count)
        indices = np.empty(count, spec.index_dtype)
        join_gaps(gaps, indices)
        write_values(view, indices, reader.read_integers(size_bytes=spec.element_size_bytes, count=count))


def _encode_index_value(spec: TensorSpec, old: Bits, new: Bits) -> bytes:
    indices = find_changes(old, new)
    pair = np.concatenate((indices.view(np.uint8), new[indices].view(np.uint8)))
    return encode_varint(indices.size) + PlaneEncoder().encode(pair)


def _decode_index_value(spec: TensorSpec, body: bytes, view: Bits) -> None:
    reader = PlaneReader(body)
    count = reader.read_varint()
    index_size_bytes = count * spec.index_dtype.itemsize
    size_bytes = index_size_bytes + count * spec.element_size_bytes
    pair = reader.read_plane(size_min=size_bytes, size_max=size_bytes)
    indices = _aligned(pair[:index_size_bytes].view(spec.index_dtype))
    write_values(view, indices, _aligned(pair[index_size_bytes:].view(spec.bits_dtype)))


def _aligned(array: Bits) -> Bits:
    """Return an array that compiled loops take."""
    return array if array.flags.aligned else array.copy()


def _encode_xor(spec: TensorSpec, old: Bits, new: Bits) -> bytes:
    return PlaneEncoder().encode_integers(old ^ new)


def _decode_xor(spec: TensorSpec, body: bytes, view: Bits) -> None:
    view ^= PlaneReader(body).read_integers(size_bytes=spec.element_size_bytes, count=spec.element_count)


PUBLIC_LAYOUTS: Final = (
    Layout("published", _encode_published, _decode_published),
    Layout("index_value_zstd", _encode_index_value, _decode_index_value),
    Layout("xor_zstd", _encode_xor, _decode_xor),
)
