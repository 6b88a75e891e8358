"""Weights rebuilt from what is durable: the anchor and the patches in the store."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import xxhash

from pulsenet.chain.plan import plan_route
from pulsenet.chain.records import Catalogue, CatalogueEntry, Manifest
from pulsenet.codec.anchor import AnchorReader
from pulsenet.codec.changes import apply_changes
from pulsenet.codec.patch import RunBlocks, decode_patch
from pulsenet.errors import (
    IntegrityError,
    PatchMismatchError,
    PulsenetError,
    RemoteProtocolError,
    StorageError,
    StructureError,
    UnavailableError,
)
from pulsenet.ids import Digest, RunId, Version, short
from pulsenet.local.shared_memory import Bytes, Region
from pulsenet.tensors.digest import compute_root, hash_tensor
from pulsenet.tensors.params import ParameterTable
from pulsenet.wire.schema import decode_value, encode_value
from pulsenetd.storage.store import Store


@dataclass(frozen=True, slots=True)
class HeldVersion:
    """What a mirror or a baseline held when it was last durable: the target of a rebuild."""

    version: Version
    root: Digest
    table_digest: Digest

    def encode(self) -> bytes:
        """Return the form kept in the store's state."""
        return encode_value(self)

    @classmethod
    def decode(cls, data: bytes) -> HeldVersion:
        """Read the form kept in the store's state."""
        return decode_value(cls, data)


@dataclass(slots=True)
class Weights:
    """One whole version in memory."""

    table: ParameterTable
    region: Region
    hashes: list[bytes]
    """XXH3-128 of each tensor, in table order."""
    held: HeldVersion


def rebuild(store: Store, target: HeldVersion, *, name: str, run_blocks: RunBlocks = map) -> Weights:
    """Load the cheapest anchor and patches of the store that lead to ``target``, and check its root.

    Args:
        store: Holds the manifests and blobs.
        target: What to rebuild.
        name: Of the memory, for people who look at a process.
        run_blocks: ``map``, or an executor's ``map``.

    Raises:
        UnavailableError: The store does not hold a way there, or none of its ways gives the root.
        StorageError: No memory (reason ``memory``), or the disk failed.
    """
    usable = store.whole_manifests()
    avoid: set[Digest] = set()
    while True:
        route = _plan(target, usable, avoid)
        try:
            return _build(store, [usable[digest] for digest in route], target, name=name, run_blocks=run_blocks)
        except _HopError as error:
            # Damage that appeared only on reading: another way may still be whole.
            avoid.add(route[error.position])


def rebuild_last(store: Store, key: str, *, name: str, run_blocks: RunBlocks = map) -> Weights | None:
    """Rebuild what the store's state ``key`` says was held last; ``None`` if nothing was, or no whole way leads there.

    Raises:
        StorageError: No memory, or the disk failed.
    """
    data = store.state(key)
    if data is None:
        return None
    try:
        return rebuild(store, HeldVersion.decode(data), name=name, run_blocks=run_blocks)
    except (UnavailableError, RemoteProtocolError):
        # No way leads there, or the note of it is damaged: readers fetch an anchor, and a trainer makes one.
        return None


def _plan(target: HeldVersion, usable: dict[Digest, Manifest], avoid: set[Digest]) -> list[Digest]:
    entries = tuple(
        CatalogueEntry(
            kind=manifest.kind,
            base_version=manifest.base_version,
            version=manifest.version,
            root=manifest.root,
            manifest_digest=digest,
            encoded_size_bytes=manifest.encoded_size_bytes,
        )
        for digest, manifest in sorted(usable.items())
    )
    catalogue = Catalogue(RunId(bytes(32)), target.version.epoch, entries)
    return [entry.manifest_digest for entry in plan_route(None, target.version, catalogue, avoid=avoid)]


class _HopError(PulsenetError):
    """The hop at this position of the route cannot be used."""

    def __init__(self, position: int) -> None:
        super().__init__(f"hop {position}")
        self.position = position


def _build(
    store: Store, manifests: list[Manifest], target: HeldVersion, *, name: str, run_blocks: RunBlocks
) -> Weights:
    weights: Weights | None = None
    try:
        for position, manifest in enumerate(manifests):
            try:
                if weights is None:
                    weights = load_anchor(store, manifest, name=name)
                else:
                    replay(store, manifest, weights, run_blocks)
            except StorageError as error:
                if error.reason != "damaged":
                    raise
                raise _HopError(position) from error
            except (IntegrityError, RemoteProtocolError) as error:
                raise _HopError(position) from error
        assert weights is not None
        weights.hashes = hash_tensors(weights.table, weights.region.bytes, run_blocks=run_blocks)
        found = compute_root(weights.table, weights.hashes)
        if found != target.root:
            raise UnavailableError(f"rebuilt {target.version} has root {short(found)}, not {short(target.root)}")
        weights.held = target
        return weights
    except BaseException:
        if weights is not None:
            weights.region.close()
        raise


def replay(store: Store, manifest: Manifest, weights: Weights, run_blocks: RunBlocks) -> None:
    """Move weights along a patch whose blob is whole, without a spool; if it fails they are of no more use.

    Hashes are left as they were.

    Raises:
        PatchMismatchError: The weights are not the patch's base.
        RemoteProtocolError: The blob is no patch.
        StorageError: A chunk is missing or damaged (reason ``damaged``).
    """
    if manifest.table_digest != weights.held.table_digest or manifest.base_root != weights.held.root:
        raise PatchMismatchError(f"the hop to {manifest.version} starts from other weights")
    table, region = weights.table, weights.region.bytes
    for changes in decode_patch(store.read_blob(manifest.blob_id), table, region, run_blocks=run_blocks):
        apply_changes(table.view(region, changes.tensor_index), changes)
    weights.held = HeldVersion(manifest.version, manifest.root, manifest.table_digest)


def load_anchor(store: Store, manifest: Manifest, *, name: str, into: Weights | None = None) -> Weights:
    """Load an anchor and check its root.

    Args:
        store: Holds the blob.
        manifest: Of the anchor.
        name: Of fresh memory.
        into: Weights to overwrite instead of taking fresh memory, if their table is the anchor's; check the
            blob with :func:`check_anchor` before, because they are lost if this raises.

    Raises:
        StorageError: A chunk is missing or damaged (reason ``damaged``), or there is no memory.
        RemoteProtocolError: The blob is no anchor.
        IntegrityError: Its table or root is not the manifest's.
    """
    reader = _open_anchor(store, manifest)
    table = reader.table
    region = into.region if into is not None else Region.create(name, table.layout_size_bytes)
    try:
        for piece in reader.read_tensors():
            start = table.offsets[piece.tensor_index] + piece.offset_bytes
            region.bytes[start : start + len(piece.data)] = np.frombuffer(piece.data, np.uint8)
        hashes = hash_tensors(table, region.bytes)
        _check_root(table, hashes, manifest)
    except BaseException:
        if into is None:
            region.close()
        raise
    return Weights(table, region, hashes, HeldVersion(manifest.version, manifest.root, manifest.table_digest))


def check_anchor(store: Store, manifest: Manifest) -> ParameterTable:
    """Read an anchor through without keeping it, check its root, and return its table.

    Raises:
        StorageError: A chunk is missing or damaged (reason ``damaged``).
        RemoteProtocolError: The blob is no anchor.
        IntegrityError: Its table or root is not the manifest's.
    """
    reader = _open_anchor(store, manifest)
    hashers = [xxhash.xxh3_128() for _ in reader.table.tensors]
    for piece in reader.read_tensors():
        hashers[piece.tensor_index].update(piece.data)
    _check_root(reader.table, [hasher.digest() for hasher in hashers], manifest)
    return reader.table


def hash_tensors(
    table: ParameterTable, region: Bytes, indices: Iterable[int] | None = None, *, run_blocks: RunBlocks = map
) -> list[bytes]:
    """Return the hashes of these tensors of a region, of all in table order if ``indices`` is ``None``."""
    chosen = range(len(table.tensors)) if indices is None else indices
    return list(run_blocks(lambda index: hash_tensor(table.view(region, index)), chosen))


def _open_anchor(store: Store, manifest: Manifest) -> AnchorReader:
    reader = AnchorReader(store.read_blob(manifest.blob_id))
    if reader.table.digest != manifest.table_digest:
        raise StructureError(f"the anchor of {manifest.version} holds table {short(reader.table.digest)}")
    return reader


def _check_root(table: ParameterTable, hashes: list[bytes], manifest: Manifest) -> None:
    found = compute_root(table, hashes)
    if found != manifest.root:
        raise IntegrityError(f"the anchor of {manifest.version} has root {short(found)}, not {short(manifest.root)}")
