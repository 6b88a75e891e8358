"""One simulated node: real machines and a driver like the daemon's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from pulsenet import limits
from pulsenet.chain.records import SignedRecord
from pulsenet.chain.retention import RetentionLimits
from pulsenet.chain.signing import decode_signed, encode_signed, record_digest
from pulsenet.chain.trust import Trust
from pulsenet.errors import TrustError
from pulsenet.ids import Digest, PeerId, RunId, Version
from pulsenet.node.effects import (
    EXECUTION_ORDER,
    AnnounceHave,
    AnnounceHead,
    CancelRequest,
    Count,
    DialPeer,
    DropPreparation,
    DropSnapshot,
    Effect,
    Log,
    PrepareHop,
    RefuseSnapshot,
    Release,
    Report,
    SaveState,
    SendRequest,
    SetTimer,
    ShowToMachines,
    StoreChunkList,
    StoreRecord,
    StrikePeer,
)
from pulsenet.node.events import Event, ForkProofSeen, HaveSeen, HeadSeen, SnapshotOffered, TimerFired
from pulsenet.node.inferencer import Inferencer
from pulsenet.node.machine import Machine
from pulsenet.node.mender import Mender
from pulsenet.node.mesh import BOOK_KEY, Holdings, Mesh
from pulsenet.node.news import TRUST_KEY
from pulsenet.node.published import STATE_KEY
from pulsenet.node.respond import Push, respond
from pulsenet.node.trainer import Trainer
from pulsenet.testing.disk import FailingStore
from pulsenet.testing.exchange import Exchange, Slots
from pulsenet.testing.fakes import Chance, FakeDirectory, FakeStore, make_sign, verify
from pulsenet.testing.hands import WORK_TYPES, Hands, Work
from pulsenet.testing.network import Network
from pulsenet.testing.weights import TABLE
from pulsenet.wire.messages import ExchangeHave, Message, PeerAddress, PushForkProof, PushHead, PushRollouts


class Surroundings(Protocol):
    """What a node needs of its world."""

    network: Network
    directory: FakeDirectory
    genesis: SignedRecord

    @property
    def now(self) -> float:
        """Virtual monotonic time in seconds."""
        ...

    def wall_ms(self, node: SimNode) -> int:
        """Return the node's wall clock, its skew included."""
        ...

    def schedule(self, node: SimNode, machine: str, event: Event, delay_seconds: float = 0.0) -> None:
        """Deliver an event to one machine of this life of the node."""
        ...

    def work(self, node: SimNode, machine: str, work: Work) -> None:
        """Let the node's hands do something that takes time."""
        ...

    def send(self, node: SimNode, machine: str, request: SendRequest) -> None:
        """Carry a request to its receiver and the replies back."""
        ...

    def dial(self, node: SimNode, dial: DialPeer) -> None:
        """Try to connect two nodes."""
        ...

    def crash(self, node: SimNode) -> None:
        """Kill a node."""
        ...

    def set_timer(self, node: SimNode, machine: str, moment: float) -> None:
        """Wake a machine of this life of the node, unless it sets its timer anew before."""
        ...

    def make_slots(self) -> Slots:
        """Return new upload slots for a life of a node."""
        ...

    def make_hands(self, node: SimNode) -> Hands:
        """Return new hands for a life of the node."""
        ...

    def note_version(self, version: Version, root: Digest) -> None:
        """A publisher committed a version."""
        ...


class SimNode:
    """A node that can crash and come back with what its store holds.

    Args:
        name: For people.
        peer_id: The node's key.
        role: ``trainer``, ``inferencer`` or ``seed``.
        surroundings: Its world.
        chance: Everything this node leaves to chance.
        bootstraps: Peers to start from.
        retention_limits: How much to keep, or ``None`` for the defaults.
        is_dialable: Whether it has addresses to tell: not behind a NAT.
    """

    is_honest = True
    """Whether what it answers is checked."""

    def __init__(
        self,
        name: str,
        peer_id: PeerId,
        role: str,
        surroundings: Surroundings,
        chance: Chance,
        bootstraps: Sequence[PeerAddress],
        retention_limits: RetentionLimits | None = None,
        *,
        is_dialable: bool = True,
    ) -> None:
        self.name = name
        self.peer_id = peer_id
        self.role = role
        self.store = FailingStore()
        self.is_up = False
        self.life = 0
        """Counts starts; what an earlier life scheduled is lost with it."""
        self.skew_ms = 0
        self.writing: dict[Digest, bytes] = {}
        """Chunks on their way to the disk."""
        self.dies_after: int | None = None
        """Effects the node still carries out before it dies, wherever in a call that is."""
        self.shard = chance(limits.HAVE_SHARDS)
        """Of the have records read last from the directory."""
        self.counts: dict[tuple[str, str], int] = {}
        self.reports: dict[str, object] = {}
        self.log: list[str] = []
        self.refused: list[RefuseSnapshot] = []
        self.dropped: list[int] = []
        self._world = surroundings
        self._chance = chance
        self._bootstraps = tuple(bootstraps)
        self._retention_limits = retention_limits
        self.addresses = (address_of(peer_id),) if is_dialable else ()
        self._told = Holdings()
        self.machines: dict[str, Machine] = {}
        self.timers: dict[str, float] = {}
        """When each machine wants to be woken."""
        self.exchanges: dict[tuple[str, int], Exchange] = {}
        """Requests for chunks under way, by machine and request."""
        self.follower: Inferencer | None = None
        self.trainer: Trainer | None = None
        self.mesh: Mesh | None = None
        self.slots = surroundings.make_slots()
        self.hands = surroundings.make_hands(self)

    # Life and death

    def start(self) -> None:
        """Build the machines from what the store holds and let them begin."""
        assert not self.is_up
        self.is_up = True
        self.dies_after = None
        self._told = Holdings()
        self.life += 1
        self.slots = self._world.make_slots()
        self.hands = self._world.make_hands(self)
        if self.role != "seed":
            self.hands.rebuild_mirror()
        self.trust = self._restore_trust()
        sign = make_sign(self.peer_id)
        self.mesh = Mesh(
            self.trust,
            self.peer_id,
            sign,
            self._chance.fork(),
            role=self.role,
            addresses=self.addresses,
            bootstraps=self._bootstraps,
            saved=self.store.state.get(BOOK_KEY),
        )
        self.machines = {"mesh": self.mesh}
        if self.role == "trainer":
            state = self.store.state.get(STATE_KEY)
            self.trainer = Trainer(self.trust, self.peer_id, sign, self._chance.fork(), verify=verify, state=state)
            self.machines["trainer"] = self.trainer
            self.machines["mender"] = self._make_mender(self.trainer, self.mesh)
        else:
            self.follower = self._make_follower(self.mesh)
            self.machines["follower"] = self.follower
        for machine in self.machines:
            self._world.schedule(self, machine, TimerFired())

    def crash(self) -> None:
        """Die at once: machines, mirror, engine and connections are gone, the store stays."""
        self.is_up = False
        self.machines = {}
        self.timers = {}
        self.writing = {}
        self.exchanges = {}
        self.follower = self.trainer = self.mesh = None

    def _make_mender(self, trainer: Trainer, mesh: Mesh) -> Mender:
        return Mender(
            self.peer_id,
            self._chance.fork(),
            self.store,
            find_state=lambda: trainer.state,
            have_of=mesh.have_of,
            lacking=[blob_id for blob_id in self.store.lists if not self.store.holds_blob(blob_id)],
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
            retention_limits=self._retention_limits,
            have_of=mesh.have_of,
        )

    def _restore_trust(self) -> Trust:
        run_id = RunId(record_digest(self._world.genesis))
        saved = self.store.state.get(TRUST_KEY)
        if saved is not None:
            return Trust.restore(saved, run_id, verify)
        trust = Trust(run_id, verify)
        if self.role == "trainer":
            self._restore_publisher(trust)
        return trust

    def _restore_publisher(self, trust: Trust) -> None:
        self.store.put_record(self._world.genesis)
        for record in self.store.descriptors(0):
            trust.accept_descriptor(decode_signed(record))
        for record in self.store.epochs(1):
            trust.accept_epoch(decode_signed(record))
        head = self.store.newest_head()
        if head is not None:
            try:
                trust.accept_head(decode_signed(head), self._world.wall_ms(self))
            except TrustError as error:
                if error.code != "expired":
                    raise

    # Driver

    def deliver(self, machine: str, event: Event) -> None:
        """Hand an event to one machine and carry out what it orders."""
        if machine not in self.machines:
            return
        effects = self.machines[machine].handle(event, self._world.now, self._world.wall_ms(self))
        self._execute_all(machine, effects)
        self._tell_holdings()

    def deliver_to_all(self, event: Event) -> None:
        """Hand an event that names no request to every machine."""
        for machine in tuple(self.machines):
            self.deliver(machine, event)

    def answer(self, request: Message, asker: PeerId) -> list[Message]:
        """Answer a peer's request; pushed items are shown to the machines first."""
        match request:
            case PushHead(head):
                self.deliver_to_all(HeadSeen(head, asker))
            case PushForkProof(first, second):
                self.deliver_to_all(ForkProofSeen(first, second, asker))
            case ExchangeHave(have):
                self.deliver_to_all(HaveSeen(have, asker))
        if self.mesh is None:
            return []  # it died of what it was shown
        return respond(request, StoreAndMesh(self.store, self.mesh))

    def offer_snapshot(self, region: bytearray, trainer_step: int) -> int:
        """Hand over weights, as a training process does; return their generation."""
        generation = self.hands.take_snapshot(region)
        self.deliver("trainer", SnapshotOffered(generation, trainer_step, TABLE.digest))
        return generation

    def _execute_all(self, machine: str, effects: Iterable[Effect]) -> None:
        life = self.life
        for effect in sorted(effects, key=lambda effect: EXECUTION_ORDER[type(effect)]):
            if self.dies_after is not None:
                self.dies_after -= 1
                if self.dies_after < 0:
                    self._world.crash(self)
            if not self.is_up or self.life != life:
                return
            self._execute(machine, effect)

    def _execute(self, machine: str, effect: Effect) -> None:
        match effect:
            case SendRequest():
                self._world.send(self, machine, effect)
            case CancelRequest(request_id):
                if (machine, request_id) in self.exchanges:
                    self.exchanges[machine, request_id].cancel()
            case ShowToMachines(event):
                for name in self.machines:
                    self._world.schedule(self, name, event)
            case SetTimer(at):
                self._world.set_timer(self, machine, at)
            case DialPeer():
                self._world.dial(self, effect)
            case AnnounceHead(record):
                if self._reaches_directory:
                    self._world.directory.put(self._world.directory.heads, record)
                self.deliver_to_all(HeadSeen(encode_signed(record), None))
            case AnnounceHave(record):
                if self._reaches_directory:
                    self._world.directory.put(self._world.directory.haves, record)
            case _ if isinstance(effect, WORK_TYPES):
                self._world.work(self, machine, effect)
            case _:
                self._execute_here(effect)

    @property
    def _reaches_directory(self) -> bool:
        return self._world.network.islands.get(self.peer_id, 0) == 0

    def _execute_here(self, effect: Effect) -> None:
        match effect:
            case StoreRecord(record):
                self.store.put_record(record)
            case StoreChunkList(blob_id, data):
                self.store.lists[blob_id] = data
            case SaveState(key, value):
                self.store.state[key] = value
            case Release(blob_ids, record_digests):
                self.store.release(blob_ids, record_digests)
            case PrepareHop(manifest):
                assert manifest.blob_id in self.store.lists
                self.hands.mirror.prepare(manifest)
            case DropPreparation():
                self.hands.mirror.drop_preparation()
            case Count(name, label):
                self.counts[name, label] = self.counts.get((name, label), 0) + 1
            case StrikePeer(_, code):
                self.counts["strike", code] = self.counts.get(("strike", code), 0) + 1
            case Report(fields):
                self.reports.update(fields)
            case Log(level, text):
                self.log.append(f"{level}: {text}")
            case DropSnapshot(generation):
                self.dropped.append(generation)
            case RefuseSnapshot():
                self.refused.append(effect)
            case _:
                raise AssertionError(f"nobody carries out {effect}")

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
