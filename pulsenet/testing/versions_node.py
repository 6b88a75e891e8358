"""One simulated node of a run with rounds and versions: a trainer that also publishes, or an inferencer."""

from __future__ import annotations

import struct
from typing import Protocol

import numpy as np

from pulsenet.chain.records import SignedRecord
from pulsenet.chain.signing import encode_signed, record_digest
from pulsenet.chain.trust import Trust
from pulsenet.ids import Digest, PeerId, RunId, Version
from pulsenet.node.effects import (
    AnnounceHave,
    AnnounceHead,
    DialPeer,
    DropPreparation,
    DropSnapshot,
    Effect,
    PrepareHop,
    RefuseSnapshot,
)
from pulsenet.node.events import AggregateApplied, Event, ForkProofSeen, HaveSeen, HeadSeen, SnapshotOffered, TimerFired
from pulsenet.node.inferencer import Inferencer
from pulsenet.node.listener import Listener
from pulsenet.node.machine import Machine
from pulsenet.node.mesh import BOOK_KEY, Holdings, Mesh
from pulsenet.node.news import TRUST_KEY
from pulsenet.node.published import STATE_KEY
from pulsenet.node.respond import StoreView
from pulsenet.node.trainer import Trainer
from pulsenet.testing.fakes import Chance, FakeDirectory, make_sign, verify
from pulsenet.testing.hands import WORK_TYPES, Hands, Work
from pulsenet.testing.network import Network
from pulsenet.testing.node import StoreAndMesh, address_of
from pulsenet.testing.rounds_node import RoundsNode, Surroundings, TrainingOrder
from pulsenet.testing.toy_training import OuterState
from pulsenet.testing.weights import TABLE, make_region
from pulsenet.wire.messages import ExchangeHave, Message, PushForkProof, PushHead

BASE_REGION = make_region(Chance(0xBA5E))
"""Everything of the weights that rounds do not move."""


class VersionSurroundings(Surroundings, Protocol):
    """What a node needs of its world beside what rounds do."""

    network: Network
    directory: FakeDirectory

    def wall_ms(self, node: VersionsNode) -> int:
        """Return the node's wall clock, its skew included."""
        ...

    def work(self, node: VersionsNode, machine: str, work: Work) -> None:
        """Let the node's hands do something that takes time."""
        ...

    def dial(self, node: VersionsNode, dial: DialPeer) -> None:
        """Try to connect two nodes."""
        ...

    def hand_over(self, node: VersionsNode) -> None:
        """Let the training process publish the weights it holds, if it happens to."""
        ...

    def note_version(self, node: VersionsNode, version: Version, root: Digest) -> None:
        """A publisher committed a version, announced or not."""
        ...

    def note_head(self, node: VersionsNode, record: SignedRecord) -> None:
        """A publisher announces."""
        ...


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
    """A node that can crash and come back with what its disks hold.

    Args:
        name: For people.
        peer_id: The node's key.
        is_authority: Whether it votes, countersigns, and may coordinate and publish.
        is_trainer: Whether a training process is attached; otherwise it is an inferencer.
        holds_start: As in :class:`RoundsNode`.
    """

    def __init__(
        self,
        name: str,
        peer_id: PeerId,
        surroundings: VersionSurroundings,
        chance: Chance,
        *,
        is_authority: bool,
        is_trainer: bool,
        holds_start: bool = True,
    ) -> None:
        super().__init__(
            name,
            peer_id,
            surroundings,
            chance,
            is_authority=is_authority,
            is_trainer=is_trainer,
            holds_start=holds_start,
        )
        self.role = "trainer" if is_trainer or is_authority else "inferencer"
        self.skew_ms = chance(4_000) - 2_000
        self.refused: list[RefuseSnapshot] = []
        self.dropped: list[int] = []
        self.follower: Inferencer | None = None
        self.trainer: Trainer | None = None
        self.mesh: Mesh | None = None
        self._surroundings = surroundings
        self.hands = self._make_hands()

    # Life and death

    def start(self) -> None:
        """Build the machines from what the store holds and let them begin."""
        self.hands = self._make_hands()
        self.hands.rebuild_mirror()
        super().start()
        sign = make_sign(self.peer_id)
        self.mesh = Mesh(
            self.trust,
            self.peer_id,
            sign,
            self._chance.fork(),
            role=self.role,
            addresses=(address_of(self.peer_id),),
            saved=self.store.state.get(BOOK_KEY),
        )
        added: dict[str, Machine] = {"mesh": self.mesh}
        if self.role == "trainer":
            state = self.store.state.get(STATE_KEY)
            self.trainer = Trainer(
                self.trust,
                self.peer_id,
                sign,
                self._chance.fork(),
                verify=verify,
                state=state,
                leadership=self.coordinator,
            )
            added["trainer"] = self.trainer
            added["listener"] = Listener(self.trust, self.peer_id, self._chance.fork(), self.store)
        else:
            self.follower = self._make_follower(self.mesh)
            added["follower"] = self.follower
        self.machines |= added
        for machine in added:
            self._world.schedule(self, machine, TimerFired())

    def crash(self) -> None:
        """Die at once: machines, mirror, engine and training are gone, the disks stay."""
        super().crash()
        self.follower = self.trainer = self.mesh = None

    def attach_training(self) -> None:
        """Start a training process from its disk; its script publishes what it holds first of all."""
        super().attach_training()
        self._surroundings.hand_over(self)

    def _make_hands(self) -> Hands:
        return Hands(
            self.store,
            engine_fails=lambda: self._surroundings.network.engine_fails(),
            note_version=lambda version, root: self._surroundings.note_version(self, version, root),
        )

    def _make_follower(self, mesh: Mesh) -> Inferencer:
        mirror = self.hands.mirror
        held = None if mirror.version is None or mirror.root is None else (mirror.version, mirror.root)
        return Inferencer(
            self.trust,
            self.peer_id,
            self._chance.fork(),
            self.store,
            role=self.role,
            held=held,
            stored=self.store.manifests(),
            have_of=mesh.have_of,
        )

    def _open_trust(self) -> Trust:
        saved = self.store.state.get(TRUST_KEY)
        self.store.put_record(self._world.genesis)
        if saved is None:
            return super()._open_trust()
        return Trust.restore(saved, RunId(record_digest(self._world.genesis)), verify)

    # Driver

    def offer_snapshot(self, region: bytearray, round_index: int) -> str:
        """Hand over the weights of a round, as a training process does; return why they are refused at once."""
        assert self.trainer is not None
        generation = self.hands.take_snapshot(region)
        offered = SnapshotOffered(generation, round_index, TABLE.digest)
        refusal = self.trainer.find_refusal(offered, self._world.now)
        if not refusal:
            self.deliver("trainer", offered)
        return refusal

    def deliver(self, machine: str, event: Event) -> None:
        """Hand an event to one machine and carry out what it orders."""
        super().deliver(machine, event)
        self._tell_holdings()

    def answer(self, request: Message, asker: PeerId) -> list[Message]:
        """Answer a peer's request; pushed items are shown to the machines first."""
        match request:
            case PushHead(head):
                self.deliver_to_all(HeadSeen(head, asker))
            case PushForkProof(first, second):
                self.deliver_to_all(ForkProofSeen(first, second, asker))
            case ExchangeHave(have):
                self.deliver_to_all(HaveSeen(have, asker))
        return super().answer(request, asker)

    def do(self, order: TrainingOrder) -> Event:
        """Let the training process carry out one order; after an outer step it publishes."""
        before = self.training.state
        answer = super().do(order)
        after = self.training.state
        has_stepped = before is not None and after is not None and after.round_index > before.round_index
        if has_stepped and isinstance(answer, AggregateApplied):
            self._surroundings.hand_over(self)
        return answer

    def _wall_ms(self) -> int:
        return self._surroundings.wall_ms(self)

    def _execute(self, machine: str, effect: Effect) -> None:
        match effect:
            case DialPeer():
                self._surroundings.dial(self, effect)
            case AnnounceHead(record):
                self._surroundings.note_head(self, record)
                self._surroundings.directory.put(self._surroundings.directory.heads, record)
                self.deliver_to_all(HeadSeen(encode_signed(record), None))
            case AnnounceHave(record):
                self._surroundings.directory.put(self._surroundings.directory.haves, record)
            case _ if isinstance(effect, WORK_TYPES):
                self._surroundings.work(self, machine, effect)
            case _:
                super()._execute(machine, effect)

    def _execute_here(self, effect: Effect) -> None:
        match effect:
            case PrepareHop(manifest):
                self.hands.mirror.prepare(manifest)
            case DropPreparation():
                self.hands.mirror.drop_preparation()
            case DropSnapshot(generation):
                self.dropped.append(generation)
            case RefuseSnapshot():
                self.refused.append(effect)
            case _:
                super()._execute_here(effect)

    def _tell_holdings(self) -> None:
        if self.mesh is None:
            return
        if self.follower is not None:
            holdings = self.follower.holdings
        elif self.trainer is not None and self.trainer.state is not None:
            state = self.trainer.state
            holdings = Holdings(state.version.epoch, *state.patch_range, state.anchor_numbers)
        else:
            return
        self._execute_all("mesh", self.mesh.update(self._world.now, self._wall_ms(), holdings=holdings))

    def _view(self) -> StoreView:
        assert self.mesh is not None
        return StoreAndMesh(self.store, self.mesh)
