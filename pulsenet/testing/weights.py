"""A tiny model for simulations: real table, real codec, real roots, a few kilobytes."""

from __future__ import annotations

import numpy as np

from pulsenet.chain.records import Kind, Manifest
from pulsenet.codec.changes import Changes, apply_changes, undo_changes
from pulsenet.codec.patch import PatchTotals, decode_patch, encode_patch
from pulsenet.errors import IntegrityError, PulsenetError
from pulsenet.ids import Digest, Version
from pulsenet.node.events import HopApplied, HopFailed
from pulsenet.node.machine import Draw
from pulsenet.tensors.digest import compute_region_root
from pulsenet.tensors.params import ParameterTable, TensorSpec, make_table
from pulsenet.testing.fakes import FakeStore
from pulsenet.wire.chunks import ChunkCutter, ChunkList

CHUNK_SIZE_BYTES = 256
"""Small, so that a tiny model still has many chunks."""

TABLE: ParameterTable = make_table(
    [
        TensorSpec("embed.weight", "BF16", (40, 16)),
        TensorSpec("layer.bias", "F32", (16,)),
        TensorSpec("layer.weight", "BF16", (16, 16)),
        TensorSpec("scale", "BF16", ()),
        TensorSpec("unused", "BF16", (0, 5)),
    ]
)


def make_region(draw: Draw) -> bytearray:
    """Return random weights in the dense layout of :data:`TABLE`."""
    region = bytearray(TABLE.layout_size_bytes)
    for index in range(len(TABLE.tensors)):
        view = TABLE.view(region, index)
        view[:] = np.array([draw(1 << 16) for _ in range(view.size)], dtype=view.dtype)
    return region


def change_region(region: bytearray, draw: Draw, change_count: int) -> bytearray:
    """Return a copy in which up to ``change_count`` elements have other bits."""
    changed = bytearray(region)
    for _ in range(change_count):
        view = TABLE.view(changed, draw(len(TABLE.tensors)))
        if view.size:
            view[draw(view.size)] = draw(1 << 16)
    return changed


def compute_root_of(region: bytearray) -> Digest:
    """Return the root of a region of :data:`TABLE`."""
    return compute_region_root(TABLE, region)


def store_patch(store: FakeStore, old: bytearray, new: bytearray) -> tuple[ChunkList, PatchTotals]:
    """Encode a patch into a store and return its chunk list."""
    cutter = ChunkCutter(CHUNK_SIZE_BYTES)
    totals = PatchTotals()
    for piece in encode_patch(TABLE, old, new, totals=totals):
        store.chunks.update(cutter.feed(piece))
    return _finish(store, cutter), totals


def store_anchor(store: FakeStore, region: bytearray) -> ChunkList:
    """Write an anchor into a store, chunked per tensor, and return its chunk list."""
    cutter = ChunkCutter(CHUNK_SIZE_BYTES)
    for index in range(len(TABLE.tensors)):
        store.chunks.update(cutter.feed(TABLE.view(region, index).tobytes()))
        store.chunks.update(cutter.boundary())
    return _finish(store, cutter)


def _finish(store: FakeStore, cutter: ChunkCutter) -> ChunkList:
    store.chunks.update(cutter.finish())
    store.lists[cutter.chunk_list.blob_id] = cutter.chunk_list.encode()
    return cutter.chunk_list


class FakeMirror:
    """A node's current weights: volatile, moved along one manifest at a time, undone when a root does not hold."""

    def __init__(self) -> None:
        self.region: bytearray | None = None
        self.version: Version | None = None
        self.root: Digest | None = None
        self._prepared: tuple[Digest, bytearray] | None = None
        self.prepared_count = 0
        """Hops that were decoded while they arrived."""

    def prepare(self, manifest: Manifest) -> None:
        """Decode along with the chunks of a hop; what that gives is known at :meth:`apply`."""
        assert self.region is not None
        assert (self.version, self.root) == (manifest.base_version, manifest.base_root), "prepared on other weights"
        self._prepared = (manifest.blob_id, self.region)

    def drop_preparation(self) -> None:
        """Forget what was prepared."""
        self._prepared = None

    def apply(self, manifest: Manifest, store: FakeStore) -> HopApplied | HopFailed:
        """Apply a hop whose blob is whole in ``store``."""
        before, prepared = self.region, self._prepared
        self._prepared = None
        if prepared is not None and prepared[0] == manifest.blob_id:
            # Whoever ordered it must not have let the mirror move meanwhile.
            assert prepared[1] is before
            self.prepared_count += 1
        try:
            region = (
                self._load_anchor(manifest, store) if manifest.kind is Kind.ANCHOR else self._patch(manifest, store)
            )
        except PulsenetError as error:
            reason = "base_mismatch" if isinstance(error, IntegrityError) else "decode"
            assert self.region is before
            return HopFailed(manifest.version, reason, self.version)
        if compute_root_of(region) != manifest.root:
            return HopFailed(manifest.version, "root_mismatch", self.version)
        self.region, self.version, self.root = region, manifest.version, manifest.root
        return HopApplied(manifest.version, manifest.root)

    def flip_bit(self, draw: Draw) -> None:
        """Damage one bit, as bad memory would."""
        assert self.region is not None
        view = TABLE.view(self.region, 0)
        view[draw(view.size)] ^= 1 << draw(16)

    def _load_anchor(self, manifest: Manifest, store: FakeStore) -> bytearray:
        data = b"".join(store.read_blob(manifest.blob_id))
        region = bytearray(TABLE.layout_size_bytes)
        if len(data) != TABLE.size_bytes:
            raise IntegrityError(f"an anchor of {len(data)} bytes for a table of {TABLE.size_bytes}")
        start = 0
        for offset, spec in zip(TABLE.offsets, TABLE.tensors, strict=True):
            region[offset : offset + spec.size_bytes] = data[start : start + spec.size_bytes]
            start += spec.size_bytes
        return region

    def _patch(self, manifest: Manifest, store: FakeStore) -> bytearray:
        if self.region is None or self.version != manifest.base_version:
            raise IntegrityError(f"the mirror holds {self.version}, the patch is on {manifest.base_version}")
        region = bytearray(self.region)
        spool: list[Changes] = []
        for changes in decode_patch(store.read_blob(manifest.blob_id), TABLE, region):
            apply_changes(TABLE.view(region, changes.tensor_index), changes)
            spool.append(changes)
        if compute_root_of(region) == manifest.root:
            return region
        # The result is wrong: undoing the spool must give back exactly what was there.
        for changes in reversed(spool):
            undo_changes(TABLE.view(region, changes.tensor_index), changes)
        assert region == self.region
        raise IntegrityError(f"the patch to {manifest.version} did not give its root")
