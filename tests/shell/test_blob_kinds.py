"""Blobs are known by the signed records that name them; strangers cannot make the node read without end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pulsenet.chain.records import Manifest
from pulsenet.chain.signing import record_digest
from pulsenet.ids import Digest
from pulsenet.wire.messages import GetChunks
from pulsenet.wire.schema import decode_value
from pulsenetd.blob_kinds import LOOK_SECONDS, BlobKinds
from pulsenetd.storage.scrub import RoundMeter
from pulsenetd.storage.store import Store

CHUNKS = (Digest(bytes(32)),)


async def test_a_blob_is_of_the_kind_its_record_says(store: Store, run: Any) -> None:
    now = 100.0

    with ThreadPoolExecutor(1) as threads:
        kinds = BlobKinds(store, threads, lambda: now)
        news = run.news(1)
        blob_id = decode_value(Manifest, news.manifest.payload).blob_id
        assert await kinds.find(GetChunks(CHUNKS)) == "other"
        assert await kinds.find(GetChunks(CHUNKS, blob_id)) == "other"
        store.put_record(news.manifest)
        assert await kinds.find(GetChunks(CHUNKS, blob_id)) == "other", "not read again at once"
        now += LOOK_SECONDS
        kind = str(decode_value(Manifest, news.manifest.payload).kind)
        assert await kinds.find(GetChunks(CHUNKS, blob_id)) == kind


async def test_no_record_is_read_twice(store: Store, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for unknown blobs would have all records read and decoded every two seconds."""
    now = 0.0
    read: list[Digest] = []
    read_one = store.record

    def note(digest: Digest) -> bytes | None:
        read.append(digest)
        return read_one(digest)

    monkeypatch.setattr(store, "record", note)
    monkeypatch.setattr(store, "records_of_type", None)
    with ThreadPoolExecutor(1) as threads:
        kinds, meter = BlobKinds(store, threads, lambda: now), RoundMeter(store)
        for number in (1, 2, 2):
            news = run.news(number)
            store.put_record(news.manifest)
            now += LOOK_SECONDS
            blob_id = decode_value(Manifest, news.manifest.payload).blob_id
            assert await kinds.find(GetChunks(CHUNKS, Digest(bytes(32)))) == "other"
            assert await kinds.find(GetChunks(CHUNKS, blob_id)) != "other"
            assert meter.measure() == 0
        assert len(read) == 2
        store.release((), [record_digest(news.manifest)], now=0.0)
        now += LOOK_SECONDS
        assert await kinds.find(GetChunks(CHUNKS, Digest(bytes(32)))) == "other"
        assert await kinds.find(GetChunks(CHUNKS, blob_id)) == "other", "forgotten with its record"


async def test_a_disk_that_fails_ends_no_transfer(store: Store) -> None:
    with ThreadPoolExecutor(1) as threads:
        kinds = BlobKinds(store, threads)
        store.close()
        assert await kinds.find(GetChunks(CHUNKS, Digest(bytes(32)))) == "other"
