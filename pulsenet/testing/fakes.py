"""Stand-ins for chance, keys, disk and directory, all deterministic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from blake3 import blake3

from pulsenet.chain.records import Descriptor, EpochRecord, Manifest, SignedRecord
from pulsenet.chain.signing import Sign, decode_signed, encode_signed, record_digest, seal
from pulsenet.ids import Digest, PeerId, compute_digest
from pulsenet.node.effects import Effect, Release, SaveState, StoreChunkList, StoreRecord
from pulsenet.node.holdings import Given
from pulsenet.node.published import HEAD_KEY
from pulsenet.node.respond import Push
from pulsenet.wire.chunks import ChunkList
from pulsenet.wire.messages import PeerAddress
from pulsenet.wire.schema import decode_value

_MASK = (1 << 64) - 1

Kind = TypeVar("Kind")
"""A kind of effect."""


class Chance:
    """A seeded source of integers (SplitMix64): the same seed gives the same run on every machine."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def __call__(self, count: int) -> int:
        """Return an integer from 0 to ``count - 1``."""
        assert count >= 1
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return (mixed ^ (mixed >> 31)) % count

    def happens(self, per_mille: int) -> bool:
        """Return ``True`` in ``per_mille`` of 1,000 cases."""
        return self(1000) < per_mille

    def between(self, low: float, high: float) -> float:
        """Return a number from ``low`` to ``high`` in a million steps."""
        return low + (high - low) * self(1_000_001) / 1_000_000

    def fork(self) -> Chance:
        """Return an independent source, so that one part's draws do not shift another's."""
        return Chance(self(1 << 62))


def make_key(name: str) -> PeerId:
    """Return the key that a peer of this name has in every simulation."""
    return PeerId(compute_digest(b"simulated key of " + name.encode()))


def make_sign(peer_id: PeerId) -> Sign:
    """Return a signer for a simulated key: anybody could forge it, and no simulated peer does."""
    return lambda message: blake3(b"signature" + peer_id + message).digest(length=64)


def verify(peer_id: PeerId, message: bytes, signature: bytes) -> bool:
    """Check a simulated signature."""
    return make_sign(peer_id)(message) == signature


def make_descriptor(authorities: Iterable[PeerId], trainers: Iterable[PeerId] = (), **changes: Any) -> Descriptor:
    """Return the first descriptor of a run; without rounds, unless ``changes`` say otherwise."""
    fields: dict[str, Any] = {
        "name": "simulated",
        "nonce": bytes(16),
        "revision": 0,
        "previous": None,
        "owners": (make_key("owner"),),
        "owner_threshold": 1,
        "authorities": tuple(sorted(authorities)),
        "trainers": tuple(sorted(trainers)),
        "inferencers": (),
        "open_trainers_max": 0,
        "open_inferencers_max": 0,
        "private": False,
        "table_digest": None,
        "base_root": None,
        "base_blob_id": None,
        "algorithm": "none",
        "constants": (),
        "publish_interval_min_ms": 0,
        "anchor_interval": 10,
        "wire_version_min": 1,
        "wire_version_max": 1,
    }
    return Descriptor(**fields | changes)


def make_genesis(authorities: Iterable[PeerId], trainers: Iterable[PeerId], **changes: Any) -> SignedRecord:
    """Return such a descriptor, signed by the owner of all simulated runs."""
    owner = make_key("owner")
    return seal(make_descriptor(authorities, trainers, **changes), make_sign(owner), owner)


@dataclass
class FakeStore:
    """A disk: what is in it survives a crash; chunks being written do not reach it.

    It offers the look-ups of :class:`pulsenet.node.fetch.StoreIndex`, and is what the serving rule reads of a node
    without a mesh.
    """

    records: dict[Digest, bytes] = field(default_factory=dict)
    lists: dict[Digest, bytes] = field(default_factory=dict)
    chunks: dict[Digest, bytes] = field(default_factory=dict)
    state: dict[str, bytes] = field(default_factory=dict)
    descriptor_records: dict[int, bytes] = field(default_factory=dict)
    epoch_records: dict[int, bytes] = field(default_factory=dict)
    given: Given = field(default_factory=Given)

    def put_record(self, record: SignedRecord) -> None:
        """Keep a record under its digest; descriptors and epochs also under their numbers."""
        data = encode_signed(record)
        self.records[record_digest(record)] = data
        if record.type == Descriptor.TYPE:
            self.descriptor_records[decode_value(Descriptor, record.payload).revision] = data
        elif record.type == EpochRecord.TYPE:
            self.epoch_records[decode_value(EpochRecord, record.payload).epoch] = data

    def keep(self, effects: Iterable[Effect]) -> None:
        """Carry out what is ordered of a disk, but for chunks; other orders are passed over."""
        for effect in effects:
            match effect:
                case StoreRecord(record):
                    self.put_record(record)
                case StoreChunkList(blob_id, data):
                    self.lists[blob_id] = data
                case SaveState(key, value):
                    self.state[key] = value
                case Release(blob_ids, record_digests):
                    self.release(blob_ids, record_digests)

    def release(self, blob_ids: tuple[Digest, ...], record_digests: tuple[Digest, ...]) -> None:
        """Drop blobs and records; a chunk goes when no blob left uses it."""
        for digest in record_digests:
            self.records.pop(digest, None)
        going = {d for blob_id in blob_ids if blob_id in self.lists for d in self.digests_of(self.lists.pop(blob_id))}
        used = {digest for data in self.lists.values() for digest in self.digests_of(data)}
        for digest in going - used:
            self.chunks.pop(digest, None)

    def read_blob(self, blob_id: Digest) -> Iterator[bytes]:
        """Yield a whole blob's chunks in order."""
        for _, digest in ChunkList.decode(self.lists[blob_id]).entries:
            yield self.chunks[digest]

    def holds_blob(self, blob_id: Digest) -> bool:
        """Say whether list and chunks are all here."""
        data = self.lists.get(blob_id)
        return data is not None and all(digest in self.chunks for digest in self.digests_of(data))

    def manifests(self) -> dict[Digest, Manifest]:
        """Return the stored manifests whose blobs are whole."""
        found: dict[Digest, Manifest] = {}
        for digest, data in self.records.items():
            signed = decode_signed(data)
            if signed.type == Manifest.TYPE:
                manifest = decode_value(Manifest, signed.payload)
                if self.holds_blob(manifest.blob_id):
                    found[digest] = manifest
        return found

    def has_chunk(self, digest: Digest) -> bool:
        return digest in self.chunks

    def chunk(self, digest: Digest) -> bytes | None:
        if digest in self.chunks:
            self.given.note(digest)
        return self.chunks.get(digest)

    def was_given(self, digest: Digest) -> bool:
        return digest in self.given

    def chunk_list(self, blob_id: Digest) -> bytes | None:
        return self.lists.get(blob_id)

    def chunk_list_slice(self, blob_id: Digest, offset: int, size_bytes: int) -> tuple[int, bytes] | None:
        data = self.lists.get(blob_id)
        return None if data is None else (len(data), data[offset : offset + size_bytes])

    def record(self, digest: Digest) -> bytes | None:
        return self.records.get(digest)

    def newest_head(self) -> bytes | None:
        return self.state.get(HEAD_KEY)

    def descriptors(self, revision_min: int) -> Iterator[bytes]:
        return iter([data for number, data in sorted(self.descriptor_records.items()) if number >= revision_min])

    def epochs(self, epoch_min: int) -> Iterator[bytes]:
        return iter([data for number, data in sorted(self.epoch_records.items()) if number >= epoch_min])

    def have(self) -> bytes | None:
        return None

    def neighbours(self) -> Sequence[PeerAddress]:
        return ()

    def push_verdict(self, push: Push) -> str:
        return "untrusted"

    @staticmethod
    def digests_of(data: bytes) -> tuple[Digest, ...]:
        """Return the chunks an encoded list names."""
        return ChunkList.decode(data).digests


def only(effects: Iterable[Effect], kind: type[Kind]) -> list[Kind]:
    """Return the effects of one kind."""
    return [effect for effect in effects if isinstance(effect, kind)]


@dataclass
class FakeDirectory:
    """The DHT as the core sees it: the newest record of each key, under its signer."""

    heads: dict[PeerId, bytes] = field(default_factory=dict)
    haves: dict[PeerId, bytes] = field(default_factory=dict)

    def put(self, shelf: dict[PeerId, bytes], record: SignedRecord) -> None:
        """Keep a record under its signer's key."""
        shelf[record.signers[0]] = encode_signed(record)
