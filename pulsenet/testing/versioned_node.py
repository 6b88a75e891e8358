"""What simulated nodes of every run with versions share: a mesh, a publisher or a follower, and hands for slow work."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Generic

from pulsenet.chain.retention import RetentionLimits
from pulsenet.chain.signing import encode_signed
from pulsenet.chain.trust import Trust
from pulsenet.ids import PeerId
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
from pulsenet.node.events import Event, ForkProofSeen, HaveSeen, HeadSeen
from pulsenet.node.inferencer import Inferencer
from pulsenet.node.mesh import BOOK_KEY, Holdings, Mesh
from pulsenet.node.published import STATE_KEY
from pulsenet.node.respond import Push
from pulsenet.node.trainer import Trainer
from pulsenet.node.turns import Leadership
from pulsenet.testing.fakes import FakeDirectory, FakeStore, make_sign, verify
from pulsenet.testing.hands import Hands, Work
from pulsenet.testing.simulated_node import SimulatedNode
from pulsenet.testing.simulation import Node, Simulation
from pulsenet.wire.messages import ExchangeHave, Message, PeerAddress, PushForkProof, PushHead, PushRollouts


class VersionedWorld(Simulation[Node], Generic[Node]):
    """A world in which versions are published."""

    directory: FakeDirectory

    @abstractmethod
    def make_hands(self, node: Node) -> Hands:
        """Return new hands for a life of the node."""

    @abstractmethod
    def work(self, node: Node, machine: str, work: Work) -> None:
        """Let the node's hands do something that takes time."""

    @abstractmethod
    def dial(self, node: Node, dial: DialPeer) -> None:
        """Try to connect two nodes."""

    def _pull_later(self, node: Node, delay_seconds: float) -> None:
        self.later_on(node, delay_seconds, lambda: self._pull(node))

    @abstractmethod
    def _pull(self, node: Node) -> None:
        """Let a node read the directory, now and again later."""


class VersionedNode(SimulatedNode):
    """A node that publishes versions or follows them."""

    trust: Trust
    role: str
    """``trainer``, ``inferencer`` or ``seed``."""
    addresses: tuple[str, ...]
    _world: VersionedWorld[Any]

    def _become(self, role: str, *, is_dialable: bool) -> None:
        """Say once what the node is in all its lives."""
        self.role = role
        self.addresses = (address_of(self.peer_id),) if is_dialable else ()
        self.refused: list[RefuseSnapshot] = []
        self.dropped: list[int] = []
        self.follower: Inferencer | None = None
        self.trainer: Trainer | None = None
        self.mesh: Mesh | None = None
        self.hands = self._world.make_hands(self)
        self._told = Holdings()

    # Life and death

    def _take_hands(self) -> None:
        """Begin a life with new hands, and with the mirror that the store gives."""
        self._told = Holdings()
        self.hands = self._world.make_hands(self)
        if self.role != "seed":
            self.hands.rebuild_mirror()

    def _make_mesh(self, bootstraps: Sequence[PeerAddress] = ()) -> Mesh:
        self.mesh = Mesh(
            self.trust,
            self.peer_id,
            make_sign(self.peer_id),
            self._chance.fork(),
            role=self.role,
            addresses=self.addresses,
            bootstraps=bootstraps,
            saved=self.store.state.get(BOOK_KEY),
        )
        return self.mesh

    def _make_trainer(self, leadership: Leadership | None = None) -> Trainer:
        self.trainer = Trainer(
            self.trust,
            self.peer_id,
            make_sign(self.peer_id),
            self._chance.fork(),
            verify=verify,
            state=self.store.state.get(STATE_KEY),
            leadership=leadership,
        )
        return self.trainer

    def _make_follower(self, mesh: Mesh, retention_limits: RetentionLimits | None = None) -> Inferencer:
        mirror = self.hands.mirror
        self.follower = Inferencer(
            self.trust,
            self.peer_id,
            self._chance.fork(),
            self.store,
            role=self.role,
            held=None if mirror.version is None or mirror.root is None else (mirror.version, mirror.root),
            stored=self.store.manifests(),
            retention_limits=retention_limits,
            have_of=mesh.have_of,
        )
        return self.follower

    def crash(self) -> None:
        """Die at once: machines, mirror, engine and connections are gone, the disks stay."""
        super().crash()
        self.follower = self.trainer = self.mesh = None

    # Driver

    def deliver(self, machine: str, event: Event) -> None:
        """Hand an event to one machine and carry out what it orders."""
        super().deliver(machine, event)
        self._tell_holdings()

    def _show_push(self, request: Message, asker: PeerId) -> None:
        """Show the machines what a peer pushes."""
        match request:
            case PushHead(head):
                self.deliver_to_all(HeadSeen(head, asker))
            case PushForkProof(first, second):
                self.deliver_to_all(ForkProofSeen(first, second, asker))
            case ExchangeHave(have):
                self.deliver_to_all(HaveSeen(have, asker))

    def _execute(self, machine: str, effect: Effect) -> None:
        match effect:
            case DialPeer():
                self._world.dial(self, effect)
            case AnnounceHead(record):
                if self._reaches_directory:
                    self._world.directory.put(self._world.directory.heads, record)
                self.deliver_to_all(HeadSeen(encode_signed(record), None))
            case AnnounceHave(record):
                if self._reaches_directory:
                    self._world.directory.put(self._world.directory.haves, record)
            case PrepareHop(manifest):
                assert manifest.blob_id in self.store.lists
                self.hands.mirror.prepare(manifest)
            case DropPreparation():
                self.hands.mirror.drop_preparation()
            case DropSnapshot(generation):
                self.dropped.append(generation)
            case RefuseSnapshot():
                self.refused.append(effect)
            case _ if isinstance(effect, Work):
                self._world.work(self, machine, effect)
            case _:
                super()._execute(machine, effect)

    @property
    def _reaches_directory(self) -> bool:
        return self._world.network.islands.get(self.peer_id, 0) == 0

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
        if holdings != self._told:
            self._told = holdings
            effects = self.mesh.update(self._world.now, self._world.wall_ms(self), holdings=holdings)
            self._execute_all("mesh", effects)


class StoreAndMesh:
    """The store and the mesh as the serving rule sees them."""

    def __init__(self, store: FakeStore, mesh: Mesh) -> None:
        self._mesh = mesh
        self.newest_head = store.newest_head
        self.record = store.record
        self.descriptors = store.descriptors
        self.epochs = store.epochs
        self.chunk_list = store.chunk_list
        self.chunk_list_slice = store.chunk_list_slice
        self.chunk = store.chunk
        self.has_chunk = store.has_chunk
        self.was_given = store.was_given

    def have(self) -> bytes | None:
        return self._mesh.own_have

    def neighbours(self) -> Sequence[PeerAddress]:
        return self._mesh.neighbour_addresses()

    def push_verdict(self, push: Push) -> str:
        return "untrusted" if isinstance(push, PushRollouts) else self._mesh.push_verdict(push)


def address_of(peer_id: PeerId) -> str:
    """Return where a simulated peer can be dialled."""
    return f"/memory/{peer_id.hex()}"
