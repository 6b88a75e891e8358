"""Ten thousand junk records beside the true one, in a real DHT on loopback: it is found, and memory is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import msgpack
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from pulsenet.chain.records import Have, Head, SignedRecord
from pulsenet.chain.signing import encode_signed, seal
from pulsenet.ids import Digest, PeerId, RunId, Version
from pulsenetd.identity import Identity, to_libp2p_bytes, verify
from pulsenetd.network import hivemind_repairs
from pulsenetd.network.directory import SUBKEYS_MAX, Directory
from pulsenetd.network.directory_keys import DirectoryKeys, get_key_id, get_shard, get_slot
from pulsenetd.network.validator import get_expiry

RUN_ID = RunId(bytes(range(32)))
JUNK_COUNT = 10_000
BATCH = 500
"""Records in one call: hivemind takes what fits a message of 4 MiB."""

Junk = tuple[bytes, bytes, float, bytes | None]
"""Key, value, expiry and subkey."""


@contextlib.asynccontextmanager
async def open_directory(node: Any, authority: Any) -> AsyncIterator[Directory]:
    directory = Directory(peer_id=node.peer_id, run_id=RUN_ID, verify=verify)
    directory.set_authorities([authority.peer_id])
    await directory.open(node.transport.hivemind_p2p)
    try:
        yield directory
    finally:
        await directory.close()
        hivemind_repairs.set_clock(time.time)


def sign_head(identity: Identity, number: int, issued_at_ms: int) -> SignedRecord:
    digest = Digest(bytes(32))
    head = Head(RUN_ID, 0, 0, Version(0, number), digest, digest, digest, None, issued_at_ms, issued_at_ms + 300_000)
    return seal(head, identity.sign, identity.peer_id)


def sign_have(key: Ed25519PrivateKey, issued_at_ms: int) -> SignedRecord:
    have = Have(RUN_ID, "seed", 0, 0, 0, (), ("/ip4/127.0.0.1/tcp/1",), issued_at_ms)
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


def test_ten_thousand_junk_records_hide_no_head(make_node: Any) -> None:
    """A-DHT-6, A-DHT-7, A-AUTH-4: under the authority's own key, with later expiries."""

    async def main() -> None:
        async with (
            make_node("a") as a,
            make_node("b") as b,
            open_directory(a, a) as honest,
            open_directory(b, a) as attacker,
        ):
            await b.meet(a)
            await attacker.join([a.peer_id])
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

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["forged", "of strangers"])
def test_ten_thousand_have_records_stay_within_bounds(make_node: Any, kind: str) -> None:
    """A-DHT-7: forged ones are refused; as many true ones as a shard may hold are kept, whoever signs them."""

    async def main() -> None:
        async with (
            make_node("a") as a,
            make_node("b") as b,
            open_directory(a, a) as honest,
            open_directory(b, a) as attacker,
        ):
            await b.meet(a)
            await attacker.join([a.peer_id])
            now_ms = int(time.time() * 1000)
            head = sign_head(a.identity, 2, now_ms)
            assert await honest.announce_head(head)
            shard = get_shard(a.peer_id)
            key = DirectoryKeys(RUN_ID).get_have_key(shard, get_slot(time.time()))
            if kind == "forged":
                record = encode_signed(sign_have(Ed25519PrivateKey.generate(), now_ms))
                expiry = get_expiry(now_ms)
                junk = [(key, record, expiry, index.to_bytes(32, "big")) for index in range(JUNK_COUNT)]
            else:
                junk = []
                for _ in range(4 * SUBKEYS_MAX):  # every one costs the victim a signature's check
                    signed = sign_have(Ed25519PrivateKey.generate(), now_ms)
                    junk.append((key, encode_signed(signed), get_expiry(now_ms), bytes(signed.signers[0])))
            have = seal(Have(RUN_ID, "seed", 0, 0, 0, (), (), now_ms + 1_000), a.identity.sign, a.identity.peer_id)
            assert await honest.announce_have(have)
            taken = await flood(attacker, a, junk)
            found = await honest.read_haves(shard)
            assert encode_signed(have) in found
            assert len(found) <= SUBKEYS_MAX
            assert (taken == 0) is (kind == "forged")
            entry = honest._storage.data[get_key(key)]
            assert len(entry.value.data) <= SUBKEYS_MAX
            assert await attacker.read_heads() == [encode_signed(head)]

    asyncio.run(main())


def get_key(key: bytes) -> Any:
    return importlib.import_module("hivemind.dht.routing").DHTID.from_bytes(get_key_id(key))
