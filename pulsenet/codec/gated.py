"""The *gated* codec of one block: entries of a pseudo-gradient, for holders of its weights (SPEC codec, "Gated").

Positions are gaps among weights equally far from the edge of their BF16 rounding cell, values are counted from that
edge in the weight's own last places: about 18 bits an entry, where index and value take 64.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pulsenet import limits
from pulsenet.codec.cells import REACH_MAX, classify_reach, measure_reach, measure_values, restore_values
from pulsenet.codec.classes import CLASS_COUNT, classify, count_gaps, find_members
from pulsenet.codec.compress import PlaneEncoder, PlaneReader
from pulsenet.codec.indices import RANK_SIZE_BYTES_MAX, decode_ranks, encode_ranks
from pulsenet.codec.rice import PARAMETER_MAX, choose_parameter, read_codes, write_codes
from pulsenet.codec.varint import encode_varint
from pulsenet.errors import RemoteProtocolError
from pulsenet.tensors.floats import FLOAT_FORMATS

UInt8s = npt.NDArray[np.uint8]
UInt32s = npt.NDArray[np.uint32]

_FP32: Final = FLOAT_FORMATS["F32"]
_OUTLIER_DIVISOR: Final = 4096
"""One entry in so many may lie above the reach of the first class: it must not take classes from all others."""


def encode_gated(theta: UInt32s, positions: UInt32s, values: UInt32s, encoder: PlaneEncoder | None = None) -> bytes:
    """Return the *gated* body of at least one entry.

    Args:
        theta: FP32 bits of all weights of the block.
        positions: Ascending positions of the entries.
        values: FP32 bits of what is to be subtracted from the weights there; any bits come back.
        encoder: Writes the planes.
    """
    encoder = PlaneEncoder() if encoder is None else encoder
    reaches = measure_reach(theta[: int(positions[-1]) + 1])
    top = _choose_top(reaches[positions])
    classes = classify_reach(reaches, top)
    gaps, _, starts = count_gaps(classes, positions)
    counts = np.diff(starts)
    gap_parameters, gap_stream = _write_by_class(gaps, counts)
    numbers, aways, escapes = measure_values(theta[positions], values)
    regular, sizes = _order_values(theta[positions], escapes)
    value_parameters, value_stream = _write_by_class(numbers[regular], sizes)
    pieces = [encode_varint(positions.size), encode_varint(top), _encode_mask(counts)]
    for row in np.flatnonzero(counts):
        pieces += [encode_varint(int(counts[row])), bytes([gap_parameters[row]])]
    pieces += [encode_varint(len(gap_stream)), gap_stream, encode_varint(escapes.size)]
    if escapes.size:
        pieces += [encoder.encode(encode_ranks(escapes)), encoder.encode_integers(values[escapes])]
    pieces += [encoder.encode(np.packbits(aways[regular], bitorder="little")), _encode_mask(sizes)]
    pieces += [bytes([value_parameters[row]]) for row in np.flatnonzero(sizes)]
    return b"".join(pieces) + value_stream


def _choose_top(reaches: npt.NDArray[np.uint16]) -> int:
    """Return the highest reach that more than one entry in ``_OUTLIER_DIVISOR`` has or exceeds."""
    outlier_count = reaches.size // _OUTLIER_DIVISOR
    return int(np.partition(reaches, -1 - outlier_count)[-1 - outlier_count])


def _order_values(theta: UInt32s, escapes: UInt32s) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return the ranks of all entries but the escapes, by exponent class of their weight, and how many each has."""
    is_regular = np.ones(theta.size, np.bool_)
    is_regular[escapes] = False
    regular = np.flatnonzero(is_regular)
    classes = classify(theta[regular], _FP32)
    return regular[np.argsort(classes, kind="stable")], np.bincount(classes, minlength=CLASS_COUNT)


def _encode_mask(counts: npt.NDArray[Any]) -> bytes:
    return encode_varint(sum(1 << int(row) for row in np.flatnonzero(counts)))


def _write_by_class(numbers: UInt32s, counts: npt.NDArray[Any]) -> tuple[list[int], bytes]:
    """Return a parameter for each class and one stream of Rice codes; ``numbers`` are ordered by class."""
    ends = np.cumsum(counts).tolist()
    parts = [numbers[end - count : end] for end, count in zip(ends, counts.tolist(), strict=True)]
    chosen = [choose_parameter(part) for part in parts]
    stream = np.zeros(-(-sum(size_bits for _, size_bits in chosen) // 8), np.uint8)
    bit = 0
    for part, (parameter, _) in zip(parts, chosen, strict=True):
        bit = write_codes(part, parameter, stream, bit)
    return [parameter for parameter, _ in chosen], stream.tobytes()


def decode_gated(reader: PlaneReader, theta: UInt32s) -> tuple[UInt32s, UInt32s]:
    """Return the ascending positions and the values' bits of a *gated* body.

    Raises:
        RemoteProtocolError: the body breaks the specification, or does not fit ``theta``: ``patch-count``,
            ``patch-gaps``, ``patch-values``, ``patch-plane``, ``patch-trailing``, ``patch-varint`` or
            ``patch-truncated``.
    """
    positions = _decode_positions(reader, theta)
    count = positions.size
    escapes, escaped_values = _decode_escapes(reader, count)
    regular, sizes = _order_values(theta[positions], escapes)
    away_size = -(-regular.size // 8)
    packed = reader.read_plane(size_min=away_size, size_max=away_size)
    if regular.size % 8 and int(packed[-1]) >> (regular.size % 8):
        raise RemoteProtocolError("patch-values", "direction bits beyond the last value")
    present = _read_mask(reader)
    if present != sum(1 << int(row) for row in np.flatnonzero(sizes)):
        raise RemoteProtocolError("patch-values", f"values of the classes {present:#x}, the weights lie in others")
    parameters = [_read_parameter(reader) if present >> row & 1 else 0 for row in range(CLASS_COUNT)]
    stream = np.frombuffer(reader.take_rest(), np.uint8)
    numbers = _read_by_class(stream, sizes.tolist(), parameters, number_max=(1 << 32) - 1, code="patch-values")
    aways = np.unpackbits(packed, count=regular.size, bitorder="little")
    restored = restore_values(theta[positions[regular]], numbers, aways)
    if restored is None:
        raise RemoteProtocolError("patch-values", "a number that stands for no FP32 value at its weight")
    values = np.empty(count, np.uint32)
    values[escapes] = escaped_values
    values[regular] = restored
    return positions, values


def _decode_positions(reader: PlaneReader, theta: UInt32s) -> UInt32s:
    count = reader.read_varint()
    if not 0 < count <= theta.size:
        raise RemoteProtocolError("patch-count", f"{count} entries among {theta.size} elements")
    top = reader.read_varint()
    if top > REACH_MAX:
        raise RemoteProtocolError("patch-values", f"a reach of {top}")
    present = _read_mask(reader)
    counts, parameters = [0] * CLASS_COUNT, [0] * CLASS_COUNT
    for row in range(CLASS_COUNT):
        if present >> row & 1:
            counts[row], parameters[row] = reader.read_varint(), _read_parameter(reader)
            if not 0 < counts[row] <= count:
                raise RemoteProtocolError("patch-count", f"{counts[row]} entries of a class among {count}")
    if sum(counts) != count:
        raise RemoteProtocolError("patch-count", f"{count} entries, but another number in the classes")
    stream = np.frombuffer(reader.take(reader.read_varint()), np.uint8)
    gaps = _read_by_class(stream, counts, parameters, number_max=limits.BLOCK_ELEMENTS - 1, code="patch-gaps")
    if int(gaps.sum(dtype=np.int64)) + count > theta.size:
        raise RemoteProtocolError("patch-gaps", f"gaps go through more than {theta.size} elements")
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    found = find_members(classify_reach(measure_reach(theta), top), gaps, starts)
    if found is None:
        raise RemoteProtocolError("patch-gaps", "a class of the weights is smaller than the body says")
    return found[0]


def _decode_escapes(reader: PlaneReader, count: int) -> tuple[UInt32s, UInt32s]:
    escape_count = reader.read_varint()
    if escape_count > count:
        raise RemoteProtocolError("patch-count", f"{escape_count} escapes among {count} entries")
    if escape_count == 0:
        return np.empty(0, np.uint32), np.empty(0, np.uint32)
    encoded = reader.read_plane(size_min=escape_count, size_max=escape_count * RANK_SIZE_BYTES_MAX)
    escapes = decode_ranks(encoded, count, escape_count)
    if escapes is None:
        raise RemoteProtocolError("patch-values", "ranks of escapes do not decode")
    return escapes, reader.read_integers(size_bytes=4, count=escape_count)


def _read_mask(reader: PlaneReader) -> int:
    present = reader.read_varint()
    if present >> CLASS_COUNT:
        raise RemoteProtocolError("patch-values", f"classes {present:#x}")
    return present


def _read_parameter(reader: PlaneReader) -> int:
    parameter = reader.read_byte()
    if parameter > PARAMETER_MAX:
        raise RemoteProtocolError("patch-values", f"parameter {parameter}")
    return parameter


def _read_by_class(stream: UInt8s, counts: list[int], parameters: list[int], *, number_max: int, code: str) -> UInt32s:
    """Undo :func:`_write_by_class`; ``code`` refuses numbers above ``number_max``."""
    numbers = np.empty(sum(counts), np.uint32)
    bit, end = 0, 0
    for count, parameter in zip(counts, parameters, strict=True):
        bit = read_codes(stream, bit, parameter, number_max, numbers[end : end + count])
        end += count
        if bit == -1:
            raise RemoteProtocolError("patch-truncated", "a stream ends inside a code")
        if bit < 0:
            raise RemoteProtocolError(code, f"a number above {number_max}")
    if -(-bit // 8) != stream.size or (bit & 7 and int(stream[-1]) >> (bit & 7)):
        raise RemoteProtocolError("patch-trailing", f"{stream.size * 8 - bit} bits left, or one of them set")
    return numbers
