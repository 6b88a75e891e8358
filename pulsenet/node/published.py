"""What a publisher has committed, and the records that say so: pure values, no machine.

A :class:`PublishedState` is everything a publisher needs to go on after a restart. It is saved in the same
transaction as the records it names, so the two never disagree.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated

from pulsenet import limits
from pulsenet.chain.records import Catalogue, CatalogueEntry, Kind, Manifest
from pulsenet.chain.retention import due_skip_bases, is_anchor_due, retained
from pulsenet.chain.rules import entry_key
from pulsenet.chain.signing import decode_signed, record_digest
from pulsenet.chain.trust import entry_of
from pulsenet.errors import RemoteProtocolError, StorageError
from pulsenet.ids import Digest, RunId, Version
from pulsenet.node.effects import EncodeSkip, StoreAnchor
from pulsenet.wire.schema import LATER, CountMax, SizeMax, decode_value, encode_value

STATE_KEY = "publisher"
"""Name of the saved state among the node's durable values."""

HEAD_KEY = "head"
"""Name of the newest head among the node's durable values, an encoded signed record."""

CATALOGUES_KEPT = 4
"""Catalogues kept for requesters that still hold an older head of the same few seconds."""

ANCHOR_INTERVAL_MAX = 400
"""Two anchors this far apart, the patches since the older and their skips fit one catalogue."""

TERM_NONE = 0
"""In a run without rounds one authority publishes and no coordinator is elected."""


@dataclass(frozen=True, slots=True)
class Retained:
    """One manifest the publisher keeps, and the blob behind it."""

    entry: CatalogueEntry
    blob_id: Digest


@dataclass(frozen=True, slots=True)
class PublishedState:
    """The committed state of a publisher."""

    version: Version
    root: Digest
    table_digest: Digest
    manifest_digest: Digest
    """The manifest by which ``version`` came to be; heads name it."""
    previous: Digest
    """The manifest published last, extras included; the next one names it."""
    epoch_record: Annotated[bytes, SizeMax(limits.RECORD_SIZE_BYTES_MAX)] | None
    """The encoded signed record of the version's epoch; ``None`` in epoch 0."""
    unbroken_from: int
    """First number since which every version followed by a patch or skip: further skips may start from it."""
    raw_size_bytes: int
    element_count: int
    trainer_step: int
    retained: Annotated[tuple[Retained, ...], CountMax(limits.CATALOGUE_ENTRIES_MAX)]
    """In the order of a catalogue."""
    catalogue_digests: Annotated[tuple[Digest, ...], CountMax(CATALOGUES_KEPT)]
    """Catalogues that can be served, oldest first; the last one is named by the head."""
    consensus: bool = field(default=True, metadata=LATER)
    """As of the version's manifests."""

    def encode(self) -> bytes:
        """Return the form kept on disk."""
        return encode_value(self)

    @classmethod
    def restore(cls, data: bytes) -> PublishedState:
        """Read the form kept on disk.

        Raises:
            StorageError: ``data`` is damaged.
        """
        try:
            return decode_value(cls, data)
        except RemoteProtocolError as error:
            raise StorageError(f"the saved state of the publisher is damaged: {error}") from error

    @property
    def epoch_digest(self) -> Digest | None:
        """Digest of the epoch's record, as heads name it."""
        return None if self.epoch_record is None else record_digest(decode_signed(self.epoch_record))

    def root_of(self, version: Version) -> Digest | None:
        """Return the root this publisher gave to ``version``, while it is retained."""
        if version == self.version:
            return self.root
        return next((item.entry.root for item in self.retained if item.entry.version == version), None)

    @property
    def newest_anchor(self) -> Version | None:
        """The newest version an anchor is retained for."""
        return max((item.entry.version for item in self.retained if item.entry.kind is Kind.ANCHOR), default=None)

    @property
    def patch_range(self) -> tuple[int, int]:
        """Numbers of the first and last version a retained blob leads to; all are of the current epoch.

        What a have record states as ``version_first`` and ``version_last``.
        """
        numbers = [
            item.entry.version.number for item in self.retained if item.entry.version.epoch == self.version.epoch
        ]
        return min(numbers), max(numbers)

    @property
    def anchor_numbers(self) -> tuple[int, ...]:
        """Numbers of the retained anchors, ascending."""
        return tuple(item.entry.version.number for item in self.retained if item.entry.kind is Kind.ANCHOR)

    @property
    def blob_ids(self) -> frozenset[Digest]:
        """Blobs that must stay in the store; everything else a publisher made is an orphan."""
        return frozenset(item.blob_id for item in self.retained)

    @property
    def record_digests(self) -> frozenset[Digest]:
        """Records that must stay in the store, descriptors apart."""
        epoch_digest = self.epoch_digest
        manifests = (item.entry.manifest_digest for item in self.retained)
        epoch = () if epoch_digest is None else (epoch_digest,)
        return frozenset((*manifests, *self.catalogue_digests, *epoch, self.manifest_digest))


def keep(items: Iterable[Retained]) -> tuple[Retained, ...]:
    """Return the items a publisher keeps, in the order of a catalogue."""
    by_entry = {item.entry: item for item in items}
    verdict = retained(by_entry, "trainer")
    return tuple(by_entry[entry] for entry in sorted(verdict.keep, key=entry_key))


def advance(
    state: PublishedState | None, manifest: Manifest, manifest_digest: Digest, epoch_record: bytes | None
) -> PublishedState:
    """Return the state once ``manifest`` is committed as the newest version; its catalogue is still to come.

    A new epoch drops everything of the epochs before: no route leads across the cut.
    """
    kept = () if state is None else state.retained
    if state is not None and state.version.epoch != manifest.version.epoch:
        kept = ()
    added = Retained(entry_of(manifest, manifest_digest), manifest.blob_id)
    follows = state is not None and manifest.kind is not Kind.ANCHOR
    return PublishedState(
        version=manifest.version,
        root=manifest.root,
        table_digest=manifest.table_digest,
        manifest_digest=manifest_digest,
        previous=manifest_digest,
        epoch_record=epoch_record,
        unbroken_from=state.unbroken_from if state is not None and follows else manifest.version.number,
        raw_size_bytes=manifest.raw_size_bytes,
        element_count=manifest.element_count,
        trainer_step=manifest.trainer_step,
        retained=keep((*kept, added)),
        catalogue_digests=() if state is None else state.catalogue_digests,
        consensus=manifest.consensus,
    )


def add_extra(state: PublishedState, manifest: Manifest, manifest_digest: Digest) -> PublishedState:
    """Return the state with a second way to its version; its catalogue is still to come."""
    added = Retained(entry_of(manifest, manifest_digest), manifest.blob_id)
    return replace(state, previous=manifest_digest, retained=keep((*state.retained, added)))


def find_extras_due(
    state: PublishedState, anchor_interval: int, *, is_aligned: bool = False
) -> list[EncodeSkip | StoreAnchor]:
    """Return the second ways to the version just committed that are due: skips first, they are quickly made.

    Args:
        is_aligned: As in :func:`pulsenet.chain.retention.is_anchor_due`.
    """
    bases = due_skip_bases(state.version, state.unbroken_from)
    # Where numbers were left out, the version may have come by a skip from that base already.
    present = {item.entry.base_version for item in state.retained if item.entry.version == state.version}
    extras: list[EncodeSkip | StoreAnchor] = [
        EncodeSkip(base, state.version) for base in bases if state.root_of(base) is not None and base not in present
    ]
    interval = min(anchor_interval, ANCHOR_INTERVAL_MAX)
    if is_anchor_due(state.version, state.newest_anchor, interval, is_aligned=is_aligned):
        extras.append(StoreAnchor(state.version))
    return extras


def find_repair(state: PublishedState, blob_id: Digest) -> StoreAnchor | None:
    """Return the anchor that takes the place of a lost blob; ``None`` where newcomers need it not."""
    lost = next((item.entry for item in state.retained if item.blob_id == blob_id), None)
    anchor = state.newest_anchor
    if lost is None or lost.kind is Kind.SKIP or (anchor is not None and lost.version < anchor):
        return None
    return StoreAnchor(state.version)


def make_catalogue(state: PublishedState, run_id: RunId) -> Catalogue:
    """Return the catalogue of everything retained."""
    return Catalogue(run_id=run_id, epoch=state.version.epoch, entries=tuple(item.entry for item in state.retained))


def with_catalogue(state: PublishedState, catalogue_digest: Digest) -> PublishedState:
    """Return the state whose heads name this catalogue; the oldest one beyond the bound is let go."""
    others = tuple(digest for digest in state.catalogue_digests if digest != catalogue_digest)
    return replace(state, catalogue_digests=(*others, catalogue_digest)[-CATALOGUES_KEPT:])


def find_released(
    before: PublishedState | None, after: PublishedState
) -> tuple[tuple[Digest, ...], tuple[Digest, ...]]:
    """Return the blobs and records that ``before`` needed and ``after`` does not, each ascending."""
    if before is None:
        return (), ()
    blob_ids = before.blob_ids - after.blob_ids
    # The record of an epoch that is over stays: it proves which versions were cut.
    record_digests = before.record_digests - after.record_digests - {before.epoch_digest}
    return tuple(sorted(blob_ids)), tuple(sorted(record_digests))


def summarise(manifest: Manifest, *, is_standby: bool = False) -> str:
    """Return the operator's line about a new version."""
    what = "keeping ready" if is_standby else "published"
    changed = manifest.changed_count / max(manifest.element_count, 1)
    return (
        f"{what} version {manifest.version} as {manifest.kind}: {changed:.2%} changed, "
        f"{manifest.encoded_size_bytes} of {manifest.raw_size_bytes} bytes"
    )
