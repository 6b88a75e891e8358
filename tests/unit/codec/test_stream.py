from collections.abc import Iterator

import numpy as np
import pytest

from pulsenet.codec.blocks import BlockMap, Codec
from pulsenet.codec.patch import encode_patch
from pulsenet.codec.stream import (
    HEADER_SIZE_BYTES,
    Form,
    PatchHeader,
    PatchReader,
    PatchRecord,
    PieceSource,
    peek_header,
)
from pulsenet.codec.varint import encode_varint
from pulsenet.errors import RemoteProtocolError
from pulsenet.ids import Digest
from pulsenet.tensors.params import TensorSpec, make_table

TABLE = make_table([TensorSpec("a", "BF16", (40,)), TensorSpec("b", "F32", (3,)), TensorSpec("c", "U8", (5,))])
OLD = np.zeros(TABLE.layout_size_bytes, np.uint8)
NEW = OLD.copy()
NEW[[10, 12, 195]] = 1
BLOB = b"".join(encode_patch(TABLE, OLD, NEW))


def read(pieces: list[bytes]) -> list[tuple[int, int, int]]:
    reader = PatchReader(pieces, TABLE)
    return [(r.block.tensor_index, r.codec_id, r.changed_count) for r in reader.read_records()]


def test_header_says_form_and_table() -> None:
    header = peek_header(BLOB[:HEADER_SIZE_BYTES])
    assert header == PatchHeader(Form.RELATIVE, TABLE.digest)
    assert header.encode() == BLOB[:HEADER_SIZE_BYTES]
    assert peek_header(PatchHeader(Form.ABSOLUTE, Digest(bytes(32))).encode()).form is Form.ABSOLUTE


def test_records_do_not_depend_on_how_the_blob_was_cut() -> None:
    expected = [(0, Codec.PLAIN, 2), (2, Codec.ABSOLUTE, 1)]
    assert read([BLOB]) == expected
    assert read([bytes([byte]) for byte in BLOB]) == expected
    assert read([b"", BLOB[:41], b"", b"", BLOB[41:], b""]) == expected


def test_records_come_before_the_rest_of_the_blob_is_there() -> None:
    def pieces() -> Iterator[bytes]:
        yield BLOB[:-3]
        raise AssertionError("asked for more than the records need")

    reader = PatchReader(pieces(), TABLE)
    records = reader.read_records()
    assert next(records).block.tensor_index == 0
    assert next(records).block.tensor_index == 2


def test_every_cut_is_refused() -> None:
    for size in range(len(BLOB)):
        with pytest.raises(RemoteProtocolError, match=r"^patch-truncated:"):
            read([BLOB[:size]])


def test_bytes_after_the_end_are_refused_in_any_piece() -> None:
    for pieces in ([BLOB + b"\0"], [BLOB, b"\0"], [BLOB, b"", BLOB]):
        with pytest.raises(RemoteProtocolError, match=r"^patch-trailing:"):
            read(pieces)


def test_body_size_is_checked_before_the_body_is_read() -> None:
    def pieces() -> Iterator[bytes]:
        yield BLOB[:HEADER_SIZE_BYTES] + bytes([Codec.ABSOLUTE, 0]) + b"\xff\xff\xff\xff\x0f"
        raise AssertionError("asked for the body")

    with pytest.raises(RemoteProtocolError, match=r"^patch-size:"):
        list(PatchReader(pieces(), TABLE).read_records())


def test_block_number_far_outside_costs_nothing() -> None:
    blob = BLOB[:HEADER_SIZE_BYTES] + bytes([Codec.ABSOLUTE]) + b"\xff" * 8 + b"\x7f"
    with pytest.raises(RemoteProtocolError, match=r"^patch-block:"):
        read([blob])


def test_a_record_may_fill_its_bounds_and_no_more() -> None:
    def first_record(block_index: int, body: bytes) -> PatchRecord:
        blob = BLOB[:HEADER_SIZE_BYTES] + bytes([Codec.ABSOLUTE, block_index]) + encode_varint(len(body)) + body
        return next(PatchReader([blob], TABLE).read_records())

    body = bytes([5 << 1]).ljust(BlockMap(TABLE).block(2).body_size_bytes_max, b"\0")
    record = first_record(2, body)
    assert (record.changed_count, record.body) == (5, body)
    for block_index, other, code in ((3, body, "patch-block"), (2, body + b"\0", "patch-size")):
        with pytest.raises(RemoteProtocolError) as raised:
            first_record(block_index, other)
        assert raised.value.code == code


@pytest.mark.parametrize(
    ("position", "value", "code"),
    [(0, 0x51, "patch-magic"), (4, 2, "patch-version"), (5, 2, "patch-form"), (7, 1, "patch-form")],
)
def test_header_of_another_kind_is_refused(position: int, value: int, code: str) -> None:
    damaged = bytearray(BLOB)
    damaged[position] = value
    for refuse in (lambda: peek_header(damaged), lambda: read([bytes(damaged)])):
        with pytest.raises(RemoteProtocolError) as raised:
            refuse()
        assert raised.value.code == code
    with pytest.raises(RemoteProtocolError, match=r"^patch-truncated:"):
        peek_header(BLOB[: HEADER_SIZE_BYTES - 1])


def test_blob_for_another_table_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match=r"^patch-table:"):
        PatchReader([BLOB], make_table(TABLE.tensors[:2]))


def test_a_record_that_needs_old_bits_is_refused_in_an_absolute_patch() -> None:
    blob = bytearray(BLOB)
    blob[5] = Form.ABSOLUTE
    with pytest.raises(RemoteProtocolError, match=r"^codec-unsuitable:"):
        read([bytes(blob)])


def test_a_source_counts_what_was_taken() -> None:
    source = PieceSource([b"ab", b"cd"])
    assert source.taken_size_bytes == 0
    source.take(3)
    assert source.taken_size_bytes == 3
    assert source.is_at_end() is False
    source.take(1)
    assert source.is_at_end()


def test_counts_of_a_record_and_of_the_end_are_checked() -> None:
    outside, empty = (
        BLOB[:HEADER_SIZE_BYTES] + bytes([Codec.ABSOLUTE, 2, 1, count << 1]) + b"\0\1\0" for count in (6, 0)
    )
    for blob in (outside, empty, BLOB[:-1] + b"\x04", BLOB[:-2] + b"\x03\x03"):
        with pytest.raises(RemoteProtocolError, match=r"^patch-count:"):
            read([blob])
