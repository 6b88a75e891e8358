"""A run and its keys, for machines that sign and believe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pulsenet.chain.ledger import Ledger
from pulsenet.chain.records import EpochRecord, Have, Head, SignedRecord, Vote
from pulsenet.chain.signing import add_signature, encode_signed, record_digest, seal
from pulsenet.chain.trust import Trust
from pulsenet.ids import Digest, RunId, Version, compute_digest
from pulsenet.node.machine import Seat
from pulsenet.testing.fakes import make_descriptor, make_key, make_sign, verify

START_MS = 1_800_000_000_000


class Key:
    """A simulated key: whoever has one can sign."""

    def __init__(self, seed: int) -> None:
        self.peer_id = make_key(f"key {seed}")
        self.sign = make_sign(self.peer_id)


class Run:
    """Owner, one or more authorities (the first publishes) and strangers."""

    owner, publisher, second, third, stranger = (Key(seed) for seed in range(1, 6))
    start_ms = START_MS
    verify = staticmethod(verify)

    def __init__(self, *, authorities: tuple[Key, ...] | None = None, **changes: Any) -> None:
        keys = (self.publisher,) if authorities is None else authorities
        owners = (self.owner.peer_id,)
        self.descriptor = make_descriptor((key.peer_id for key in keys), owners=owners, **changes)
        self.genesis = self.seal(self.descriptor, self.owner)
        self.run_id = RunId(record_digest(self.genesis))

    @staticmethod
    def key(seed: int) -> Key:
        return Key(seed)

    def trust(self) -> Trust:
        """What a node believes that knows the genesis and nothing else."""
        trust = Trust(self.run_id, verify)
        trust.accept_descriptor(self.genesis)
        return trust

    @staticmethod
    def seat(key: Key, trust: Trust, ledger: Ledger) -> Seat:
        """The place of a key in the run; nothing is left to chance."""
        return Seat(trust, ledger, key.peer_id, key.sign, lambda count: 0)

    def revise(self, **changes: Any) -> SignedRecord:
        """Revision 1."""
        revised = replace(self.descriptor, revision=1, previous=record_digest(self.genesis), **changes)
        return self.seal(revised, self.owner)

    @staticmethod
    def seal(record: Any, *signers: Key) -> SignedRecord:
        signed = seal(record, signers[0].sign, signers[0].peer_id)
        for key in signers[1:]:
            signed = add_signature(signed, key.sign, key.peer_id)
        return signed

    def vote(self, candidate: Key, *, term: int = 1, voter: Key | None = None) -> bytes:
        """An encoded vote: the candidate's for itself, unless another key is named."""
        return encode_signed(self.seal(Vote(self.run_id, 0, term, candidate.peer_id, None), voter or candidate))

    @staticmethod
    def digest(text: str) -> Digest:
        return compute_digest(text.encode())

    def head(self, version: Version, *, issued_at_ms: int = START_MS, key: Key | None = None, **changes: Any) -> bytes:
        """An encoded signed head, of the publisher unless another key is named."""
        fields: dict[str, Any] = {
            "run_id": self.run_id,
            "revision": 0,
            "term": 0,
            "version": version,
            "root": self.digest(f"root {version}"),
            "manifest_digest": self.digest("manifest"),
            "catalogue_digest": self.digest("catalogue"),
            "epoch_digest": None,
            "issued_at_ms": issued_at_ms,
            "valid_until_ms": issued_at_ms + 300_000,
        }
        return encode_signed(self.seal(Head(**{**fields, **changes}), key or self.publisher))

    def have(self, key: Key, *, issued_at_ms: int = START_MS, **changes: Any) -> bytes:
        """An encoded signed have record."""
        fields: dict[str, Any] = {
            "run_id": self.run_id,
            "role": "inferencer",
            "epoch": 0,
            "version_first": 1,
            "version_last": 1,
            "anchors": (1,),
            "addresses": (),
            "issued_at_ms": issued_at_ms,
        }
        return encode_signed(self.seal(Have(**{**fields, **changes}), key))

    def epoch(self, epoch: int, first_number: int, kept: Version | None = None, *, revision: int = 0) -> SignedRecord:
        """An epoch record signed by the owner."""
        root = None if kept is None else self.digest(f"root {kept}")
        return self.seal(EpochRecord(self.run_id, revision, epoch, kept, root, first_number, "restart"), self.owner)


@pytest.fixture
def run() -> Run:
    return Run()


@pytest.fixture
def make_run() -> Callable[..., Run]:
    return Run
