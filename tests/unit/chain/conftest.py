"""A small run with real Ed25519 keys, for the tests of what is signed and believed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from pulsenet.chain.records import (
    Catalogue,
    Descriptor,
    EpochRecord,
    Head,
    Kind,
    Manifest,
    SignedRecord,
    StateAnchor,
)
from pulsenet.chain.rules import entry_key
from pulsenet.chain.signing import add_signature, record_digest, seal
from pulsenet.chain.trust import Trust, entry_of
from pulsenet.ids import Digest, PeerId, RunId, Version, compute_digest
from pulsenet.testing.fakes import make_descriptor

NOW_MS = 1_800_000_000_000


class Key:
    """An Ed25519 key made from one byte."""

    def __init__(self, seed: int) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)
        self.peer_id = PeerId(self._key.public_key().public_bytes_raw())

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)


def verify(peer_id: PeerId, message: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(peer_id).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def digest(text: str) -> Digest:
    return compute_digest(text.encode())


class Run:
    """Owner 1, authorities 2 (the publisher) and 3, trainer 4, inferencer 5, stranger 6."""

    owner, publisher, second, trainer, inferencer, stranger = (Key(seed) for seed in range(1, 7))
    now_ms = NOW_MS

    def __init__(self, **changes: Any) -> None:
        members = {
            "owners": (self.owner.peer_id,),
            "authorities": (self.publisher.peer_id, self.second.peer_id),
            "trainers": (self.trainer.peer_id,),
            "inferencers": (self.inferencer.peer_id,),
        }
        self.descriptor = make_descriptor(**members | changes)
        self.genesis = seal(self.descriptor, self.owner.sign, self.owner.peer_id)
        self.run_id = RunId(record_digest(self.genesis))

    def trust(self, **arguments: Any) -> Trust:
        """A node that knows the genesis."""
        trust = Trust(self.run_id, verify, **arguments)
        trust.accept_descriptor(self.genesis)
        return trust

    def revise(self, before: SignedRecord, descriptor: Descriptor, *signers: Key, **changes: Any) -> SignedRecord:
        revised = replace(descriptor, revision=descriptor.revision + 1, previous=record_digest(before), **changes)
        return self.sign(revised, *(signers or (self.owner,)))

    def sign(self, record: Any, *signers: Key) -> SignedRecord:
        signed = seal(record, signers[0].sign, signers[0].peer_id)
        for key in signers[1:]:
            signed = add_signature(signed, key.sign, key.peer_id)
        return signed

    def manifest(self, number: int, **changes: Any) -> Manifest:
        """A patch from number - 1; number 1 is an anchor."""
        epoch = changes.pop("epoch", 0)
        is_anchor = changes.pop("is_anchor", number == 1)
        fields: dict[str, Any] = {
            "run_id": self.run_id,
            "revision": 0,
            "term": 0,
            "kind": Kind.ANCHOR if is_anchor else Kind.PATCH,
            "base_version": None if is_anchor else Version(epoch, number - 1),
            "version": Version(epoch, number),
            "base_root": None if is_anchor else digest(f"root {number - 1}"),
            "root": digest(f"root {number}"),
            "table_digest": digest("table"),
            "blob_id": digest(f"blob {number}"),
            "raw_size_bytes": 2000,
            "encoded_size_bytes": 2000 if is_anchor else 30,
            "changed_count": 1000 if is_anchor else 9,
            "element_count": 1000,
            "codec_id": 2,
            "trainer_step": number,
            "previous": None,
        }
        return Manifest(**{**fields, **changes})

    def catalogue(self, *manifests: Manifest, epoch: int = 0) -> Catalogue:
        entries = [entry_of(item, record_digest(self.sign(item, self.publisher))) for item in manifests]
        return Catalogue(self.run_id, epoch, tuple(sorted(entries, key=entry_key)))

    def head(self, number: int, **changes: Any) -> Head:
        epoch = changes.pop("epoch", 0)
        issued_at_ms = changes.pop("issued_at_ms", NOW_MS)
        fields: dict[str, Any] = {
            "run_id": self.run_id,
            "revision": 0,
            "term": 0,
            "version": Version(epoch, number),
            "root": digest(f"root {number}"),
            "manifest_digest": digest(f"manifest {number}"),
            "catalogue_digest": digest("catalogue"),
            "epoch_digest": None,
            "issued_at_ms": issued_at_ms,
            "valid_until_ms": issued_at_ms + 300_000,
        }
        return Head(**{**fields, **changes})

    def signed_head(self, number: int, **changes: Any) -> SignedRecord:
        return self.sign(self.head(number, **changes), self.publisher)

    def epoch(self, epoch: int, first_number: int, **changes: Any) -> EpochRecord:
        fields: dict[str, Any] = {
            "run_id": self.run_id,
            "revision": 0,
            "epoch": epoch,
            "kept_version": Version(0, first_number - 1),
            "kept_root": digest(f"root {first_number - 1}"),
            "first_number": first_number,
            "reason": "restart",
        }
        return EpochRecord(**{**fields, **changes})

    def state_anchor(self, round_index: int, outcome: Digest | None, **changes: Any) -> StateAnchor:
        """The state before a round; ``outcome`` is of the receipt that led to it."""
        fields: dict[str, Any] = {
            "run_id": self.run_id,
            "revision": 0,
            "round_index": round_index,
            "state_root": digest(f"state {round_index}"),
            "outcome": outcome,
            "blob_id": digest(f"anchor {round_index}"),
            "encoded_size_bytes": 80,
        }
        return StateAnchor(**{**fields, **changes})


@pytest.fixture
def run() -> Run:
    return Run()


@pytest.fixture
def make_run() -> Callable[..., Run]:
    return Run


@pytest.fixture
def real_verify() -> Callable[[PeerId, bytes, bytes], bool]:
    return verify
