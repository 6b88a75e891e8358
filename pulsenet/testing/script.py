"""A publisher by script: signs whatever a test wants said, true or false."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pulsenet.chain.records import (
    Catalogue,
    CatalogueEntry,
    Descriptor,
    EpochRecord,
    Head,
    Kind,
    Manifest,
    SignedRecord,
)
from pulsenet.chain.rules import Signable, entry_key
from pulsenet.chain.signing import decode_signed, encode_signed, record_digest, seal
from pulsenet.chain.trust import Trust, entry_of
from pulsenet.ids import Digest, PeerId, RunId, Version, compute_digest
from pulsenet.testing.fakes import FakeStore, make_genesis, make_key, make_sign, verify
from pulsenet.wire.chunks import ChunkCutter
from pulsenet.wire.schema import decode_value

NOW_MS = 1_700_000_000_000
"""Unix time of everything scripted, unless said otherwise."""

VALIDITY_MS = 300_000
CHUNK_SIZE_BYTES = 64


class ScriptedPublisher:
    """An authority whose store holds everything it signed; nothing here is checked, so it can lie.

    Args:
        authorities: Names of further authorities of the run.
    """

    def __init__(self, name: str = "publisher", authorities: Sequence[str] = ()) -> None:
        self.peer_id = make_key(name)
        self.owner = make_key("owner")
        self.store = FakeStore()
        keys = tuple(sorted({self.peer_id, *(make_key(other) for other in authorities)}))
        self.genesis = make_genesis(keys, keys, name="scripted")
        self.store.put_record(self.genesis)
        self.descriptor = decode_value(Descriptor, self.genesis.payload)
        self.newest_descriptor = self.genesis
        self.run_id = RunId(record_digest(self.genesis))
        self.manifests: dict[Digest, Manifest] = {}
        self.epoch: SignedRecord | None = None

    def sign(self, record: Signable, signer: PeerId | None = None) -> SignedRecord:
        """Sign a record, as the publisher unless told otherwise, and keep it."""
        key = self.peer_id if signer is None else signer
        signed = seal(record, make_sign(key), key)
        self.store.put_record(signed)
        return signed

    def make_trust(self, *, with_genesis: bool = True) -> Trust:
        """Return the trust of a newcomer to this run."""
        trust = Trust(self.run_id, verify)
        if with_genesis:
            trust.accept_descriptor(self.genesis)
        return trust

    def revise(self, authorities: tuple[PeerId, ...]) -> SignedRecord:
        """Sign the next revision of the descriptor, with these authorities."""
        revision = self.descriptor.revision + 1
        previous = record_digest(self.newest_descriptor)
        self.descriptor = replace(self.descriptor, revision=revision, previous=previous, authorities=authorities)
        self.newest_descriptor = self.sign(self.descriptor, self.owner)
        return self.newest_descriptor

    def open_epoch(self, epoch: int, kept: Version | None, first_number: int) -> SignedRecord:
        """Sign an epoch record; heads from now on name it."""
        kept_root = None if kept is None else root_of(kept)
        record = EpochRecord(self.run_id, self.descriptor.revision, epoch, kept, kept_root, first_number, "test")
        self.epoch = self.sign(record)
        return self.epoch

    def add(
        self, kind: Kind, base: Version | None, version: Version, data: bytes = b"", root: Digest | None = None
    ) -> Digest:
        """Make a blob and a manifest for it; return the manifest's digest."""
        cutter = ChunkCutter(CHUNK_SIZE_BYTES)
        self.store.chunks.update([*cutter.feed(data), *cutter.finish()])
        blob_id = cutter.chunk_list.blob_id
        self.store.lists[blob_id] = cutter.chunk_list.encode()
        count = 1000
        manifest = Manifest(
            run_id=self.run_id,
            revision=self.descriptor.revision,
            term=0,
            kind=kind,
            base_version=base,
            version=version,
            base_root=None if base is None else root_of(base),
            root=root_of(version) if root is None else root,
            table_digest=Digest(b"t" * 32),
            blob_id=blob_id,
            raw_size_bytes=2 * count,
            encoded_size_bytes=len(data),
            changed_count=count if kind is Kind.ANCHOR else min(len(data), count),
            element_count=count,
            codec_id=1,
            trainer_step=version.number,
            previous=None,
        )
        digest = record_digest(self.sign(manifest))
        self.manifests[digest] = manifest
        return digest

    def catalogue(self, digests: Sequence[Digest], epoch: int = 0) -> SignedRecord:
        """Sign a catalogue of these manifests."""
        entries: list[CatalogueEntry] = [entry_of(self.manifests[digest], digest) for digest in digests]
        return self.sign(Catalogue(self.run_id, epoch, tuple(sorted(entries, key=entry_key))))

    def head(self, digests: Sequence[Digest], at_ms: int = NOW_MS, signer: PeerId | None = None) -> bytes:
        """Sign a head over a catalogue of these manifests; the last is the newest version's."""
        manifest = self.manifests[digests[-1]]
        head = Head(
            run_id=self.run_id,
            revision=self.descriptor.revision,
            term=0,
            version=manifest.version,
            root=manifest.root,
            manifest_digest=digests[-1],
            catalogue_digest=record_digest(self.catalogue(digests, manifest.version.epoch)),
            epoch_digest=None if self.epoch is None else record_digest(self.epoch),
            issued_at_ms=at_ms,
            valid_until_ms=at_ms + VALIDITY_MS,
        )
        return encode_signed(self.sign(head, signer))

    def chain(self, anchor: int, last: int) -> list[Digest]:
        """Make an anchor and every patch from it to ``last``, a few chunks each."""
        digests = [self.add(Kind.ANCHOR, None, Version(0, anchor), make_data(f"anchor {anchor}", 300))]
        for number in range(anchor + 1, last + 1):
            base, version = Version(0, number - 1), Version(0, number)
            digests.append(self.add(Kind.PATCH, base, version, make_data(f"patch {number}", 100)))
        return digests


def root_of(version: Version) -> Digest:
    """Return the scripted root of a version."""
    return compute_digest(f"root of {version}".encode())


def make_data(name: str, size_bytes: int) -> bytes:
    """Return bytes that follow from a name."""
    block = compute_digest(name.encode())
    return (block * (size_bytes // len(block) + 1))[:size_bytes]


def break_signature(record: bytes) -> bytes:
    """Return an encoded record with one bit of its first signature flipped."""
    signed = decode_signed(record)
    first = bytes([signed.signatures[0][0] ^ 1]) + signed.signatures[0][1:]
    return encode_signed(replace(signed, signatures=(first, *signed.signatures[1:])))
