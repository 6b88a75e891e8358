"""A whole swarm in one process, on virtual time: the same seed gives the same run, to the last event.

Nodes run the real machines; clock, network, disk, engine and directory are fakes that fail by draw. After every
event the checkers look at everything.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from blake3 import blake3

from pulsenet.chain.records import Descriptor, SignedRecord
from pulsenet.chain.retention import RetentionLimits
from pulsenet.chain.signing import seal
from pulsenet.ids import Digest, PeerId, Version
from pulsenet.node.effects import DialPeer, SendRequest
from pulsenet.node.events import (
    Event,
    HaveSeen,
    HeadSeen,
    PeerConnected,
    PeerLost,
    ReplyReceived,
    RequestDone,
    RequestFailed,
    TimerFired,
)
from pulsenet.testing.checkers import ALL_CHECKERS, Checker, SimulationError
from pulsenet.testing.fakes import Chance, FakeDirectory, make_key, make_sign
from pulsenet.testing.hands import Work
from pulsenet.testing.network import CALM, Faults, Network
from pulsenet.testing.node import SimNode, address_of
from pulsenet.testing.weights import change_region, make_region
from pulsenet.wire.messages import GetChunks, PeerAddress

WALL_START_MS = 1_700_000_000_000
"""Unix time at which every simulation begins."""

PULL_SECONDS = 15.0
"""How often each node reads the directory."""

WORK_SECONDS_MAX = 0.05
"""Longest time of one piece of disk, mirror, engine or encoder work."""

EVENTS_MAX = 2_000_000
"""A run with more events is called stuck."""


class World:
    """The swarm of one seed.

    Args:
        seed: Decides everything that chance decides.
        faults: How bad the network is; see :func:`pulsenet.testing.network.draw_faults`.
        anchor_interval: Versions between anchors.
        checkers: What is checked after every event.
    """

    def __init__(
        self,
        seed: int,
        *,
        faults: Faults = CALM,
        anchor_interval: int = 10,
        checkers: Sequence[Callable[[], Checker]] = ALL_CHECKERS,
    ) -> None:
        self.seed = seed
        self.chance = Chance(seed)
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
        self._now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._trainer_step = 0
        self._connections: set[frozenset[PeerId]] = set()

    # Scenario

    def add_node(self, name: str, role: str, retention_limits: RetentionLimits | None = None) -> SimNode:
        """Add a node and start it; everybody but the trainer is told where the trainer is."""
        peer_id = make_key(name)
        bootstraps = () if role == "trainer" else (PeerAddress(self.trainer_key, (address_of(self.trainer_key),)),)
        node = SimNode(name, peer_id, role, self, self.chance.fork(), bootstraps, retention_limits)
        self.nodes[peer_id] = node
        self.start(node)
        return node

    def start(self, node: SimNode) -> None:
        """Start a node, for the first time or after a crash."""
        node.start()
        self._pull_later(node, 0.1)

    def crash(self, node: SimNode) -> None:
        """Kill a node; its peers notice."""
        node.crash()
        for pair in sorted((pair for pair in self._connections if node.peer_id in pair), key=sorted):
            self._connections.discard(pair)
            (other,) = pair - {node.peer_id}
            self._to_all_later(self.nodes[other], PeerLost(node.peer_id, "closed"))

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
        self.network.faults = CALM
        self.network.partitions.clear()
        self.network.silent.clear()
        self.network.liars.clear()

    @property
    def newest(self) -> Version | None:
        """The newest committed version."""
        return max(self.versions, default=None)

    def is_settled(self) -> bool:
        """Say whether every live follower has the newest version, in its engine if it has one."""
        followers = [node.follower for node in self.nodes.values() if node.follower is not None]
        return all(
            follower.phase == "current" and (node.role == "seed" or follower.applied_version == self.newest)
            for node in self.nodes.values()
            if (follower := node.follower) is not None
        ) and bool(followers)

    # Time

    @property
    def now(self) -> float:
        """Virtual monotonic time in seconds."""
        return self._now

    def wall_ms(self, node: SimNode) -> int:
        """Return the node's wall clock, its skew included."""
        return WALL_START_MS + round(self._now * 1000) + node.skew_ms

    def run_for(self, seconds: float) -> None:
        """Let virtual time pass."""
        end = self._now + seconds
        while self._step(end):
            pass
        self._now = end

    def run_until(self, is_done: Callable[[], bool], limit_seconds: float) -> None:
        """Run until a condition holds.

        Raises:
            SimulationError: it does not within ``limit_seconds`` of virtual time.
        """
        end = self._now + limit_seconds
        while not is_done():
            if not self._step(end):
                raise SimulationError(self.seed, f"not done after {limit_seconds} s: {self.describe()}")

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
        timer = min(
            ((at, node.name, machine) for node in self.nodes.values() for machine, at in node.timers.items()),
            default=None,
        )
        if self._queue and (timer is None or self._queue[0][0] <= timer[0]):
            if self._queue[0][0] > end:
                return False
            at, _, action = heapq.heappop(self._queue)
            self._now = max(self._now, at)
            action()
        elif timer is not None and timer[0] <= end:
            at, name, machine = timer
            self._now = max(self._now, at)
            node = self.nodes[make_key(name)]
            del node.timers[machine]
            self._deliver(node, machine, TimerFired())
        else:
            return False
        self.event_count += 1
        if self.event_count > EVENTS_MAX:
            raise SimulationError(self.seed, f"more than {EVENTS_MAX} events: {self.describe()}")
        for checker in self._checkers:
            checker.check(self)
        return True

    # What nodes ask of the world

    def schedule(self, node: SimNode, machine: str, event: Event, delay_seconds: float = 0.0) -> None:
        """Deliver an event to one machine of this life of the node."""
        self._later(delay_seconds, node, lambda: self._deliver(node, machine, event))

    def work(self, node: SimNode, machine: str, work: Work) -> None:
        """Let the node's hands do something that takes time."""
        hands = node.hands
        delay_seconds = self.chance.between(0.0, WORK_SECONDS_MAX)
        self._later(delay_seconds, node, lambda: self._deliver(node, machine, hands.finish(work)))

    def send(self, node: SimNode, machine: str, request: SendRequest) -> None:
        """Carry a request to its receiver and the replies back."""
        failure = self.network.find_failure(node.peer_id, request.peer_id)
        if failure:
            delay_seconds = request.timeout_seconds if failure == "timeout" else self.network.latency_seconds()
            failed = RequestFailed(request.request_id, request.peer_id, failure)
            self.schedule(node, machine, failed, delay_seconds)
            return
        self._later(self.network.latency_seconds(), node, lambda: self._arrive(node, machine, request))

    def dial(self, node: SimNode, dial: DialPeer) -> None:
        """Try to connect two nodes."""
        self._later(self.network.latency_seconds(), node, lambda: self._connect(node, dial.peer_id))

    def note_version(self, version: Version, root: Digest) -> None:
        """A publisher committed a version."""
        self.versions[version] = root

    # Inside

    def _deliver(self, node: SimNode, machine: str, event: Event) -> None:
        self._trace.update(f"{self._now:.6f} {node.name} {machine} {event!r}\n".encode())
        node.deliver(machine, event)

    def _later(self, delay_seconds: float, node: SimNode, action: Callable[[], None]) -> None:
        life = node.life

        def act() -> None:
            if node.is_up and node.life == life:
                action()

        self._order += 1
        heapq.heappush(self._queue, (self._now + delay_seconds, self._order, act))

    def _to_all_later(self, node: SimNode, event: Event) -> None:
        self._later(self.network.latency_seconds(), node, lambda: self._deliver_to_all(node, event))

    def _deliver_to_all(self, node: SimNode, event: Event) -> None:
        for machine in tuple(node.machines):
            self._deliver(node, machine, event)

    def _arrive(self, node: SimNode, machine: str, request: SendRequest) -> None:
        receiver = self.nodes.get(request.peer_id)
        if receiver is None or not receiver.is_up:
            failed = RequestFailed(request.request_id, request.peer_id, "closed")
            self.schedule(node, machine, failed, self.network.latency_seconds())
            return
        last_seconds = 0.0
        for reply in receiver.answer(request.message, node.peer_id):
            received = self.network.corrupt(receiver.peer_id, reply)
            event = ReplyReceived(request.request_id, receiver.peer_id, received)
            for _ in range(2 if self.network.duplicates() else 1):
                delay_seconds = self.network.latency_seconds()
                last_seconds = max(last_seconds, delay_seconds)
                self.schedule(node, machine, event, delay_seconds)
        if isinstance(request.message, GetChunks):
            self.schedule(node, machine, RequestDone(request.request_id, receiver.peer_id), last_seconds)

    def _connect(self, node: SimNode, peer_id: PeerId) -> None:
        other = self.nodes.get(peer_id)
        if other is None or not other.is_up or self.network.is_cut(node.peer_id, peer_id):
            self._deliver_to_all(node, PeerLost(peer_id, "refused"))
            return
        self._connections.add(frozenset((node.peer_id, peer_id)))
        self._deliver_to_all(node, PeerConnected(peer_id, (address_of(peer_id),), outbound=True))
        inbound = PeerConnected(node.peer_id, (address_of(node.peer_id),), outbound=False)
        self._to_all_later(other, inbound)

    def _pull_later(self, node: SimNode, delay_seconds: float) -> None:
        self._later(delay_seconds, node, lambda: self._pull(node))

    def _pull(self, node: SimNode) -> None:
        for record in tuple(self.directory.heads.values()):
            self._deliver_to_all(node, HeadSeen(record, None))
        for peer_id, record in tuple(self.directory.haves.items()):
            if peer_id != node.peer_id:
                self._deliver_to_all(node, HaveSeen(record, None))
        self._pull_later(node, self.chance.between(0.8, 1.2) * PULL_SECONDS)

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
