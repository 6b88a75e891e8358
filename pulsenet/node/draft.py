"""Drafts of a publisher: the records of one commit, signed and not yet stored."""

from __future__ import annotations

from dataclasses import dataclass

from pulsenet.chain.records import Kind, Manifest, SignedRecord
from pulsenet.chain.signing import encode_signed, record_digest
from pulsenet.codec import anchor
from pulsenet.ids import Version
from pulsenet.node.effects import EncodeSkip, StoreAnchor
from pulsenet.node.events import AnchorStored, PatchEncoded, SkipEncoded, SnapshotOffered
from pulsenet.node.published import PublishedState, add_extra, advance
from pulsenet.node.scribe import Scribe


@dataclass(frozen=True, slots=True)
class Encoding:
    """The snapshot being encoded."""

    snapshot: SnapshotOffered
    kind: Kind


@dataclass(frozen=True, slots=True)
class Draft:
    """What becomes true with one commit."""

    generation: int | None
    """The snapshot's; ``None`` for a second way to the committed version."""
    manifest: Manifest
    signed: SignedRecord
    """The manifest as signed."""
    state: PublishedState
    epoch: SignedRecord | None = None
    """The record of the version's epoch, where the epoch is new here."""
    is_fresh: bool = False
    """Whether nothing that was committed before is part of it."""


def draft_version(
    scribe: Scribe,
    encoding: Encoding,
    encoded: PatchEncoded,
    *,
    before: PublishedState | None,
    version: Version,
    epoch: SignedRecord | None,
    term: int,
) -> Draft:
    """Sign the manifest of an encoded snapshot; where numbers were left out before ``version``, a patch is a skip.

    Args:
        before: What is committed, and what the version goes on from unless ``epoch`` opens a new epoch.
    """
    snapshot = encoding.snapshot
    within = None if epoch is not None else before
    base = None if encoding.kind is Kind.ANCHOR else within
    kind = Kind.ANCHOR
    if base is not None:
        kind = Kind.PATCH if version.number == base.version.number + 1 else Kind.SKIP
    manifest = Manifest(
        run_id=scribe.run_id,
        revision=scribe.revision,
        term=term,
        kind=kind,
        base_version=None if base is None else base.version,
        version=version,
        base_root=None if base is None else base.root,
        root=encoded.root,
        table_digest=snapshot.table_digest,
        blob_id=encoded.blob_id,
        raw_size_bytes=encoded.raw_size_bytes,
        encoded_size_bytes=encoded.encoded_size_bytes,
        changed_count=encoded.element_count if base is None else encoded.changed_count,
        element_count=encoded.element_count,
        codec_id=encoded.codec_id,
        trainer_step=snapshot.trainer_step,
        previous=None if within is None else within.previous,
        consensus=snapshot.consensus,
    )
    epoch_record = None if within is None else within.epoch_record
    if epoch is not None:
        epoch_record = encode_signed(epoch)
    signed = scribe.seal(manifest)
    after = advance(before, manifest, record_digest(signed), epoch_record)
    return Draft(snapshot.generation, manifest, signed, after, epoch, is_fresh=before is None)


def draft_extra(
    scribe: Scribe,
    state: PublishedState,
    extra: EncodeSkip | StoreAnchor,
    event: SkipEncoded | AnchorStored,
    *,
    term: int,
) -> Draft | None:
    """Sign the manifest of a second way to the committed version; ``None`` if ``extra`` was not answered by this."""
    skip = event if isinstance(event, SkipEncoded) else None
    base_version = None if skip is None else skip.base_version
    asked_base = extra.base_version if isinstance(extra, EncodeSkip) else None
    if event.version != state.version or base_version != asked_base:
        return None
    manifest = Manifest(
        run_id=scribe.run_id,
        revision=scribe.revision,
        term=term,
        kind=Kind.ANCHOR if skip is None else Kind.SKIP,
        base_version=base_version,
        version=state.version,
        base_root=None if base_version is None else state.root_of(base_version),
        root=state.root,
        table_digest=state.table_digest,
        blob_id=event.blob_id,
        raw_size_bytes=state.raw_size_bytes,
        encoded_size_bytes=event.encoded_size_bytes,
        changed_count=state.element_count if skip is None else skip.changed_count,
        element_count=state.element_count,
        codec_id=anchor.CODEC_ID if skip is None else skip.codec_id,
        trainer_step=state.trainer_step,
        previous=state.previous,
        consensus=state.consensus,
    )
    signed = scribe.seal(manifest)
    return Draft(None, manifest, signed, add_extra(state, manifest, record_digest(signed)))
