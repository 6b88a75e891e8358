"""Blobs as lists of chunks."""

from __future__ import annotations

import random

import pytest

from pulsenet import limits
from pulsenet.errors import IntegrityError, LocalProtocolError, RemoteProtocolError
from pulsenet.ids import Digest, compute_digest
from pulsenet.wire.chunks import (
    Chunk,
    ChunkCutter,
    ChunkList,
    GrowingCutter,
    compute_list_size_bytes_max,
    open_chunk_list,
    split_digests,
)

SIZE = 16


def cut(blob: bytes, chunk_size_bytes: int = SIZE) -> tuple[ChunkList, dict[Digest, bytes]]:
    cutter = ChunkCutter(chunk_size_bytes)
    chunks = cutter.feed(blob) + cutter.finish()
    return cutter.chunk_list, dict(chunks)


@pytest.mark.parametrize("size_bytes", [0, 1, SIZE - 1, SIZE, SIZE + 1, 3 * SIZE])
def test_sizes_at_the_edge_a_chk_2(size_bytes: int) -> None:
    blob = bytes(range(size_bytes))
    chunk_list, chunks = cut(blob)
    assert [size for size, _ in chunk_list.entries] == [
        len(blob[start : start + SIZE]) for start in range(0, size_bytes, SIZE)
    ]
    assert chunk_list.size_bytes == size_bytes
    assert ChunkList.decode(chunk_list.encode()) == chunk_list
    assert b"".join(chunks[digest] for _, digest in chunk_list.entries) == blob


def test_the_nominal_chunk_size_is_the_default() -> None:
    cutter = ChunkCutter()
    chunks = cutter.feed(bytes(limits.CHUNK_SIZE_BYTES + 1)) + cutter.finish()
    assert [len(data) for _, data in chunks] == [limits.CHUNK_SIZE_BYTES, 1]


@pytest.mark.parametrize("step", [65_537, 1 << 20])
def test_chunks_that_grow_are_short_where_little_lies_before_them(step: int) -> None:
    blob = random.Random(1).randbytes(1 << 20) * 260
    cutter = GrowingCutter()
    chunks = [chunk for start in range(0, len(blob), step) for chunk in cutter.feed(blob[start : start + step])]
    chunks += cutter.finish()
    assert b"".join(data for _, data in chunks) == blob
    place, seen = 0, []
    for size, _ in cutter.chunk_list.entries[:-1]:
        assert size == max(1 << 16, min(1 << (place // 256).bit_length() - 1, limits.CHUNK_SIZE_BYTES) if place else 0)
        place += size
        seen.append(size)
    assert seen == sorted(seen)
    assert set(seen) == {1 << bits for bits in range(16, 21)}


def test_an_empty_blob_is_an_empty_list_and_has_a_name() -> None:
    assert cut(b"")[0].entries == ()
    assert cut(b"")[0].blob_id == compute_digest(b"PNCHUNK1" + bytes(16))


@pytest.mark.parametrize("step", [1, 3, SIZE, 50])
def test_chunks_depend_on_bytes_and_boundaries_only(step: int) -> None:
    blob = bytes(range(100))
    cutter = ChunkCutter(SIZE)
    for start in range(0, 100, step):
        cutter.feed(memoryview(blob)[start : start + step])
    cutter.finish()
    assert cutter.chunk_list == cut(blob)[0]


def test_a_boundary_starts_a_new_chunk_so_equal_tensors_share_chunks() -> None:
    tensor = bytes(range(20))
    cutter = ChunkCutter(SIZE)
    chunks: list[Chunk] = []
    for other in (b"abc", b"defgh"):
        for piece in (other, tensor):
            chunks += cutter.feed(piece)
            chunks += cutter.boundary()
    chunks += cutter.finish()
    assert [len(data) for _, data in chunks] == [3, 16, 4, 5, 16, 4]
    assert chunks[1:3] == chunks[4:6]
    assert len(cutter.chunk_list.digests) == 4


@pytest.mark.parametrize("chunk_size_bytes", [0, limits.CHUNK_SIZE_BYTES_MAX + 1])
def test_a_chunk_size_outside_the_limit_is_our_mistake(chunk_size_bytes: int) -> None:
    with pytest.raises(LocalProtocolError):
        ChunkCutter(chunk_size_bytes)


def test_a_list_outside_the_limits_is_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = compute_digest(b"")
    for entry in [(0, digest), (limits.CHUNK_SIZE_BYTES_MAX + 1, digest), (1, Digest(b"short"))]:
        with pytest.raises(LocalProtocolError):
            ChunkList((entry,)).encode()
    monkeypatch.setattr(limits, "CHUNK_LIST_ENTRIES_MAX", 2)
    with pytest.raises(LocalProtocolError):
        ChunkList(((1, digest),) * 3).encode()
    with pytest.raises(LocalProtocolError):
        cut(bytes(range(48)))


def test_a_malformed_list_is_refused() -> None:
    good = cut(bytes(range(40)))[0].encode()
    assert len(good) == 24 + 3 * 36
    zero_size = good[:24] + bytes(4) + good[28:]
    two_sizes = good[:24] + b"\x08" + good[25:60] + b"\x10\0\0\0" + good[28:60] + good[96:]
    swapped = bytearray(good)
    swapped[12] = 1
    for data in (
        b"",
        good[:23],
        good[:-1],
        good + b"\0",
        b"X" + good[1:],
        bytes(swapped),
        zero_size,
        good[:16] + b"\x29" + good[17:],
        good[:24] + b"\xff\xff\xff\xff" + good[28:],
        good[:16] + b"\x20" + two_sizes[17:],
        good[:8] + b"\xff\xff\xff\xff" + good[12:],
    ):
        with pytest.raises(RemoteProtocolError) as caught:
            ChunkList.decode(data)
        assert caught.value.code == "chunk-list"


def test_a_list_is_opened_only_under_its_name_and_signed_size() -> None:
    chunk_list, _ = cut(bytes(range(40)))
    data = chunk_list.encode()
    assert open_chunk_list(data, blob_id=chunk_list.blob_id, size_bytes=40) == chunk_list
    with pytest.raises(IntegrityError, match="named"):
        open_chunk_list(data, blob_id=compute_digest(b""), size_bytes=40)
    with pytest.raises(IntegrityError, match="signed"):
        open_chunk_list(data, blob_id=chunk_list.blob_id, size_bytes=41)
    assert len(data) <= compute_list_size_bytes_max(40)
    assert compute_list_size_bytes_max(0) == 24
    assert compute_list_size_bytes_max(1 << 40) == 24 + 36 * limits.CHUNK_LIST_ENTRIES_MAX


def test_digests_of_a_list_come_in_order_so_many_at_a_time() -> None:
    chunk_list, _ = cut(bytes(range(5 * SIZE)) + bytes(range(SIZE)))
    digests = [digest for _, digest in chunk_list.entries]
    assert digests[5] == digests[0]
    assert list(split_digests(chunk_list.encode(), 4)) == [digests[:4], digests[4:]]
    assert list(split_digests(chunk_list.encode(), 6)) == [digests]
    assert list(split_digests(cut(b"")[0].encode(), 4)) == []
