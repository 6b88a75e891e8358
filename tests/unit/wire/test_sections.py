"""Sections: cut alone, found by the sizes in a chunk list, decoded alone."""

import numpy as np
import pytest

from pulsenet import limits
from pulsenet.codec.contribution import (
    HEADER_SIZE_BYTES,
    ContributionHeader,
    TensorEntries,
    collect_entries,
    decode_contribution,
    decode_records,
    encode_contribution,
    read_contribution,
    view_weights,
)
from pulsenet.codec.sections import SectionMap, find_slice_sections
from pulsenet.errors import LocalProtocolError, RemoteProtocolError
from pulsenet.ids import Digest
from pulsenet.tensors.params import ParameterTable, TensorSpec, make_table
from pulsenet.wire.chunks import Chunk, ChunkList
from pulsenet.wire.sections import (
    BlobCutter,
    SectionCutter,
    find_slice_chunks,
    find_slice_range,
    list_sections,
)

ROOT = Digest(bytes(range(32)))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BLOCK_ELEMENTS", 16)


def table_of(*counts: int) -> ParameterTable:
    return make_table([TensorSpec(f"t{index:02}", "F32", (count,)) for index, count in enumerate(counts)])


def cut(blob: bytes, piece_size: int = 1 << 20) -> tuple[ChunkList, list[Chunk]]:
    cutter = SectionCutter(HEADER_SIZE_BYTES)
    chunks = []
    for start in range(0, len(blob), piece_size):
        chunks += cutter.feed(blob[start : start + piece_size])
    chunks += cutter.finish()
    return cutter.chunk_list, chunks


def encode(table: ParameterTable, theta: list[np.ndarray], entries: list[TensorEntries]) -> bytes:
    header = ContributionHeader(table.digest, ROOT, 3, 8)
    return b"".join(encode_contribution(table, theta, entries, header=header))


def state(table: ParameterTable, density: float, seed: int = 1) -> tuple[list[np.ndarray], list[TensorEntries]]:
    generator = np.random.default_rng(seed)
    theta = [generator.standard_normal(spec.element_count).astype(np.float32) for spec in table.tensors]
    entries = []
    for index, weights in enumerate(theta):
        sent = np.flatnonzero(generator.random(weights.size) < density).astype(np.uint32)
        entries.append(TensorEntries(index, sent, generator.integers(0, 1 << 32, sent.size, np.uint32)))
    return theta, entries


@pytest.mark.parametrize("piece_size", [1, 7, 1 << 20])
def test_every_section_starts_a_chunk_however_the_bytes_come(small_blocks: None, piece_size: int) -> None:
    table = table_of(1, 40, 7, 16, 3)
    theta, entries = state(table, 0.5)
    blob = encode(table, theta, entries)
    chunk_list, chunks = cut(blob, piece_size)
    assert b"".join(data for _, data in chunks) == blob
    found = list_sections(chunk_list)
    assert len(found) == 1 + SectionMap(table).section_count
    assert found[0] == range(1)
    for slice_count in (1, 2, 3, 9):
        parts = []
        for slice_index in range(slice_count):
            header, body = find_slice_chunks(chunk_list, slice_index, slice_count)
            pieces = [chunks[place][1] for place in (*header, *body)]
            sections = find_slice_sections(SectionMap(table).section_count, slice_index, slice_count)
            records = read_contribution(pieces, table, state_root=ROOT, sections=sections)
            parts += decode_records(records, view_weights(table, theta), map)
        for own, expected in zip(collect_entries(table, parts), entries, strict=True):
            assert np.array_equal(own.indices, expected.indices)
            assert np.array_equal(own.value_bits, expected.value_bits)


def test_a_section_without_entries_is_an_end_alone(small_blocks: None) -> None:
    table = table_of(40)
    theta, _ = state(table, 0.0)
    entries = [TensorEntries(0, np.array([20], np.uint32), np.array([9], np.uint32))]
    chunk_list, chunks = cut(encode(table, theta, entries))
    assert [data for _, data in chunks][1::2] == [b"\0\0\0", b"\0\0\0"]
    assert len(chunk_list.entries) == 4


def make_full_section() -> tuple[ParameterTable, list[np.ndarray], list[TensorEntries]]:
    """Return a contribution whose only section would be one whole chunk without the byte that fills it up."""
    # Random bits do not compress: a record of 17 bytes and four planes, one of 14 bytes, an end of 5.
    count = (limits.CHUNK_SIZE_BYTES - 36) // 4
    table = table_of(count, 2)
    bits = np.random.default_rng(2).integers(0, 1 << 32, count, np.uint32)
    entries = [TensorEntries(0, np.arange(count, dtype=np.uint32), bits)]
    entries.append(TensorEntries(1, np.array([1], np.uint32), np.array([0x7FC12345], np.uint32)))
    return table, [np.zeros(count, np.float32), np.zeros(2, np.float32)], entries


def test_a_section_that_would_fill_whole_chunks_has_one_byte_more() -> None:
    table, theta, entries = make_full_section()
    blob = encode(table, theta, entries)
    assert len(blob) == HEADER_SIZE_BYTES + limits.CHUNK_SIZE_BYTES + 1
    chunk_list, _ = cut(blob)
    assert [size for size, _ in chunk_list.entries] == [HEADER_SIZE_BYTES, limits.CHUNK_SIZE_BYTES, 1]
    assert list_sections(chunk_list) == [range(1), range(1, 3)]
    found = list(decode_contribution([blob], table, theta, state_root=ROOT))
    assert np.array_equal(found[0].value_bits, entries[0].value_bits)
    with pytest.raises(RemoteProtocolError, match="patch-trailing"):
        list(decode_contribution([blob[:-1] + b"\1"], table, theta, state_root=ROOT))
    with pytest.raises(RemoteProtocolError, match="patch-truncated"):
        list(decode_contribution([blob[:-1]], table, theta, state_root=ROOT))


def test_a_list_that_ends_with_a_full_chunk_is_not_cut_at_sections() -> None:
    full = ChunkList(((3, ROOT), (limits.CHUNK_SIZE_BYTES, Digest(bytes(32)))))
    for chunk_list in (full, ChunkList(())):
        with pytest.raises(RemoteProtocolError, match="chunk-list"):
            list_sections(chunk_list)


def test_bytes_that_are_no_contribution_are_not_cut(small_blocks: None) -> None:
    table = table_of(40)
    blob = encode(table, *state(table, 0.5))
    for piece in (blob[:-1], blob[:50], b""):
        with pytest.raises(LocalProtocolError, match="ends inside"):
            cut(piece)
    with pytest.raises(LocalProtocolError, match="no contribution blob"):
        cut(bytes(HEADER_SIZE_BYTES) + b"\1" + b"\xff" * 9)


def test_a_record_of_another_section_is_refused(small_blocks: None) -> None:
    table = table_of(40)
    theta, _ = state(table, 0.0)
    blob = encode(table, theta, [TensorEntries(0, np.array([3], np.uint32), np.array([9], np.uint32))])
    moved = blob[: HEADER_SIZE_BYTES + 1] + b"\1" + blob[HEADER_SIZE_BYTES + 2 :]
    with pytest.raises(RemoteProtocolError, match="patch-block"):
        list(decode_contribution([moved], table, theta, state_root=ROOT))


@pytest.mark.unmeasured
@pytest.mark.parametrize("piece_size", [1, 3, 1 << 20])
def test_any_blob_is_cut_as_it_must_be(small_blocks: None, piece_size: int) -> None:
    table = table_of(40, 7)
    contribution = encode(table, *state(table, 0.5))
    other = bytes(range(200)) * 6_000
    for blob, expected in ((contribution, cut(contribution)[0]), (other, None), (b"PL", None)):
        cutter, found = BlobCutter(), []
        for start in range(0, len(blob), piece_size):
            found += cutter.feed(blob[start : start + piece_size])
        found += cutter.finish()
        assert b"".join(data for _, data in found) == blob
        if expected is not None:
            assert cutter.chunk_list == expected
        else:
            assert all(size == limits.CHUNK_SIZE_BYTES for size, _ in cutter.chunk_list.entries[:-1])
    mixed, cutter = b"PLSM" + bytes(300_000), BlobCutter()
    chunks = [
        chunk
        for start in range(0, len(mixed), 1 + piece_size)
        for chunk in cutter.feed(mixed[start:][: 1 + piece_size])
    ]
    chunks += cutter.finish()
    assert [len(data) for _, data in chunks] == [1 << 16] * 4 + [300_004 - (4 << 16)]
    broken = BlobCutter()
    broken.feed(contribution[:-1])
    with pytest.raises(LocalProtocolError):
        broken.finish()


def test_a_slice_lies_behind_the_ones_before_it(small_blocks: None) -> None:
    table = table_of(40, 7, 60)
    blob = encode(table, *state(table, 0.5))
    chunk_list, _ = cut(blob)
    ranges = [find_slice_range(chunk_list, index, 3) for index in range(3)]
    assert ranges[0][0] == HEADER_SIZE_BYTES
    assert [start + size for start, size in ranges] == [ranges[1][0], ranges[2][0], len(blob)]
    empty = [find_slice_range(chunk_list, index, 50) for index in range(50)]
    assert sum(size for _, size in empty) == len(blob) - HEADER_SIZE_BYTES
    assert any(size == 0 for _, size in empty)
