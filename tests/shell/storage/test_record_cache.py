"""Each record is decoded once, and what was read of it goes with it."""

from __future__ import annotations

from typing import Any

from pulsenet.chain.records import Descriptor, SignedRecord
from pulsenet.chain.signing import record_digest
from pulsenet.ids import Digest
from pulsenetd.storage.record_cache import RecordCache
from pulsenetd.storage.store import Store


class Swapped(dict[Digest, str]):
    """What a cache knows, which another thread replaces right after it was asked for."""

    def __init__(self, known: dict[Digest, str], cache: RecordCache[str]) -> None:
        super().__init__(known)
        self._cache = cache

    def __contains__(self, digest: object) -> bool:
        self._cache._known = {}
        return super().__contains__(digest)


def test_a_look_beside_another_one_goes_on_with_what_it_began_with(store: Store, run: Any) -> None:
    """Several requests look at one time, where the first takes longer than the pause between two looks."""
    read: list[Digest] = []

    def name(record: SignedRecord) -> str:
        read.append(record_digest(record))
        return "genesis"

    store.put_record(run.genesis)
    cache = RecordCache(store, [Descriptor.TYPE], name)
    assert list(cache.look()) == ["genesis"]
    cache._known = Swapped(cache._known, cache)
    assert list(cache.look()) == ["genesis"]
    assert read == [record_digest(run.genesis)]
