"""What this node keeps on its shelf: whole blobs, what may be served of them, and what may go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from pulsenet.chain.records import Catalogue, CatalogueEntry, Kind, Manifest
from pulsenet.chain.retention import RetentionLimits, retained
from pulsenet.chain.trust import entry_of
from pulsenet.ids import Digest, Version
from pulsenet.node.mesh import Holdings


class Shelf:
    """Manifests whose blobs are whole here. Pure.

    Args:
        role: ``inferencer`` or ``seed``; see :func:`pulsenet.chain.retention.retained`.
        stored: What the store holds at the start.
        retention_limits: How much to keep, or ``None`` for the defaults.
    """

    def __init__(self, role: str, stored: Mapping[Digest, Manifest], retention_limits: RetentionLimits | None) -> None:
        self._role = role
        self._stored = dict(stored)
        self._limits = self._whole_limits = retention_limits
        self._begun: dict[Digest, Manifest] = {}
        """Manifests whose blobs are being fetched, or were when they were last wanted."""
        self._lost: dict[Digest, None] = {}
        """Manifests whose blobs were here whole until the disk damaged them."""
        self._chosen: tuple[Catalogue, tuple[CatalogueEntry, ...]] | None = None

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def digests(self) -> tuple[Digest, ...]:
        """Digests of the manifests kept."""
        return tuple(self._stored)

    @property
    def newest_version(self) -> Version | None:
        """The newest version a kept blob leads to."""
        return max((manifest.version for manifest in self._stored.values()), default=None)

    @property
    def holdings(self) -> Holdings:
        """The newest unbroken stretch of patches and the anchors of the newest epoch."""
        newest = self.newest_version
        if newest is None:
            return Holdings()
        ours = [manifest for manifest in self._stored.values() if manifest.version.epoch == newest.epoch]
        numbers = {manifest.version.number for manifest in ours if manifest.kind is Kind.PATCH}
        last = first = max(numbers, default=0)
        while first - 1 in numbers:
            first -= 1
        # Two authorities may have signed one anchor, each in its term.
        anchors = tuple(sorted({manifest.version.number for manifest in ours if manifest.kind is Kind.ANCHOR}))
        return Holdings(newest.epoch, first, last, anchors)

    def holds(self, digest: Digest) -> bool:
        """Say whether the blob of this manifest is on the shelf."""
        return digest in self._stored

    def begin(self, digest: Digest, manifest: Manifest) -> None:
        """A blob is on its way here: what came of it goes again if it is wanted no more before it is whole."""
        if digest not in self._stored:
            self._begun[digest] = manifest

    def add(self, digest: Digest, manifest: Manifest | None) -> None:
        """Put a whole blob on the shelf."""
        if manifest is not None:
            self._stored[digest] = manifest
            self._begun.pop(digest, None)
            self._lost.pop(digest, None)

    def lose(self, blob_id: Digest) -> None:
        """Take a blob off the shelf that the disk damaged: it is neither announced nor taken for whole any more."""
        gone = [digest for digest, manifest in self._stored.items() if manifest.blob_id == blob_id]
        for digest in gone:
            self._begun[digest] = self._stored.pop(digest)
            self._lost[digest] = None

    def note_taken(self, size_bytes: int) -> bool:
        """Leave this much of the room to others; return whether what is kept may change by that."""
        whole = self._whole_limits
        if whole is None or whole.size_bytes_max is None:
            return False
        before = self._limits
        self._limits = replace(whole, size_bytes_max=max(whole.size_bytes_max - size_bytes, 0))
        self._chosen = None
        return self._limits != before

    def choose_lost(
        self,
        catalogue: Catalogue | None,
        find: Callable[[Digest], Manifest | None],
        is_whole: Callable[[Digest], bool],
    ) -> tuple[CatalogueEntry, ...]:
        """Return what was damaged and is still named, to be fetched again; what is whole by now is put back.

        Args:
            catalogue: The newest, or ``None`` while it is not here.
            find: Returns a manifest by its digest.
            is_whole: Says whether a blob was fetched.
        """
        if catalogue is None or not self._lost:
            return ()
        named = {entry.manifest_digest: entry for entry in catalogue.entries}
        for digest in tuple(self._lost):
            manifest = find(digest)
            if digest not in named:
                del self._lost[digest]
            elif manifest is not None and is_whole(manifest.blob_id):
                self.add(digest, manifest)
        return tuple(named[digest] for digest in self._lost)

    def choose_for_seed(self, catalogue: Catalogue) -> tuple[CatalogueEntry, ...]:
        """Return what a seed wants of a catalogue, newest first, patches before anchors."""
        if self._chosen is None or self._chosen[0] is not catalogue:
            keep = retained(catalogue.entries, "seed", self._limits).keep
            ordered = sorted(keep, key=lambda entry: (entry.version, entry.kind is not Kind.ANCHOR), reverse=True)
            self._chosen = (catalogue, tuple(ordered))
        return self._chosen[1]

    def release(
        self, mirror: Version | None, named: Iterable[CatalogueEntry], wanted: Collection[Digest] = ()
    ) -> tuple[tuple[Digest, ...], tuple[Digest, ...]]:
        """Take off the shelf what is no longer kept, and return the blob ids and record digests that may go.

        Args:
            mirror: Version of the mirror, which must stay rebuildable.
            named: What the newest catalogue names; a seed keeps nothing else.
            wanted: Manifests whose blobs are being fetched; of others what came in part goes too.
        """
        entries = [entry_of(manifest, digest) for digest, manifest in self._stored.items()]
        if self._role == "seed":
            keep = {entry.manifest_digest for entry in retained(named, "seed", self._limits).keep}
            going = [entry for entry in entries if entry.manifest_digest not in keep]
        else:
            going = list(retained(entries, self._role, self._limits, mirror=mirror).release)
        gone = {entry.manifest_digest: self._stored.pop(entry.manifest_digest) for entry in going}
        # What was damaged is fetched again, so what is left of it stays; a seed wants it like anything else.
        spared = {*wanted, *(() if self._role == "seed" else self._lost)}
        for digest in [digest for digest in self._begun if digest not in spared]:
            gone[digest] = self._begun.pop(digest)
        # Two manifests may name one blob: two empty patches, or an anchor of unchanged weights.
        still_used = {manifest.blob_id for manifest in (*self._stored.values(), *self._begun.values())}
        blob_ids = {manifest.blob_id for manifest in gone.values()} - still_used
        return tuple(sorted(blob_ids)), tuple(sorted(gone))
