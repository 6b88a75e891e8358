"""Blocks: the independent parts of a patch, and the codecs of one block (SPEC codec, "Blocks").

A tensor is cut into blocks of ``BLOCK_ELEMENTS`` elements; blocks are numbered through the whole table. A codec
turns the changes of one block into a body and back. Decoders trust no count: each is checked against the block.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Final, Protocol, TypeVar

import numpy as np

from pulsenet import limits
from pulsenet.codec.changes import Bits, Changes, Indices
from pulsenet.codec.compare import list_changes
from pulsenet.codec.compress import PlaneEncoder, PlaneReader, join_bytes
from pulsenet.codec.indices import (
    NARROW_ESCAPE,
    RANK_SIZE_BYTES_MAX,
    WIDE_ESCAPE,
    UInt32s,
    decode_gaps,
    decode_ranks,
    encode_gaps,
    encode_ranks,
)
from pulsenet.codec.tight import decode_tight, encode_tight
from pulsenet.codec.values import join_steps, split_steps
from pulsenet.codec.varint import BodyReader, encode_varint
from pulsenet.errors import LocalProtocolError, PatchMismatchError, RemoteProtocolError
from pulsenet.tensors.floats import FLOAT_FORMATS
from pulsenet.tensors.params import ParameterTable, TensorSpec


class Codec(IntEnum):
    """Ids of block codecs. 0 ends a patch; receivers refuse what they do not know."""

    ABSOLUTE = 1
    PLAIN = 2
    DENSE = 3
    TIGHT = 4


RELATIVE_CODECS: Final = frozenset({Codec.PLAIN, Codec.TIGHT})
"""Codecs that need the old bits to decode, and a float format."""


DENSE_TRIED_DIVISOR: Final = 8
"""*dense* is tried where the best sparse body is longer than the block's bytes divided by this."""

BODY_SIZE_SLACK_BYTES: Final = 64
"""What counts and plane heads may add to a body."""


@dataclass(frozen=True, slots=True)
class Block:
    """Where a block lies."""

    tensor_index: int
    spec: TensorSpec
    element_start: int
    """First element, counted in the tensor."""
    element_count: int

    @property
    def size_bytes(self) -> int:
        return self.element_count * self.spec.element_size_bytes

    @property
    def body_size_bytes_max(self) -> int:
        """A longer body is refused: *dense* needs the block's bytes, *absolute* alone up to a quarter more."""
        return self.size_bytes + self.element_count // 4 + BODY_SIZE_SLACK_BYTES

    def cut(self, view: Bits) -> Bits:
        """Return the block's part of its tensor's view."""
        return view[self.element_start : self.element_start + self.element_count]


class BlockMap:
    """Numbers the blocks of a table: tensors in table order, blocks ascending in each."""

    def __init__(self, table: ParameterTable) -> None:
        self._table = table
        starts, total = [], 0
        for spec in table.tensors:
            starts.append(total)
            total += -(-spec.element_count // limits.BLOCK_ELEMENTS)
        self._starts = starts
        self.block_count = total

    def block(self, block_index: int) -> Block:
        """Return the block numbered ``block_index``, from 0."""
        assert 0 <= block_index < self.block_count
        # Empty tensors have no block: the last tensor that starts at or before the index is the one that holds it.
        tensor_index = bisect_right(self._starts, block_index) - 1
        spec = self._table.tensors[tensor_index]
        start = (block_index - self._starts[tensor_index]) * limits.BLOCK_ELEMENTS
        return Block(tensor_index, spec, start, min(limits.BLOCK_ELEMENTS, spec.element_count - start))

    def indices_of(self, tensor_index: int) -> range:
        """Return the numbers of a tensor's blocks."""
        start = self._starts[tensor_index]
        return range(start, start + -(-self._table.tensors[tensor_index].element_count // limits.BLOCK_ELEMENTS))

    def index_of(self, tensor_index: int, element: int) -> int:
        """Return the number of the block that holds one element of a tensor."""
        return self._starts[tensor_index] + element // limits.BLOCK_ELEMENTS


class Located(Protocol):
    """What lies at positions in a tensor: changes or entries."""

    @property
    def tensor_index(self) -> int: ...
    @property
    def indices(self) -> Indices: ...


Item = TypeVar("Item", bound=Located)


def split_by_block(table: ParameterTable, items: Iterable[Item]) -> Iterator[tuple[int, Item, slice, UInt32s]]:
    """Yield a block's number, an item, the part of the item that lies in the block, and its positions there.

    Raises:
        LocalProtocolError: while iterating, items that do not ascend by tensor and index, or lie outside their tensor.
    """
    blocks, last = BlockMap(table), (-1, -1)
    for item in items:
        indices = item.indices
        if indices.size == 0:
            continue
        if not 0 <= item.tensor_index < len(table.tensors):
            raise LocalProtocolError(f"positions in tensor {item.tensor_index} of {len(table.tensors)}")
        spec = table.tensors[item.tensor_index]
        if (item.tensor_index, int(indices[0])) <= last or not bool(np.all(indices[1:] > indices[:-1])):
            raise LocalProtocolError(f"positions in tensor {spec.name!r} are out of order")
        last = (item.tensor_index, int(indices[-1]))
        if last[1] >= spec.element_count:
            raise LocalProtocolError(f"position {last[1]} in tensor {spec.name!r} of {spec.element_count} elements")
        wide = indices.astype(np.uint64)
        cuts = np.flatnonzero(np.diff(wide // np.uint64(limits.BLOCK_ELEMENTS))) + 1
        for start, end in pairwise((0, *cuts.tolist(), wide.size)):
            positions = (wide[start:end] % np.uint64(limits.BLOCK_ELEMENTS)).astype(np.uint32)
            yield blocks.index_of(item.tensor_index, int(wide[start])), item, slice(start, end), positions


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """One record's content."""

    codec: IntEnum
    """Of a patch a :class:`Codec`."""
    changed_count: int
    body: bytes


def encode_block(block: Block, old: Bits, new: Bits, allowed: frozenset[Codec]) -> EncodedBlock | None:
    """Return the shortest allowed encoding of a block that was ``old`` and is ``new``; ``None`` if nothing changed.

    Equal lengths go to the lower codec id, so the result never depends on anything but its arguments.
    """
    positions, old_bits, new_bits = list_changes(old, new)
    if positions.size == 0:
        return None
    tried: list[EncodedBlock] = []
    encoder = PlaneEncoder()
    number_format = FLOAT_FORMATS.get(block.spec.dtype)
    if Codec.TIGHT in allowed and number_format is not None:
        body = encode_tight(number_format, old, positions, old_bits, new_bits)
        tried.append(EncodedBlock(Codec.TIGHT, positions.size, body))
    if Codec.ABSOLUTE in allowed or Codec.PLAIN in allowed:
        tried += _encode_gapped(block, encoder, positions, old_bits, new_bits, allowed, tried)
    shortest = min((len(encoded.body) for encoded in tried), default=block.size_bytes)
    if Codec.DENSE in allowed and shortest * DENSE_TRIED_DIVISOR > block.size_bytes:
        body = encode_varint(positions.size) + encoder.encode_integers(new)
        tried.append(EncodedBlock(Codec.DENSE, positions.size, body))
    return min(tried, key=lambda encoded: (len(encoded.body), encoded.codec))


def _encode_gapped(
    block: Block,
    encoder: PlaneEncoder,
    positions: UInt32s,
    old_bits: Bits,
    new_bits: Bits,
    allowed: frozenset[Codec],
    tried: list[EncodedBlock],
) -> list[EncodedBlock]:
    """Return the encodings that start with the gaps, unless the gaps alone are no shorter than one that was tried."""
    head = _encode_positions(encoder, positions)
    if any(len(head) >= len(encoded.body) for encoded in tried):
        return []
    found = []
    if Codec.ABSOLUTE in allowed:
        found.append(EncodedBlock(Codec.ABSOLUTE, positions.size, head + encoder.encode_integers(new_bits)))
    if Codec.PLAIN in allowed and block.spec.dtype in FLOAT_FORMATS:
        steps = _encode_steps(encoder, old_bits, new_bits)
        found.append(EncodedBlock(Codec.PLAIN, positions.size, head + steps))
    return found


def encode_absolute_block(positions: UInt32s, new_bits: Bits, encoder: PlaneEncoder | None = None) -> EncodedBlock:
    """Return the *absolute* encoding of at least one change; ``positions`` count from the block's start."""
    encoder = PlaneEncoder() if encoder is None else encoder
    body = _encode_positions(encoder, positions) + encoder.encode_integers(new_bits)
    return EncodedBlock(Codec.ABSOLUTE, positions.size, body)


def _encode_steps(encoder: PlaneEncoder, old_bits: Bits, new_bits: Bits) -> bytes:
    ups, exceptions = split_steps(old_bits, new_bits)
    pieces = [encoder.encode(ups), encode_varint(exceptions.size)]
    if exceptions.size:
        pieces += [encoder.encode(encode_ranks(exceptions)), encoder.encode_integers(new_bits[exceptions])]
    return b"".join(pieces)


def _encode_positions(encoder: PlaneEncoder, positions: UInt32s) -> bytes:
    count = positions.size
    narrow = encode_gaps(positions, NARROW_ESCAPE)
    # More escapes than changes: two bytes a gap compress better (measured; the density is then below 0.25 %).
    if narrow.size <= 2 * count:
        return encode_varint(count << 1) + encoder.encode(narrow)
    return encode_varint(count << 1 | 1) + encoder.encode_integers(encode_gaps(positions, WIDE_ESCAPE))


def decode_block(block: Block, codec_id: int, body: bytes | bytearray | memoryview, old: Bits) -> Changes:
    """Return the changes that ``body`` makes to a block that holds ``old``.

    Raises:
        RemoteProtocolError: the body breaks the specification, whatever ``old`` is.
        PatchMismatchError: ``old`` is not what the body was made from.
    """
    reader = PlaneReader(body)
    positions, old_bits, new_bits = _decoder(block, codec_id)(block, reader, old)
    # No step of *tight* gives the old bits again.
    if codec_id != Codec.TIGHT and np.any(old_bits == new_bits):
        raise PatchMismatchError(f"tensor {block.spec.name!r} already holds bits that the patch says it changes")
    indices = positions.astype(block.spec.index_dtype, copy=False)
    if block.element_start:
        indices += block.spec.index_dtype.type(block.element_start)
    return Changes(block.tensor_index, indices, old_bits, new_bits)


def check_codec(block: Block, codec_id: int, *, is_absolute: bool) -> None:
    """Refuse a codec that cannot decode the block, or that needs the old bits in an absolute patch.

    Raises:
        RemoteProtocolError: ``codec-unknown``, or ``codec-unsuitable`` for the tensor's dtype or the patch's form.
    """
    _decoder(block, codec_id)
    if is_absolute and codec_id in RELATIVE_CODECS:
        raise RemoteProtocolError("codec-unsuitable", f"{Codec(codec_id).name.lower()} in an absolute patch")


def read_changed_count(codec_id: int, body: bytes | bytearray | memoryview) -> int:
    """Return how many changes a body says it holds, without decoding it.

    Raises:
        RemoteProtocolError: ``patch-truncated`` or ``patch-varint``.
    """
    count = BodyReader(body).read_varint()
    return count if codec_id in (Codec.DENSE, Codec.TIGHT) else count >> 1


Decoder = Callable[[Block, PlaneReader, Bits], tuple[UInt32s, Bits, Bits]]
"""Returns the positions, the old bits there and the new bits."""


def _decoder(block: Block, codec_id: int) -> Decoder:
    decoder = _DECODERS.get(codec_id)
    if decoder is None:
        raise RemoteProtocolError("codec-unknown", f"codec {codec_id}")
    if codec_id in RELATIVE_CODECS and block.spec.dtype not in FLOAT_FORMATS:
        raise RemoteProtocolError("codec-unsuitable", f"{Codec(codec_id).name.lower()} for {block.spec.dtype}")
    return decoder


def _decode_absolute(block: Block, reader: PlaneReader, old: Bits) -> tuple[UInt32s, Bits, Bits]:
    positions, new_bits = decode_listed(block, reader)
    return positions, old.take(positions), new_bits


def decode_listed(block: Block, reader: PlaneReader) -> tuple[UInt32s, Bits]:
    """Return the positions and bits of an *absolute* body.

    Raises:
        RemoteProtocolError: the body breaks the specification.
    """
    positions = _decode_positions(block, reader)
    new_bits = reader.read_integers(size_bytes=block.spec.element_size_bytes, count=positions.size)
    reader.expect_end()
    return positions, new_bits


def _decode_plain(block: Block, reader: PlaneReader, old: Bits) -> tuple[UInt32s, Bits, Bits]:
    positions = _decode_positions(block, reader)
    count = positions.size
    ups_size = -(-count // 8)
    ups = reader.read_plane(size_min=ups_size, size_max=ups_size)
    if count % 8 and int(ups[-1]) >> (count % 8):
        raise RemoteProtocolError("patch-values", "step bits beyond the last change")
    exception_count = reader.read_varint()
    if exception_count > count:
        raise RemoteProtocolError("patch-count", f"{exception_count} exceptions among {count} changes")
    old_bits = old.take(positions)
    new_bits = join_steps(old_bits, ups)
    if exception_count:
        encoded = reader.read_plane(size_min=exception_count, size_max=exception_count * RANK_SIZE_BYTES_MAX)
        ranks = decode_ranks(encoded, count, exception_count)
        if ranks is None:
            raise RemoteProtocolError("patch-values", "ranks of exceptions do not decode")
        if np.any(ups[ranks >> 3] >> (ranks & 7).astype(np.uint8) & 1):
            raise RemoteProtocolError("patch-values", "the step bit of an exception is set")
        new_bits[ranks] = reader.read_integers(size_bytes=block.spec.element_size_bytes, count=exception_count)
    reader.expect_end()
    return positions, old_bits, new_bits


def _decode_dense(block: Block, reader: PlaneReader, old: Bits) -> tuple[UInt32s, Bits, Bits]:
    changed_count = reader.read_varint()
    if not 0 < changed_count <= block.element_count:
        raise RemoteProtocolError("patch-count", f"{changed_count} changes among {block.element_count} elements")
    new = reader.read_integers(size_bytes=block.spec.element_size_bytes, count=block.element_count)
    reader.expect_end()
    positions, old_bits, new_bits = list_changes(old, new)
    if positions.size != changed_count:
        raise PatchMismatchError(
            f"tensor {block.spec.name!r}: {positions.size} elements differ, the patch says {changed_count}"
        )
    return positions, old_bits, new_bits


def _decode_tight(block: Block, reader: PlaneReader, old: Bits) -> tuple[UInt32s, Bits, Bits]:
    return decode_tight(FLOAT_FORMATS[block.spec.dtype], reader, old)


_DECODERS: Final[dict[int, Decoder]] = {
    Codec.ABSOLUTE: _decode_absolute,
    Codec.PLAIN: _decode_plain,
    Codec.DENSE: _decode_dense,
    Codec.TIGHT: _decode_tight,
}


def _decode_positions(block: Block, reader: PlaneReader) -> UInt32s:
    head = reader.read_varint()
    count, is_wide = head >> 1, head & 1
    if not 0 < count <= block.element_count:
        raise RemoteProtocolError("patch-count", f"{count} changes among {block.element_count} elements")
    escape = WIDE_ESCAPE if is_wide else NARROW_ESCAPE
    size_max = count + block.element_count // escape
    codes = reader.read_plane(size_min=count, size_max=size_max)
    if is_wide:
        codes = join_bytes([codes, reader.read_plane(size_min=codes.size, size_max=codes.size)])
    positions = decode_gaps(codes, escape, block.element_count, count)
    if positions is None:
        raise RemoteProtocolError("patch-gaps", f"gaps do not name {count} of {block.element_count} elements")
    return positions
