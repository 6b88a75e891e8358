"""Drafts of a publisher: the records of one commit, signed and not yet stored."""

from __future__ import annotations

from dataclasses import dataclass

from pulsenet.chain.records import Kind, Manifest, SignedRecord
from pulsenet.chain.signing import encode_signed, record_digest
from pulsenet.chain.trust import Trust
from pulsenet.codec import anchor
from pulsenet.ids import Version
from pulsenet.node.effects import EncodeSkip, StoreAnchor
from pulsenet.node.events import AnchorStored, PatchEncoded, SkipEncoded, SnapshotOffered
from pulsenet.node.published import (
    PublishedState,
    add_extra,
    advance,
    describe_extra,
    describe_snapshot,
)
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
    trust: Trust,
    encoding: Encoding,
    encoded: PatchEncoded,
    *,
    before: PublishedState | None,
    version: Version,
    epoch: SignedRecord | None,
    term: int,
) -> Draft:
    """Sign the manifest of an encoded snapshot.

    Args:
        before: What is committed, and what the version goes on from unless ``epoch`` opens a new epoch.
    """
    snapshot = encoding.snapshot
    within = None if epoch is not None else before
    manifest = describe_snapshot(
        encoded,
        run_id=trust.run_id,
        revision=scribe.revision,
        term=term,
        version=version,
        table_digest=snapshot.table_digest,
        trainer_step=snapshot.trainer_step,
        base=None if encoding.kind is Kind.ANCHOR else within,
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
    trust: Trust,
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
    manifest = describe_extra(
        state,
        run_id=trust.run_id,
        revision=scribe.revision,
        term=term,
        base_version=base_version,
        blob_id=event.blob_id,
        encoded_size_bytes=event.encoded_size_bytes,
        changed_count=state.element_count if skip is None else skip.changed_count,
        codec_id=anchor.CODEC_ID if skip is None else skip.codec_id,
    )
    signed = scribe.seal(manifest)
    return Draft(None, manifest, signed, add_extra(state, manifest, record_digest(signed)))
