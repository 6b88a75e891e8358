"""What the doctor says of stores, and what it repairs of them."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from pulsenet.errors import StorageError
from pulsenet.ids import Digest, compute_digest
from pulsenet.wire.chunks import ChunkList
from pulsenetd.doctor.findings import Finding, Grade, Subject
from pulsenetd.doctor.stores import look_at_stores
from pulsenetd.storage.store import DATABASE_NAME, Store

DATA = (b"weights", b"more weights")


@pytest.fixture
def node(tmp_path: Path) -> Path:
    directory = tmp_path / "run" / "seed"
    store = Store.open(directory)
    entries = tuple((len(data), compute_digest(data)) for data in DATA)
    chunk_list = ChunkList(entries)
    store.put_chunk_list(chunk_list.blob_id, chunk_list.encode())
    for data in DATA:
        store.put_chunks({compute_digest(data): data})
    store.close()
    return directory


def find_chunk(node: Path, data: bytes) -> Path:
    name = Digest(compute_digest(data)).hex()
    return node / "chunks" / name[:2] / name


def look(node: Path, *, reads_all: bool = False) -> Finding:
    (finding,) = look_at_stores(Subject(node.parent, nodes=(node,), reads_all=reads_all))
    return finding


def test_a_whole_store_is_whole_at_both_looks(node: Path) -> None:
    assert "1 blobs, 2 chunks, of the right size" in look(node).text
    assert "all of them read and whole" in look(node, reads_all=True).text


def test_a_flipped_bit_is_found_by_reading_all(node: Path) -> None:
    find_chunk(node, DATA[0]).write_bytes(b"Weights")
    assert look(node).grade is Grade.OK
    finding = look(node, reads_all=True)
    assert (finding.grade, "1 of 2 chunks are damaged, 0 are missing" in finding.text) == (Grade.WARN, True)
    assert "scrub" in finding.next_step


def test_repair_deletes_what_is_damaged_and_says_what_is_left_to_do(node: Path) -> None:
    find_chunk(node, DATA[0]).write_bytes(b"Wei")
    finding = look(node)
    assert finding.repair is not None
    assert "1 damaged chunk and 0 records deleted" in finding.repair()
    assert find_chunk(node, DATA[1]).exists()
    finding = look(node)
    assert "1 of 2 chunks are missing" in finding.text
    assert finding.repair is None
    assert "at its start" in finding.next_step


def test_a_running_node_is_read_but_not_repaired(node: Path) -> None:
    store = Store.open(node)
    try:
        assert look(node, reads_all=True).grade is Grade.OK
        find_chunk(node, DATA[0]).write_bytes(b"Wei")
        finding = look(node)
        assert finding.repair is None
        assert "within a day" in finding.next_step
    finally:
        store.close()


def test_a_repair_that_a_start_overtook_refuses(node: Path) -> None:
    find_chunk(node, DATA[0]).write_bytes(b"Wei")
    finding = look(node)
    assert finding.repair is not None
    store = Store.open(node)
    try:
        with pytest.raises(StorageError, match="in use"):
            finding.repair()
    finally:
        store.close()


def test_a_damaged_database_is_left_to_the_operator(node: Path) -> None:
    database = node / DATABASE_NAME
    database.write_bytes(b"no database at all" * 100)
    finding = look(node)
    assert finding.grade is Grade.FAIL
    assert finding.repair is None
    assert f"mv {database}" in finding.next_step


def test_what_is_no_record_is_named(node: Path) -> None:
    with sqlite3.connect(node / DATABASE_NAME) as connection:
        connection.execute("UPDATE blobs SET chunk_list = x'00'")
    connection.close()
    assert "no record" in look(node).text


def test_progress_counts_bytes(node: Path) -> None:
    seen: list[tuple[int, int]] = []
    watched = Subject(node.parent, nodes=(node,), reads_all=True, on_progress=lambda *amounts: seen.append(amounts))
    look_at_stores(watched)
    assert seen[-1] == (sum(map(len, DATA)),) * 2
