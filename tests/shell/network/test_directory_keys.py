"""Slots, shards and key names of the directory."""

from __future__ import annotations

from pulsenet import limits
from pulsenet.ids import PeerId, RunId, compute_digest
from pulsenetd.network import hivemind_repairs
from pulsenetd.network.directory_keys import (
    DirectoryKeys,
    get_accepted_slots,
    get_key_id,
    get_read_slots,
    get_shard,
    get_slot,
)

RUN = RunId(bytes(32))
PEER = PeerId(bytes(range(32)))


def test_slots_last_ten_minutes() -> None:
    assert get_slot(0) == 0
    assert get_slot(599.9) == 0
    assert get_slot(600.0) == 1
    assert get_slot(-5.0) == 0


def test_readers_ask_this_slot_and_the_last_and_writers_may_be_one_ahead() -> None:
    assert get_read_slots(6_000.0) == (10, 9)
    assert get_read_slots(10.0) == (0,)
    assert get_accepted_slots(6_000.0) == (11, 10, 9)


def test_every_part_of_a_key_matters() -> None:
    keys = DirectoryKeys(RUN)
    names = {
        keys.get_head_key(PEER, 1),
        keys.get_head_key(PEER, 2),
        keys.get_head_key(PeerId(bytes(32)), 1),
        keys.get_have_key(0, 1),
        keys.get_have_key(1, 1),
        keys.get_have_key(0, 2),
        DirectoryKeys(RunId(bytes([1]) * 32)).get_head_key(PEER, 1),
        DirectoryKeys(RUN, b"secret").get_head_key(PEER, 1),
        DirectoryKeys(RUN, b"Secret").get_head_key(PEER, 1),
    }
    assert len(names) == 9
    assert keys.get_head_key(PEER, 1) == DirectoryKeys(RUN).get_head_key(PEER, 1)


def test_shards_are_the_first_bits_of_the_peers_digest_and_all_occur() -> None:
    shards = {get_shard(PeerId(bytes([number]) * 32)) for number in range(200)}
    assert shards == set(range(limits.HAVE_SHARDS))
    assert get_shard(PEER) == compute_digest(PEER)[0] >> 4


def test_key_ids_are_hiveminds() -> None:
    hivemind_repairs.load_now()
    from hivemind.dht.routing import DHTID

    key = DirectoryKeys(RUN).get_head_key(PEER, 7)
    assert get_key_id(key) == DHTID.generate(key).to_bytes()
