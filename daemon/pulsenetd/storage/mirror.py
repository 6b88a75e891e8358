"""The mirror: an inferencer's copy of the current weights in shared memory, moved hop by hop, all or nothing.

A patch is first decoded to a spool, with nothing written, if possible while it arrives. Then it is written, the
touched tensors are hashed and the root is compared; if anything differs, the spool undoes it and the old root is
checked. A version is reported only after its root held and the fact is durable. After a crash the mirror is rebuilt
from the store.

All methods block; they may be called from any thread, and take turns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pulsenet import limits
from pulsenet.chain.records import Kind, Manifest
from pulsenet.codec.changes import apply_changes, undo_changes
from pulsenet.codec.patch import RunBlocks, decode_patch
from pulsenet.errors import (
    IntegrityError,
    PatchMismatchError,
    PulsenetError,
    RemoteProtocolError,
    StorageError,
    StructureError,
)
from pulsenet.ids import Digest, Version, short
from pulsenet.local.protocol import UpdateKind
from pulsenet.node.events import HopApplied, HopFailed
from pulsenet.serving.engine import name_failure
from pulsenet.tensors.digest import compute_root
from pulsenetd.storage.preparation import Preparation, can_prepare
from pulsenetd.storage.rebuild import HeldVersion, Weights, check_anchor, hash_tensors, load_anchor, rebuild_last
from pulsenetd.storage.spools import Point, Spool, SpoolDirectory, compose_spools, write_unnamed
from pulsenetd.storage.staging import Loans, StagedUpdate
from pulsenetd.storage.store import Store

STATE_KEY: Final = "mirror"
"""Where the store keeps what the mirror held: the target of a rebuild."""

MEMORY_NAME: Final = "pulsenet-mirror"


@dataclass(frozen=True, slots=True)
class HopTimes:
    """Seconds the last hop took, by stage."""

    decode_seconds: float
    """What was left of decoding once the patch was whole."""
    apply_seconds: float
    verify_seconds: float


class _TooLargeError(PulsenetError):
    """Records for an engine would exceed their share of the model."""


class Mirror:
    """Holds one version; empty until an anchor was loaded or :meth:`restore` found one."""

    def __init__(
        self,
        store: Store,
        spool_directory: Path,
        *,
        run_blocks: RunBlocks = map,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            store: Where blobs and the durable state are.
            spool_directory: Emptied; on the same disk as the store or another.
            run_blocks: ``map``, or an executor's ``map`` to decode on several cores.
            monotonic: Clock of :class:`HopTimes`.
        """
        self._store = store
        self._spools = SpoolDirectory(spool_directory)
        self._spool_directory = spool_directory
        self._run_blocks = run_blocks
        self._monotonic = monotonic
        self._mutex = threading.Lock()
        self._weights: Weights | None = None
        self._preparation: Preparation | None = None
        self.prepared_count = 0
        """Hops whose decoding was done, or begun, while they arrived."""
        self.loans = Loans()
        self.last_times: HopTimes | None = None

    @property
    def held(self) -> HeldVersion | None:
        """What the mirror holds, checked; ``None`` while it is empty or being written."""
        weights = self._weights
        return None if weights is None else weights.held

    def restore(self) -> Version | None:
        """Rebuild what the mirror held when the process ended; ``None`` if the store has no whole way there.

        Raises:
            StorageError: No memory, or the disk failed.
        """
        with self._mutex:
            self._rebuild()
            return None if self._weights is None else self._weights.held.version

    def verify(self) -> bool:
        """Hash everything; a mirror that does not have its root is lost and gives False.

        For doubt about memory this process did not write alone.
        """
        with self._mutex:
            weights = self._weights
            if weights is None:
                return False
            weights.hashes = hash_tensors(weights.table, weights.region.bytes, run_blocks=self._run_blocks)
            if compute_root(weights.table, weights.hashes) == weights.held.root:
                return True
            self._lose()
            return False

    def prepare(self, manifest: Manifest) -> None:
        """Start to decode a patch from what is held while its chunks are being stored; does nothing for other hops.

        Whatever was being prepared is dropped. The spool is used by :meth:`apply_hop`.
        """
        with self._mutex:
            self._end_preparation()
            weights = self._weights
            if weights is not None and can_prepare(manifest, weights.held):
                self._preparation = Preparation(manifest, weights, self._store, self._spools, self._run_blocks)

    def drop_preparation(self) -> None:
        """Stop preparing."""
        with self._mutex:
            self._end_preparation()

    def apply_hop(self, manifest: Manifest) -> HopApplied | HopFailed:
        """Move along one manifest whose blob is whole: to its version, or not at all.

        A preparation for another hop is dropped. If the old version cannot be brought back by undoing, it is rebuilt
        from the store; if that fails too, ``HopFailed.mirror`` is ``None``.
        """
        with self._mutex:
            if self._preparation is not None and self._preparation.manifest != manifest:
                self._end_preparation()
            old = self._weights
            try:
                if manifest.kind is Kind.ANCHOR:
                    self._load(manifest)
                else:
                    self._patch(manifest)
                return HopApplied(manifest.version, manifest.root)
            except (IntegrityError, RemoteProtocolError, StorageError) as error:
                reason = name_failure(error)
            if old is not None and self._weights is None:
                # Lost half written: its memory goes before as much is taken again. Not within the handler: until that
                # ends, the error's frames hold the memory.
                old.region.close()
                with suppress(StorageError):
                    self._rebuild()
            held = self.held
            return HopFailed(manifest.version, reason, None if held is None else held.version)

    def stage(self, engine_version: Version | None, engine_root: Digest | None = None) -> StagedUpdate | None:
        """Return what leads an engine from its version to the mirror's; ``None`` if it is there, or nothing is held.

        Records if the spools lead there and stay within ``SPOOL_RATIO_MAX`` of the model, else the mirror itself
        on loan: no hop is made until it is given back (see :class:`~pulsenetd.storage.staging.Loans`).

        Raises:
            StorageError: The disk refused the records.
        """
        with self._mutex:
            weights = self._weights
            if weights is None:
                return None
            if weights.held.version == engine_version and engine_root in (None, weights.held.root):
                return None
            if engine_version is not None:
                staged = self._stage_records(weights, engine_version, engine_root)
                if staged is not None:
                    return staged
            return StagedUpdate(
                kind=UpdateKind.FULL,
                base_version=None,
                version=weights.held.version,
                root=weights.held.root,
                table=weights.table,
                size_bytes=weights.table.layout_size_bytes,
                descriptor=weights.region.reopen_for_reading(),
                give_back=self.loans.lend(),
            )

    def close(self) -> None:
        """Let go of the memory and the spools."""
        with self._mutex:
            self._lose()
            self._spools.clear()

    # Hops

    def _rebuild(self) -> None:
        self._lose()
        self._weights = rebuild_last(self._store, STATE_KEY, name=MEMORY_NAME, run_blocks=self._run_blocks)

    def _load(self, manifest: Manifest) -> None:
        old = self._weights
        into: Weights | None = None
        if old is not None:
            # Read it through first: what is held survives a bad anchor without needing the memory twice.
            table = check_anchor(self._store, manifest)
            into = old if table == old.table else None
            self.loans.end_all()
            self._weights = None
            if into is None:
                old.region.close()
        started = self._monotonic()
        self._weights = load_anchor(self._store, manifest, name=MEMORY_NAME, into=into)
        # Reading and hashing take turns chunk by chunk, so they are not told apart.
        seconds = self._monotonic() - started
        self.last_times = HopTimes(0.0, seconds, 0.0)
        self._spools.clear()
        self._store.save_state(STATE_KEY, self._weights.held.encode())

    def _patch(self, manifest: Manifest) -> None:
        weights = self._weights
        if weights is None or (weights.held.version, weights.held.root) != (manifest.base_version, manifest.base_root):
            raise PatchMismatchError(f"the hop to {manifest.version} starts from {manifest.base_version}")
        if manifest.table_digest != weights.held.table_digest:
            raise StructureError(f"the hop to {manifest.version} has another parameter table")
        base = Point(weights.held.version, weights.held.root)
        started = self._monotonic()
        spool = self._decode(manifest, weights)
        decoded = self._monotonic()
        try:
            self.loans.end_all()
            started_writing = self._monotonic()
            applied = self._write(spool, manifest, weights)
        except BaseException:
            spool.remove()
            raise
        self.last_times = HopTimes(
            decode_seconds=decoded - started,
            apply_seconds=applied - started_writing,
            verify_seconds=self._monotonic() - applied,
        )
        size_bytes_max = int(weights.table.size_bytes * limits.SPOOL_RATIO_MAX)
        self._spools.keep(base, Point(manifest.version, manifest.root), spool, size_bytes_max=size_bytes_max)

    def _decode(self, manifest: Manifest, weights: Weights) -> Spool:
        """Return the spool of a whole patch, the one prepared if there is one; the mirror is only read."""
        preparation, self._preparation = self._preparation, None
        prepared = None if preparation is None else preparation.finish()
        if prepared is not None:
            self.prepared_count += 1
            return prepared
        writer = self._spools.begin(weights.table)
        try:
            pieces = self._store.read_blob(manifest.blob_id)
            for changes in decode_patch(pieces, weights.table, weights.region.bytes, run_blocks=self._run_blocks):
                writer.write(changes)
            return writer.finish()
        except BaseException:
            writer.abandon()
            raise

    def _write(self, spool: Spool, manifest: Manifest, weights: Weights) -> float:
        """Write, check the root and save the fact; on any failure bring the old version back, or lose the mirror.

        Returns the time when the last record was written.
        """
        table, region = weights.table, weights.region.bytes
        before, old_hashes = weights.held, list(weights.hashes)
        # Nothing is held while it is half written: whatever ends this function early leaves it so.
        self._weights = None
        try:
            for changes in spool.read_blocks():
                apply_changes(table.view(region, changes.tensor_index), changes)
            applied = self._monotonic()
            hashes = self._hash_touched(weights, spool.tensor_indices)
            found = compute_root(table, hashes)
            if found != manifest.root:
                raise IntegrityError(f"{manifest.version} came out as root {short(found)}")
            after = HeldVersion(manifest.version, manifest.root, manifest.table_digest)
            self._store.save_state(STATE_KEY, after.encode())
        except Exception:
            for changes in spool.read_blocks():
                undo_changes(table.view(region, changes.tensor_index), changes)
            restored = self._hash_touched(weights, spool.tensor_indices)
            if restored == old_hashes:
                self._weights = weights
            else:
                # The old weights were not what their root said: a flipped bit, or somebody else wrote.
                self._spools.clear()
            assert weights.held == before
            raise
        weights.hashes = hashes
        weights.held = after
        self._weights = weights
        return applied

    def _hash_touched(self, weights: Weights, tensor_indices: Sequence[int]) -> list[bytes]:
        """Return all hashes, those of the touched tensors computed anew."""
        hashes = list(weights.hashes)
        region = weights.region.bytes
        found = hash_tensors(weights.table, region, tensor_indices, run_blocks=self._run_blocks)
        for index, tensor_hash in zip(tensor_indices, found, strict=True):
            hashes[index] = tensor_hash
        return hashes

    def _stage_records(
        self, weights: Weights, engine_version: Version, engine_root: Digest | None
    ) -> StagedUpdate | None:
        held = weights.held
        route = self._spools.find_route(engine_version, Point(held.version, held.root), base_root=engine_root)
        if route is None:
            return None
        size_bytes_max = int(weights.table.size_bytes * limits.SPOOL_RATIO_MAX)

        def stop_if_large(size_bytes: int) -> None:
            if size_bytes > size_bytes_max:
                raise _TooLargeError(f"{size_bytes} bytes of records")

        try:
            descriptor, size_bytes = write_unnamed(self._spool_directory, compose_spools(route), on_size=stop_if_large)
        except (_TooLargeError, PatchMismatchError):
            return None
        except StorageError as error:
            if error.reason != "damaged":
                raise
            # A spool is a cache: what the disk lost of it is handed over from memory.
            return None
        return StagedUpdate(
            kind=UpdateKind.RECORDS,
            base_version=engine_version,
            version=held.version,
            root=held.root,
            table=weights.table,
            size_bytes=size_bytes,
            descriptor=descriptor,
            give_back=lambda: True,
        )

    def _end_preparation(self) -> None:
        preparation, self._preparation = self._preparation, None
        if preparation is not None:
            preparation.cancel()

    def _lose(self) -> None:
        self._end_preparation()
        weights, self._weights = self._weights, None
        if weights is not None:
            weights.region.close()
