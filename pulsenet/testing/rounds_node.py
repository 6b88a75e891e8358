"""One simulated trainer or authority: the real machines of the rounds, and a toy training process beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from pulsenet.chain.ledger import LEDGER_KEY, Ledger
from pulsenet.chain.records import SignedRecord
from pulsenet.chain.signing import record_digest
from pulsenet.chain.trust import Trust
from pulsenet.ids import PeerId, RunId
from pulsenet.node.candidacy import BALLOT_KEY
from pulsenet.node.coordinator import Coordinator
from pulsenet.node.effects import (
    EXECUTION_ORDER,
    ApplyAggregate,
    CancelRequest,
    CheckContribution,
    Count,
    Effect,
    Log,
    Release,
    Report,
    RestoreState,
    RunInnerSteps,
    SaveState,
    SendRequest,
    SetTimer,
    ShowToMachines,
    StoreChunk,
    StoreChunkList,
    StoreContribution,
    StoreRecord,
    StoreStateAnchor,
    StrikePeer,
    SumSlices,
)
from pulsenet.node.events import (
    ChunkStored,
    Event,
    InnerStepsDone,
    StateAnchorStored,
    StoreFailed,
    TimerFired,
    TrainingLost,
)
from pulsenet.node.machine import Machine
from pulsenet.node.onlooker import Onlooker
from pulsenet.node.own_work import OWN_KEY
from pulsenet.node.respond import Push, StoreView, respond
from pulsenet.node.rounds import Rounds
from pulsenet.node.rounds_respond import event_of, respond_to_round
from pulsenet.testing.fakes import Chance, FakeStore, make_sign, verify
from pulsenet.testing.toy_training import SIZE, Exact, ToyTraining, TrainingDisk, start_state
from pulsenet.wire.messages import (
    GetAggregates,
    GetRounds,
    Message,
    PeerAddress,
    PushContribution,
    PushReceipt,
    PushTerm,
    PushVote,
    Refusal,
)

TrainingOrder = (
    RunInnerSteps | StoreContribution | CheckContribution | SumSlices | ApplyAggregate | RestoreState | StoreStateAnchor
)
"""What the training process does, in the order in which it is told."""

TRAINING_ORDERS = (
    RunInnerSteps,
    StoreContribution,
    CheckContribution,
    SumSlices,
    ApplyAggregate,
    RestoreState,
    StoreStateAnchor,
)


class Surroundings(Protocol):
    """What a node needs of its world."""

    genesis: SignedRecord

    @property
    def now(self) -> float:
        """Virtual monotonic time in seconds."""
        ...

    def schedule(self, node: RoundsNode, machine: str, event: Event, delay_seconds: float = 0.0) -> None:
        """Deliver an event to one machine of this life of the node."""
        ...

    def train(self, node: RoundsNode, machine: str, order: TrainingOrder) -> None:
        """Let the node's training process do something that takes time."""
        ...

    def send(self, node: RoundsNode, machine: str, request: SendRequest) -> None:
        """Carry a request to its receiver and the replies back."""
        ...


class RoundsNode:
    """A node that can crash and come back with what its disks hold.

    Args:
        name: For people.
        peer_id: The node's key.
        is_authority: Whether it votes, countersigns and may coordinate.
        is_trainer: Whether a training process is attached.
        holds_start: Whether that begins with the starting state; a joiner has none.
    """

    def __init__(
        self,
        name: str,
        peer_id: PeerId,
        surroundings: Surroundings,
        chance: Chance,
        *,
        is_authority: bool,
        is_trainer: bool,
        holds_start: bool = True,
    ) -> None:
        self.name = name
        self.peer_id = peer_id
        self.is_authority = is_authority
        self.is_trainer = is_trainer
        self.store = FakeStore()
        self.disk = TrainingDisk(start_state() if holds_start else None)
        self.is_up = False
        self.is_training = False
        self.life = 0
        self.counts: dict[tuple[str, str], int] = {}
        self.reports: dict[str, object] = {}
        self.log: list[str] = []
        self.busy_until = 0.0
        """Until then every request is refused: the node is in an outer step and says so."""
        self._world = surroundings
        self._chance = chance
        self.machines: dict[str, Machine] = {}
        self.timers: dict[str, float] = {}
        self.coordinator: Coordinator | None = None
        self.rounds: Rounds | None = None
        self._training_seed = chance(1 << 62)
        self.training = ToyTraining(self.peer_id, self.disk, self.store, self._training_seed)
        self.training_free_at = 0.0
        self.is_damaged = False
        """Whether its state was damaged on purpose; nothing is asked of it until it has everybody's again."""
        self.received_size_bytes = 0
        """Content of chunks that peers sent it."""
        self.is_full = False
        """Whether the node's disk refuses everything; the training disk is another."""
        self.keeps_books = True
        """Whether everything its inner steps made is known; not after its training disk was set back."""
        self.made: Exact = np.zeros(SIZE)
        """Inner steps of all lives of the training process."""
        self.gone: Exact = np.zeros(SIZE)
        """What died unsaved with the process, or was dropped because a rule says so."""

    # Life and death

    def start(self) -> None:
        """Build the machines from what the store holds and let them begin."""
        assert not self.is_up
        self.is_up = True
        self.life += 1
        self.trust = self._open_trust()
        state = self.store.state
        self.ledger = Ledger.restore(self.trust, state.get(LEDGER_KEY), self.store.record)
        sign = make_sign(self.peer_id)
        self.machines = {}
        if self.is_authority:
            ballot = state.get(BALLOT_KEY)
            chance = self._chance.fork()
            self.coordinator = Coordinator(
                self.trust, self.ledger, self.peer_id, sign, chance, self.store, ballot=ballot
            )
            self.machines["coordinator"] = self.coordinator
        if self.is_trainer:
            own = state.get(OWN_KEY)
            chance = self._chance.fork()
            self.rounds = Rounds(self.trust, self.ledger, self.peer_id, sign, chance, self.store, own=own)
            self.machines["rounds"] = self.rounds
        else:
            chance = self._chance.fork()
            self.machines["onlooker"] = Onlooker(self.trust, self.ledger, self.peer_id, chance)
        for machine in self.machines:
            self._world.schedule(self, machine, TimerFired())
        if self.is_trainer:
            self.attach_training()

    def _open_trust(self) -> Trust:
        trust = Trust(RunId(record_digest(self._world.genesis)), verify)
        trust.accept_descriptor(self._world.genesis)
        return trust

    def crash(self) -> None:
        """Die at once, training process and all; the disks stay."""
        self._end_training()
        self.is_up = False
        self.machines = {}
        self.timers = {}
        self.coordinator = None
        self.rounds = None

    def attach_training(self) -> None:
        """Start a training process from its disk."""
        assert not self.is_training
        self.is_training = True
        self.training = ToyTraining(self.peer_id, self.disk, self.store, self._training_seed)
        self.training_free_at = self._world.now
        self._world.schedule(self, "rounds", self.training.attach())

    def kill_training(self) -> None:
        """Kill the training process alone."""
        self._end_training()
        self.deliver("rounds", TrainingLost())

    def _end_training(self) -> None:
        if not self.is_training:
            return
        self.is_training = False
        state = self.training.state
        self.made += self.training.made
        self.gone += self.training.dropped
        if state is not None and state.round_index not in self.disk.stored:
            self.gone += self.training.local

    def account(self) -> tuple[Exact, Exact, Exact]:
        """Return what inner steps made in all, what of it is gone by rule or death, and what is held uncounted."""
        training = self.training
        made, gone = self.made.copy(), self.gone.copy()
        if self.is_training:
            made, gone = made + training.made, gone + training.dropped
        state = training.state if self.is_training else self.disk.state
        if state is None:
            return made, gone, np.zeros(SIZE)
        work = self.disk.stored.get(state.round_index)
        if work is not None:
            return made, gone, work.corrected.astype(np.float64)
        local = training.local if self.is_training else np.zeros(SIZE)
        return made, gone, state.residual.astype(np.float64) + local

    # Driver

    def deliver(self, machine: str, event: Event) -> None:
        """Hand an event to one machine and carry out what it orders."""
        if machine not in self.machines:
            return
        self._execute_all(machine, self.machines[machine].handle(event, self._world.now, self._wall_ms()))

    def _wall_ms(self) -> int:
        # No record of the rounds has a time in it.
        return 0

    def _execute_all(self, machine: str, effects: list[Effect]) -> None:
        for effect in sorted(effects, key=lambda effect: EXECUTION_ORDER[type(effect)]):
            if self.is_full and isinstance(effect, StoreChunk):
                self._world.schedule(self, machine, StoreFailed(effect.digest, "enospc"))
                continue
            if self.is_full and EXECUTION_ORDER[type(effect)] == 0:
                # As the daemon's driver does: nothing is done any more that comes after what was not stored.
                self._world.schedule(self, machine, StoreFailed(None, "enospc"))
                return
            self._execute(machine, effect)

    def deliver_to_all(self, event: Event) -> None:
        """Hand an event that names no request to every machine."""
        for machine in tuple(self.machines):
            self.deliver(machine, event)

    def answer(self, request: Message, asker: PeerId) -> list[Message]:
        """Answer a peer's request; pushed items are shown to the machines first."""
        if self._world.now < self.busy_until:
            return [Refusal("busy", "an outer step runs", round(1000 * (self.busy_until - self._world.now)))]
        if isinstance(request, PushVote | PushTerm | PushContribution | PushReceipt):
            self.deliver_to_all(event_of(request, asker))
        if isinstance(request, PushVote | PushTerm | PushContribution | PushReceipt | GetRounds | GetAggregates):
            find_verdict = None if self.coordinator is None else self.coordinator.verdicts.find
            return [respond_to_round(request, self.ledger, find_verdict)]
        return respond(request, self._view())

    def _view(self) -> StoreView:
        return _View(self.store)

    def do(self, order: TrainingOrder) -> Event:
        """Let the training process carry out one order; return what came of it."""
        training = self.training
        match order:
            case RunInnerSteps(round_index, inner_steps, number):
                if training.state is not None and training.state.round_index == round_index:
                    training.run_inner_steps(inner_steps, number)
                return InnerStepsDone(round_index)
            case StoreContribution():
                return training.store_contribution()
            case CheckContribution():
                return training.check(order)
            case SumSlices():
                return training.sum_slices(order)
            case ApplyAggregate():
                return training.apply(order)
            case RestoreState(anchor, drops_residual):
                return training.restore(anchor.blob_id, drops_residual=drops_residual)
            case StoreStateAnchor():
                return StateAnchorStored(*training.write_anchor())

    def _execute(self, machine: str, effect: Effect) -> None:
        match effect:
            case SendRequest():
                self._world.send(self, machine, effect)
            case CancelRequest():
                pass  # lines are no bottleneck here: what was asked for arrives, and is ignored
            case SetTimer(at):
                self.timers[machine] = at
            case ShowToMachines(event):
                for name in self.machines:
                    self._world.schedule(self, name, event)
            case StoreChunk(digest, data):
                self.store.chunks[digest] = data
                self._world.schedule(self, machine, ChunkStored(digest))
            case _ if isinstance(effect, TRAINING_ORDERS):
                self._world.train(self, machine, effect)
            case _:
                self._execute_here(effect)

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
            case Count(name, label):
                self.counts[name, label] = self.counts.get((name, label), 0) + 1
            case StrikePeer(_, code):
                self.counts["strike", code] = self.counts.get(("strike", code), 0) + 1
            case Report(fields):
                self.reports.update(fields)
            case Log(level, text):
                self.log.append(f"{level}: {text}")
            case _:
                raise AssertionError(f"nobody carries out {effect}")


class _View:
    """The store as the serving rule sees it."""

    def __init__(self, store: FakeStore) -> None:
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
        return None

    def neighbours(self) -> Sequence[PeerAddress]:
        return ()

    def push_verdict(self, push: Push) -> str:
        return "untrusted"
