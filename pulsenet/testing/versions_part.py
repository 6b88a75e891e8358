"""A simulated node's part in the versions of a run: a mesh, a publisher or a follower, and hands for slow work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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
from pulsenet.node.events import ForkProofSeen, HaveSeen, HeadSeen
from pulsenet.node.inferencer import Inferencer
from pulsenet.node.machine import Machine
from pulsenet.node.mesh import BOOK_KEY, Holdings, Mesh
from pulsenet.node.published import STATE_KEY
from pulsenet.node.respond import Push
from pulsenet.node.trainer import Trainer
from pulsenet.node.turns import Leadership
from pulsenet.testing.fakes import Chance, FakeStore, make_sign, verify
from pulsenet.testing.hands import Hands, Work
from pulsenet.wire.messages import ExchangeHave, Message, PeerAddress, PushForkProof, PushHead, PushRollouts

if TYPE_CHECKING:
    from pulsenet.testing.versions_world import VersionsWorld
    from pulsenet.testing.world import World


class VersionsPart:
    """What publishes versions or follows them, in all lives of a node.

    Args:
        node: Whose part it is, a node of that world.
        world: Has the directory, and time for slow work.
        chance: The node's.
        role: ``trainer``, ``inferencer`` or ``seed``.
        is_dialable: Whether it has addresses to tell: not behind a NAT.
    """

    hands: Hands
    mesh: Mesh
    """Of this life of the node, or the last one."""

    def __init__(
        self, node: Any, world: World | VersionsWorld, chance: Chance, role: str, *, is_dialable: bool = True
    ) -> None:
        self.role = role
        self.addresses = (address_of(node.peer_id),) if is_dialable else ()
        self.refused: list[RefuseSnapshot] = []
        self.dropped: list[int] = []
        self.follower: Inferencer | None = None
        self.trainer: Trainer | None = None
        self._node = node
        self._world = world
        self._chance = chance
        self._told = Holdings()

    # Life and death

    def start(
        self,
        trust: Trust,
        *,
        leadership: Leadership | None = None,
        bootstraps: Sequence[PeerAddress] = (),
        retention_limits: RetentionLimits | None = None,
    ) -> dict[str, Machine]:
        """Begin a life with new hands and the mirror that the store gives; return its machines."""
        key, store = self._node.peer_id, self._node.store
        self._told = Holdings()
        self.hands = self._world.make_hands(store)
        if self.role != "seed":
            self.hands.rebuild_mirror()
        self.mesh = Mesh(
            trust,
            key,
            make_sign(key),
            self._chance.fork(),
            role=self.role,
            addresses=self.addresses,
            bootstraps=bootstraps,
            saved=store.state.get(BOOK_KEY),
        )
        if self.role == "trainer":
            self.trainer = Trainer(
                trust,
                key,
                make_sign(key),
                self._chance.fork(),
                verify=verify,
                state=store.state.get(STATE_KEY),
                leadership=leadership,
            )
            return {"mesh": self.mesh, "trainer": self.trainer}
        mirror = self.hands.mirror
        self.follower = Inferencer(
            trust,
            key,
            self._chance.fork(),
            store,
            role=self.role,
            held=None if mirror.version is None or mirror.root is None else (mirror.version, mirror.root),
            stored=store.manifests(),
            retention_limits=retention_limits,
            have_of=self.mesh.have_of,
        )
        return {"mesh": self.mesh, "follower": self.follower}

    def crash(self) -> None:
        """Lose what is in memory."""
        self.follower = self.trainer = None

    # Driver

    def show_push(self, request: Message, asker: PeerId) -> None:
        """Show the machines what a peer pushes."""
        match request:
            case PushHead(head):
                self._node.deliver_to_all(HeadSeen(head, asker))
            case PushForkProof(first, second):
                self._node.deliver_to_all(ForkProofSeen(first, second, asker))
            case ExchangeHave(have):
                self._node.deliver_to_all(HaveSeen(have, asker))

    def execute(self, machine: str, effect: Effect) -> bool:
        """Carry out an order, and say whether it was this part's to carry out."""
        directory = self._world.directory
        match effect:
            case DialPeer():
                self._world.dial(self._node, effect)
            case AnnounceHead(record):
                if self._reaches_directory:
                    directory.put(directory.heads, record)
                self._node.deliver_to_all(HeadSeen(encode_signed(record), None))
            case AnnounceHave(record):
                if self._reaches_directory:
                    directory.put(directory.haves, record)
            case PrepareHop(manifest):
                assert manifest.blob_id in self._node.store.lists
                self.hands.mirror.prepare(manifest)
            case DropPreparation():
                self.hands.mirror.drop_preparation()
            case DropSnapshot(generation):
                self.dropped.append(generation)
            case RefuseSnapshot():
                self.refused.append(effect)
            case _ if isinstance(effect, Work):
                self._world.work(self._node, machine, effect)
            case _:
                return False
        return True

    @property
    def _reaches_directory(self) -> bool:
        return self._world.network.islands.get(self._node.peer_id, 0) == 0

    def tell_holdings(self) -> None:
        """Let the mesh tell of what the publisher or follower has come to hold."""
        machine = self.follower or self.trainer
        if machine is not None and machine.holdings != self._told:
            self._told = machine.holdings
            effects = self.mesh.update(self._world.now, self._world.wall_ms(self._node), holdings=self._told)
            self._node.carry_out("mesh", effects)


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
