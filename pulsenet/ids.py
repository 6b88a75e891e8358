"""Names of things: peers, digests, versions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from blake3 import blake3

PeerId = NewType("PeerId", bytes)
"""A peer's raw Ed25519 public key, 32 bytes. Sorting "by peer" means by these bytes."""

Digest = NewType("Digest", bytes)
"""BLAKE3 of immutable bytes, 32 bytes."""

RunId = NewType("RunId", bytes)
"""Digest of the run's genesis descriptor, 32 bytes."""

PEER_ID_SIZE_BYTES = 32
DIGEST_SIZE_BYTES = 32


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """One exact set of compute weights. The number never falls, across epochs too."""

    epoch: int
    number: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.number}"


def compute_digest(data: bytes | bytearray | memoryview) -> Digest:
    """Return the BLAKE3 digest of ``data``."""
    return Digest(blake3(data).digest())


def short(identifier: bytes) -> str:
    """Return the first eight hexadecimal digits, for people to read."""
    return identifier[:4].hex()
