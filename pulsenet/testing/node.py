"""One simulated node of a swarm without rounds: real machines and a driver like the daemon's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pulsenet import limits
from pulsenet.chain.retention import RetentionLimits
from pulsenet.chain.signing import decode_signed, record_digest
from pulsenet.chain.trust import Trust
from pulsenet.errors import TrustError
from pulsenet.ids import Digest, PeerId, RunId
from pulsenet.node.effects import EXECUTION_ORDER, CancelRequest, Effect
from pulsenet.node.events import Event, SnapshotOffered
from pulsenet.node.mender import Mender
from pulsenet.node.news import TRUST_KEY
from pulsenet.node.respond import respond
from pulsenet.node.trainer import Trainer
from pulsenet.testing.disk import FailingStore
from pulsenet.testing.exchange import Exchange
from pulsenet.testing.fakes import Chance, verify
from pulsenet.testing.simulated_node import SimulatedNode
from pulsenet.testing.versions_part import StoreAndMesh, VersionsPart
from pulsenet.testing.weights import TABLE
from pulsenet.wire.messages import Message, PeerAddress

if TYPE_CHECKING:
    from pulsenet.testing.world import World


class SimNode(SimulatedNode):
    """A node that can crash and come back with what its store holds.

    Args:
        name: For people.
        peer_id: The node's key.
        role: ``trainer``, ``inferencer`` or ``seed``.
        world: Its world.
        chance: Everything this node leaves to chance.
        bootstraps: Peers to start from.
        retention_limits: How much to keep, or ``None`` for the defaults.
        is_dialable: Whether it has addresses to tell: not behind a NAT.
    """

    is_honest = True
    """Whether what it answers is checked."""

    store: FailingStore
    _world: World

    def __init__(
        self,
        name: str,
        peer_id: PeerId,
        role: str,
        world: World,
        chance: Chance,
        bootstraps: Sequence[PeerAddress],
        retention_limits: RetentionLimits | None = None,
        *,
        is_dialable: bool = True,
    ) -> None:
        super().__init__(name, peer_id, world, chance, FailingStore())
        self.versions = VersionsPart(self, world, chance, role, is_dialable=is_dialable)
        self.writing: dict[Digest, bytes] = {}
        """Chunks on their way to the disk."""
        self.dies_after: int | None = None
        """Effects the node still carries out before it dies, wherever in a call that is."""
        self.shard = chance(limits.HAVE_SHARDS)
        """Of the have records read last from the directory."""
        self._bootstraps = tuple(bootstraps)
        self._retention_limits = retention_limits
        self.exchanges: dict[tuple[str, int], Exchange] = {}
        """Requests for chunks under way, by machine and request."""
        self.slots = world.make_slots()

    # Life and death

    def start(self) -> None:
        """Build the machines from what the store holds and let them begin."""
        self._come_up()
        self.dies_after = None
        self.slots = self._world.make_slots()
        self.trust = self._restore_trust()
        machines = self.versions.start(self.trust, bootstraps=self._bootstraps, retention_limits=self._retention_limits)
        if self.versions.trainer is not None:
            machines["mender"] = self._make_mender(self.versions.trainer)
        self._add_machines(machines)

    def crash(self) -> None:
        """Die at once: machines, mirror, engine and connections are gone, the store stays."""
        super().crash()
        self.versions.crash()
        self.writing = {}
        self.exchanges = {}

    def _make_mender(self, trainer: Trainer) -> Mender:
        return Mender(
            self.peer_id,
            self._chance.fork(),
            self.store,
            find_state=lambda: trainer.state,
            have_of=self.versions.mesh.have_of,
            lacking=[blob_id for blob_id in self.store.lists if not self.store.holds_blob(blob_id)],
        )

    def _restore_trust(self) -> Trust:
        run_id = RunId(record_digest(self._world.genesis))
        saved = self.store.state.get(TRUST_KEY)
        if saved is not None:
            return Trust.restore(saved, run_id, verify)
        trust = Trust(run_id, verify)
        if self.versions.role == "trainer":
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
        super().deliver(machine, event)
        self.versions.tell_holdings()

    def answer(self, request: Message, asker: PeerId) -> list[Message]:
        """Answer a peer's request; pushed items are shown to the machines first."""
        self.versions.show_push(request, asker)
        # It may have died of what it was shown.
        return respond(request, StoreAndMesh(self.store, self.versions.mesh)) if self.is_up else []

    def offer_snapshot(self, region: bytearray, trainer_step: int) -> int:
        """Hand over weights, as a training process does; return their generation."""
        generation = self.versions.hands.take_snapshot(region)
        self.deliver("trainer", SnapshotOffered(generation, trainer_step, TABLE.digest))
        return generation

    def carry_out(self, machine: str, effects: Iterable[Effect]) -> None:
        """Carry out what a machine orders, by rank, until the node dies of it."""
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
        if isinstance(effect, CancelRequest):
            if (machine, effect.request_id) in self.exchanges:
                self.exchanges[machine, effect.request_id].cancel()
        elif not self.versions.execute(machine, effect):
            super()._execute(machine, effect)
