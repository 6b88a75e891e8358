"""Slices of chunk lists cost what they are long, and parts come and go with their lists."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from pulsenet import limits
from pulsenet.ids import Digest
from pulsenet.wire.chunks import ChunkList
from pulsenetd.storage.list_parts import PART_SIZE_BYTES
from pulsenetd.storage.store import DATABASE_NAME, Store

LONG_COUNT = 400_000
"""Chunks of a blob of 400 GB; its list has 14 MB."""


def make_list(count: int, seed: int = 0) -> ChunkList:
    return ChunkList(tuple((1, Digest((seed << 64 | place).to_bytes(32, "big"))) for place in range(count)))


def read_bytes_of_process() -> int:
    """Return the bytes that this process read by system calls so far."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


@pytest.fixture
def reopened(tmp_path: Path) -> tuple[Store, bytes, Digest]:
    chunk_list = make_list(LONG_COUNT)
    store = Store.open(tmp_path / "node")
    store.put_chunk_list(chunk_list.blob_id, chunk_list.encode())
    store.close()
    return Store.open(tmp_path / "node"), chunk_list.encode(), chunk_list.blob_id


def test_a_slice_reads_no_more_of_the_disk_than_its_size_wherever_it_lies(
    reopened: tuple[Store, bytes, Digest],
) -> None:
    store, encoded, blob_id = reopened
    size_bytes = limits.CHUNK_SIZE_BYTES_MAX
    for offset in (0, size_bytes, len(encoded) - 36, len(encoded), 5_000_001):
        before = read_bytes_of_process()
        found = store.chunk_list_slice(blob_id, offset, size_bytes)
        cost = read_bytes_of_process() - before
        assert found == (len(encoded), encoded[offset : offset + size_bytes])
        # Two parts that are cut, the pages of the tree, and what /proc itself says.
        assert cost <= len(found[1]) + 2 * PART_SIZE_BYTES + 64 * 4_096, offset
    before = read_bytes_of_process()
    assert store.chunk_list(blob_id) == encoded
    assert read_bytes_of_process() - before >= len(encoded)  # so that the count counts
    store.close()


@pytest.mark.parametrize("count", [0, 1, PART_SIZE_BYTES // 36, PART_SIZE_BYTES // 36 + 1, 12_000])
def test_slices_put_together_are_the_list(tmp_path: Path, count: int) -> None:
    store = Store.open(tmp_path / "node")
    chunk_list = make_list(count)
    encoded = chunk_list.encode()
    store.put_chunk_list(chunk_list.blob_id, encoded)
    for size_bytes in (100_000, PART_SIZE_BYTES, limits.CHUNK_SIZE_BYTES_MAX):
        joined = b""
        while len(joined) < len(encoded):
            found = store.chunk_list_slice(chunk_list.blob_id, len(joined), size_bytes)
            assert found is not None
            assert found[0] == len(encoded)
            assert found[1]
            joined += found[1]
        assert joined == encoded
    assert store.chunk_list_slice(chunk_list.blob_id, len(encoded), 10) == (len(encoded), b"")
    assert store.chunk_list_slice(Digest(bytes(32)), 0, 10) is None
    store.close()


def count_parts(directory: Path) -> int:
    connection = sqlite3.connect(directory / DATABASE_NAME)
    (count,) = connection.execute("SELECT count(*) FROM list_parts").fetchone()
    connection.close()
    return int(count)


def test_parts_go_with_their_list(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "node")
    chunk_list = make_list(12_000)
    store.put_chunk_list(chunk_list.blob_id, chunk_list.encode())
    store.put_chunk_list(chunk_list.blob_id, chunk_list.encode())
    assert count_parts(tmp_path / "node") == -(-len(chunk_list.encode()) // PART_SIZE_BYTES)
    store.release([chunk_list.blob_id], [], now=0.0)
    assert count_parts(tmp_path / "node") == 0
    assert store.chunk_list_slice(chunk_list.blob_id, 0, 10) is None
    store.close()


def test_a_store_of_before_gets_its_parts_and_loses_those_of_lists_that_are_gone(tmp_path: Path) -> None:
    directory = tmp_path / "node"
    store = Store.open(directory)
    chunk_list = make_list(12_000)
    store.put_chunk_list(chunk_list.blob_id, chunk_list.encode())
    store.close()
    connection = sqlite3.connect(directory / DATABASE_NAME)
    with connection:
        connection.execute("DELETE FROM list_parts")
        connection.execute("INSERT INTO list_parts VALUES (?, 0, ?)", (os.urandom(32), b"orphan"))
    connection.close()
    store = Store.open(directory)
    encoded = chunk_list.encode()
    assert store.chunk_list_slice(chunk_list.blob_id, 300_000, 1_000) == (len(encoded), encoded[300_000:301_000])
    store.close()
    assert count_parts(directory) == -(-len(encoded) // PART_SIZE_BYTES)
