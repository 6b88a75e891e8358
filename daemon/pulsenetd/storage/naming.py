"""Which blobs a record stands for: what is named by none is an orphan."""

from __future__ import annotations

from typing import Final

from pulsenet.chain.records import Aggregate, Contribution, Manifest, SignedRecord, StateAnchor
from pulsenet.chain.signing import decode_signed, record_digest
from pulsenet.errors import RemoteProtocolError
from pulsenet.ids import Digest
from pulsenet.wire.chunks import ChunkList
from pulsenet.wire.schema import decode_value

Naming = Manifest | Contribution | Aggregate | StateAnchor
NAMING: Final[tuple[type[Naming], ...]] = (Manifest, Contribution, Aggregate, StateAnchor)
"""Records that name blobs."""


def find_blobs_of(record: SignedRecord) -> set[Digest]:
    """Return the blobs that a record stands for."""
    for kind in NAMING:
        if record.type == kind.TYPE:
            named: Naming = decode_value(kind, record.payload)
            return {each.blob_id for each in (named.slices if isinstance(named, Aggregate) else (named,))}
    return set()


def is_sound(digest: Digest, encoded: bytes) -> bool:
    """Return whether a stored record is what it is kept as."""
    try:
        record = decode_signed(encoded)
        find_blobs_of(record)
    except RemoteProtocolError:
        return False
    return record_digest(record) == digest


def describe_record(record: SignedRecord) -> str:
    """Return what a record stands for, for people."""
    if record.type == Manifest.TYPE:
        manifest = decode_value(Manifest, record.payload)
        return f"{manifest.kind} to {manifest.version}"
    if record.type == StateAnchor.TYPE:
        return f"state of round {decode_value(StateAnchor, record.payload).round_index}"
    if record.type == Contribution.TYPE:
        return f"contribution to round {decode_value(Contribution, record.payload).round_index}"
    return f"{record.type}"


def decode_own_list(data: bytes) -> ChunkList | None:
    """Decode a list we stored; a damaged one is treated like an absent one."""
    try:
        return ChunkList.decode(data)
    except RemoteProtocolError:
        return None
