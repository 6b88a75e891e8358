"""Attackers lie as their attack says, and are honest before."""

from __future__ import annotations

import pytest

from pulsenet.chain.records import Head
from pulsenet.chain.signing import decode_signed
from pulsenet.ids import Digest, PeerId, Version, compute_digest
from pulsenet.testing.attackers import JUNK_SIZE_BYTES, Attack, Attacker, add_attacker, press
from pulsenet.testing.world import World
from pulsenet.wire.messages import (
    ChunkListReply,
    ChunkReply,
    GetChunkList,
    GetChunks,
    GetDescriptors,
    GetEpochs,
    GetHead,
    GetHoldings,
    GetRecords,
    HeadReply,
    HoldingsReply,
    Message,
    PushForkProof,
    PushHead,
    RecordsReply,
)
from pulsenet.wire.schema import INTEGER_MAX, decode_value

ASKER = PeerId(b"a" * 32)


@pytest.fixture
def stage() -> tuple[World, Attacker]:
    """A swarm at version 3 with one who may attack."""
    world = World(1)
    world.add_node("trainer", "trainer")
    attacker = add_attacker(world, "attacker")
    for _ in range(3):
        world.publish_and_wait()
        world.run_until(world.is_settled, 60.0)
    return world, attacker


def ask_head(attacker: Attacker) -> Head:
    (reply,) = attacker.answer(GetHead(), ASKER)
    assert isinstance(reply, HeadReply)
    assert reply.head is not None
    return decode_value(Head, decode_signed(reply.head).payload)


def test_before_the_attack_it_is_a_seed_like_others(stage: tuple[World, Attacker]) -> None:
    _, attacker = stage
    assert ask_head(attacker).version == Version(0, 3)
    assert attacker.make_pushes() == []
    assert attacker.lie_count == 0


@pytest.mark.parametrize("attack", [Attack.ROLLBACK, Attack.FREEZE])
def test_old_heads_are_told_for_ever(stage: tuple[World, Attacker], attack: Attack) -> None:
    world, attacker = stage
    attacker.start_attack(attack)
    world.publish_and_wait()
    press(world, [attacker], 30.0)
    assert ask_head(attacker).version == Version(0, 3)
    assert attacker.make_pushes() == [PushHead(attacker.frozen_head or b"")]
    assert attacker.answer(GetRecords(()), ASKER) == [RecordsReply(())]
    stored = decode_value(Head, decode_signed(world.directory.heads[world.trainer_key]).payload)
    assert (stored.version == Version(0, 3)) is (attack is Attack.ROLLBACK)


def test_the_last_number_is_signed_with_a_leaked_key_if_there_is_one(stage: tuple[World, Attacker]) -> None:
    world, attacker = stage
    attacker.start_attack(Attack.FAST_FORWARD)
    assert ask_head(attacker).version.number == INTEGER_MAX
    (push,) = attacker.make_pushes()
    assert isinstance(push, PushHead)
    assert decode_signed(push.head).signers == (attacker.peer_id,)
    attacker.start_attack(Attack.FAST_FORWARD, leaked_key=world.trainer_key)
    (push,) = attacker.make_pushes()
    assert isinstance(push, PushHead)
    assert decode_signed(push.head).signers == (world.trainer_key,)
    assert attacker.answer(GetRecords(()), ASKER) == [RecordsReply(())]


def test_true_things_stand_in_the_place_of_others(stage: tuple[World, Attacker]) -> None:
    _, attacker = stage
    attacker.start_attack(Attack.MIX_AND_MATCH)
    digest = next(iter(attacker.store.records))
    (records,) = attacker.answer(GetRecords((digest,)), ASKER)
    assert isinstance(records, RecordsReply)
    assert len(records.records) == 1
    assert records.records != (attacker.store.records[digest],)
    blob_id = next(iter(attacker.store.lists))
    (chunk_list,) = attacker.answer(GetChunkList(blob_id, 0), ASKER)
    assert isinstance(chunk_list, ChunkListReply)
    assert compute_digest(chunk_list.data) != blob_id
    chunk = next(iter(attacker.store.chunks))
    replies = attacker.answer(GetChunks((chunk,)), ASKER)
    assert [isinstance(reply, ChunkReply) and reply.digest == chunk for reply in replies] == [True, False]
    foreign = attacker.answer(GetDescriptors(0), ASKER)
    assert foreign == attacker.answer(GetEpochs(1), ASKER) != []
    assert ask_head(attacker).version == Version(0, 4)
    assert [type(push) for push in attacker.make_pushes()] == [PushHead, PushForkProof]
    assert isinstance(attacker.answer(GetHoldings(blob_id), ASKER)[0], HoldingsReply)


@pytest.mark.parametrize(
    "request_",
    [
        GetHead(),
        GetRecords((Digest(bytes(32)),)),
        GetDescriptors(0),
        GetEpochs(1),
        GetChunkList(Digest(bytes(32)), 0),
        GetChunks((Digest(bytes(32)),)),
        GetHoldings(Digest(bytes(32))),
    ],
)
def test_answers_have_no_end(stage: tuple[World, Attacker], request_: Message) -> None:
    _, attacker = stage
    attacker.start_attack(Attack.ENDLESS)
    replies = attacker.answer(request_, ASKER)
    assert len(replies) > 4
    assert JUNK_SIZE_BYTES >= 1 << 20
    assert attacker.lie_count == 1
    assert len(attacker.make_pushes()) == 2
