"""A scrub reads everything, deletes what is damaged, and says what is lacking."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pulsenet.chain.signing import decode_signed, record_digest
from pulsenet.ids import Digest, Version
from pulsenetd.storage.naming import describe_record
from pulsenetd.storage.scrub import scrub
from pulsenetd.storage.store import Store

MEBIBYTE = 1 << 20


def chunk_file(store: Store, digest: Digest) -> Path:
    return store.directory / "chunks" / digest.hex()[:2] / digest.hex()


def put_version(store: Store, kit: Any, number: int) -> list[Digest]:
    """Keep a version of three chunks; return them."""
    with store.writing_blob() as writer:
        for index in range(3):
            writer.feed(bytes([number, index]) * (MEBIBYTE // 2))
        chunk_list = writer.finish()
    store.put_record(kit.sign_manifest(kit.make_manifest(version=Version(0, number), blob_id=chunk_list.blob_id)))
    return [digest for _, digest in chunk_list.entries]


def test_what_is_whole_is_left_alone(store: Store, kit: Any) -> None:
    put_version(store, kit, 1)
    seen: list[tuple[int, int]] = []
    report = scrub(store, lambda done, total: seen.append((done, total)))
    assert report.is_whole
    assert (report.chunk_count, report.chunk_size_bytes, report.record_count) == (3, 3 * MEBIBYTE, 1)
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_damage_is_deleted_named_and_can_be_fetched_again(store: Store, kit: Any) -> None:
    """A-DSK-2: one flipped bit, one file that is short, one that is gone; then all of it is there again."""
    first, second = put_version(store, kit, 1), put_version(store, kit, 2)
    originals = {digest: store.chunk(digest) for digest in (*first, *second)}
    flipped = bytearray(originals[first[0]] or b"")
    flipped[7] ^= 1
    chunk_file(store, first[0]).write_bytes(flipped)
    chunk_file(store, second[1]).write_bytes(b"short")
    chunk_file(store, second[2]).unlink()
    report = scrub(store)
    assert not report.is_whole
    assert report.damaged_count == 3
    assert [
        (lack.name, lack.chunk_count, lack.size_bytes) for lack in sorted(report.lacks, key=lambda one: one.name)
    ] == [
        ("anchor to 0.1", 1, MEBIBYTE),
        ("anchor to 0.2", 2, 2 * MEBIBYTE),
    ]
    assert set(store.take_damaged_blobs()) == {lack.blob_id for lack in report.lacks}
    assert store.take_damaged_blobs() == []
    for digest in (first[0], second[1], second[2]):
        store.put_chunks({digest: originals[digest] or b""})
    assert scrub(store).is_whole


def test_a_record_that_is_another_is_deleted(store: Store, kit: Any) -> None:
    put_version(store, kit, 1)
    other = kit.sign_manifest(kit.make_manifest(version=Version(0, 9)))
    with store._database.transaction() as database:
        database.execute("INSERT INTO records VALUES (?, ?, ?)", (bytes(32), "manifest", b"junk"))
        database.execute("UPDATE records SET encoded = ? WHERE digest != ?", (b"x", bytes(32)))
    store.put_record(other)
    report = scrub(store)
    assert (report.bad_record_count, report.record_count) == (2, 1)
    assert store.record(record_digest(other)) is not None
    assert describe_record(other) == "anchor to 0.9"


@pytest.mark.parametrize("where", ["envelope", "payload"])
def test_a_record_in_which_bits_flipped_keeps_no_store_from_opening(
    store: Store, kit: Any, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """SQLite does not notice it, and a scrub, which deletes such records, has to open the store first."""
    put_version(store, kit, 1)
    put_version(store, kit, 2)
    (digest, encoded), (kept, _) = store.records()
    damaged = bytearray(encoded)
    damaged[0 if where == "envelope" else encoded.index(decode_signed(encoded).payload) + 4] ^= 0x81
    with store._database.transaction() as database:
        database.execute("UPDATE records SET encoded = ? WHERE digest = ?", (bytes(damaged), digest))
    store.close()
    again = Store.open(store.directory)
    try:
        assert "1 stored records were damaged and are deleted" in caplog.text
        assert list(again.whole_manifests()) == [kept]
        (blob_id,) = again.blob_ids()
        assert again.missing_chunks(blob_id) == []
        assert len(again.chunk_digests()) == 3
        report = scrub(again)
        assert (report.bad_record_count, report.record_count, report.is_whole) == (1, 1, False)
    finally:
        again.close()
