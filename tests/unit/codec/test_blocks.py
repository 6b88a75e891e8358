from dataclasses import dataclass

import numpy as np
import pytest
from numba import config as numba_config

from pulsenet import limits
from pulsenet.codec.blocks import (
    Block,
    BlockMap,
    Codec,
    check_codec,
    decode_block,
    encode_absolute_block,
    encode_block,
    read_changed_count,
    split_by_block,
)
from pulsenet.codec.changes import Indices
from pulsenet.codec.compress import PlaneEncoder
from pulsenet.codec.varint import encode_varint
from pulsenet.errors import LocalProtocolError, PatchMismatchError, RemoteProtocolError
from pulsenet.tensors.floats import FLOAT_FORMATS, from_ordered, to_ordered
from pulsenet.tensors.params import ELEMENT_SIZES_BYTES, TensorSpec, make_table

ALL = frozenset(Codec)


def block_of(count: int, dtype: str = "BF16", start: int = 0) -> Block:
    return Block(0, TensorSpec("w", dtype, (start + count,)), start, count)


def bits(count: int, dtype: str, seed: int = 0) -> np.ndarray:
    size = ELEMENT_SIZES_BYTES[dtype]
    return np.random.default_rng(seed).integers(0, 256, count * size, np.uint8).view(f"<u{size}")


def stepped(old: np.ndarray, positions: list[int]) -> np.ndarray:
    new = old.copy()
    new[positions] ^= 1
    return new


@dataclass
class Positions:
    tensor_index: int
    indices: Indices


def positions_of(*items: tuple[int, list[int]]) -> list[Positions]:
    return [Positions(tensor_index, np.array(indices, np.uint32)) for tensor_index, indices in items]


def test_positions_are_split_at_the_blocks_they_lie_in() -> None:
    size = limits.BLOCK_ELEMENTS
    table = make_table([TensorSpec("a", "U8", (size + 3,)), TensorSpec("b", "U8", (0,)), TensorSpec("c", "U8", (3,))])
    items = positions_of((0, [0, 5]), (0, [6, size - 1, size, size + 2]), (1, []), (2, [0, 2]))
    found = [(index, item, part, at.tolist()) for index, item, part, at in split_by_block(table, items)]
    assert found == [
        (0, items[0], slice(0, 2), [0, 5]),
        (0, items[1], slice(0, 2), [6, size - 1]),
        (1, items[1], slice(2, 4), [0, 2]),
        (2, items[3], slice(0, 2), [0, 2]),
    ]


@pytest.mark.parametrize(
    "items",
    [
        [(0, [2, 1])],
        [(0, [1, 1])],
        [(0, [0, 4]), (0, [4])],
        [(0, [0, 4]), (0, [2])],
        [(1, [0]), (0, [1])],
        [(0, [0, 5])],
        [(2, [0])],
        [(-1, [0])],
    ],
)
def test_positions_that_do_not_ascend_or_lie_outside_are_our_own_fault(items: list[tuple[int, list[int]]]) -> None:
    table = make_table([TensorSpec("a", "U8", (5,)), TensorSpec("b", "U8", (5,))])
    with pytest.raises(LocalProtocolError):
        list(split_by_block(table, positions_of(*items)))


def test_blocks_are_numbered_through_the_table_and_skip_empty_tensors() -> None:
    size = limits.BLOCK_ELEMENTS
    table = make_table(
        [
            TensorSpec("a", "U8", (0,)),
            TensorSpec("b", "U8", (size + 1,)),
            TensorSpec("c", "U8", (0, 3)),
            TensorSpec("d", "BF16", ()),
            TensorSpec("e", "U8", (0,)),
        ]
    )
    blocks = BlockMap(table)
    assert blocks.block_count == 3
    found = [blocks.block(index) for index in range(3)]
    assert [(b.tensor_index, b.element_start, b.element_count) for b in found] == [
        (1, 0, size),
        (1, size, 1),
        (3, 0, 1),
    ]
    assert [blocks.index_of(b.tensor_index, b.element_start) for b in found] == [0, 1, 2]
    assert BlockMap(make_table([])).block_count == 0


def test_blocks_of_a_tensor_beyond_2_to_the_32_start_where_they_should() -> None:
    """A-DT-4."""
    table = make_table([TensorSpec("w", "BF16", ((1 << 32) + 8,))])
    blocks = BlockMap(table)
    last = blocks.block(blocks.block_count - 1)
    assert (last.element_start, last.element_count) == (1 << 32, 8)
    old = bits(8, "BF16")
    encoded = encode_block(last, old, stepped(old, [5]), ALL)
    assert encoded is not None
    found = decode_block(last, encoded.codec, encoded.body, old)
    assert found.indices.tolist() == [(1 << 32) + 5]
    assert found.indices.dtype == np.uint64


@pytest.mark.parametrize("dtype", sorted(ELEMENT_SIZES_BYTES))
@pytest.mark.parametrize(
    "allowed", [ALL, {Codec.ABSOLUTE}, {Codec.DENSE}, {Codec.PLAIN, Codec.DENSE}, {Codec.TIGHT, Codec.DENSE}]
)
@pytest.mark.parametrize("positions", [[0], [999], [0, 1, 2, 3], list(range(0, 1000, 3)), list(range(1000))])
def test_every_dtype_and_codec_gives_the_changes_back(dtype: str, allowed: set[Codec], positions: list[int]) -> None:
    block = block_of(1000, dtype, start=2000)
    old = bits(1000, dtype)
    new = stepped(old, positions)
    encoded = encode_block(block, old, new, frozenset(allowed))
    assert encoded is not None
    assert encoded.codec in allowed
    assert encoded.changed_count == read_changed_count(encoded.codec, encoded.body) == len(positions)
    assert len(encoded.body) <= block.body_size_bytes_max
    found = decode_block(block, encoded.codec, encoded.body, old)
    assert found.indices.tolist() == [2000 + position for position in positions]
    assert np.array_equal(found.old_bits, old[positions])
    assert np.array_equal(found.new_bits, new[positions])


def test_equal_blocks_have_no_encoding() -> None:
    old = bits(100, "BF16")
    assert encode_block(block_of(100), old, old.copy(), ALL) is None


def test_shortest_codec_wins() -> None:
    old = bits(4000, "BF16") | np.uint16(0x3F00)
    scattered = np.flatnonzero(np.random.default_rng(8).random(4000) < 0.02).tolist()
    sparse = encode_block(block_of(4000), old, stepped(old, scattered), ALL)
    other = old.copy()
    other[::200] = bits(20, "BF16", seed=1)
    jumping = encode_block(block_of(4000), old, other, ALL)
    random = encode_block(block_of(4000), old, bits(4000, "BF16", seed=2), ALL)
    assert sparse is not None
    assert jumping is not None
    assert random is not None
    assert (sparse.codec, jumping.codec, random.codec) == (Codec.TIGHT, Codec.ABSOLUTE, Codec.DENSE)
    without = encode_block(block_of(4000), old, stepped(old, scattered), ALL - {Codec.TIGHT})
    assert without is not None
    assert without.codec == Codec.PLAIN
    assert len(without.body) > len(sparse.body)


def test_block_whose_gaps_alone_are_longer_than_tight_is_tight() -> None:
    generator = np.random.default_rng(10)
    old = np.where(generator.random(20_000) < 0.05, 0x3000, 0x3F00).astype(np.uint16)
    hit = np.flatnonzero((old == 0x3000) & (generator.random(20_000) < 0.1)).tolist()
    allowed = (ALL, ALL - {Codec.TIGHT}, frozenset({Codec.TIGHT}))
    mixed, gapped, tight = (encode_block(block_of(20_000), old, stepped(old, hit), codecs) for codecs in allowed)
    assert mixed is not None
    assert gapped is not None
    assert mixed == tight
    assert len(mixed.body) < 0.8 * len(gapped.body)


def test_regular_changes_are_left_to_the_codec_that_sees_them_repeat() -> None:
    old = np.full(100_000, 0x3F80, np.uint16)
    encoded = encode_block(block_of(100_000), old, stepped(old, list(range(0, 100_000, 5))), ALL)
    assert encoded is not None
    assert encoded.codec != Codec.TIGHT
    assert len(encoded.body) < 100


def test_a_few_changes_cost_a_few_bytes() -> None:
    old = bits(576, "BF16")
    encoded = encode_block(block_of(576), old, stepped(old, [10, 200, 400]), ALL)
    assert encoded is not None
    assert len(encoded.body) <= 12


def test_random_bytes_never_grow_beyond_the_bound() -> None:
    for dtype in ("U8", "BF16", "F32", "I64"):
        for count in (1, 2, 7, 64, 5000):
            block = block_of(count, dtype)
            old, new = bits(count, dtype), bits(count, dtype, seed=3)
            new[0] = ~old[0]
            encoded = encode_block(block, old, new, ALL)
            assert encoded is not None
            assert len(encoded.body) <= block.size_bytes * limits.PATCH_OVERHEAD_RATIO_MAX + 48


def test_absolute_bodies_of_any_density_fit_the_receivers_bound() -> None:
    generator = np.random.default_rng(5)
    for density in (0.02, 0.3, 0.5, 0.8, 0.95, 1.0):
        positions = np.flatnonzero(generator.random(20_000) < density).astype(np.uint32)
        encoded = encode_absolute_block(positions, generator.integers(0, 256, positions.size, np.uint8))
        assert len(encoded.body) <= block_of(20_000, "U8").body_size_bytes_max


def test_a_body_may_have_a_quarter_byte_an_element_more_than_its_block() -> None:
    assert block_of(1000).body_size_bytes_max == 2000 + 250 + 64


@pytest.mark.parametrize(("position", "is_wide"), [(254, 0), (255, 0), (509, 0), (510, 1)])
def test_gaps_are_wide_where_narrow_ones_need_more_than_two_bytes_a_change(position: int, is_wide: int) -> None:
    encoded = encode_absolute_block(np.array([position], np.uint32), np.zeros(1, np.uint16))
    assert encoded.body[0] == 1 << 1 | is_wide
    found = decode_block(block_of(511), Codec.ABSOLUTE, encoded.body, np.ones(511, np.uint16))
    assert found.indices.tolist() == [position]


def test_unknown_and_unsuitable_codecs_are_refused() -> None:
    for codec_id, dtype, is_absolute, code in (
        (0, "BF16", False, "codec-unknown"),
        (5, "BF16", False, "codec-unknown"),
        (255, "BF16", False, "codec-unknown"),
        (2, "F64", False, "codec-unsuitable"),
        (2, "I16", False, "codec-unsuitable"),
        (2, "BF16", True, "codec-unsuitable"),
        (4, "U8", False, "codec-unsuitable"),
        (4, "BF16", True, "codec-unsuitable"),
    ):
        with pytest.raises(RemoteProtocolError) as raised:
            check_codec(block_of(10, dtype), codec_id, is_absolute=is_absolute)
        assert raised.value.code == code
    for dtype in FLOAT_FORMATS:
        check_codec(block_of(10, dtype), 2, is_absolute=False)
        check_codec(block_of(10, dtype), 4, is_absolute=False)


def test_another_base_is_noticed_where_the_body_allows_it() -> None:
    block, old = block_of(100), bits(100, "BF16")
    new = stepped(old, [7, 50])
    for allowed in ({Codec.ABSOLUTE}, {Codec.DENSE}):
        encoded = encode_block(block, old, new, frozenset(allowed))
        assert encoded is not None
        with pytest.raises(PatchMismatchError):
            decode_block(block, encoded.codec, encoded.body, new)


def test_exception_equal_to_the_base_is_a_mismatch() -> None:
    block, old = block_of(10), bits(10, "BF16")
    new = old.copy()
    new[3] ^= 0x5555
    encoded = encode_block(block, old, new, frozenset({Codec.PLAIN}))
    assert encoded is not None
    with pytest.raises(PatchMismatchError):
        decode_block(block, encoded.codec, encoded.body, new)


def test_dense_body_without_changes_is_refused() -> None:
    old = bits(4, "U8")
    for count in (0, 5):
        body = encode_varint(count) + PlaneEncoder().encode(old)
        with pytest.raises(RemoteProtocolError, match="patch-count"):
            decode_block(block_of(4, "U8"), Codec.DENSE, body, old)


def plane(*values: int) -> bytes:
    return PlaneEncoder().encode(np.array(values, np.uint8))


TWO = encode_varint(2 << 1) + plane(0, 0)
"""Two changes, at 0 and 1."""

NINE = encode_varint(9 << 1) + plane(*[0] * 9)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (encode_varint(0), "patch-count"),
        (encode_varint(11 << 1), "patch-count"),
        (encode_varint(1 << 1) + plane(10), "patch-gaps"),  # A-APP-5: index = numel
        (encode_varint(1 << 1 | 1) + plane(0) + plane(1), "patch-gaps"),
        (encode_varint(1 << 1 | 1) + plane(0) + plane(0, 0), "patch-plane"),
        (TWO + plane(4), "patch-values"),
        (TWO + plane(0, 0), "patch-plane"),
        (TWO + plane(0) + encode_varint(3), "patch-count"),
        (TWO + plane(0) + encode_varint(1) + plane(2), "patch-values"),
        (TWO + plane(2) + encode_varint(1) + plane(1), "patch-values"),
        (NINE + plane(0, 1) + encode_varint(1) + plane(8), "patch-values"),
        (TWO + plane(0) + encode_varint(1) + plane(1) + plane(0), "patch-truncated"),
        (TWO + plane(0) + encode_varint(0) + b"\0", "patch-trailing"),
    ],
)
def test_plain_body_with_a_fault_is_refused_by_name(body: bytes, code: str) -> None:
    with pytest.raises(RemoteProtocolError) as raised:
        decode_block(block_of(10), Codec.PLAIN, body, bits(10, "BF16"))
    assert raised.value.code == code


def test_block_cuts_its_part_of_a_view() -> None:
    block = block_of(3, "U8", start=4)
    assert block.cut(np.arange(9, dtype=np.uint8)).tolist() == [4, 5, 6]


def patterns_of(dtype: str) -> np.ndarray:
    """Every pattern of 8 and 16 bits, every upper half of 32; without numba every 61st of the long lists."""
    size = ELEMENT_SIZES_BYTES[dtype]
    if size == 1:
        return np.arange(1 << 8, dtype=np.uint32).astype(np.uint8)
    halves = np.arange(0, 1 << 16, 61 if numba_config.DISABLE_JIT else 1, np.uint32)
    return halves << np.uint32(16) if size == 4 else halves.astype(np.uint16)


@pytest.mark.parametrize("dtype", sorted(FLOAT_FORMATS))
@pytest.mark.parametrize("codec", [Codec.ABSOLUTE, Codec.PLAIN, Codec.TIGHT, Codec.DENSE])
def test_every_pattern_of_every_float_format_comes_back(dtype: str, codec: Codec) -> None:
    """A-ENC-1 to A-ENC-4 over all patterns: all change, few change, NaN payloads, -0.0, infinities."""
    old = patterns_of(dtype)
    block = block_of(old.size, dtype)
    up = from_ordered(to_ordered(old) + old.dtype.type(1))
    few = np.where(np.arange(old.size) % 17 == 3, up, old)
    for new in (up, few, ~old, np.roll(old, 5), old ^ old.dtype.type(1)):
        encoded = encode_block(block, old, new, frozenset({codec}))
        assert encoded is not None
        assert encoded.codec == codec
        found = old.copy()
        changes = decode_block(block, encoded.codec, encoded.body, old)
        found[changes.indices] = changes.new_bits
        assert np.array_equal(found, new)


def test_per_block_choice_suits_the_format() -> None:
    """FP32 after an optimiser step changes in most bits of most weights: sizes of steps win over values."""
    generator = np.random.default_rng(9)
    weights = (generator.standard_normal(20_000) * 0.02).astype(np.float32)
    moved = weights + (generator.standard_normal(20_000) * 3e-6).astype(np.float32)
    sizes = {}
    for codec in (Codec.ABSOLUTE, Codec.PLAIN, Codec.TIGHT):
        encoded = encode_block(
            block_of(20_000, "F32"), weights.view(np.uint32), moved.view(np.uint32), frozenset({codec})
        )
        assert encoded is not None
        sizes[codec] = len(encoded.body)
    assert min(sizes, key=lambda codec: sizes[codec]) == Codec.TIGHT
    assert sizes[Codec.TIGHT] < 0.6 * weights.nbytes
