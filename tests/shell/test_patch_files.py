"""The patch file's frame: header, size and digest."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from blake3 import blake3

from pulsenet.errors import StorageError, UsageError
from pulsenet.ids import Digest
from pulsenet.tensors.params import TensorSpec, make_table
from pulsenetd.files.patch_files import PatchFileHeader, open_patch, write_patch

TABLE = make_table([TensorSpec("w", "BF16", (3,))])
BLOB = bytes(range(200))


def encode(blob: bytes = BLOB, table: bytes | None = None) -> bytes:
    header = PatchFileHeader(
        table=TABLE.encode() if table is None else table,
        base_root=Digest(b"b" * 32),
        root=Digest(b"r" * 32),
        codec_id=2,
        changed_count=1,
        blob_size_bytes=len(BLOB),
        blob_digest=Digest(blake3(BLOB).digest()),
    )
    file = io.BytesIO()
    write_patch(file, header, [blob[:50], blob[50:]])
    return file.getvalue()


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "p.pulse"
    path.write_bytes(encode())
    opened = open_patch(path)
    assert opened.table == TABLE
    assert (opened.header.base_root, opened.header.root) == (b"b" * 32, b"r" * 32)
    assert b"".join(opened.read_blob()) == BLOB
    assert opened.size_bytes == path.stat().st_size


def test_every_cut_and_every_flipped_byte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.pulse"
    whole = encode()
    for size_bytes in range(0, len(whole), 7):
        path.write_bytes(whole[:size_bytes])
        with pytest.raises((StorageError, UsageError)):
            open_patch(path)
    for position in range(len(whole) - len(BLOB), len(whole)):
        flipped = bytearray(whole)
        flipped[position] ^= 0x40
        path.write_bytes(flipped)
        with pytest.raises(StorageError, match="damaged"):
            open_patch(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(StorageError, match="damaged"):
        open_patch(path)


def test_what_is_no_patch_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        open_patch(tmp_path / "missing")
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    with pytest.raises(UsageError, match="is no patch file"):
        open_patch(tmp_path / "model.safetensors")
    with pytest.raises(StorageError, match="cannot be read"):
        open_patch(tmp_path)


@pytest.mark.parametrize("table", [b"", b"\xc1", TABLE.encode()[:-1]])
def test_a_damaged_table_is_refused(table: bytes, tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(encode(table=table))
    with pytest.raises(StorageError, match="damaged"):
        open_patch(tmp_path / "p")


def test_a_header_that_claims_gigabytes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(b"PULSEPF1" + b"\xff" * 4)
    with pytest.raises(StorageError, match="a header of 4294967295 bytes"):
        open_patch(tmp_path / "p")
