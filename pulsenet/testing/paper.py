"""Weights that exist on paper only: blobs of any size and no content, for measuring how they spread.

Everything up to the codec is real: manifests, chunk lists, chunks of their true size, digests. A blob that is whole
counts as applied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pulsenet import limits
from pulsenet.chain.records import Kind, Manifest
from pulsenet.ids import Digest, Version, compute_digest
from pulsenet.node.effects import ApplyHop, EncodeSkip, EncodeSnapshot, StoreAnchor
from pulsenet.node.events import Event, ExtraFailed, HopApplied, HopFailed, PatchEncoded
from pulsenet.testing.fakes import FakeStore
from pulsenet.testing.hands import ANCHOR_CODEC_ID, Hands, Work
from pulsenet.testing.weights import FakeMirror
from pulsenet.wire.chunks import ChunkList

PATCH_CODEC_ID = 1


@dataclass(frozen=True, slots=True)
class PaperSizes:
    """How large blobs are, in bytes."""

    anchor: int = 1_000
    patch: int = 100_000_000
    chunk: int = limits.CHUNK_SIZE_BYTES


class PaperMirror(FakeMirror):
    """A mirror that holds a version and no weights."""

    def prepare(self, manifest: Manifest) -> None:
        """Nothing is decoded."""

    def take(self, manifest: Manifest, store: FakeStore) -> HopApplied | HopFailed:
        """Move to a manifest's version if its blob is whole."""
        if not store.holds_blob(manifest.blob_id):
            return HopFailed(manifest.version, "decode", self.version)
        self.version, self.root = manifest.version, manifest.root
        return HopApplied(manifest.version, manifest.root)


class PaperHands(Hands):
    """The workers of a node that follows or publishes weights on paper.

    Args:
        store: The node's disk.
        sizes: Sizes of what it publishes.
        note_version: As in :class:`Hands`.
    """

    def __init__(self, store: FakeStore, sizes: PaperSizes, *, note_version: Callable[[Version, Digest], None]) -> None:
        super().__init__(store, engine_fails=lambda: False, note_version=note_version)
        self._paper = PaperMirror()
        self.mirror = self._paper
        self._sizes = sizes

    def rebuild_mirror(self) -> None:
        """Take the newest whole version the store leads to."""
        newest = max(self.store.manifests().values(), key=lambda manifest: manifest.version, default=None)
        if newest is not None:
            self._paper.take(newest, self.store)

    def finish(self, work: Work) -> Event:
        """Do the work and return the event that tells of it."""
        match work:
            case ApplyHop(manifest):
                return self._paper.take(manifest, self.store)
            case EncodeSnapshot(generation, kind):
                return self._write(generation, kind)
            case StoreAnchor(version) | EncodeSkip(_, version):
                return ExtraFailed(version, "no_spool")
            case _:
                return super().finish(work)

    def _write(self, generation: int, kind: Kind) -> PatchEncoded:
        size_bytes = self._sizes.anchor if kind is Kind.ANCHOR else self._sizes.patch
        chunk_list = write_paper(self.store, size_bytes, self._sizes.chunk, name=f"{kind} {generation}")
        return PatchEncoded(
            generation=generation,
            blob_id=chunk_list.blob_id,
            codec_id=ANCHOR_CODEC_ID if kind is Kind.ANCHOR else PATCH_CODEC_ID,
            root=compute_digest(f"root {generation}".encode()),
            raw_size_bytes=2 * size_bytes,
            encoded_size_bytes=size_bytes,
            changed_count=size_bytes,
            element_count=size_bytes,
        )


def write_paper(store: FakeStore, size_bytes: int, chunk_size_bytes: int, *, name: str) -> ChunkList:
    """Write a blob of zeros into a store, each chunk headed by a name of its own, and return its chunk list."""
    entries: list[tuple[int, Digest]] = []
    for start in range(0, size_bytes, chunk_size_bytes):
        length = min(chunk_size_bytes, size_bytes - start)
        data = f"{name} {start}".encode()[:length].ljust(length, b"\0")
        digest = compute_digest(data)
        store.chunks[digest] = data
        entries.append((length, digest))
    chunk_list = ChunkList(tuple(entries))
    store.lists[chunk_list.blob_id] = chunk_list.encode()
    return chunk_list
