"""The inner optimizer's state as bytes."""

import struct

import numpy as np
import pytest

from pulsenet.errors import LocalProtocolError, RemoteProtocolError
from pulsenet.outer.inner_state import (
    DIMENSIONS_MAX,
    NAME_SIZE_BYTES_MAX,
    SLOTS_MAX,
    Slot,
    compute_slots_size_max,
    decode_slots,
    encode_slots,
)

SPECIALS = np.array([0x7FC00001, 0x80000000, 1, 0xFF800000, 0x3F800000, 0x12345678], np.uint32).view(np.float32)
ONE = np.ones(1, np.float32)


def zeros(count: int) -> np.ndarray:
    return np.zeros(count, np.float32)


def slot_bytes(name: bytes = b"m", shape: tuple[int, ...] = (), values: bytes = bytes(4)) -> bytes:
    head = struct.pack("<H", len(name)) + name + struct.pack(f"<B{len(shape)}Q", len(shape), *shape)
    return head + values


def decode(data: bytes, element_count: int = 6) -> tuple[Slot, ...]:
    return decode_slots(np.frombuffer(data, np.uint8), element_count)


def test_slots_come_back_in_bits_and_in_the_order_of_their_names() -> None:
    given = [Slot("step", (), ONE), Slot("exp_avg", (2, 3), SPECIALS), Slot("row", (2, 1), zeros(2))]
    data = encode_slots(given)
    assert data.tobytes() == encode_slots(given[::-1]).tobytes()
    found = decode_slots(data, 6)
    assert [(slot.name, slot.shape) for slot in found] == [("exp_avg", (2, 3)), ("row", (2, 1)), ("step", ())]
    assert found[0].values.tobytes() == SPECIALS.tobytes()
    assert encode_slots(found).tobytes() == data.tobytes()
    assert decode_slots(encode_slots([]), 0) == ()


def test_a_name_may_be_one_letter() -> None:
    (slot,) = decode(struct.pack("<H", 1) + slot_bytes(b"m"))
    assert (slot.name, slot.shape) == ("m", ())


def test_a_tensor_of_one_element_has_no_slots_of_two() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode(struct.pack("<H", 1) + slot_bytes(shape=(2,), values=bytes(8)), element_count=1)
    assert caught.value.code == "state-slots"


def test_a_single_number_may_stand_beside_an_empty_tensor() -> None:
    (slot,) = decode_slots(encode_slots([Slot("step", (), ONE)]), 0)
    assert slot.values.tolist() == [1.0]


def test_the_largest_state_is_as_large_as_computed() -> None:
    shape = (1,) * (DIMENSIONS_MAX - 1) + (6,)
    slots = [Slot(f"{index:02}".ljust(NAME_SIZE_BYTES_MAX, "n"), shape, SPECIALS) for index in range(SLOTS_MAX)]
    assert encode_slots(slots).size == compute_slots_size_max(6)
    assert len(decode_slots(encode_slots(slots), 6)) == SLOTS_MAX


@pytest.mark.parametrize(
    "slots",
    [
        [Slot(str(index), (), ONE) for index in range(SLOTS_MAX + 1)],
        [Slot("m", (), ONE), Slot("m", (), ONE)],
        [Slot("", (), ONE)],
        [Slot("m" * (NAME_SIZE_BYTES_MAX + 1), (), ONE)],
        [Slot("m", (1,) * (DIMENSIONS_MAX + 1), ONE)],
        [Slot("m", (2,), ONE)],
    ],
    ids=["too many", "twice", "no name", "long name", "many dimensions", "other size"],
)
def test_what_does_not_fit_is_our_own_fault(slots: list[Slot]) -> None:
    with pytest.raises(LocalProtocolError):
        encode_slots(slots)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        struct.pack("<H", 1),
        struct.pack("<H", SLOTS_MAX + 1) + b"".join(slot_bytes(b"%02d" % index) for index in range(SLOTS_MAX + 1)),
        struct.pack("<H", 0) + b"x",
        struct.pack("<H", 1) + slot_bytes(name=b""),
        struct.pack("<H", 1) + slot_bytes(name=b"n" * (NAME_SIZE_BYTES_MAX + 1)),
        struct.pack("<H", 1) + slot_bytes(name=b"\xff"),
        struct.pack("<H", 1) + slot_bytes(shape=(1,) * (DIMENSIONS_MAX + 1)),
        struct.pack("<H", 1) + slot_bytes(shape=(7,), values=bytes(28)),
        struct.pack("<H", 1) + slot_bytes(shape=(1 << 63, 1 << 63)),
        struct.pack("<H", 1) + slot_bytes(shape=(0, (1 << 64) - 1), values=b""),
        struct.pack("<H", 1) + slot_bytes(shape=(2,)),
        struct.pack("<H", 2) + slot_bytes(b"b") + slot_bytes(b"a"),
        struct.pack("<H", 2) + slot_bytes(b"a") + slot_bytes(b"a"),
    ],
)
def test_bytes_that_are_no_state_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode(data)
    assert caught.value.code == "state-slots"
