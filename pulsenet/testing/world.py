"""A whole swarm in one process, on virtual time: the same seed gives the same run, to the last event.

Nodes run the real machines; clock, network, disk, engine and directory are fakes that fail by draw. After every
event the checkers look at everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pulsenet import limits
from pulsenet.chain.retention import RetentionLimits
from pulsenet.ids import Digest, PeerId, Version
from pulsenet.node.effects import DialPeer, SendRequest, StoreChunk
from pulsenet.node.events import (
    AnchorStored,
    Event,
    HaveSeen,
    HeadSeen,
    PatchEncoded,
    PeerConnected,
    PeerLost,
    SkipEncoded,
)
from pulsenet.testing.checkers import ALL_CHECKERS, Checker, SimulationError
from pulsenet.testing.exchange import Exchange, Slots
from pulsenet.testing.fakes import FakeDirectory, FakeStore, make_genesis, make_key
from pulsenet.testing.hands import ANCHOR_CODEC_ID, Hands, Work
from pulsenet.testing.links import Link, Links
from pulsenet.testing.network import CALM, Faults
from pulsenet.testing.node import SimNode
from pulsenet.testing.outline import outline
from pulsenet.testing.simulation import Simulation
from pulsenet.testing.versions_part import address_of
from pulsenet.testing.weights import change_region, make_region
from pulsenet.wire.messages import GetChunks, Message, PeerAddress

PULL_SECONDS = 15.0
"""How often each node reads the directory."""

WORK_SECONDS_MAX = 0.05
"""Longest time of one piece of disk, mirror, engine or encoder work."""


class World(Simulation[SimNode]):
    """The swarm of one seed.

    Args:
        seed: As for :class:`Simulation`.
        faults: Likewise.
        anchor_interval: Versions between anchors.
        checkers: What is checked after every event.
        scale: Bytes on the wire that one byte of a chunk stands for; see :class:`pulsenet.testing.links.Links`.
    """

    events_max = 50_000_000

    def __init__(
        self,
        seed: int,
        *,
        faults: Faults = CALM,
        anchor_interval: int = 10,
        checkers: Sequence[Callable[[], Checker]] = ALL_CHECKERS,
        scale: float = 1.0,
    ) -> None:
        super().__init__(seed, faults)
        self.links = Links(self.clock, scale=scale)
        """Lines of nodes that were given one; everybody else's has room for everything."""
        self.directory = FakeDirectory()
        self.versions: dict[Version, Digest] = {}
        """Every version ever committed, with its root."""
        self.trainer_key = make_key("trainer")
        self.genesis = make_genesis([self.trainer_key], [self.trainer_key], anchor_interval=anchor_interval)
        self.region = make_region(self.chance.fork())
        """Weights of the training process."""
        self._checkers = [make() for make in checkers]
        self._trainer_step = 0
        self._newest: Version | None = None
        self._behind: set[PeerId] = set()
        """Live followers that do not have the newest version."""
        self._touched: dict[PeerId, SimNode] = {}
        """Whom the event under way has changed."""
        self._connections: dict[PeerId, dict[PeerId, None]] = {}
        self.tears_writes = False
        """Whether a crash leaves parts of the chunks that were being written."""
        self.published_size_bytes = 0
        """Encoded size of every blob the trainer ever wrote: patches, anchors and skip patches, each once."""
        self._published: set[Digest] = set()
        self._kinds: dict[Digest, str] = {}

    # Scenario

    def add_node(
        self,
        name: str,
        role: str,
        retention_limits: RetentionLimits | None = None,
        link: Link | None = None,
        make: type[SimNode] = SimNode,
    ) -> SimNode:
        """Add a node and start it; everybody but the trainer is told where the trainer is."""
        peer_id = make_key(name)
        bootstraps = () if role == "trainer" else (PeerAddress(self.trainer_key, (address_of(self.trainer_key),)),)
        if link is not None:
            self.links.connect(peer_id, link)
        node = make(
            name,
            peer_id,
            role,
            self,
            self.chance.fork(),
            bootstraps,
            retention_limits,
            is_dialable=self.links.link_of(peer_id).is_dialable,
        )
        self.nodes[peer_id] = node
        self.start(node)
        return node

    def start(self, node: SimNode) -> None:
        """Start a node, for the first time or after a crash."""
        node.start()
        self._touched[node.peer_id] = node
        self.later_on(node, 0.1, lambda: self._pull(node))

    def crash(self, node: SimNode) -> None:
        """Kill a node; its peers notice."""
        for digest, data in node.writing.items():
            if self.tears_writes:
                node.store.tear(digest, data, self.chance)
        node.crash()
        self._behind.discard(node.peer_id)
        self.links.drop(node.peer_id)
        for other in self.nodes.values():
            other.slots.tidy()
        for other_id in self._connections.pop(node.peer_id, {}):
            del self._connections[other_id][node.peer_id]
            self.notify(self.nodes[other_id], PeerLost(node.peer_id, "closed"))

    def break_cut_connections(self) -> None:
        """Let every pair notice whose connection a partition cut, as keep-alives do after a while."""
        for peer_id, others in self._connections.items():
            for other_id in [other for other in others if self.network.is_cut(peer_id, other)]:
                del others[other_id]
                if self.nodes[peer_id].is_up:
                    self.notify(self.nodes[peer_id], PeerLost(other_id, "closed"))

    def publish(self, change_count: int = 20) -> int:
        """Train one step and hand the weights over; return the generation."""
        self.region = change_region(self.region, self.chance, change_count)
        self._trainer_step += 1
        return self.nodes[self.trainer_key].offer_snapshot(self.region, self._trainer_step)

    def publish_and_wait(self, limit_seconds: float = 30.0) -> Version:
        """Publish and run until the version is committed."""
        count = len(self.versions)
        self.publish()
        self.run_until(lambda: len(self.versions) > count, limit_seconds)
        return max(self.versions)

    def heal(self) -> None:
        """End all faults of the network."""
        self.network.heal()

    @property
    def newest(self) -> Version | None:
        """The newest committed version."""
        return self._newest

    def is_settled(self) -> bool:
        """Say whether every live follower has the newest version, in its engine if it has one."""
        self._look_at_touched()
        return not self._behind and any(node.versions.follower is not None for node in self.nodes.values())

    @property
    def behind_count(self) -> int:
        """Live followers that do not have the newest version."""
        self._look_at_touched()
        return len(self._behind)

    def describe(self) -> str:
        """Return one line on where every node stands."""
        parts = []
        for node in self.nodes.values():
            follower = node.versions.follower
            where = "down" if not node.is_up else "up"
            if follower is not None:
                where = f"{follower.phase} mirror {follower.mirror_version} engine {follower.applied_version}"
            parts.append(f"{node.name} {where}")
        return f"newest {self.newest}; " + "; ".join(parts)

    # Looking

    def _check(self) -> None:
        self._look_at_touched()

    def _look_at_touched(self) -> None:
        for node in self._touched.values():
            for checker in self._checkers:
                checker.check_node(self, node)
            if node.is_up and node.versions.follower is not None and not self._is_current(node):
                self._behind.add(node.peer_id)
            else:
                self._behind.discard(node.peer_id)
        self._touched.clear()

    def _is_current(self, node: SimNode) -> bool:
        follower = node.versions.follower
        if follower is None or follower.phase != "current" or self._newest is None:
            return False
        if node.versions.role == "inferencer":
            return follower.applied_version == self._newest
        holdings = follower.holdings
        newest = max((holdings.version_last, *holdings.anchors))
        return (holdings.epoch, newest) == (self._newest.epoch, self._newest.number)

    # What nodes ask of the world

    def make_hands(self, store: FakeStore) -> Hands:
        """Return new hands for a life of a node."""
        return Hands(store, engine_fails=self.network.engine_fails, note_version=self.note_version)

    def make_slots(self) -> Slots:
        """Return new upload slots for a life of a node."""
        return Slots(self.clock, self.links.scale)

    def work(self, node: SimNode, machine: str, work: Work) -> None:
        """Let the node's hands do something that takes time."""
        hands = node.versions.hands
        delay_seconds = self.chance.between(0.0, WORK_SECONDS_MAX)
        if isinstance(work, StoreChunk):
            node.writing[work.digest] = work.data

        def act() -> None:
            if isinstance(work, StoreChunk):
                node.writing.pop(work.digest, None)
            event = hands.finish(work)
            if isinstance(event, PatchEncoded | AnchorStored | SkipEncoded) and event.blob_id not in self._published:
                self._note_blob(node, event)
            self.deliver(node, machine, event)

        self.later_on(node, delay_seconds, act)

    def send(self, node: SimNode, machine: str, request: SendRequest) -> None:
        """Carry a request to its receiver and the replies back."""
        exchange = Exchange(self, node, machine, request)
        exchange.start()
        if isinstance(request.message, GetChunks):
            node.exchanges[machine, request.request_id] = exchange

    def dial(self, node: SimNode, dial: DialPeer) -> None:
        """Try to connect two nodes."""
        delay_seconds = self.network.latency_seconds() + self.links.delay_seconds(node.peer_id, dial.peer_id)
        self.later_on(node, delay_seconds, lambda: self._connect(node, dial.peer_id))

    def note_version(self, version: Version, root: Digest) -> None:
        """A publisher committed a version."""
        if self.versions.setdefault(version, root) != root:
            raise SimulationError(self.seed, f"{version} was committed with two roots")
        if self._newest is not None and version.number <= self._newest.number and version != self._newest:
            raise SimulationError(self.seed, f"{version} was committed after {self._newest}")
        if self._newest is None or version > self._newest:
            self._newest = version
            self._behind.update(node.peer_id for node in self.nodes.values() if node.versions.follower is not None)

    # What exchanges ask of the world

    def deliver(self, node: SimNode, machine: str, event: Event) -> None:
        """Hand an event to a machine now."""
        self._touched[node.peer_id] = node
        super().deliver(node, machine, event)

    def answer(self, node: SimNode, message: Message, asker: PeerId) -> list[Message]:
        """Have a node answer a request now."""
        self._trace.update(f"{self.clock.now:.6f} {node.name} asked {outline(message)}\n".encode())
        self._touched[node.peer_id] = node
        replies = node.answer(message, asker)
        for checker in self._checkers:
            checker.check_replies(self, node, replies)
        return replies

    def kind_of(self, digests: tuple[Digest, ...]) -> str:
        """Return the kind of the blob that chunks belong to."""
        return next((self._kinds[digest] for digest in digests if digest in self._kinds), "other")

    def is_reachable(self, sender: PeerId, receiver: PeerId) -> bool:
        """Say whether there is a connection, or one could be opened at once."""
        return self.links.link_of(receiver).is_dialable or receiver in self._connections.get(sender, {})

    # Inside

    def _note_blob(self, node: SimNode, event: PatchEncoded | AnchorStored | SkipEncoded) -> None:
        self._published.add(event.blob_id)
        self.published_size_bytes += event.encoded_size_bytes
        kind = {AnchorStored: "anchor", SkipEncoded: "skip"}.get(type(event), "patch")
        if isinstance(event, PatchEncoded) and event.codec_id == ANCHOR_CODEC_ID:
            kind = "anchor"
        for digest in node.store.digests_of(node.store.lists[event.blob_id]):
            self._kinds.setdefault(digest, kind)

    def _connect(self, node: SimNode, peer_id: PeerId) -> None:
        other = self.nodes.get(peer_id)
        if (
            other is None
            or not other.is_up
            or self.network.is_cut(node.peer_id, peer_id)
            or not self.is_reachable(node.peer_id, peer_id)
        ):
            self.deliver_to_all(node, PeerLost(peer_id, "refused"))
            return
        self._connections.setdefault(node.peer_id, {})[peer_id] = None
        self._connections.setdefault(peer_id, {})[node.peer_id] = None
        self.deliver_to_all(node, PeerConnected(peer_id, other.versions.addresses, outbound=True))
        self.notify(other, PeerConnected(node.peer_id, node.versions.addresses, outbound=False))

    def _pull(self, node: SimNode) -> None:
        """Read the heads and one shard of the have records, as the daemon does."""
        self.later_on(node, self.chance.between(0.8, 1.2) * PULL_SECONDS, lambda: self._pull(node))
        if self.network.islands.get(node.peer_id, 0) != 0:
            return  # the directory is on the other side
        for record in tuple(self.directory.heads.values()):
            self.deliver_to_all(node, HeadSeen(record, None))
        node.shard = (node.shard + 1) % limits.HAVE_SHARDS
        for peer_id, record in tuple(self.directory.haves.items()):
            if peer_id[0] % limits.HAVE_SHARDS == node.shard and peer_id != node.peer_id:
                self.deliver_to_all(node, HaveSeen(record, None))
