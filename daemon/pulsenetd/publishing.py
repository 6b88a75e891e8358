"""The publisher's pipeline: from a sealed snapshot to durable blobs, and the baseline that moves at the commit.

The baseline is the memory of the last committed snapshot itself, sealed by the training process: nothing is
copied. After a restart it is rebuilt from the newest anchor and the patches in the store.

Methods take an effect and return the event that answers it. All block, and take turns: the memory is the
baseline, the snapshot in work, and one that waits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pulsenet.chain.records import Kind, Manifest
from pulsenet.codec import anchor
from pulsenet.codec.changes import Changes
from pulsenet.codec.compare import find_changes
from pulsenet.codec.patch import PatchTotals, RunBlocks, decode_patch, encode_absolute, encode_patch
from pulsenet.errors import IntegrityError, PulsenetError, StorageError, UnavailableError
from pulsenet.ids import Digest, Version, short
from pulsenet.local.shared_memory import Region
from pulsenet.node.effects import Commit, EncodeSkip, EncodeSnapshot, StoreAnchor
from pulsenet.node.events import (
    AnchorStored,
    Committed,
    EncodeFailed,
    ExtraFailed,
    PatchEncoded,
    SkipEncoded,
)
from pulsenet.tensors.digest import compute_root
from pulsenet.tensors.params import ParameterTable
from pulsenet.wire.chunks import ChunkList
from pulsenet.wire.schema import decode_value
from pulsenetd.rebuild import HeldVersion, Weights, hash_tensors, rebuild
from pulsenetd.spools import Point, Spool, SpoolDirectory, compose_spools
from pulsenetd.storage import Store

STATE_KEY: Final = "baseline"
"""Where the store keeps what was committed last: the target of a rebuild."""

MEMORY_NAME: Final = "pulsenet-baseline"

SPOOL_RATIO_PUBLISHER: Final = 1.0
"""Spools kept for skip patches, together, up to this share of the model; older skips are made by comparing."""


@dataclass(slots=True)
class _Snapshot:
    """Weights offered, and what was learned of them while encoding."""

    table: ParameterTable
    region: Region
    hashes: list[bytes] | None = None
    spool: Spool | None = None
    """Changes since the baseline, once encoded as a patch."""

    def close(self) -> None:
        self.region.close()
        self.drop_spool()

    def drop_spool(self) -> None:
        if self.spool is not None:
            self.spool.remove()
            self.spool = None


class PublishFailedError(PulsenetError):
    """Work was given up for a reason the machine knows by its ``code``."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class Publisher:
    """Encodes, keeps and commits versions; the machine that orders it is ``pulsenet.node.trainer``."""

    def __init__(
        self, store: Store, spool_directory: Path, *, codec: str = "auto", run_blocks: RunBlocks = map
    ) -> None:
        """
        Args:
            store: Where blobs, records and state are kept.
            spool_directory: Emptied.
            codec: A key of ``CODEC_CHOICES``.
            run_blocks: ``map``, or an executor's ``map`` to use several cores.
        """
        self._store = store
        self._spools = SpoolDirectory(spool_directory)
        self._codec = codec
        self._run_blocks = run_blocks
        self._mutex = threading.Lock()
        self._snapshots_mutex = threading.Lock()
        self._snapshots: dict[int, _Snapshot] = {}
        self._baseline: Weights | None = None

    @property
    def committed(self) -> HeldVersion | None:
        """The version the next patch is made against."""
        baseline = self._baseline
        return None if baseline is None else baseline.held

    def restore(self) -> Version | None:
        """Rebuild the baseline after a restart; ``None`` if nothing was committed or the store has no way there.

        Raises:
            StorageError: No memory, or the disk failed.
        """
        data = self._store.state(STATE_KEY)
        if data is None:
            return None
        with self._mutex:
            try:
                target = HeldVersion.decode(data)
                self._baseline = rebuild(self._store, target, name=MEMORY_NAME, run_blocks=self._run_blocks)
            except UnavailableError:
                return None
            return target.version

    def offer(self, generation: int, table: ParameterTable, region: Region) -> None:
        """Take an immutable snapshot over, to be encoded or dropped."""
        with self._snapshots_mutex:
            self._snapshots[generation] = _Snapshot(table, region)

    def drop(self, generation: int) -> None:
        """Let go of a snapshot that will not be published; an unknown one is no error."""
        with self._snapshots_mutex:
            snapshot = self._snapshots.pop(generation, None)
        if snapshot is not None:
            snapshot.close()

    def encode_snapshot(self, effect: EncodeSnapshot) -> PatchEncoded | EncodeFailed:
        """Encode an offered snapshot into the store; on failure it is dropped and nothing is left behind."""
        with self._mutex:
            try:
                snapshot = self._snapshots.get(effect.generation)
                if snapshot is None:
                    raise PublishFailedError("no_snapshot")
                if effect.kind is Kind.ANCHOR:
                    return self._encode_anchor(effect.generation, snapshot)
                return self._encode_patch(effect.generation, snapshot)
            except PulsenetError as error:
                self.drop(effect.generation)
                return EncodeFailed(effect.generation, _reason(error))

    def store_anchor(self, effect: StoreAnchor) -> AnchorStored | ExtraFailed:
        """Write the committed version as an anchor."""
        with self._mutex:
            try:
                baseline = self._require_baseline(effect.version)
                chunk_list = self._write_anchor(baseline.table, baseline.region)
            except PulsenetError as error:
                return ExtraFailed(effect.version, _reason(error))
            return AnchorStored(effect.version, chunk_list.blob_id, chunk_list.size_bytes)

    def encode_skip(self, effect: EncodeSkip) -> SkipEncoded | ExtraFailed:
        """Write one patch that spans several versions, ending at the committed one."""
        with self._mutex:
            try:
                return self._encode_skip(effect)
            except PulsenetError as error:
                return ExtraFailed(effect.version, _reason(error))

    def commit(self, effect: Commit) -> Committed | EncodeFailed | ExtraFailed:
        """Make records and state durable in one transaction; if it names a snapshot, the baseline moves to it."""
        with self._mutex:
            try:
                self._check_servable(effect)
                if effect.generation is None:
                    self._store.commit(effect.records, effect.state)
                else:
                    self._commit_snapshot(effect, effect.generation)
            except PulsenetError as error:
                if effect.generation is None:
                    return ExtraFailed(effect.version, _reason(error))
                self.drop(effect.generation)
                return EncodeFailed(effect.generation, _reason(error))
            return Committed(effect.version)

    def close(self) -> None:
        """Let go of all memory and spools."""
        with self._snapshots_mutex:
            generations = list(self._snapshots)
        for generation in generations:
            self.drop(generation)
        with self._mutex:
            if self._baseline is not None:
                self._baseline.region.close()
                self._baseline = None
            self._spools.clear()

    # Inside

    def _encode_anchor(self, generation: int, snapshot: _Snapshot) -> PatchEncoded:
        snapshot.drop_spool()
        snapshot.hashes = hash_tensors(snapshot.table, snapshot.region.bytes, run_blocks=self._run_blocks)
        chunk_list = self._write_anchor(snapshot.table, snapshot.region)
        return self._encoded(generation, snapshot, chunk_list, anchor.CODEC_ID, snapshot.table.element_count)

    def _encode_patch(self, generation: int, snapshot: _Snapshot) -> PatchEncoded:
        baseline = self._baseline
        if baseline is None:
            raise PublishFailedError("no_baseline")
        if snapshot.table.digest != baseline.held.table_digest:
            raise PublishFailedError("structure")
        table, old, new = snapshot.table, baseline.region.bytes, snapshot.region.bytes
        totals = PatchTotals()
        pieces = encode_patch(table, old, new, codec=self._codec, totals=totals, run_blocks=self._run_blocks)
        chunk_list = self._write_patch(pieces)
        try:
            snapshot.drop_spool()
            snapshot.spool = self._read_back(chunk_list, baseline, snapshot)
            snapshot.hashes = hash_tensors(table, new, run_blocks=self._run_blocks)
        except PulsenetError:
            self._store.discard_blob(chunk_list.blob_id)
            raise
        return self._encoded(generation, snapshot, chunk_list, totals.codec_id, totals.changed_count)

    def _encoded(
        self, generation: int, snapshot: _Snapshot, chunk_list: ChunkList, codec_id: int, changed_count: int
    ) -> PatchEncoded:
        assert snapshot.hashes is not None
        return PatchEncoded(
            generation=generation,
            blob_id=chunk_list.blob_id,
            codec_id=codec_id,
            root=compute_root(snapshot.table, snapshot.hashes),
            raw_size_bytes=snapshot.table.size_bytes,
            encoded_size_bytes=chunk_list.size_bytes,
            changed_count=changed_count,
            element_count=snapshot.table.element_count,
        )

    def _read_back(self, chunk_list: ChunkList, baseline: Weights, snapshot: _Snapshot) -> Spool:
        """Decode the patch as a receiver will, and spool it.

        Every change in it must be the snapshot's. That none is missing is not looked at: it would cost as much
        as encoding, and receivers check the root.

        Raises:
            IntegrityError: A change gives other bits than the snapshot.
            RemoteProtocolError: Our own patch does not decode.
        """
        table, old, new = snapshot.table, baseline.region.bytes, snapshot.region.bytes
        writer = self._spools.begin(table)
        changed = 0
        try:
            pieces = self._store.read_blob(chunk_list.blob_id)
            for changes in decode_patch(pieces, table, old, run_blocks=self._run_blocks):
                if (table.view(new, changes.tensor_index)[changes.indices] != changes.new_bits).any():
                    raise IntegrityError(f"the patch {short(chunk_list.blob_id)} does not give the snapshot")
                changed += len(changes)
                writer.write(changes)
            return writer.finish()
        except BaseException:
            writer.abandon()
            raise

    def _encode_skip(self, effect: EncodeSkip) -> SkipEncoded:
        baseline = self._require_baseline(effect.version)
        held = baseline.held
        route = self._spools.find_route(effect.base_version, Point(held.version, held.root))
        changes = self._compare_with(effect.base_version, baseline) if route is None else compose_spools(route)
        totals = PatchTotals()
        chunk_list = self._write_patch(encode_absolute(baseline.table, changes, totals=totals))
        return SkipEncoded(
            base_version=effect.base_version,
            version=effect.version,
            blob_id=chunk_list.blob_id,
            codec_id=totals.codec_id,
            encoded_size_bytes=chunk_list.size_bytes,
            changed_count=totals.changed_count,
        )

    def _compare_with(self, base_version: Version, baseline: Weights) -> Iterator[Changes]:
        """Rebuild an older version and compare: what spools would say, after a restart or beyond their limit."""
        roots = {
            (manifest.root, manifest.table_digest)
            for _, manifest in self._store.manifests()
            if manifest.version == base_version
        }
        if len(roots) != 1:
            raise PublishFailedError("no_base")
        root, table_digest = roots.pop()
        if table_digest != baseline.held.table_digest:
            raise PublishFailedError("structure")
        target = HeldVersion(base_version, root, table_digest)
        old = rebuild(self._store, target, name="pulsenet-skip-base", run_blocks=self._run_blocks)
        try:
            for index, spec in enumerate(baseline.table.tensors):
                before, after = (baseline.table.view(weights.region.bytes, index) for weights in (old, baseline))
                indices = find_changes(before, after).astype(spec.index_dtype, copy=False)
                if indices.size:
                    yield Changes(index, indices, before[indices], after[indices])
        finally:
            old.region.close()

    def _write_anchor(self, table: ParameterTable, region: Region) -> ChunkList:
        self._store.require_space(anchor.compute_anchor_size_bytes(table))
        with self._store.writing_blob() as writer:
            for piece in anchor.encode_anchor(table, region.bytes):
                if piece.starts_chunk:
                    writer.boundary()
                writer.feed(piece.data)
            return writer.finish()

    def _write_patch(self, pieces: Iterator[bytes]) -> ChunkList:
        with self._store.writing_blob() as writer:
            for piece in pieces:
                writer.feed(piece)
            return writer.finish()

    def _require_baseline(self, version: Version) -> Weights:
        if self._baseline is None or self._baseline.held.version != version:
            raise PublishFailedError("no_baseline")
        return self._baseline

    def _check_servable(self, effect: Commit) -> None:
        """Refuse to commit a manifest whose bytes are not all here: it could be announced but not fetched."""
        for record in effect.records:
            if record.type == Manifest.TYPE:
                blob_id = decode_value(Manifest, record.payload).blob_id
                if not self._store.is_complete(blob_id):
                    raise StorageError(f"blob {short(blob_id)} is not whole", "damaged")

    def _commit_snapshot(self, effect: Commit, generation: int) -> None:
        with self._snapshots_mutex:
            snapshot = self._snapshots.get(generation)
        if snapshot is None or snapshot.hashes is None:
            raise PublishFailedError("no_snapshot")
        held = HeldVersion(effect.version, effect.root, Digest(snapshot.table.digest))
        self._store.commit(effect.records, [*effect.state, (STATE_KEY, held.encode())])
        # Durable: from here on nothing may fail, or memory and disk would disagree.
        with self._snapshots_mutex:
            del self._snapshots[generation]
        before, self._baseline = self._baseline, Weights(snapshot.table, snapshot.region, snapshot.hashes, held)
        if before is not None:
            before.region.close()
        if before is None or snapshot.spool is None:
            self._spools.clear()
            return
        base = Point(before.held.version, before.held.root)
        size_bytes_max = int(snapshot.table.size_bytes * SPOOL_RATIO_PUBLISHER)
        self._spools.keep(base, Point(held.version, held.root), snapshot.spool, size_bytes_max=size_bytes_max)


def _reason(error: PulsenetError) -> str:
    """Return the stable code of the failure events."""
    match error:
        case PublishFailedError():
            return error.code
        case StorageError():
            return error.reason
        case UnavailableError():
            return "no_base"
        case _:
            return "encode"
