from collections.abc import Iterator

import numpy as np
import pytest

from pulsenet.errors import LocalProtocolError, RemoteProtocolError
from pulsenet.ids import Digest
from pulsenet.outer.floats import FP32s
from pulsenet.outer.inner_state import Slot, StateBytes, encode_slots
from pulsenet.outer.state import compute_state_root
from pulsenet.outer.state_anchor import (
    HEADER_SIZE_BYTES,
    PIECE_SIZE_BYTES_MAX,
    StateHeader,
    check_state_size,
    compute_state_size_bytes,
    decode_state,
    encode_state,
    hash_state,
)
from pulsenet.tensors.digest import hash_tensor
from pulsenet.tensors.params import ParameterTable, TensorSpec

BITS = np.array([0x7FC00001, 0x80000000, 1, 0xFF800000, 0x3F800000, 0x12345678], np.uint32).view(np.float32)
TENSORS = [(BITS, BITS[::-1].copy()), (np.array([2.5], np.float32), np.array([-0.0], np.float32))]


def read(tensor_index: int) -> tuple[FP32s, FP32s]:
    return TENSORS[tensor_index]


def header(table: ParameterTable, round_index: int = 20) -> StateHeader:
    hashes = [(hash_tensor(theta), hash_tensor(momentum)) for theta, momentum in TENSORS]
    return StateHeader(compute_state_root(table, round_index=round_index, hashes=hashes), round_index)


def blob(table: ParameterTable) -> bytes:
    return b"".join(bytes(piece) for piece in encode_state(table, header(table), read))


def cut(data: bytes, size_bytes: int) -> Iterator[bytes]:
    for start in range(0, len(data), size_bytes):
        yield data[start : start + size_bytes]
        yield b""


@pytest.mark.parametrize("size_bytes", [1, 5, 1000])
def test_a_state_comes_back_in_bits_whatever_the_cut(table: ParameterTable, size_bytes: int) -> None:
    data = blob(table)
    assert len(data) == compute_state_size_bytes(table)
    found = list(decode_state(cut(data, size_bytes), table, header(table)))
    assert [index for index, _, _ in found] == [0, 1]
    for index, theta, momentum in found:
        assert (theta.tobytes(), momentum.tobytes()) == tuple(values.tobytes() for values in TENSORS[index])
        assert theta.dtype == momentum.dtype == np.dtype(np.float32)
    assert hash_state(cut(data, size_bytes), table, header(table)) == header(table).state_root


def test_one_flipped_bit_gives_another_root(table: ParameterTable) -> None:
    data = bytearray(blob(table))
    data[HEADER_SIZE_BYTES + 3] ^= 1
    assert hash_state([bytes(data)], table, header(table)) != header(table).state_root


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda data: data[:20], "state-truncated"),
        (lambda data: data[:-1], "state-truncated"),
        (lambda data: data + b"\0", "state-trailing"),
        (lambda data: b"X" + data[1:], "state-header"),
        (lambda data: data[:4] + b"\2" + data[5:], "state-header"),
        (lambda data: data[:7] + b"\1" + data[8:], "state-header"),
        (lambda data: data[:8] + b"\xff" + data[9:], "mismatch"),
        (lambda data: data[:40] + b"\xff" + data[41:], "mismatch"),
    ],
)
def test_each_fault_of_a_blob_has_its_code(table: ParameterTable, change: object, code: str) -> None:
    assert callable(change)
    with pytest.raises(RemoteProtocolError) as caught:
        list(decode_state([change(blob(table))], table, header(table)))
    assert caught.value.code == code


def test_a_size_that_cannot_be_is_refused_before_anything_is_read(table: ParameterTable) -> None:
    size_bytes = compute_state_size_bytes(table)
    check_state_size(table, size_bytes)
    for wrong, code in ((size_bytes - 1, "state-truncated"), (size_bytes + 1, "state-trailing")):
        with pytest.raises(RemoteProtocolError) as caught:
            check_state_size(table, wrong)
        assert caught.value.code == code


def test_a_large_tensor_goes_out_in_pieces_and_an_empty_one_in_none() -> None:
    elements = PIECE_SIZE_BYTES_MAX // 4 + 1
    table = ParameterTable((TensorSpec("empty", "F32", (0,)), TensorSpec("large", "F32", (elements,))))
    tensors = [np.zeros(0, np.float32), np.arange(elements, dtype=np.float32)]
    state = StateHeader(Digest(bytes(32)), 0)
    pieces = [bytes(piece) for piece in encode_state(table, state, lambda index: (tensors[index], tensors[index]))]
    assert [len(piece) for piece in pieces[1:]] == [PIECE_SIZE_BYTES_MAX, 4] * 2
    (_, nothing, _), (_, theta, momentum) = decode_state(pieces, table, state)
    assert nothing.size == 0
    assert np.array_equal(theta, tensors[1])
    assert np.array_equal(momentum, tensors[1])


def test_arrays_that_are_not_the_tables_are_our_own_fault(table: ParameterTable) -> None:
    short = np.zeros(2, np.float32)
    with pytest.raises(LocalProtocolError):
        list(encode_state(table, header(table), lambda index: (short, short)))


ADAM = [
    encode_slots([Slot("step", (), np.ones(1, np.float32)), Slot("exp_avg", (2, 3), BITS)]),
    encode_slots([]),
]


def read_inner(tensor_index: int) -> tuple[FP32s, StateBytes]:
    return TENSORS[tensor_index][0], ADAM[tensor_index]


def inner_header(table: ParameterTable) -> StateHeader:
    hashes = [(hash_tensor(TENSORS[index][0]), hash_tensor(ADAM[index])) for index in range(2)]
    return StateHeader(compute_state_root(table, round_index=3, hashes=hashes), 3, has_inner_state=True)


def inner_blob(table: ParameterTable) -> bytes:
    return b"".join(bytes(piece) for piece in encode_state(table, inner_header(table), read_inner))


@pytest.mark.parametrize("size_bytes", [1, 5, 1000])
def test_an_inner_optimizers_state_comes_back_in_bytes(table: ParameterTable, size_bytes: int) -> None:
    data = inner_blob(table)
    found = list(decode_state(cut(data, size_bytes), table, inner_header(table)))
    for index, theta, inner in found:
        assert (theta.tobytes(), inner.tobytes()) == (TENSORS[index][0].tobytes(), ADAM[index].tobytes())
    assert hash_state(cut(data, size_bytes), table, inner_header(table)) == inner_header(table).state_root


def test_the_two_formats_are_not_taken_for_each_other(table: ParameterTable) -> None:
    for data, expected in ((blob(table), inner_header(table)), (inner_blob(table), header(table))):
        with pytest.raises(RemoteProtocolError) as caught:
            list(decode_state([data], table, expected))
        assert caught.value.code == "state-header"


def test_an_inner_state_that_lies_about_its_size_is_refused_before_memory_is_spent(table: ParameterTable) -> None:
    at = HEADER_SIZE_BYTES + TENSORS[0][0].nbytes
    for size_bytes, code in ((1 << 60, "state-slots"), (len(ADAM[0]) - 1, "state-slots")):
        data = bytearray(inner_blob(table))
        data[at : at + 8] = size_bytes.to_bytes(8, "little")
        with pytest.raises(RemoteProtocolError) as caught:
            list(decode_state([bytes(data)], table, inner_header(table)))
        assert caught.value.code == code


def test_the_size_of_an_anchor_with_an_inner_state_lies_between_bounds(table: ParameterTable) -> None:
    size_bytes = len(inner_blob(table))
    check_state_size(table, size_bytes, has_inner_state=True)
    for wrong, code in ((HEADER_SIZE_BYTES + 4 * table.element_count, "state-truncated"), (1 << 30, "state-trailing")):
        with pytest.raises(RemoteProtocolError) as caught:
            check_state_size(table, wrong, has_inner_state=True)
        assert caught.value.code == code
