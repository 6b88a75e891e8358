import numpy as np
import pytest

from pulsenet.codec.compress import PlaneEncoder, PlaneReader
from pulsenet.codec.gated import decode_gated, encode_gated
from pulsenet.codec.varint import encode_varint
from pulsenet.errors import RemoteProtocolError
from pulsenet.tensors.bf16 import cast_to_bf16_bits


def gate(theta: np.ndarray, deltas: np.ndarray) -> np.ndarray:
    """Return where a delta changes the BF16 cast; both are FP32 bits."""
    with np.errstate(all="ignore"):
        moved = theta.view(np.float32) - deltas.view(np.float32)
    return np.flatnonzero(cast_to_bf16_bits(theta.view(np.float32)) != cast_to_bf16_bits(moved)).astype(np.uint32)


def trained(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return weights and what some steps of a constant size would subtract from them, as bits."""
    generator = np.random.default_rng(seed)
    theta = (generator.standard_normal(count) * 0.05).astype(np.float32)
    local = theta - (generator.standard_normal(count) * 5e-6).astype(np.float32)
    return theta.view(np.uint32), (theta - local).view(np.uint32)


def check(theta: np.ndarray, positions: np.ndarray, values: np.ndarray) -> bytes:
    body = encode_gated(theta, positions, values)
    found, bits = decode_gated(PlaneReader(body), theta)
    assert np.array_equal(found, positions)
    assert np.array_equal(bits, values)
    return body


def test_gated_entries_cost_less_than_their_values_alone_would() -> None:
    theta, deltas = trained(30_000)
    sent = gate(theta, deltas)
    body = check(theta, sent, deltas[sent])
    assert 0.02 < sent.size / theta.size < 0.1
    assert len(body) * 8 / sent.size < 20


@pytest.mark.parametrize("count", [1, 2, 9, 200])
@pytest.mark.parametrize("density", [0.01, 0.5, 1.0])
def test_any_positions_and_any_bits_come_back(count: int, density: float) -> None:
    generator = np.random.default_rng(count)
    theta = generator.integers(0, 1 << 32, count, np.uint32)
    positions = np.flatnonzero(generator.random(count) < density).astype(np.uint32)
    positions = positions if positions.size else np.array([count - 1], np.uint32)
    check(theta, positions, generator.integers(0, 1 << 32, positions.size, np.uint32))


@pytest.mark.parametrize("value", [0, 1 << 31, 1, 0x7FC00001, 0xFF800000, 0x7F7FFFFF])
def test_odd_values_among_gated_ones_come_back(value: int) -> None:
    theta, deltas = trained(3000, seed=1)
    sent = gate(theta, deltas)
    values = deltas[sent].copy()
    values[:: max(1, sent.size // 5)] = value
    check(theta, sent, values)


def test_outlier_does_not_take_the_classes_from_the_others() -> None:
    theta, deltas = trained(30_000, seed=2)
    sent = gate(theta, deltas)
    body = check(theta, sent, deltas[sent])
    far = np.argmax(np.abs(theta.view(np.float32)))
    with_outlier = np.union1d(sent, [far]).astype(np.uint32)
    values = deltas.copy()
    values[far] = theta[far]
    assert len(check(theta, with_outlier, values[with_outlier])) < len(body) * 1.02


ONE = 0x3F808000
"""1.0 and half a cell: on the edge, so of reach 254 and exponent class 0."""

THETA = np.array([ONE, ONE, 0x3F008000, ONE], np.uint32)
"""Of the reaches 254, 254, 252 and 254."""


def plane(*values: int) -> bytes:
    return PlaneEncoder().encode(np.array(values, np.uint8))


def body_of(**parts: object) -> bytes:
    """Return a body of one entry: gap 1 among the weights on the edge, towards it, number 2."""
    whole: dict[str, object] = {
        "count": 1,
        "top": 254,
        "classes": 1,
        "plans": encode_varint(1) + b"\0",
        "gaps": b"\2",
        "escapes": encode_varint(0),
        "aways": plane(0),
        "value_classes": 1,
        "parameters": b"\0",
        "numbers": b"\4",
    }
    whole |= parts
    gaps = whole["gaps"]
    assert isinstance(gaps, bytes)
    whole["gaps"] = encode_varint(len(gaps)) + gaps
    return b"".join(part if isinstance(part, bytes) else encode_varint(int(str(part))) for part in whole.values())


def test_body_made_by_hand_decodes() -> None:
    positions, values = decode_gated(PlaneReader(body_of()), THETA)
    assert positions.tolist() == [1]
    # Two places of 1.0 downward, because its low half is not below the edge: subtracted with its own sign.
    assert values.view(np.float32).tolist() == [2 * 2.0**-23]


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ({"count": 0}, "patch-count"),
        ({"count": 5}, "patch-count"),
        ({"count": 2}, "patch-count"),
        ({"top": 543}, "patch-values"),
        ({"classes": 1 << 20}, "patch-values"),
        ({"classes": 0, "plans": b""}, "patch-count"),
        ({"plans": encode_varint(0) + b"\0"}, "patch-count"),
        ({"plans": encode_varint(2) + b"\0"}, "patch-count"),
        ({"plans": encode_varint(1) + b"\x20"}, "patch-values"),
        ({"gaps": b""}, "patch-truncated"),
        ({"gaps": b"\0"}, "patch-truncated"),
        ({"gaps": b"\2\0"}, "patch-trailing"),
        ({"gaps": b"\6"}, "patch-trailing"),
        ({"gaps": b"\x10"}, "patch-gaps"),  # A-APP-5: four weights before the entry
        ({"gaps": b"\x08"}, "patch-gaps"),  # more weights of the class than there are
        ({"plans": encode_varint(1) + b"\x1f", "gaps": b"\2\0\0\0\1"}, "patch-gaps"),
        ({"escapes": encode_varint(2)}, "patch-count"),
        ({"escapes": encode_varint(1) + plane(1) + plane(0) * 4}, "patch-values"),
        ({"escapes": encode_varint(1) + plane() + plane(0) * 4}, "patch-plane"),
        ({"escapes": encode_varint(1) + plane(0) + plane(0) * 3 + plane(0, 0)}, "patch-plane"),
        ({"aways": plane()}, "patch-plane"),
        ({"aways": plane(0, 0)}, "patch-plane"),
        ({"aways": plane(2)}, "patch-values"),
        ({"value_classes": 1 << 20}, "patch-values"),
        ({"value_classes": 2}, "patch-values"),
        ({"value_classes": 0, "parameters": b""}, "patch-values"),
        ({"parameters": b"\x20"}, "patch-values"),
        ({"parameters": b"", "numbers": b""}, "patch-truncated"),
        ({"numbers": b""}, "patch-truncated"),
        ({"numbers": b"\4\0"}, "patch-trailing"),
        ({"numbers": b"\x0c"}, "patch-trailing"),
        ({"parameters": b"\x1f", "numbers": b"\4\0\0\0\0"}, "patch-values"),  # 2^32
        ({"parameters": b"\x1f", "numbers": b"\7\0\0\1\0"}, "patch-trailing"),
        ({"parameters": b"\x19", "numbers": b"\3\0\0\2"}, "patch-values"),  # 25 bits
    ],
)
def test_body_with_a_fault_is_refused_by_name(parts: dict[str, object], code: str) -> None:
    with pytest.raises(RemoteProtocolError) as raised:
        decode_gated(PlaneReader(body_of(**parts)), THETA)
    assert raised.value.code == code


def test_body_cut_anywhere_is_refused() -> None:
    theta, deltas = trained(500, seed=3)
    sent = gate(theta, deltas)
    body = encode_gated(theta, sent, deltas[sent])
    for size in range(len(body)):
        with pytest.raises(RemoteProtocolError):
            decode_gated(PlaneReader(body[:size]), theta)
