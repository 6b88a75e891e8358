"""A simulated node keeps what is durable, loses the rest, and serves what it holds."""

from __future__ import annotations

import pytest

from pulsenet.ids import Version
from pulsenet.node.events import TimerFired
from pulsenet.testing.node import SimNode
from pulsenet.testing.versions_part import address_of
from pulsenet.testing.world import World
from pulsenet.wire.messages import (
    ExchangeHave,
    GetChunks,
    GetHead,
    HaveReply,
    HeadReply,
    PushForkProof,
    PushHead,
    PushReply,
    PushRollouts,
)


def settled() -> tuple[World, SimNode, SimNode]:
    world = World(2)
    trainer = world.add_node("trainer", "trainer")
    node = world.add_node("inferencer", "inferencer")
    world.publish_and_wait()
    world.run_until(world.is_settled, 30.0)
    return world, trainer, node


def test_a_crash_loses_machines_and_mirror_and_a_start_rebuilds_them() -> None:
    world, _, node = settled()
    chunks = dict(node.store.chunks)
    world.crash(node)
    assert node.machines == {}
    assert node.versions.follower is None
    node.deliver("follower", TimerFired())
    world.start(node)
    assert node.store.chunks == chunks
    assert node.versions.follower is not None
    assert node.versions.follower.mirror_version == Version(0, 1)
    assert node.life == 2


def test_requests_are_answered_from_the_store_and_pushes_by_verdict() -> None:
    _, trainer, node = settled()
    head = trainer.store.newest_head()
    assert head is not None
    assert node.answer(GetHead(), trainer.peer_id) == [HeadReply(head)]
    digest = next(iter(node.store.chunks))
    assert len(node.answer(GetChunks((digest,)), trainer.peer_id)) == 1
    assert node.answer(PushHead(head), trainer.peer_id) == [PushReply(accepted=True, reason="")]
    (reply,) = node.answer(PushHead(b"junk"), trainer.peer_id)
    assert isinstance(reply, PushReply)
    assert not reply.accepted
    (reply,) = node.answer(PushForkProof(b"a", b"b"), trainer.peer_id)
    assert isinstance(reply, PushReply)
    assert not reply.accepted
    assert node.answer(PushRollouts(b"x"), trainer.peer_id) == [PushReply(accepted=False, reason="untrusted")]
    assert trainer.versions.mesh.own_have is not None
    (have,) = node.answer(ExchangeHave(trainer.versions.mesh.own_have), trainer.peer_id)
    assert isinstance(have, HaveReply)


def test_an_effect_nobody_knows_is_an_error_of_the_simulation() -> None:
    _, _, node = settled()
    with pytest.raises((AssertionError, KeyError)):
        node.carry_out("mesh", [object()])  # type: ignore[list-item]
    with pytest.raises(AssertionError, match="nobody carries out"):
        node._execute("mesh", object())  # type: ignore[arg-type]


def test_snapshots_that_are_replaced_or_refused_are_told() -> None:
    world, trainer, _ = settled()
    for _ in range(4):
        world.publish()
    world.run_for(5.0)
    assert len(trainer.versions.dropped) == 2
    assert world.newest == Version(0, 3)
    assert address_of(trainer.peer_id).startswith("/memory/")


def test_a_publisher_that_restarts_goes_on_from_its_store() -> None:
    world, trainer, _ = settled()
    world.crash(trainer)
    world.start(trainer)
    world.run_for(10.0)
    assert world.publish_and_wait() == Version(0, 2)
    world.crash(trainer)
    world.run_for(1000.0)
    world.start(trainer)
    world.run_for(10.0)
    assert world.publish_and_wait().number == 3
