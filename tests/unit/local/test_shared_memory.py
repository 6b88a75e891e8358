"""Sealed snapshots and lent regions."""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pulsenet.errors import LocalProtocolError, RemoteProtocolError, StorageError
from pulsenet.local.parts import PartLayout
from pulsenet.local.shared_memory import (
    Region,
    SnapshotWriter,
    check_lent,
    check_snapshot,
    create_memory,
    read_available_memory_bytes,
    seal_snapshot,
    write_at,
    write_parts,
    write_snapshot,
)
from pulsenet.tensors.params import TensorSpec, make_table

TABLE = make_table([TensorSpec("a", "BF16", (3,)), TensorSpec("b", "F32", (2,)), TensorSpec("c", "U8", (0,))])
BLOCKS = [(0, 0, b"abcd"), (0, 4, b"ef"), (1, 0, np.arange(8, dtype=np.uint8))]


def open_count() -> int:
    return len(os.listdir("/proc/self/fd"))


def make_snapshot(size_bytes: int = 8, data: bytes = b"12345678") -> int:
    descriptor = create_memory("test", size_bytes)
    write_at(descriptor, data, 0)
    seal_snapshot(descriptor)
    return descriptor


def test_a_snapshot_has_the_dense_layout_and_nobody_can_change_it() -> None:
    descriptor = write_snapshot(TABLE, BLOCKS)
    region = Region.open_snapshot(os.dup(descriptor), TABLE.layout_size_bytes)
    assert TABLE.view(region.bytes, 0).tobytes() == b"abcdef"
    assert TABLE.view(region.bytes, 1).tobytes() == bytes(range(8))
    assert region.size_bytes == TABLE.layout_size_bytes
    assert not region.writable
    for attempt in (
        lambda: os.pwrite(descriptor, b"x", 0),
        lambda: os.ftruncate(descriptor, 1),
        lambda: os.ftruncate(descriptor, 1 << 20),
        lambda: mmap.mmap(descriptor, 8, mmap.MAP_SHARED, mmap.PROT_WRITE),
        lambda: fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, 0),
    ):
        with pytest.raises(OSError, match="Operation not permitted"):
            attempt()
    with pytest.raises(ValueError, match="read-only"):
        region.bytes[0] = 1
    os.close(descriptor)
    region.close()
    region.close()


def test_arrays_keep_closed_memory_alive() -> None:
    region = Region.open_snapshot(make_snapshot(), 8)
    view = region.bytes[2:4]
    region.close()
    assert view.tobytes() == b"34"
    assert region.size_bytes == 0


def test_memory_without_every_seal_is_refused_and_closed(tmp_path: Path) -> None:
    descriptor = create_memory("test", 8)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    before = open_count()
    with pytest.raises(RemoteProtocolError, match="handoff-unsealed"):
        Region.open_snapshot(descriptor, 8)
    assert open_count() == before - 1
    (tmp_path / "file").write_bytes(b"12345678")
    plain = os.open(tmp_path / "file", os.O_RDWR)
    with pytest.raises(RemoteProtocolError, match="not a memfd"):
        check_snapshot(plain, 8)
    with pytest.raises(RemoteProtocolError, match="handoff-unsealed"):
        Region.open_lent(plain, 8)


@pytest.mark.parametrize("size_bytes", [7, 9])
def test_memory_of_another_size_is_refused(size_bytes: int) -> None:
    descriptor = make_snapshot()
    for check in (check_snapshot, check_lent):
        with pytest.raises(RemoteProtocolError, match="handoff-size"):
            check(descriptor, size_bytes)
    os.close(descriptor)


def test_a_snapshot_without_bytes_works() -> None:
    table = make_table([TensorSpec("c", "U8", (0,))])
    region = Region.open_snapshot(write_snapshot(table, []), 0)
    assert region.bytes.size == 0
    region.close()


def test_a_lent_region_is_written_by_its_owner_and_read_by_others() -> None:
    owner = Region.create("test", 4096)
    assert owner.writable
    reader = Region.open_lent(owner.reopen_for_reading(), 4096)
    owner.bytes[5] = 42
    assert reader.bytes[5] == 42
    with pytest.raises(ValueError, match="read-only"):
        reader.bytes[5] = 1
    other = os.open(f"/proc/self/fd/{owner.reopen_for_reading()}", os.O_RDWR)
    with pytest.raises(OSError, match="Operation not permitted"):
        os.pwrite(other, b"x", 0)
    with pytest.raises(OSError, match="Operation not permitted"):
        mmap.mmap(other, 4096, mmap.MAP_SHARED, mmap.PROT_WRITE)
    with pytest.raises(OSError, match="Operation not permitted"):
        os.ftruncate(other, 0)
    owner.bytes[5] = 43
    assert reader.bytes[5] == 43
    os.close(other)
    owner.close()
    reader.close()


def test_an_empty_lent_region_works() -> None:
    owner = Region.create("test", 0)
    reader = Region.open_lent(owner.reopen_for_reading(), 0)
    assert reader.size_bytes == 0


def test_memory_that_does_not_exist_is_an_error_not_a_signal() -> None:
    with pytest.raises(StorageError) as caught:
        Region.create("test", 1 << 60)
    assert caught.value.reason == "memory"
    with pytest.raises(StorageError) as caught:
        create_memory("test", -1)
    assert caught.value.reason == "memory"


def test_a_system_without_memfd_is_named(monkeypatch: Any) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(StorageError, match="Linux only"):
        create_memory("test", 1)


@pytest.mark.parametrize(
    ("limit", "used", "statistics", "available"),
    [
        ("max", "900", None, 4096),
        ("1000", "900", None, 100),
        ("1000", "1000", "anon 300\nactive_file 200\ninactive_file 450\nshmem 90\n", 650),
        ("9000", "1000", "active_file 0\ninactive_file 0\n", 4096),
        ("1000", "1001", "active_file 0\n", 0),
    ],
)
def test_pages_of_files_leave_room_in_a_container(
    tmp_path: Path, limit: str, used: str, statistics: str | None, available: int
) -> None:
    """They fill whatever a container may have while training data are read, and go when memory is asked for."""
    files = {"meminfo": "MemTotal: 8 kB\nMemAvailable: 4 kB\n", "memory.max": limit, "memory.current": used}
    for name, text in {**files, **({} if statistics is None else {"memory.stat": statistics})}.items():
        (tmp_path / name).write_text(text)
    assert read_available_memory_bytes(tmp_path, tmp_path) == available


def test_a_system_that_tells_nothing_is_not_refused_memory(tmp_path: Path) -> None:
    assert read_available_memory_bytes(tmp_path, tmp_path) == 1 << 63


def test_sealing_needs_every_writable_mapping_gone() -> None:
    descriptor = create_memory("test", 4096)
    mapping = mmap.mmap(descriptor, 4096)
    with pytest.raises(LocalProtocolError, match="cannot seal"):
        seal_snapshot(descriptor)
    mapping.close()
    seal_snapshot(descriptor)
    with pytest.raises(StorageError, match="cannot write"):
        write_at(descriptor, b"x", 0)
    os.close(descriptor)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([(0, 0, b"abcdef")], "b has 0 of 8 bytes"),
        ([(0, 0, b"abcdefg")], "ends at byte 7 of 6"),
        ([(0, 2, b"abcd")], "the next is 0"),
        ([(0, 0, b"ab"), (0, 0, b"ab")], "the next is 2"),
        ([(1, 0, b"abcdefgh")], "a has 0 of 6 bytes"),
    ],
)
def test_a_snapshot_with_a_gap_an_overlap_or_an_end_is_refused(blocks: Any, message: str) -> None:
    before = open_count()
    with pytest.raises(LocalProtocolError, match=message):
        write_snapshot(TABLE, blocks)
    assert open_count() == before


def test_a_writer_given_up_closes_its_memory() -> None:
    before = open_count()
    writer = SnapshotWriter(TABLE)
    writer.write_block(0, 0, b"ab")
    writer.close()
    writer.close()
    assert open_count() == before


def test_parts_are_sealed_one_at_a_time_and_hold_what_the_whole_holds(monkeypatch: Any) -> None:
    monkeypatch.setattr("pulsenet.local.parts.PART_SIZE_BYTES_MIN", 8)
    whole = Region.open_snapshot(write_snapshot(TABLE, BLOCKS), TABLE.layout_size_bytes)
    before, seen = open_count(), []
    read: list[int] = []

    def read_blocks() -> Any:
        for block in BLOCKS:
            read.append(block[0])
            yield block

    for part in write_parts(TABLE, read_blocks()):
        assert open_count() == before + 1
        region = Region.open_snapshot(os.dup(part.descriptor), part.layout.size_bytes)
        for index in part.layout.tensor_indices:
            assert part.layout.view(region.bytes, index).tobytes() == TABLE.view(whole.bytes, index).tobytes()
        region.close()
        seen.append((part.layout.first, part.layout.count, read.copy()))
    assert seen == [(0, 1, [0, 0]), (1, 2, [0, 0, 1])]
    assert open_count() == before
    whole.close()


def test_parts_given_up_half_way_leave_no_memory() -> None:
    before = open_count()
    parts = write_parts(TABLE, iter(BLOCKS))
    next(parts)
    parts.close()  # type: ignore[attr-defined]
    with pytest.raises(LocalProtocolError, match="b has 0 of 8 bytes"):
        list(write_parts(TABLE, iter(BLOCKS[:2])))
    assert open_count() == before


def test_a_block_of_another_part_is_refused() -> None:
    writer = SnapshotWriter(TABLE, PartLayout(TABLE, 1, 2))
    with pytest.raises(LocalProtocolError, match="a belongs to another part"):
        writer.write_block(0, 0, b"ab")
    writer.close()
