"""Where records lie in the DHT: key names, time slots and shards (SPEC section 8)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from pulsenet import limits
from pulsenet.ids import PeerId, RunId, compute_digest

_CONTEXT: Final = b"pulsenet-directory-v1\0"
_SHARD_SHIFT: Final = 8 - (limits.HAVE_SHARDS - 1).bit_length()

assert limits.HAVE_SHARDS == 1 << (8 - _SHARD_SHIFT)


@dataclass(frozen=True, slots=True)
class DirectoryKeys:
    """Names a run's keys. A private run's cannot be computed without the secret of its token."""

    run_id: RunId
    secret: bytes = b""

    def get_head_key(self, authority: PeerId, slot: int) -> bytes:
        """Return the key of one authority's head."""
        return self._get_key(b"head", authority, slot)

    def get_have_key(self, shard: int, slot: int) -> bytes:
        """Return the key of one shard of have records; each is a subkey, the node's peer id."""
        assert 0 <= shard < limits.HAVE_SHARDS
        return self._get_key(b"have", bytes([shard]), slot)

    def get_directory_name(self) -> str:
        """Return the name under which this run's nodes speak to each other in the DHT."""
        return "PulsenetDirectory" + self._get_key(b"name", b"", 0)[:8].hex()

    def _get_key(self, kind: bytes, item: bytes, slot: int) -> bytes:
        secret_digest = compute_digest(self.secret)
        return compute_digest(_CONTEXT + kind + b"\0" + self.run_id + secret_digest + slot.to_bytes(8, "little") + item)


def get_slot(now: float) -> int:
    """Return the number of the time slot that ``now`` (Unix seconds) lies in; never negative."""
    return max(0, int(now // limits.DHT_SLOT_SECONDS))


def get_read_slots(now: float) -> tuple[int, ...]:
    """Return the slots a reader asks: this one and the last."""
    slot = get_slot(now)
    return (slot, slot - 1) if slot else (slot,)


def get_accepted_slots(now: float) -> tuple[int, ...]:
    """Return the slots a storing node takes records for: one more, for writers whose clock is ahead."""
    return (get_slot(now) + 1, *get_read_slots(now))


def get_shard(peer_id: PeerId) -> int:
    """Return the shard of a node's have record: the first bits of its key's digest."""
    return compute_digest(peer_id)[0] >> _SHARD_SHIFT


def get_key_id(key: bytes) -> bytes:
    """Return the 20-byte place of a key in hivemind's key space."""
    # hivemind's own choice; nothing here rests on SHA-1 being collision-free: records are signed
    return hashlib.sha1(key, usedforsecurity=False).digest()
