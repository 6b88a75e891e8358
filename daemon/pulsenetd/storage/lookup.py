"""The store as core machines look things up in it."""

from __future__ import annotations

from pulsenet.chain.records import Manifest
from pulsenet.ids import Digest
from pulsenetd.storage.store import Store


class StoreLookup:
    """Implements :class:`pulsenet.node.fetch.StoreIndex`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def has_chunk(self, digest: Digest) -> bool:
        """Say whether a chunk is durable."""
        return self._store.has_chunk(digest)

    def chunk_list(self, blob_id: Digest) -> bytes | None:
        """Return a blob's encoded chunk list."""
        return self._store.chunk_list_bytes(blob_id)

    def record(self, digest: Digest) -> bytes | None:
        """Return an encoded signed record."""
        return self._store.record(digest)


def find_lacking(store: Store) -> list[Digest]:
    """Return the blobs that a stored manifest names and that are not whole."""
    return [manifest.blob_id for _, manifest in store.manifests() if not store.is_complete(manifest.blob_id)]


def find_stored(store: Store) -> dict[Digest, Manifest]:
    """Return the manifests whose blobs are whole in the store."""
    return {digest: manifest for digest, manifest in store.manifests() if store.is_complete(manifest.blob_id)}
