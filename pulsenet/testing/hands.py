"""The slow work of a simulated node: what its disk, mirror, engine and encoder do, when their time has come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pulsenet.chain.records import Kind
from pulsenet.ids import Digest, Version
from pulsenet.node.effects import ApplyHop, Commit, EncodeSkip, EncodeSnapshot, HandToEngine, StoreAnchor, StoreChunk
from pulsenet.node.events import (
    AnchorStored,
    ChunkStored,
    Committed,
    EncodeFailed,
    EngineApplied,
    EngineFailed,
    Event,
    ExtraFailed,
    PatchEncoded,
    SkipEncoded,
)
from pulsenet.testing.fakes import FakeStore
from pulsenet.testing.weights import TABLE, FakeMirror, compute_root_of, store_anchor, store_patch

ANCHOR_CODEC_ID = 3

Work = StoreChunk | ApplyHop | HandToEngine | EncodeSnapshot | StoreAnchor | EncodeSkip | Commit
"""Effects that take time and are answered by an event."""


@dataclass
class FakeEngine:
    """What the engine serves, and every version it was ever brought to."""

    version: Version | None = None
    root: Digest | None = None


class Hands:
    """Volatile workers of one life of a node over its durable store.

    Args:
        engine_fails: Says whether the engine refuses the next update.
        note_version: Told each version a publisher commits, with its root.
    """

    def __init__(
        self,
        store: FakeStore,
        *,
        engine_fails: Callable[[], bool],
        note_version: Callable[[Version, Digest], None],
    ) -> None:
        self.store = store
        self.mirror = FakeMirror()
        self.engine = FakeEngine()
        self.swaps: list[Version] = []
        self.fetched_size_bytes = 0
        self._engine_fails = engine_fails
        self._note_version = note_version
        self._snapshots: dict[int, bytearray] = {}
        self._history: dict[Version, bytearray] = {}
        self._generation = 0

    def rebuild_mirror(self) -> None:
        """Rebuild the mirror from the newest stored anchor and the patches since, as the daemon does."""
        manifests = sorted(self.store.manifests().values(), key=lambda m: (m.version, m.kind is not Kind.ANCHOR))
        anchors = [manifest for manifest in manifests if manifest.kind is Kind.ANCHOR]
        for manifest in anchors[-1:] + [m for m in manifests if anchors and m.version > anchors[-1].version]:
            if manifest.kind is Kind.ANCHOR or manifest.base_version == self.mirror.version:
                self.mirror.apply(manifest, self.store)

    def take_snapshot(self, region: bytearray) -> int:
        """Keep weights a training process handed over; return their generation."""
        self._generation += 1
        self._snapshots[self._generation] = region
        return self._generation

    def finish(self, work: Work) -> Event:
        """Do the work and return the event that tells of it."""
        match work:
            case StoreChunk(digest, data):
                self.store.chunks[digest] = data
                self.fetched_size_bytes += len(data)
                return ChunkStored(digest)
            case ApplyHop(manifest):
                return self.mirror.apply(manifest, self.store)
            case HandToEngine(version):
                return self._swap(version)
            case EncodeSnapshot(generation, kind):
                return self._encode(generation, kind)
            case StoreAnchor(version):
                return self._store_anchor(version)
            case EncodeSkip(base_version, version):
                return self._encode_skip(base_version, version)
            case Commit():
                return self._commit(work)

    def _swap(self, version: Version) -> Event:
        # The mirror may have moved on meanwhile; the engine then gets the newest and says so.
        if self._engine_fails() or self.mirror.version is None or self.mirror.version < version:
            return EngineFailed(self.engine.version, "refused")
        self.engine.version, self.engine.root = self.mirror.version, self.mirror.root
        self.swaps.append(self.mirror.version)
        return EngineApplied(self.mirror.version)

    def _encode(self, generation: int, kind: Kind) -> Event:
        region = self._snapshots[generation]
        if kind is Kind.ANCHOR:
            chunk_list = store_anchor(self.store, region)
            codec_id, changed_count = ANCHOR_CODEC_ID, TABLE.element_count
        elif self.mirror.region is None:
            return EncodeFailed(generation, "no_baseline")
        else:
            chunk_list, totals = store_patch(self.store, self.mirror.region, region)
            codec_id, changed_count = totals.codec_id, totals.changed_count
        return PatchEncoded(
            generation=generation,
            blob_id=chunk_list.blob_id,
            codec_id=codec_id,
            root=compute_root_of(region),
            raw_size_bytes=TABLE.size_bytes,
            encoded_size_bytes=chunk_list.size_bytes,
            changed_count=changed_count,
            element_count=TABLE.element_count,
        )

    def _store_anchor(self, version: Version) -> Event:
        if self.mirror.region is None or self.mirror.version != version:
            return ExtraFailed(version, "no_baseline")
        chunk_list = store_anchor(self.store, self.mirror.region)
        return AnchorStored(version, chunk_list.blob_id, chunk_list.size_bytes)

    def _encode_skip(self, base_version: Version, version: Version) -> Event:
        if base_version not in self._history or version not in self._history:
            return ExtraFailed(version, "no_spool")
        old, new = self._history[base_version], self._history[version]
        chunk_list, totals = store_patch(self.store, old, new)
        return SkipEncoded(
            base_version,
            version,
            chunk_list.blob_id,
            totals.codec_id,
            chunk_list.size_bytes,
            totals.changed_count,
        )

    def _commit(self, commit: Commit) -> Event:
        for record in commit.records:
            self.store.put_record(record)
        self.store.state.update(commit.state)
        if commit.generation is not None:
            region = self._snapshots[commit.generation]
            self.mirror.region, self.mirror.version, self.mirror.root = region, commit.version, commit.root
            self._history[commit.version] = region
            self._snapshots = {number: kept for number, kept in self._snapshots.items() if number > commit.generation}
            self._note_version(commit.version, commit.root)
        return Committed(commit.version)
