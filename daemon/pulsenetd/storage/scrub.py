"""Reading everything a store holds, and naming what is damaged: bits rot on disks that nobody reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pulsenet.chain.records import Manifest
from pulsenet.chain.signing import decode_signed
from pulsenet.ids import Digest
from pulsenetd.storage.naming import NAMING, describe_record, find_blobs_of, is_sound
from pulsenetd.storage.record_cache import RecordCache
from pulsenetd.storage.store import Store


@dataclass(frozen=True, slots=True)
class Lack:
    """A blob that is not whole."""

    name: str
    """What names it, for people; empty if nothing does yet."""
    blob_id: Digest
    chunk_count: int
    """Chunks that it lacks."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Report:
    """What a scrub found. What was damaged is deleted by then: a node fetches it again where it needs it."""

    chunk_count: int
    chunk_size_bytes: int
    damaged_count: int
    record_count: int
    bad_record_count: int
    """Records that are not what they are kept as."""
    lacks: tuple[Lack, ...]

    @property
    def is_whole(self) -> bool:
        """Whether nothing was damaged and nothing is missing."""
        return not (self.damaged_count or self.bad_record_count or self.lacks)


def scrub(store: Store, on_progress: Callable[[int, int], None] = lambda done, total: None) -> Report:
    """Read and check everything in a store, and delete what is damaged. Blocks for as long as that takes.

    Args:
        store: Open, and used by nobody else.
        on_progress: Told how many chunks of how many were read.

    Raises:
        StorageError: The disk refused.
    """
    before = store.usage()
    digests = sorted(store.chunk_digests())
    damaged = 0
    for done, digest in enumerate(digests, 1):
        damaged += store.chunk(digest) is None
        on_progress(done, len(digests))
    names, bad = _read_records(store)
    store.release((), bad, now=0.0)
    lacks = []
    for blob_id in sorted(store.blob_ids()):
        missing = store.missing_chunks(blob_id)
        if missing:
            lacks.append(Lack(names.get(blob_id, ""), blob_id, len(missing), sum(size for size, _ in missing)))
    return Report(
        chunk_count=len(digests),
        chunk_size_bytes=before.chunk_size_bytes,
        damaged_count=damaged,
        record_count=len(store.records()),
        bad_record_count=len(bad) + store.dropped_record_count,
        lacks=tuple(lacks),
    )


class RoundMeter:
    """Measures what rounds keep. Chunk lists do not change: each is read once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._named = RecordCache(store, [kind.TYPE for kind in NAMING if kind is not Manifest], find_blobs_of)
        self._sizes: dict[Digest, int] = {}

    def measure(self) -> int:
        """Return the bytes of blobs that rounds keep; chunks that several name count for each."""
        held = set().union(*self._named.look()).intersection(self._store.blob_ids())
        self._sizes = {blob_id: self._sizes.get(blob_id) or self._measure(blob_id) for blob_id in held}
        return sum(self._sizes.values())

    def _measure(self, blob_id: Digest) -> int:
        held = self._store.read_list(blob_id)
        return 0 if held is None else held.size_bytes


def _read_records(store: Store) -> tuple[dict[Digest, str], list[Digest]]:
    """Return what names each blob, and the records that are not what they are kept as."""
    names: dict[Digest, str] = {}
    bad = []
    for digest, encoded in store.records():
        if not is_sound(digest, encoded):
            bad.append(digest)
            continue
        record = decode_signed(encoded)
        for blob_id in find_blobs_of(record):
            names[blob_id] = describe_record(record)
    return names, bad
