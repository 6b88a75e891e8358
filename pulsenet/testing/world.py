"""A whole swarm in one process, on virtual time: the same seed gives the same run, to the last event.

Nodes run the real machines; clock, network, disk, engine and directory are fakes that fail by draw. After every
event the checkers look at everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from blake3 import blake3

from pulsenet import limits
from pulsenet.chain.records import Descriptor, SignedRecord
from pulsenet.chain.retention import RetentionLimits
from pulsenet.chain.signing import seal
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
    TimerFired,
)
from pulsenet.testing.checkers import ALL_CHECKERS, Checker, SimulationError, StuckError
from pulsenet.testing.clock import VirtualClock
from pulsenet.testing.exchange import Exchange, Slots
from pulsenet.testing.fakes import Chance, FakeDirectory, make_key, make_sign
from pulsenet.testing.hands import ANCHOR_CODEC_ID, Hands, Work
from pulsenet.testing.links import Link, Links
from pulsenet.testing.network import CALM, Faults, Network
from pulsenet.testing.node import SimNode, address_of
from pulsenet.testing.outline import outline
from pulsenet.testing.weights import change_region, make_region
from pulsenet.wire.messages import GetChunks, Message, PeerAddress

WALL_START_MS = 1_700_000_000_000
"""Unix time at which every simulation begins."""

PULL_SECONDS = 15.0
"""How often each node reads the directory."""

WORK_SECONDS_MAX = 0.05
"""Longest time of one piece of disk, mirror, engine or encoder work."""

EVENTS_MAX = 50_000_000
"""A run with more events is called stuck."""


class World:
    """The swarm of one seed.

    Args:
        seed: Decides everything that chance decides.
        faults: How bad the network is; see :func:`pulsenet.testing.network.draw_faults`.
        anchor_interval: Versions between anchors.
        checkers: What is checked after every event.
        scale: Bytes on the wire that one byte of a chunk stands for; see :class:`pulsenet.testing.links.Links`.
    """

    def __init__(
        self,
        seed: int,
        *,
        faults: Faults = CALM,
        anchor_interval: int = 10,
        checkers: Sequence[Callable[[], Checker]] = ALL_CHECKERS,
        scale: float = 1.0,
    ) -> None:
        self.seed = seed
        self.chance = Chance(seed)
        self.clock = VirtualClock()
        self.links = Links(self.clock, scale=scale)
        """Lines of nodes that were given one; everybody else's has room for everything."""
        self.network = Network(self.chance.fork(), faults)
        self.directory = FakeDirectory()
        self.nodes: dict[PeerId, SimNode] = {}
        self.versions: dict[Version, Digest] = {}
        """Every version ever committed, with its root."""
        self.trainer_key = make_key("trainer")
        self.genesis = self._make_genesis(anchor_interval)
        self.region = make_region(self.chance.fork())
        """Weights of the training process."""
        self.event_count = 0
        self._trace = blake3()
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
        self._pull_later(node, 0.1)

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
            self._to_all_later(self.nodes[other_id], PeerLost(node.peer_id, "closed"))

    def break_cut_connections(self) -> None:
        """Let every pair notice whose connection a partition cut, as keep-alives do after a while."""
        for peer_id, others in self._connections.items():
            for other_id in [other for other in others if self.network.is_cut(peer_id, other)]:
                del others[other_id]
                if self.nodes[peer_id].is_up:
                    self._to_all_later(self.nodes[peer_id], PeerLost(other_id, "closed"))

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
        return not self._behind and any(node.follower is not None for node in self.nodes.values())

    @property
    def behind_count(self) -> int:
        """Live followers that do not have the newest version."""
        self._look_at_touched()
        return len(self._behind)

    # Time

    @property
    def now(self) -> float:
        """Virtual monotonic time in seconds."""
        return self.clock.now

    def wall_ms(self, node: SimNode) -> int:
        """Return the node's wall clock, its skew included."""
        return WALL_START_MS + round(self.clock.now * 1000) + node.skew_ms

    def run_for(self, seconds: float) -> None:
        """Let virtual time pass."""
        end = self.clock.now + seconds
        while self._step(end):
            pass
        self.clock.now = end

    def run_until(self, is_done: Callable[[], bool], limit_seconds: float) -> None:
        """Run until a condition holds.

        Raises:
            SimulationError: it does not within ``limit_seconds`` of virtual time.
        """
        end = self.clock.now + limit_seconds
        while not is_done():
            if not self._step(end):
                raise StuckError(self.seed, f"not done after {limit_seconds} s: {self.describe()}")

    def describe(self) -> str:
        """Return one line on where every node stands."""
        parts = []
        for node in self.nodes.values():
            follower = node.follower
            where = "down" if not node.is_up else "up"
            if follower is not None:
                where = f"{follower.phase} mirror {follower.mirror_version} engine {follower.applied_version}"
            parts.append(f"{node.name} {where}")
        return f"newest {self.newest}; " + "; ".join(parts)

    @property
    def trace_digest(self) -> str:
        """Digest of everything that happened, in order."""
        return self._trace.hexdigest()

    def _step(self, end: float) -> bool:
        if not self.clock.step(end):
            return False
        self.event_count += 1
        if self.event_count > EVENTS_MAX:
            raise StuckError(self.seed, f"more than {EVENTS_MAX} events: {self.describe()}")
        self._look_at_touched()
        return True

    def _look_at_touched(self) -> None:
        for node in self._touched.values():
            for checker in self._checkers:
                checker.check_node(self, node)
            if node.is_up and node.follower is not None and not self._is_current(node):
                self._behind.add(node.peer_id)
            else:
                self._behind.discard(node.peer_id)
        self._touched.clear()

    def _is_current(self, node: SimNode) -> bool:
        follower = node.follower
        if follower is None or follower.phase != "current" or self._newest is None:
            return False
        if node.role == "inferencer":
            return follower.applied_version == self._newest
        holdings = follower.holdings
        newest = max((holdings.version_last, *holdings.anchors))
        return (holdings.epoch, newest) == (self._newest.epoch, self._newest.number)

    # What nodes ask of the world

    def schedule(self, node: SimNode, machine: str, event: Event, delay_seconds: float = 0.0) -> None:
        """Deliver an event to one machine of this life of the node."""
        self._later(delay_seconds, node, lambda: self.deliver(node, machine, event))

    def set_timer(self, node: SimNode, machine: str, moment: float) -> None:
        """Wake a machine of this life of the node, unless it sets its timer anew before."""
        node.timers[machine] = moment
        life = node.life

        def fire() -> bool:
            if not node.is_up or node.life != life or node.timers.get(machine) != moment:
                return False
            del node.timers[machine]
            self.deliver(node, machine, TimerFired())
            return True

        self.clock.at(moment, fire)

    def make_hands(self, node: SimNode) -> Hands:
        """Return new hands for a life of the node."""
        return Hands(node.store, engine_fails=self.network.engine_fails, note_version=self.note_version)

    def make_slots(self) -> Slots:
        """Return new upload slots for a life of a node."""
        return Slots(self.clock, self.links.scale)

    def work(self, node: SimNode, machine: str, work: Work) -> None:
        """Let the node's hands do something that takes time."""
        hands = node.hands
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

        self._later(delay_seconds, node, act)

    def send(self, node: SimNode, machine: str, request: SendRequest) -> None:
        """Carry a request to its receiver and the replies back."""
        exchange = Exchange(self, node, machine, request)
        exchange.start()
        if isinstance(request.message, GetChunks):
            node.exchanges[machine, request.request_id] = exchange

    def dial(self, node: SimNode, dial: DialPeer) -> None:
        """Try to connect two nodes."""
        delay_seconds = self.network.latency_seconds() + self.links.delay_seconds(node.peer_id, dial.peer_id)
        self._later(delay_seconds, node, lambda: self._connect(node, dial.peer_id))

    def note_version(self, version: Version, root: Digest) -> None:
        """A publisher committed a version."""
        if self.versions.setdefault(version, root) != root:
            raise SimulationError(self.seed, f"{version} was committed with two roots")
        if self._newest is not None and version.number <= self._newest.number and version != self._newest:
            raise SimulationError(self.seed, f"{version} was committed after {self._newest}")
        if self._newest is None or version > self._newest:
            self._newest = version
            self._behind.update(node.peer_id for node in self.nodes.values() if node.follower is not None)

    # What exchanges ask of the world

    def deliver(self, node: SimNode, machine: str, event: Event) -> None:
        """Hand an event to a machine now."""
        self._trace.update(f"{self.clock.now:.6f} {node.name} {machine} {outline(event)}\n".encode())
        self._touched[node.peer_id] = node
        node.deliver(machine, event)

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

    def _later(self, delay_seconds: float, node: SimNode, action: Callable[[], None]) -> None:
        life = node.life

        def act() -> bool:
            is_same_life = node.is_up and node.life == life
            if is_same_life:
                action()
            return is_same_life

        self.clock.after(delay_seconds, act)

    def _to_all_later(self, node: SimNode, event: Event) -> None:
        self._later(self.network.latency_seconds(), node, lambda: self._deliver_to_all(node, event))

    def _deliver_to_all(self, node: SimNode, event: Event) -> None:
        for machine in tuple(node.machines):
            self.deliver(node, machine, event)

    def _connect(self, node: SimNode, peer_id: PeerId) -> None:
        other = self.nodes.get(peer_id)
        if (
            other is None
            or not other.is_up
            or self.network.is_cut(node.peer_id, peer_id)
            or not self.is_reachable(node.peer_id, peer_id)
        ):
            self._deliver_to_all(node, PeerLost(peer_id, "refused"))
            return
        self._connections.setdefault(node.peer_id, {})[peer_id] = None
        self._connections.setdefault(peer_id, {})[node.peer_id] = None
        self._deliver_to_all(node, PeerConnected(peer_id, other.addresses, outbound=True))
        self._to_all_later(other, PeerConnected(node.peer_id, node.addresses, outbound=False))

    def _pull_later(self, node: SimNode, delay_seconds: float) -> None:
        self._later(delay_seconds, node, lambda: self._pull(node))

    def _pull(self, node: SimNode) -> None:
        """Read the heads and one shard of the have records, as the daemon does."""
        self._pull_later(node, self.chance.between(0.8, 1.2) * PULL_SECONDS)
        if self.network.islands.get(node.peer_id, 0) != 0:
            return  # the directory is on the other side
        for record in tuple(self.directory.heads.values()):
            self._deliver_to_all(node, HeadSeen(record, None))
        node.shard = (node.shard + 1) % limits.HAVE_SHARDS
        for peer_id, record in tuple(self.directory.haves.items()):
            if peer_id[0] % limits.HAVE_SHARDS == node.shard and peer_id != node.peer_id:
                self._deliver_to_all(node, HaveSeen(record, None))

    def _make_genesis(self, anchor_interval: int) -> SignedRecord:
        owner = make_key("owner")
        descriptor = Descriptor(
            name="simulated",
            nonce=bytes(16),
            revision=0,
            previous=None,
            owners=(owner,),
            owner_threshold=1,
            authorities=(self.trainer_key,),
            trainers=(self.trainer_key,),
            inferencers=(),
            open_trainers_max=0,
            open_inferencers_max=0,
            private=False,
            table_digest=None,
            base_root=None,
            base_blob_id=None,
            algorithm="none",
            constants=(),
            publish_interval_min_ms=0,
            anchor_interval=anchor_interval,
            wire_version_min=1,
            wire_version_max=1,
        )
        return seal(descriptor, make_sign(owner), owner)
