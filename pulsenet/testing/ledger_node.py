"""What simulated nodes of runs with rounds and of those that mix share: a seat at the ledger, and a disk that fills."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pulsenet.chain.ledger import LEDGER_KEY, Ledger
from pulsenet.chain.signing import record_digest
from pulsenet.chain.trust import Trust
from pulsenet.ids import PeerId, RunId
from pulsenet.node.effects import EXECUTION_ORDER, CancelRequest, Effect, StoreChunk
from pulsenet.node.events import ChunkStored, StoreFailed
from pulsenet.node.machine import Seat
from pulsenet.testing.fakes import Chance, FakeStore, make_sign, verify
from pulsenet.testing.simulated_node import SimulatedNode
from pulsenet.testing.simulation import Simulation


class LedgerNode(SimulatedNode):
    """A node that can crash and come back with what its disk holds.

    Args:
        name: For people.
        peer_id: The node's key.
        world: Its world.
        chance: Everything this node leaves to chance.
        is_authority: Whether it votes, countersigns and may coordinate.
        is_trainer: Whether a training process is attached.
    """

    def __init__(
        self,
        name: str,
        peer_id: PeerId,
        world: Simulation[Any],
        chance: Chance,
        *,
        is_authority: bool,
        is_trainer: bool,
    ) -> None:
        super().__init__(name, peer_id, world, chance, FakeStore())
        self.is_authority = is_authority
        self.is_trainer = is_trainer
        self.received_size_bytes = 0
        """Content of chunks that peers sent it."""
        self.is_full = False
        """Whether the node's disk refuses everything; the training disk is another."""
        self._training_seed = chance(1 << 62)
        """What inner steps of rounds bring; drawn for every node, as ever, so that a seed's story stays what it was."""

    def _sit_down(self) -> None:
        """Begin a life with the rules and the ledger that the store gives; machines are added next."""
        self._come_up()
        self.trust = self._open_trust()
        self.ledger = Ledger.restore(self.trust, self.store.state.get(LEDGER_KEY), self.store.record)

    def _make_seat(self) -> Seat:
        return Seat(self.trust, self.ledger, self.peer_id, make_sign(self.peer_id), self._chance.fork())

    def _open_trust(self) -> Trust:
        trust = Trust(RunId(record_digest(self._world.genesis)), verify)
        trust.accept_descriptor(self._world.genesis)
        return trust

    def carry_out(self, machine: str, effects: Iterable[Effect]) -> None:
        """Carry out what a machine orders, by rank, as far as the disk takes it."""
        for effect in sorted(effects, key=lambda effect: EXECUTION_ORDER[type(effect)]):
            if self.is_full and isinstance(effect, StoreChunk):
                self._world.schedule(self, machine, StoreFailed(effect.digest, "enospc"))
                continue
            if self.is_full and EXECUTION_ORDER[type(effect)] == 0:
                # As the daemon's driver does: nothing is done any more that comes after what was not stored.
                self._world.schedule(self, machine, StoreFailed(None, "enospc"))
                return
            self._execute(machine, effect)

    def _execute(self, machine: str, effect: Effect) -> None:
        match effect:
            case CancelRequest():
                pass  # lines are no bottleneck here: what was asked for arrives, and is ignored
            case StoreChunk(digest, data):
                self.store.chunks[digest] = data
                self._world.schedule(self, machine, ChunkStored(digest))
            case _:
                super()._execute(machine, effect)
