import numpy as np
import pytest
from numba import config as numba_config

from pulsenet.codec.classes import classify
from pulsenet.codec.rice import (
    COUNT,
    EXCEPTIONS,
    GAP_PARAMETER,
    MODE,
    PLAN_COLUMNS,
    RANK_PARAMETER,
    SIZE_PARAMETER,
    STEPS_ARE_RICE,
    STEPS_ARE_SPARSE,
    write_stream,
)
from pulsenet.codec.tight import (
    decode_tight,
    encode_head,
    encode_head_twin,
    encode_tight,
    encode_tight_twin,
    read_head,
    read_head_twin,
)
from pulsenet.codec.varint import BodyReader, encode_varint
from pulsenet.errors import PatchMismatchError, RemoteProtocolError
from pulsenet.tensors.floats import FLOAT_FORMATS, from_ordered, to_ordered
from pulsenet.tensors.params import ELEMENT_SIZES_BYTES

needs_jit = pytest.mark.skipif(bool(numba_config.DISABLE_JIT), reason="loops over millions of elements need numba")

BF16 = FLOAT_FORMATS["BF16"]
FLOATS = sorted(FLOAT_FORMATS)


def all_patterns(dtype: str) -> np.ndarray:
    """Every pattern of 8 and 16 bits; of 32 bits every upper half. Without numba every 29th of the long lists."""
    size = ELEMENT_SIZES_BYTES[dtype]
    if size == 1:
        return np.arange(1 << 8, dtype=np.uint32).astype(np.uint8)
    halves = np.arange(0, 1 << 16, 29 if numba_config.DISABLE_JIT else 1, np.uint32)
    return halves << np.uint32(16) if size == 4 else halves.astype(np.uint16)


def check(dtype: str, old: np.ndarray, new: np.ndarray) -> bytes:
    positions = np.flatnonzero(old != new).astype(np.uint32)
    body = encode_tight(FLOAT_FORMATS[dtype], old, positions, old[positions], new[positions])
    if old.size <= 1 << 16:
        assert body == encode_tight_twin(FLOAT_FORMATS[dtype], old, positions, old[positions], new[positions])
    found, before, bits = decode_tight(FLOAT_FORMATS[dtype], BodyReader(body), old)
    assert np.array_equal(found, positions)
    assert np.array_equal(before, old[positions])
    assert np.array_equal(bits, new[positions])
    return body


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("step", [1, 2, 3, 77, -1, -2, -100])
def test_every_pattern_may_change_by_any_step(dtype: str, step: int) -> None:
    """All-changed, NaN and -0.0 included."""
    old = all_patterns(dtype)
    check(dtype, old, from_ordered(to_ordered(old) + old.dtype.type(step % (1 << 8 * old.dtype.itemsize))))


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_pattern_may_become_any_other(dtype: str) -> None:
    generator = np.random.default_rng(3)
    old = all_patterns(dtype)
    for _ in range(3):
        new = generator.permutation(old)
        new[0] = ~old[0]
        check(dtype, old, new)


def test_few_larger_steps_are_listed_as_exceptions() -> None:
    old = np.full(1000, 0x3F80, np.uint16)
    new = old + np.uint16(1)
    new[[10, 700]] += 3
    body = check("BF16", old, new)
    # The count in two bytes, the classes in one, the class's count in two: then its parameter and mode.
    assert body[5] >> 5 == STEPS_ARE_SPARSE
    assert body[6] == 2


@pytest.mark.parametrize("dtype", FLOATS)
def test_each_pattern_may_be_the_only_change(dtype: str) -> None:
    old = all_patterns(dtype)
    for position in range(0, old.size, max(1, old.size // 64)):
        new = old.copy()
        new[position] ^= 1
        assert len(check(dtype, old, new)) <= 12


@needs_jit
@pytest.mark.parametrize("gap", [0, 1, 2, 3, *((1 << width) - less for width in range(3, 20) for less in (0, 1))])
def test_every_gap_width_comes_back(gap: int) -> None:
    old = np.full(1 << 20, 0x3F80, np.uint16)
    new = old.copy()
    new[[gap, min(2 * gap + 1, old.size - 1)]] += 1
    check("BF16", old, new)


def test_small_weights_change_often_and_cost_little() -> None:
    """A-PRF-1 in small: the exponent tells where changes are likely, and the gaps are short there."""
    generator = np.random.default_rng(4)
    large, small = np.full(30_000, 0x3F00, np.uint16), np.full(30_000, 0x3800, np.uint16)
    old = generator.permutation(np.concatenate((large, small)))
    new = old.copy()
    new[(old == 0x3800) & (generator.random(old.size) < 0.2)] += 1
    count = int(np.count_nonzero(old != new))
    # Where every element is as likely as any other, a position costs H(0.1) / 0.1 = 4.7 bits; here 3.6.
    assert len(check("BF16", old, new)) * 8 / count < 3.6 * 1.03 + 1


def plan(count: int, gap_parameter: int = 0, mode: int = 0, rest: bytes = b"") -> bytes:
    return encode_varint(count) + bytes([mode << 5 | gap_parameter]) + rest


def body_of(count: int, present: int, *parts: bytes, stream: list[int]) -> bytes:
    return encode_varint(count) + encode_varint(present) + b"".join(parts) + bytes(stream)


OLD = np.array([0x3F80] * 8 + [0x3F00] * 2, np.uint16)
"""Eight elements of class 0, then two of class 1."""

SPARSE, RICE = STEPS_ARE_SPARSE, STEPS_ARE_RICE


def test_body_made_by_hand_decodes() -> None:
    # Gaps 2 and 0 (001 1), up and down (1 0), then class 1: gap 1 (01), up (1), size 3 with parameter 0 (001).
    body = body_of(3, 0b11, plan(2), plan(1, 0, RICE, b"\0"), stream=[0b10011100, 0b1001])
    positions, _, bits = decode_tight(BF16, BodyReader(body), OLD)
    assert positions.tolist() == [2, 3, 9]
    assert bits.tolist() == [0x3F81, 0x3F7F, 0x3F03]
    # Gap 0, up, and size 2 with the largest parameter.
    body = body_of(1, 1, plan(1, 0, RICE, b"\x1f"), stream=[0b1111, 0, 0, 0, 0])
    positions, _, bits = decode_tight(BF16, BodyReader(body), OLD)
    assert (positions.tolist(), bits.tolist()) == ([0], [0x3F82])


def outcome_of(read: object, body: bytes) -> object:
    try:
        plans, size_bytes = read(np.frombuffer(body, np.uint8), 1 << 20)  # type: ignore[operator]
    except RemoteProtocolError as error:
        return str(error)
    return plans.tolist(), size_bytes


@pytest.mark.parametrize("seed", range(10))
def test_a_head_and_every_damage_to_it_read_as_the_twin_reads_them(seed: int) -> None:
    generator = np.random.default_rng(seed)
    plans = np.zeros((20, PLAN_COLUMNS), np.int64)
    for row in generator.permutation(20)[: seed * 2 + 1]:
        count = int(generator.choice([1, 127, 128, 16_383, 16_384, 50_000]))
        mode = int(generator.integers(3))
        plans[row] = count, generator.integers(32), mode, 0, 0, 0
        if mode == SPARSE:
            plans[row, [EXCEPTIONS, RANK_PARAMETER]] = generator.integers(1, count + 1), generator.integers(32)
        if mode in (SPARSE, RICE):
            plans[row, SIZE_PARAMETER] = generator.integers(32)
    count = int(plans[:, COUNT].sum())
    head = encode_head(count, plans)
    assert head == encode_head_twin(count, plans)
    for tail in (b"", bytes(40)):
        assert (
            outcome_of(read_head, head + tail) == outcome_of(read_head_twin, head + tail) == (plans.tolist(), len(head))
        )
        for at in range(len(head)):
            assert outcome_of(read_head, head[:at]) == outcome_of(read_head_twin, head[:at])
            for byte in (0, 1, 0x1F, 0x20, 0x7F, 0x80, 0xFF, head[at] ^ 1):
                damaged = head[:at] + bytes([byte]) + head[at + 1 :] + tail
                assert outcome_of(read_head, damaged) == outcome_of(read_head_twin, damaged)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "patch-truncated"),
        (body_of(0, 0, stream=[]), "patch-count"),
        (body_of(11, 1, plan(11), stream=[0xFF] * 3), "patch-count"),
        (body_of(1, 0, stream=[]), "patch-count"),
        (body_of(1, 1 << 20, plan(1), stream=[3]), "patch-values"),
        (body_of(1, 1, stream=[]), "patch-truncated"),
        (body_of(1, 1, b"\1", stream=[]), "patch-truncated"),
        (body_of(1, 1, plan(0), stream=[3]), "patch-count"),
        (body_of(1, 1, plan(2), stream=[15]), "patch-count"),
        (body_of(3, 3, plan(1), plan(1), stream=[15]), "patch-count"),
        (body_of(1, 1, plan(1, mode=3), stream=[3]), "patch-values"),
        (body_of(1, 1, plan(1, mode=7), stream=[3]), "patch-values"),
        (body_of(1, 1, plan(1, 0, RICE, b"\x20"), stream=[7]), "patch-values"),
        (body_of(1, 1, plan(1, 0, SPARSE, b"\0\0\0"), stream=[15]), "patch-count"),
        (body_of(1, 1, plan(1, 0, SPARSE, b"\2\0\0"), stream=[15]), "patch-count"),
        (body_of(1, 1, plan(1, 0, SPARSE, b"\1\x20\0"), stream=[15]), "patch-values"),
        (body_of(1, 1, plan(1, 0, SPARSE, b"\1\0\xff"), stream=[15]), "patch-values"),
        (body_of(1, 1, plan(1), stream=[]), "patch-truncated"),
        (body_of(1, 1, plan(1), stream=[0]), "patch-truncated"),
        (body_of(1, 1, plan(1), stream=[0, 0x80]), "patch-truncated"),
        (body_of(1, 1, plan(1, 10), stream=[0b11]), "patch-truncated"),
        (body_of(1, 1, plan(1), stream=[3, 0]), "patch-trailing"),
        (body_of(1, 1, plan(1), stream=[7]), "patch-trailing"),
        (body_of(1, 1, plan(1), stream=[0x83]), "patch-trailing"),
        (body_of(1, 1, plan(1, 31), stream=[2, 0, 0, 0, 1]), "patch-gaps"),  # A-APP-5: far beyond the block
        (body_of(1, 1, plan(1), stream=[0, 0b1100]), "patch-gaps"),  # 10 elements before the change
        (body_of(2, 3, plan(1), plan(1), stream=[0b00000000, 0b110000, 0b11]), "patch-gaps"),
        (body_of(1, 1, plan(1, 0, RICE, b"\x0f"), stream=[0b111, 0]), "patch-truncated"),
        (body_of(1, 1, plan(1, 0, RICE, b"\x0f"), stream=[0b1011, 0, 0]), "patch-values"),
        (body_of(1, 1, plan(1, 0, RICE, b"\x0f"), stream=[0b1011, 0, 0x08]), "patch-values"),
        (body_of(1, 1, plan(1, 0, SPARSE, b"\1\0\0"), stream=[0b11011]), "patch-values"),
        # A gap beyond the block and a step beyond its bound: the stream comes before what its gaps add up to.
        (body_of(1, 1, plan(1, 0, RICE, b"\x0f"), stream=[0, 0b101100, 0, 0]), "patch-values"),
    ],
)
def test_body_with_a_fault_is_refused_by_name(body: bytes, code: str) -> None:
    with pytest.raises(RemoteProtocolError) as raised:
        decode_tight(BF16, BodyReader(body), OLD)
    assert raised.value.code == code


def test_class_that_the_base_lacks_is_the_bases_fault() -> None:
    body = body_of(1, 0b10, plan(1), stream=[0b1100])  # the third element of class 1
    with pytest.raises(PatchMismatchError):
        decode_tight(BF16, BodyReader(body), OLD)
    body = body_of(1, 0b100, plan(1), stream=[0b11])
    with pytest.raises(PatchMismatchError):
        decode_tight(BF16, BodyReader(body), OLD)


def test_largest_step_of_an_element_is_let_through_and_no_more() -> None:
    """Half the width up; one more would be a step down."""
    for dtype in FLOATS:
        number_format = FLOAT_FORMATS[dtype]
        width = number_format.element_bits
        old = np.zeros(1, f"<u{width // 8}")
        for size, is_sound in ((1 << (width - 1), True), ((1 << (width - 1)) + 1, False)):
            for mode in (RICE, SPARSE):
                plans = np.zeros((20, PLAN_COLUMNS), np.int64)
                row = int(classify(old, number_format)[0])
                plans[row, [COUNT, GAP_PARAMETER, MODE, SIZE_PARAMETER]] = 1, 0, mode, width - 2
                plans[row, [EXCEPTIONS, RANK_PARAMETER]] = mode == SPARSE, 0
                starts = np.concatenate(([0], np.cumsum(plans[:, COUNT])))
                number = np.array([size - 1], np.uint32)
                bits = 3 + (mode == SPARSE) + (int(number[0] - (mode == SPARSE)) >> (width - 2)) + width - 2
                stream = write_stream(
                    np.zeros(1, np.uint32), np.ones(1, np.uint8), number, starts.astype(np.int64), plans, bits
                )
                rest = bytes([width - 2]) if mode == RICE else bytes([1, 0, width - 2])
                body = body_of(1, 1 << row, plan(1, 0, mode, rest), stream=stream.tolist())
                if is_sound:
                    _, _, new = decode_tight(number_format, BodyReader(body), old)
                    assert int(to_ordered(new)[0]) == (int(to_ordered(old)[0]) + size) % (1 << width)
                else:
                    with pytest.raises(RemoteProtocolError, match="patch-values"):
                        decode_tight(number_format, BodyReader(body), old)
