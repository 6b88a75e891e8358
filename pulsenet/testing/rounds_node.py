"""One simulated trainer or authority: the real machines of the rounds, and a toy training process beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pulsenet.ids import PeerId
from pulsenet.node.candidacy import BALLOT_KEY
from pulsenet.node.coordinator import Coordinator
from pulsenet.node.effects import (
    CheckContribution,
    Effect,
    RestoreState,
    RunInnerSteps,
    StepState,
    StoreContribution,
    StoreStateAnchor,
    SumSlices,
)
from pulsenet.node.events import (
    Event,
    InnerStepsDone,
    StateAnchorStored,
    TrainingLost,
)
from pulsenet.node.machine import Machine
from pulsenet.node.onlooker import Onlooker
from pulsenet.node.own_work import OWN_KEY
from pulsenet.node.respond import StoreView, respond
from pulsenet.node.rounds import Rounds
from pulsenet.node.rounds_respond import event_of, respond_to_round
from pulsenet.node.verdicts import RoundPush
from pulsenet.testing.fakes import Chance
from pulsenet.testing.ledger_node import LedgerNode
from pulsenet.testing.toy_training import SIZE, Exact, ToyTraining, TrainingDisk, start_state
from pulsenet.wire.messages import GetAggregates, GetRounds, Message, Refusal

if TYPE_CHECKING:
    from pulsenet.testing.rounds_world import RoundsWorld

TrainingOrder = (
    RunInnerSteps | StoreContribution | CheckContribution | SumSlices | StepState | RestoreState | StoreStateAnchor
)
"""What the training process does, in the order in which it is told."""


class RoundsNode(LedgerNode):
    """A node that can crash and come back with what its disks hold.

    Args:
        holds_start: Whether its training process begins with the starting state; a joiner has none.
        kind: As for :class:`LedgerNode`.
    """

    _world: RoundsWorld

    def __init__(
        self,
        name: str,
        peer_id: PeerId,
        world: RoundsWorld,
        chance: Chance,
        holds_start: bool = True,
        **kind: bool,
    ) -> None:
        super().__init__(name, peer_id, world, chance, **kind)
        self.view: StoreView = self.store
        """What is served of it."""
        self.disk = TrainingDisk(start_state() if holds_start else None)
        self.is_training = False
        self.busy_until = 0.0
        """Until then every request is refused: the node is in an outer step and says so."""
        self.coordinator: Coordinator | None = None
        self.rounds: Rounds | None = None
        self.training = ToyTraining(self.peer_id, self.disk, self.store, self._training_seed)
        self.training_free_at = 0.0
        self.is_damaged = False
        """Whether its state was damaged on purpose; nothing is asked of it until it has everybody's again."""
        self.keeps_books = True
        """Whether everything its inner steps made is known; not after its training disk was set back."""
        self.made: Exact = np.zeros(SIZE)
        """Inner steps of all lives of the training process."""
        self.gone: Exact = np.zeros(SIZE)
        """What died unsaved with the process, or was dropped because a rule says so."""

    # Life and death

    def start(self) -> None:
        """Build the machines from what the store holds and let them begin."""
        self._sit_down()
        self._add_machines(self._build_machines())
        if self.is_trainer:
            self.attach_training()

    def _build_machines(self) -> dict[str, Machine]:
        state = self.store.state
        machines: dict[str, Machine] = {}
        if self.is_authority:
            self.coordinator = Coordinator(self._make_seat(), self.store, ballot=state.get(BALLOT_KEY))
            machines["coordinator"] = self.coordinator
        if self.is_trainer:
            self.rounds = Rounds(self._make_seat(), self.store, own=state.get(OWN_KEY))
            machines["rounds"] = self.rounds
        else:
            machines["onlooker"] = Onlooker(self._make_seat())
        return machines

    def crash(self) -> None:
        """Die at once, training process and all; the disks stay."""
        self._end_training()
        super().crash()
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

    def answer(self, request: Message, asker: PeerId) -> list[Message]:
        """Answer a peer's request; pushed items are shown to the machines first."""
        if self._world.now < self.busy_until:
            return [Refusal("busy", "an outer step runs", round(1000 * (self.busy_until - self._world.now)))]
        if isinstance(request, RoundPush):
            self.deliver_to_all(event_of(request, asker))
        if isinstance(request, RoundPush | GetRounds | GetAggregates):
            find_verdict = None if self.coordinator is None else self.coordinator.verdicts.find
            return [respond_to_round(request, self.ledger, find_verdict)]
        return respond(request, self.view)

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
            case StepState():
                return training.step(order)
            case RestoreState(anchor, drops_residual):
                return training.restore(anchor.blob_id, drops_residual=drops_residual)
            case StoreStateAnchor():
                return StateAnchorStored(*training.write_anchor())

    def _execute(self, machine: str, effect: Effect) -> None:
        if isinstance(effect, TrainingOrder):
            self._world.train(self, machine, effect)
        else:
            super()._execute(machine, effect)
