"""Ten thousand junk records beside the true one, in a real DHT on loopback: it is found, and memory is bounded."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgpack
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from networks import RUN_ID, open_both, open_directory, sign_head

from pulsenet.chain.records import Have, SignedRecord
from pulsenet.chain.signing import encode_signed, seal
from pulsenet.ids import PeerId
from pulsenetd.identity import to_libp2p_bytes
from pulsenetd.network.directory import RANK_KNOWN, RANK_LISTED, SHARD_SIZE_BYTES_MAX, SUBKEYS_MAX, Directory
from pulsenetd.network.directory_keys import DirectoryKeys, get_key_id, get_shard, get_slot
from pulsenetd.network.validator import get_expiry

HERE = ("/ip4/127.0.0.1/tcp/1",)
JUNK_COUNT = 10_000
BATCH = 100
"""Records in one call: hivemind waits three seconds for the answer, however busy the machine is."""

Junk = tuple[bytes, bytes, float, bytes | None]
"""Key, value, expiry and subkey."""


def sign_have(key: Ed25519PrivateKey, issued_at_ms: int, addresses: tuple[str, ...] = HERE) -> SignedRecord:
    have = Have(RUN_ID, "seed", 0, 0, 0, (), addresses, issued_at_ms)
    return seal(have, key.sign, PeerId(key.public_key().public_bytes_raw()))


async def flood(attacker: Directory, victim: Any, junk: Sequence[Junk]) -> int:
    """Ask the victim to store it all, without the attacker's own node looking at it; return what was taken."""
    peer = importlib.import_module("hivemind.p2p").PeerID(to_libp2p_bytes(victim.peer_id))
    taken = 0
    for start in range(0, len(junk), BATCH):
        keys, values, expiries, subkeys = zip(*junk[start : start + BATCH], strict=True)
        ids = [importlib.import_module("hivemind.dht.routing").DHTID.generate(source=key) for key in keys]
        packed = [msgpack.packb(value) for value in values]
        answer = await attacker._node.protocol.call_store(peer, ids, packed, list(expiries), subkeys=list(subkeys))
        assert answer is not None, "the victim did not answer"
        taken += sum(answer)
    return taken


def make_head_junk(key: bytes, own: bytes, old: bytes) -> Iterator[Junk]:
    """Bytes, heads of a stranger, an old head of the authority with later expiries, and subkeys of each."""
    later = time.time() + 250
    for index in range(JUNK_COUNT):
        value = (b"junk %d" % index, own, old)[index % 3]
        subkey = b"%d" % index if index % 2 else None
        yield key, value, later + index / JUNK_COUNT, subkey


async def test_ten_thousand_junk_records_hide_no_head(make_node: Any) -> None:
    """A-DHT-6, A-DHT-7, A-AUTH-4: under the authority's own key, with later expiries."""
    async with open_both(make_node) as (a, b, honest, attacker):
        now_ms = int(time.time() * 1000)
        old, head = sign_head(a.identity, 1, now_ms - 30_000), sign_head(a.identity, 2, now_ms)
        assert await honest.announce_head(head)
        key = DirectoryKeys(RUN_ID).get_head_key(a.peer_id, get_slot(time.time()))
        junk = list(make_head_junk(key, encode_signed(sign_head(b.identity, 9, now_ms)), encode_signed(old)))
        assert await flood(attacker, a, junk) == 0
        assert await honest.read_heads() == [encode_signed(head)]
        assert await attacker.read_heads() == [encode_signed(head)]
        assert sum(honest.validator.rejected.values()) >= JUNK_COUNT
        assert len(honest._storage) <= 2


def make_have_junk(kind: str, key: bytes, now_ms: int) -> list[Junk]:
    """Have records in one shard: forged ones, true ones of strangers' keys dated ahead, and long ones of these."""
    if kind == "forged":
        record = encode_signed(sign_have(Ed25519PrivateKey.generate(), now_ms))
        return [(key, record, get_expiry(now_ms), index.to_bytes(32, "big")) for index in range(JUNK_COUNT)]
    junk: list[Junk] = []
    ahead_ms = now_ms + 120_000
    addresses = tuple(f"/dns/{'x' * 230}/tcp/{port}" for port in range(16)) if kind == "long" else HERE
    for _ in range(JUNK_COUNT if kind == "of strangers" else 2 * SUBKEYS_MAX):
        signed = sign_have(Ed25519PrivateKey.generate(), ahead_ms, addresses)
        junk.append((key, encode_signed(signed), get_expiry(ahead_ms), bytes(signed.signers[0])))
    return junk


@pytest.mark.unmeasured
@pytest.mark.parametrize("kind", ["forged", "of strangers", "long"])
async def test_ten_thousand_have_records_hide_no_true_one_and_stay_within_bounds(make_node: Any, kind: str) -> None:
    """A-DHT-7: who was there before stays, who is listed gets in afterwards, and the answer is small enough to be sent.

    A long record costs as much as twenty usual ones, so fewer of them do.
    """
    async with open_both(make_node) as (a, _, honest, attacker):
        now_ms = int(time.time() * 1000)
        head = sign_head(a.identity, 2, now_ms)
        assert await honest.announce_head(head)
        shard = get_shard(a.peer_id)
        key = DirectoryKeys(RUN_ID).get_have_key(shard, get_slot(time.time()))
        have = seal(Have(RUN_ID, "seed", 0, 0, 0, (), (), now_ms), a.identity.sign, a.identity.peer_id)
        assert await honest.announce_have(have)
        taken = await flood(attacker, a, make_have_junk(kind, key, now_ms))
        assert (taken == 0) is (kind == "forged")
        entry = honest._storage.data[get_key(key)]
        assert len(entry.value.data) <= SUBKEYS_MAX
        assert sum(len(one.value) for one in entry.value.data.values()) <= SHARD_SIZE_BYTES_MAX
        # Over the network as at home: an answer that is too large would be none.
        for reader in (honest, attacker):
            found = await reader.read_haves(shard)
            assert encode_signed(have) in found
            assert len(found) <= SUBKEYS_MAX
        late = Ed25519PrivateKey.generate()
        record = sign_have(late, now_ms)
        one = [(key, encode_signed(record), get_expiry(now_ms), bytes(record.signers[0]))]
        if kind == "of strangers":
            assert await flood(attacker, a, one) == 0, "a stranger among strangers that fill the shard"
            honest.set_authorities([a.peer_id], listed=[a.peer_id, record.signers[0]])
        assert await flood(attacker, a, one) == 1
        assert encode_signed(record) in await attacker.read_haves(shard)
        assert encode_signed(have) in await attacker.read_haves(shard)
        assert await attacker.read_heads() == [encode_signed(head)]


async def test_who_was_in_the_last_time_slot_keeps_a_place_in_the_next(make_node: Any) -> None:
    """A-DHT-7: a flood that comes first in a new slot takes nobody's place either."""
    async with make_node("a") as a, open_directory(a, a) as directory:
        have = sign_have(Ed25519PrivateKey.generate(), int(time.time() * 1000))
        signer = bytes(have.signers[0])
        shard, slot = get_shard(have.signers[0]), get_slot(time.time())
        keys = DirectoryKeys(RUN_ID)
        here, next_one = (get_key(keys.get_have_key(shard, one)) for one in (slot, slot + 1))
        directory._storage.store_subkey(here, signer, encode_signed(have), time.time() + 100)
        assert directory._rank_subkey(next_one, signer) == RANK_KNOWN
        assert directory._rank_subkey(here, signer) == 0
        assert directory._rank_subkey(next_one, b"stranger") == 0
        assert directory._rank_subkey(get_key(b"no place of ours"), signer) == 0
        directory.set_authorities([a.peer_id], listed=[have.signers[0]])
        assert directory._rank_subkey(here, signer) == RANK_LISTED


def get_key(key: bytes) -> Any:
    return importlib.import_module("hivemind.dht.routing").DHTID.from_bytes(get_key_id(key))
