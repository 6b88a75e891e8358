"""One simulated node of a run with rounds and versions: a trainer that also publishes, or an inferencer."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

from pulsenet.chain.signing import record_digest
from pulsenet.chain.trust import Trust
from pulsenet.ids import PeerId, RunId
from pulsenet.node.effects import AnnounceHead, Effect
from pulsenet.node.events import Event, SnapshotOffered, StateStepped
from pulsenet.node.listener import Listener
from pulsenet.node.machine import Machine
from pulsenet.node.news import TRUST_KEY
from pulsenet.testing.fakes import Chance, verify
from pulsenet.testing.rounds_node import RoundsNode, TrainingOrder
from pulsenet.testing.toy_training import OuterState
from pulsenet.testing.versions_part import StoreAndMesh, VersionsPart
from pulsenet.testing.weights import TABLE, make_region
from pulsenet.wire.messages import Message

if TYPE_CHECKING:
    from pulsenet.testing.versions_world import VersionsWorld

BASE_REGION = make_region(Chance(0xBA5E))
"""Everything of the weights that rounds do not move."""


def cast_weights(state: OuterState) -> bytearray:
    """Return the weights that inferencers get of an outer state: its masters as FP32 and cut to BF16."""
    region = bytearray(BASE_REGION)
    bits = state.theta.view(np.uint32)
    TABLE.view(region, 1)[: bits.size] = bits
    TABLE.view(region, 2)[: bits.size] = (bits >> 16).astype(np.uint16)
    # Rounds differ even where their weights do not: a version that repeats another would hide a mistake.
    TABLE.view(region, 0)[:4] = np.frombuffer(struct.pack("<Q", state.round_index), np.uint16)
    return region


class VersionsNode(RoundsNode):
    """A node that also publishes the versions its rounds make, or follows them.

    Args:
        kind: As for :class:`RoundsNode`; an authority may publish, and who is neither that nor a trainer follows.
    """

    _world: VersionsWorld

    def __init__(
        self,
        name: str,
        peer_id: PeerId,
        world: VersionsWorld,
        chance: Chance,
        **kind: bool,
    ) -> None:
        super().__init__(name, peer_id, world, chance, **kind)
        role = "trainer" if self.is_trainer or self.is_authority else "inferencer"
        self.versions = VersionsPart(self, world, chance, role)
        self.skew_ms = chance(4_000) - 2_000

    # Life and death

    def _build_machines(self) -> dict[str, Machine]:
        machines = super()._build_machines()
        machines |= self.versions.start(self.trust, leadership=self.coordinator)
        if self.versions.trainer is not None:
            machines["listener"] = Listener(self.trust, self.peer_id, self._chance.fork(), self.store)
        self.view = StoreAndMesh(self.store, self.versions.mesh)
        return machines

    def crash(self) -> None:
        """Die at once: machines, training, mirror and engine are gone, the disks stay."""
        super().crash()
        self.versions.crash()

    def attach_training(self) -> None:
        """Start a training process from its disk; its script publishes what it holds first of all."""
        super().attach_training()
        self._world.hand_over(self)

    def _open_trust(self) -> Trust:
        saved = self.store.state.get(TRUST_KEY)
        self.store.put_record(self._world.genesis)
        if saved is None:
            return super()._open_trust()
        return Trust.restore(saved, RunId(record_digest(self._world.genesis)), verify)

    # Driver

    def deliver(self, machine: str, event: Event) -> None:
        """Hand an event to one machine and carry out what it orders."""
        super().deliver(machine, event)
        self.versions.tell_holdings()

    def offer_snapshot(self, region: bytearray, round_index: int) -> str:
        """Hand over the weights of a round, as a training process does; return why they are refused at once."""
        trainer = self.versions.trainer
        assert trainer is not None
        generation = self.versions.hands.take_snapshot(region)
        offered = SnapshotOffered(generation, round_index, TABLE.digest)
        refusal = trainer.find_refusal(offered, self._world.now)
        if not refusal:
            self.deliver("trainer", offered)
        return refusal

    def answer(self, request: Message, asker: PeerId) -> list[Message]:
        """Answer a peer's request; pushed items are shown to the machines first."""
        self.versions.show_push(request, asker)
        return super().answer(request, asker)

    def do(self, order: TrainingOrder) -> Event:
        """Let the training process carry out one order; after an outer step it publishes."""
        before = self.training.state
        answer = super().do(order)
        after = self.training.state
        has_stepped = before is not None and after is not None and after.round_index > before.round_index
        if has_stepped and isinstance(answer, StateStepped):
            self._world.hand_over(self)
        return answer

    def _execute(self, machine: str, effect: Effect) -> None:
        if isinstance(effect, AnnounceHead):
            self._world.note_head(self, effect.record)
        if not self.versions.execute(machine, effect):
            super()._execute(machine, effect)
