"""The anchor blob."""

from __future__ import annotations

import numpy as np
import pytest

from pulsenet import limits
from pulsenet.codec.anchor import AnchorReader, compute_anchor_size_bytes, encode_anchor
from pulsenet.errors import LocalProtocolError, RemoteProtocolError
from pulsenet.tensors.params import TensorSpec, make_table

TABLE = make_table(
    [
        TensorSpec("a", "BF16", (3, 5)),
        TensorSpec("b", "F32", (700, 500)),
        TensorSpec("c", "I8", (0, 4)),
        TensorSpec("d", "BOOL", ()),
    ],
    aliases=[("z", "a")],
    excluded=["x"],
)
HEAD = b"PLSA\x01\0\0\0"
REGION = np.arange(TABLE.layout_size_bytes, dtype=np.uint64).astype(np.uint8)


def blob() -> bytes:
    return b"".join(bytes(piece.data) for piece in encode_anchor(TABLE, REGION))


def read(data: bytes, cut: int = 1 << 16) -> tuple[AnchorReader, np.ndarray]:
    reader = AnchorReader(data[start : start + cut] for start in range(0, len(data), cut))
    region = np.zeros(reader.table.layout_size_bytes, np.uint8)
    for piece in reader.read_tensors():
        start = reader.table.offsets[piece.tensor_index] + piece.offset_bytes
        region[start : start + len(piece.data)] = np.frombuffer(piece.data, np.uint8)
    return reader, region


@pytest.mark.parametrize("cut", [1, 7, 1 << 16, 1 << 30])
def test_any_cut_of_the_blob_reads_back_the_same(cut: int) -> None:
    small = make_table([TensorSpec("a", "BF16", (3, 5)), TensorSpec("b", "U8", ())])
    table, region = (TABLE, REGION) if cut > 7 else (small, REGION[: small.layout_size_bytes])
    data = b"".join(bytes(piece.data) for piece in encode_anchor(table, region))
    assert len(data) == compute_anchor_size_bytes(table)
    reader, found = read(data, cut)
    assert reader.table == table
    for index in range(len(table.tensors)):
        assert np.array_equal(table.view(found, index), table.view(region, index))


def test_the_layout_is_magic_version_table_size_table_and_dense_bytes() -> None:
    data = blob()
    encoded = TABLE.encode()
    assert data[:12] == b"PLSA\x01\0\0\0" + len(encoded).to_bytes(4, "little")
    assert data[12 : 12 + len(encoded)] == encoded
    assert data[12 + len(encoded) :] == b"".join(TABLE.view(REGION, index).tobytes() for index in range(4))


def test_chunks_start_at_the_table_and_at_every_tensor_with_bytes() -> None:
    starts = [piece.starts_chunk for piece in encode_anchor(TABLE, REGION)]
    assert starts == [True, True, True, False, True]


def test_a_table_without_bytes_is_a_whole_anchor() -> None:
    empty = make_table([])
    data = b"".join(bytes(piece.data) for piece in encode_anchor(empty, b""))
    reader, region = read(data)
    assert (reader.table, region.size) == (empty, 0)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "anchor-truncated"),
        (blob()[:11], "anchor-truncated"),
        (blob()[:20], "anchor-truncated"),
        (b"PLSB" + blob()[4:], "anchor-header"),
        (b"PLSA\x02" + blob()[5:], "anchor-header"),
        (b"PLSA\x01\0\0\x01" + blob()[8:], "anchor-header"),
        (HEAD + (limits.TABLE_SIZE_BYTES_MAX + 1).to_bytes(4, "little"), "anchor-header"),
        (HEAD + limits.TABLE_SIZE_BYTES_MAX.to_bytes(4, "little"), "anchor-truncated"),
        (HEAD + b"\x01\0\0\0\xc0", "table-decode"),
        (blob()[:-1], "anchor-truncated"),
        (blob() + b"x", "anchor-trailing"),
    ],
)
def test_each_fault_has_its_code(data: bytes, code: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        read(data)
    assert caught.value.code == code


def test_a_region_that_is_too_small_is_our_own_fault() -> None:
    with pytest.raises(LocalProtocolError):
        list(encode_anchor(TABLE, REGION[:-1]))
