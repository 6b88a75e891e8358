"""The publisher's pipeline: from the parts of a snapshot to durable blobs, and the baseline that moves at the commit.

Each part is compared with the baseline, encoded, stored and let go while the next one arrives. The baseline is this
process's own memory; what a patch changes is spooled, and written into it once the commit is durable. Whatever fails
before leaves baseline and store as they were. After a restart the baseline is rebuilt from the newest anchor and the
patches in the store.

Methods take an effect and return the event that answers it. All block, and take turns: the memory is the baseline
and what has arrived and is not encoded yet.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from pulsenet.chain.records import Kind, Manifest
from pulsenet.codec import anchor
from pulsenet.codec.changes import Bits, Changes, apply_changes
from pulsenet.codec.compare import find_changes
from pulsenet.codec.patch import (
    PatchTotals,
    RunBlocks,
    TensorPair,
    encode_absolute,
    encode_parts,
    is_beyond_budget,
    resolve_codec,
)
from pulsenet.errors import PulsenetError, StorageError, UnavailableError
from pulsenet.ids import Digest, Version, short
from pulsenet.local.protocol import Origin
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
from pulsenet.tensors.digest import compute_root, hash_tensor
from pulsenet.tensors.params import ParameterTable
from pulsenet.wire.chunks import ChunkList
from pulsenet.wire.schema import decode_value
from pulsenetd.logs import logger
from pulsenetd.snapshots import SPOOL_RATIO_PUBLISHER, CheckedSpool, Snapshot
from pulsenetd.storage.filling import Filler, WholePart
from pulsenetd.storage.parts import PartQueue, PublishFailedError
from pulsenetd.storage.rebuild import HeldVersion, Weights, hash_tensors, load_anchor, rebuild, rebuild_last, replay
from pulsenetd.storage.spools import Point, SpoolDirectory, compose_spools
from pulsenetd.storage.store import Store

STATE_KEY: Final = "baseline"
"""Where the store keeps what was committed last: the target of a rebuild."""

MEMORY_NAME: Final = "pulsenet-baseline"

BASELINE_FAULTS: Final = frozenset({"other_base", "bad_changes", "encode"})
"""Failures after which a process that keeps a device baseline is asked for whole parts."""


class Publisher:
    """Encodes, keeps and commits versions; the machine that orders it is ``pulsenet.node.trainer``."""

    def __init__(
        self,
        store: Store,
        spool_directory: Path,
        *,
        codec: str = "auto",
        cpu_seconds_max: float = math.inf,
        run_blocks: RunBlocks = map,
    ) -> None:
        """
        Args:
            store: Where blobs, records and state are kept.
            spool_directory: Emptied.
            codec: A key of ``CODEC_CHOICES``.
            cpu_seconds_max: Processor time that encoding a version may take with *auto*: beyond it patches are *plain*.
            run_blocks: ``map``, or an executor's ``map`` to use several cores.
        """
        self._store = store
        self._spools = SpoolDirectory(spool_directory)
        self._codec = codec
        self._cpu_seconds_max = cpu_seconds_max
        self._run_blocks = run_blocks
        self._mutex = threading.Lock()
        self._snapshots_mutex = threading.Lock()
        self._snapshots: dict[int, Snapshot] = {}
        self._baseline: Weights | None = None
        self._origin: Origin | None = None
        """The hand-over the baseline came from, if its process keeps a device baseline."""
        self.waited_seconds = 0.0
        """How long the last encoding stood idle for want of a part."""

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
        with self._mutex:
            self._baseline = rebuild_last(self._store, STATE_KEY, name=MEMORY_NAME, run_blocks=self._run_blocks)
            return None if self._baseline is None else self._baseline.held.version

    def offer(self, generation: int, parts: PartQueue) -> None:
        """Take a snapshot over, to be encoded or dropped; its parts may come later, from the base it is told here."""
        with self._snapshots_mutex:
            parts.base_number = self._find_base(parts)
            self._snapshots[generation] = Snapshot(parts)

    def drop(self, generation: int) -> None:
        """Let go of a snapshot that will not be published; an unknown one is no error."""
        with self._snapshots_mutex:
            snapshot = self._snapshots.pop(generation, None)
        if snapshot is not None:
            snapshot.close()

    def encode_snapshot(self, effect: EncodeSnapshot) -> PatchEncoded | EncodeFailed:
        """Encode an offered snapshot into the store as its parts arrive.

        On failure, which includes parts that never come, it is dropped and nothing is left behind. What was encoded
        as a patch may be encoded again as an anchor.
        """
        self.waited_seconds = 0.0
        with self._mutex:
            try:
                snapshot = self._snapshots.get(effect.generation)
                if snapshot is None:
                    raise PublishFailedError("no_snapshot")
                encode = self._encode_anchor if effect.kind is Kind.ANCHOR else self._encode_patch
                answer = encode(effect.generation, snapshot)
            except PulsenetError as error:
                self.drop(effect.generation)
                reason = _reason(error)
                if reason in BASELINE_FAULTS:
                    self._origin = None
                return EncodeFailed(effect.generation, reason)
            self.waited_seconds = snapshot.parts.waited_seconds
            return answer

    def store_anchor(self, effect: StoreAnchor) -> AnchorStored | ExtraFailed:
        """Write the committed version as an anchor."""
        with self._mutex:
            try:
                baseline = self._require_baseline(effect.version)
                self._check_baseline(baseline)
                views = self._views(baseline)
                chunk_list = self._write_anchor(baseline.table, views)
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
            self._lose_baseline()

    # Inside

    def _encode_anchor(self, generation: int, snapshot: Snapshot) -> PatchEncoded:
        table = snapshot.table
        if snapshot.is_read:
            views = self._views_with_spool(snapshot)
        else:
            if self._baseline is None:
                snapshot.region = Region.create(MEMORY_NAME, table.layout_size_bytes)
            views = self._read_views(snapshot)
        chunk_list = self._write_anchor(table, views)
        return self._encoded(generation, snapshot, chunk_list, anchor.CODEC_ID, table.element_count)

    def _read_views(self, snapshot: Snapshot) -> Iterator[Bits]:
        """Yield the tensors as they arrive; without a baseline, the snapshot is to become it and is copied."""
        for part in self._read_parts(snapshot):
            for index in part.tensor_indices:
                if snapshot.region is not None:
                    snapshot.table.view(snapshot.region.bytes, index)[:] = part.view(index)
                yield part.view(index)

    def _views_with_spool(self, snapshot: Snapshot) -> Iterator[Bits]:
        """Yield the tensors of a snapshot that was let go: the baseline's, with the spooled changes, one at a time."""
        baseline = self._baseline
        if baseline is None or snapshot.spool is None:
            raise PublishFailedError("no_snapshot")
        for index in range(len(baseline.table.tensors)):
            view = baseline.table.view(baseline.region.bytes, index)
            changes = snapshot.spool.read_tensor(index)
            if changes is not None:
                view = view.copy()
                apply_changes(view, changes)
            yield view

    def _encode_patch(self, generation: int, snapshot: Snapshot) -> PatchEncoded:
        baseline = self._baseline
        if baseline is None:
            raise PublishFailedError("no_baseline")
        table = snapshot.table
        if table.digest != baseline.held.table_digest:
            raise PublishFailedError("structure")
        totals = PatchTotals()
        with CheckedSpool(self._spools, table) as spooling, self._store.writing_blob() as writer:

            def read_pairs() -> Iterator[list[TensorPair]]:
                for part in self._read_parts(snapshot):
                    spooling.part = part
                    touched = [index for index in part.tensor_indices if index not in part.unchanged]
                    yield [(index, table.view(baseline.region.bytes, index), part.view(index)) for index in touched]

            for piece in encode_parts(
                table,
                read_pairs(),
                codec=resolve_codec(
                    self._codec, is_cpu_scarce=is_beyond_budget(table.element_count, self._cpu_seconds_max)
                ),
                totals=totals,
                run_blocks=self._run_blocks,
                on_changes=spooling.take,
            ):
                writer.feed(piece)
            snapshot.spool = spooling.finish()
            chunk_list = writer.finish()
        return self._encoded(generation, snapshot, chunk_list, totals.codec_id, totals.changed_count)

    def _read_parts(self, snapshot: Snapshot) -> Iterator[WholePart]:
        """Yield the parts as they arrive, with every tensor whole and hashed; each is good until the next."""
        base = self._baseline if self._is_base_of(snapshot.parts) else None
        filler = Filler(base, self._run_blocks)
        for taken in snapshot.parts.take():
            part = filler.fill(taken)
            touched = [index for index in part.tensor_indices if index not in part.unchanged]
            hashes = dict(zip(touched, self._run_blocks(hash_tensor, map(part.view, touched)), strict=True))
            for index in part.unchanged:
                assert base is not None
                hashes[index] = base.hashes[index]
            snapshot.hashes += [hashes[index] for index in part.tensor_indices]
            yield part
            # Whoever still names the part must not keep its memory while the next is waited for.
            part.close()

    def _find_base(self, parts: PartQueue) -> int | None:
        """Return which hand-over of its process an offer's changed parts may start from; ``None`` for whole parts.

        What is still to be encoded comes first: if all of it is this process's, the baseline will be too.
        """
        mine, held, baseline = parts.origin, self._origin, self._baseline
        if mine is None or held is None or baseline is None or baseline.held.table_digest != parts.table.digest:
            return None
        waiting = [snapshot.parts.origin for snapshot in self._snapshots.values()]
        if any(origin is None or origin.sender != mine.sender for origin in (held, *waiting)):
            return None
        return held.number if held.number < mine.number else None

    def _is_base_of(self, parts: PartQueue) -> bool:
        """Say whether the baseline is the base that an offer was told, or a later hand-over of the same process."""
        mine, held, baseline = parts.origin, self._origin, self._baseline
        if mine is None or held is None or parts.base_number is None or baseline is None:
            return False
        is_same = held.sender == mine.sender and baseline.held.table_digest == parts.table.digest
        return is_same and parts.base_number <= held.number < mine.number

    def _encoded(
        self, generation: int, snapshot: Snapshot, chunk_list: ChunkList, codec_id: int, changed_count: int
    ) -> PatchEncoded:
        snapshot.is_read = True
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

    def _views(self, weights: Weights) -> Iterator[Bits]:
        return (weights.table.view(weights.region.bytes, index) for index in range(len(weights.table.tensors)))

    def _check_baseline(self, baseline: Weights) -> None:
        """Hash the baseline before it is written out for joiners: it was moved record by record.

        Raises:
            PublishFailedError: It does not have its root, and is lost: the next version stands on its own.
        """
        baseline.hashes = hash_tensors(baseline.table, baseline.region.bytes, run_blocks=self._run_blocks)
        if compute_root(baseline.table, baseline.hashes) != baseline.held.root:
            self._lose_baseline()
            raise PublishFailedError("no_baseline")

    def _write_anchor(self, table: ParameterTable, views: Iterable[Bits]) -> ChunkList:
        self._store.require_space(anchor.compute_anchor_size_bytes(table))
        with self._store.writing_blob() as writer:
            writer.feed(anchor.encode_anchor_start(table).data)
            for view in views:
                for piece in anchor.encode_anchor_tensor(view):
                    if piece.starts_chunk:
                        writer.boundary()
                    writer.feed(piece.data)
                    # Views keep a part's memory: let go of it before the next is waited for.
                    del piece
                del view
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
        if snapshot is None or not snapshot.is_read:
            raise PublishFailedError("no_snapshot")
        manifests = [record for record in effect.records if record.type == Manifest.TYPE]
        if len(manifests) != 1:
            raise PublishFailedError("no_snapshot")
        manifest = decode_value(Manifest, manifests[0].payload)
        held = HeldVersion(effect.version, effect.root, Digest(snapshot.table.digest))
        self._store.commit(effect.records, [*effect.state, (STATE_KEY, held.encode())])
        # Durable: from here on nothing may fail, or memory and disk would disagree.
        with self._snapshots_mutex:
            del self._snapshots[generation]
            # Together: whoever offers meanwhile is told of this hand-over's changes either as waiting or as held.
            self._origin = snapshot.parts.origin
        try:
            self._move_baseline(snapshot, manifest, held)
        except PulsenetError as error:
            logger.warning("the committed weights are lost (%s): the next version will be an anchor", error)
            self._lose_baseline()
        finally:
            snapshot.close()

    def _move_baseline(self, snapshot: Snapshot, manifest: Manifest, held: HeldVersion) -> None:
        """Bring the baseline to what was just committed: by the spool if there is one, else from the store."""
        if snapshot.region is not None:
            assert self._baseline is None
            self._baseline = Weights(snapshot.table, snapshot.region, snapshot.hashes, held)
            snapshot.region = None
            return
        baseline = self._baseline
        assert baseline is not None
        base = Point(baseline.held.version, baseline.held.root)
        if snapshot.spool is not None:
            for changes in snapshot.spool.read_blocks():
                apply_changes(baseline.table.view(baseline.region.bytes, changes.tensor_index), changes)
        elif manifest.kind is not Kind.ANCHOR:
            replay(self._store, manifest, baseline, self._run_blocks)
        elif manifest.table_digest == baseline.held.table_digest:
            load_anchor(self._store, manifest, name=MEMORY_NAME, into=baseline)
        else:
            self._lose_baseline()
            self._baseline = baseline = load_anchor(self._store, manifest, name=MEMORY_NAME)
        baseline.hashes, baseline.held = snapshot.hashes, held
        self._keep_spool(snapshot, manifest, base)

    def _keep_spool(self, snapshot: Snapshot, manifest: Manifest, base: Point) -> None:
        if manifest.kind is Kind.ANCHOR:
            self._spools.clear()
        elif snapshot.spool is not None:
            spool, snapshot.spool = snapshot.spool, None
            size_bytes_max = int(snapshot.table.size_bytes * SPOOL_RATIO_PUBLISHER)
            self._spools.keep(base, Point(manifest.version, manifest.root), spool, size_bytes_max=size_bytes_max)

    def _lose_baseline(self) -> None:
        baseline, self._baseline = self._baseline, None
        if baseline is not None:
            baseline.region.close()
        self._spools.clear()


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
