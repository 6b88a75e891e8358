"""One simulated member of a run that mixes: the real machines, and a toy training process that may outlive them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from pulsenet.chain.records import SliceName
from pulsenet.chain.rosters import Rosters
from pulsenet.node.candidacy import BALLOT_KEY
from pulsenet.node.effects import Effect, SaveState
from pulsenet.node.events import Event
from pulsenet.node.machine import Machine
from pulsenet.node.mixing.convener import Convener
from pulsenet.node.mixing.effects import (
    CheckMean,
    CombineParts,
    CompareProbes,
    MixReady,
    OpenRound,
    StartMixing,
    StoreState,
)
from pulsenet.node.mixing.events import MastersTold, MixingEvent, MixingLost, PartsCombined, PartStored, ProbesCompared
from pulsenet.node.mixing.journal import MIXING_KEY, Stand
from pulsenet.node.mixing.machine import Mixing
from pulsenet.node.mixing.respond import MIXING_REQUESTS, MixingRequest, event_of, respond_to_mixing
from pulsenet.node.respond import respond
from pulsenet.node.rounds_respond import event_of as event_of_round
from pulsenet.node.rounds_respond import respond_to_round
from pulsenet.outer.mixing.probe import compare_answers
from pulsenet.outer.mixing.settings import Job, MixingSettings
from pulsenet.testing.checkers import SimulationError
from pulsenet.testing.fakes import Chance
from pulsenet.testing.ledger_node import LedgerNode
from pulsenet.testing.toy_mixing import (
    TOY_TABLE,
    Doing,
    MixingDisk,
    ToyMixing,
    Values,
    check_mean,
    combine,
    make_start,
    read_values,
    write_values,
)
from pulsenet.wire.messages import Message, PushTerm, PushVote

if TYPE_CHECKING:
    from pulsenet.ids import PeerId
    from pulsenet.testing.mixing_world import MixingWorld

RECONNECT_SECONDS = 5.0
"""How long a round of the training process waits for a node that is away, as ``DaemonMixer`` does."""

HAND_SECONDS_MAX = 0.05
"""Longest time of one thing that shell or training process do beside inner steps."""


class MixingNode(LedgerNode):
    """A trainer that mixes; authorities convene as well.

    Args:
        holds_start: Whether its training process begins with values; a joiner has none.
        kind: As for :class:`LedgerNode`.
    """

    _world: MixingWorld

    def __init__(
        self,
        name: str,
        peer_id: PeerId,
        world: MixingWorld,
        chance: Chance,
        holds_start: bool = True,
        **kind: bool,
    ) -> None:
        super().__init__(name, peer_id, world, chance, **kind)
        self._start = make_start(peer_id, world.spread if holds_start else 0.0, world.dtype)
        self.mixing_disk = MixingDisk(self._start.copy() if holds_start and world.spread else None)
        self.mixing: Mixing | None = None
        self.convener: Convener | None = None
        self.toy: ToyMixing | None = None
        self.wants_state = False
        self.durable_stands: dict[tuple[int, int], Stand] = {}
        """Where the disk says that this node stands in exchanges."""
        self.lies: Callable[[Values], Values] | None = None
        """What this node hands out in place of its parts, and of the means it was to make."""
        self.waited_since: dict[Job, float] = {}
        """Since when the training process waits for a job's result."""
        self.busy_seconds = 0.0
        """Time spent in inner steps."""
        self._rounds_before = 0
        self.toy_count = 0
        """Lives of the training process."""
        self.results: list[MixReady] = []

    # Life and death

    def start(self) -> None:
        """Build the machines from what the store holds; a training process that lives on attaches again."""
        self._sit_down()
        state, settings = self.store.state, self._world.settings
        self.rosters = Rosters(self.trust, self.ledger)
        machines: dict[str, Machine] = {}
        if self.is_trainer:
            journal = state.get(MIXING_KEY)
            self.mixing = Mixing(self._make_seat(), self.rosters, settings, self.store, journal=journal)
            machines["mixing"] = self.mixing
        if self.is_authority:
            self.convener = Convener(self._make_seat(), self.rosters, settings, ballot=state.get(BALLOT_KEY))
            machines["convener"] = self.convener
        self._add_machines(machines)
        if self.convener is not None:
            self._world.schedule(self, "convener", MastersTold(TOY_TABLE))
        if self.is_trainer and self.toy is None:
            self.attach_training()
        elif self.toy is not None:
            self._tell(self.toy.attach())

    def crash(self) -> None:
        """Die at once, training process and all; the disks stay."""
        self._end_toy()
        self.stop_daemon()

    def stop_daemon(self) -> None:
        """Let the node's process die alone: the training process goes on with its own values."""
        super().crash()
        self.convener = None
        if self.toy is not None:
            self.waited_since = {}
            self._tell(self.toy.lose_node())

    def attach_training(self) -> None:
        """Start a training process from its disk."""
        world = self._world
        chance = Chance(self._chance(1 << 62))
        self.toy_count += 1
        self.toy = ToyMixing(self.mixing_disk, self.store, chance, self._start, world.step, world.learning_rate)
        self._tell(self.toy.attach())

    def kill_training(self) -> None:
        """Kill the training process alone."""
        self._end_toy()
        if self.is_up:
            self.deliver("mixing", MixingLost())

    def _end_toy(self) -> None:
        if self.toy is not None:
            self._rounds_before += self.toy.round_count
        self.toy = None
        self.waited_since = {}

    @property
    def settings(self) -> MixingSettings:
        """Of the run."""
        return self._world.settings

    @property
    def round_count(self) -> int:
        """Rounds the training process went through, in all its lives."""
        return self._rounds_before + (0 if self.toy is None else self.toy.round_count)

    @property
    def z(self) -> Values:
        """The training process's z after its last whole round."""
        z = self.mixing_disk.z
        return self._start if z is None else z

    # Driver

    def _tell(self, events: list[MixingEvent]) -> None:
        """Let the machine hear what the training process does, a little later and in order."""
        toy = self.toy
        assert toy is not None
        if not self.is_up:
            self._wait_for_node(toy)
            return
        for event in events:
            told = self._lie(event) if isinstance(event, PartStored) and self.lies is not None else event
            self._world.schedule(self, "mixing", told, HAND_SECONDS_MAX)
        if toy.doing in (Doing.MIX1, Doing.MIX2):
            job = Job.MIX1 if toy.doing is Doing.MIX1 else Job.MIX2
            self.waited_since.setdefault(job, self._world.now)

    def _open(self, plan: OpenRound) -> None:
        toy = self.toy
        if toy is None or toy.doing is not Doing.OPENING:
            return
        offers, self.wants_state = self.wants_state, False
        self.waited_since = {}
        self._tell(toy.open(plan, offers_state=offers))
        self._run_inner_steps(toy, plan)

    def _run_inner_steps(self, toy: ToyMixing, plan: OpenRound) -> None:
        seconds = self._world.open_round(self, plan.round_index)

        def end() -> None:
            if self.toy is toy and toy.plan is plan and toy.doing is Doing.INNER:
                self.busy_seconds += seconds
                self._tell(toy.end_inner_steps())

        self._world.clock.after(seconds, end)

    def _wait_for_node(self, toy: ToyMixing) -> None:
        """Open the round that is due alone if the node is not back in time; what it would be told is told then."""
        due = toy.round_count

        def go_on() -> None:
            is_due = self.toy is toy and toy.doing is Doing.OPENING and toy.round_count == due
            if is_due and not self.is_up:
                self._run_inner_steps(toy, toy.open_alone())

        if toy.doing is Doing.OPENING:
            self._world.clock.after(RECONNECT_SECONDS, go_on)

    def _take(self, ready: MixReady) -> None:
        toy = self.toy
        if toy is None or toy.plan is None or ready.round_index != toy.plan.round_index:
            return
        self.results.append(ready)
        before = toy.doing
        try:
            events = toy.take(ready)
        except ValueError as error:
            raise SimulationError(self._world.seed, f"{self.name} was given no vector: {error}") from error
        if toy.doing is not before:
            self._world.note_wait(self, ready, self.waited_since.pop(ready.job, self._world.now))
        self._tell(events)

    def deliver(self, machine: str, event: Event) -> None:
        """Hand an event to one machine and carry out what it orders."""
        self._world.touched.add(self.peer_id)
        super().deliver(machine, event)

    def _lie(self, event: PartStored) -> PartStored:
        """Return other parts than the training process handed over."""
        assert self.lies is not None
        place = (event.round_index, int(event.job))
        slices = [self.lies(read_values(self.store, part)) for part in event.slices]
        return replace(event, slices=tuple(write_values(self.store, values, *place) for values in slices))

    def do_combine(self, order: CombineParts) -> Event:
        """Carry out a combination; a liar stores something else."""
        answer = combine(self.store, order)
        if self.lies is not None and isinstance(answer, PartsCombined):
            honest = read_values(self.store, SliceName(answer.blob_id, answer.encoded_size_bytes))
            lie = write_values(self.store, self.lies(honest), order.round_index, int(order.job))
            answer = PartsCombined(order.number, lie.blob_id, lie.encoded_size_bytes, lie.norm_bits)
        self._world.note_combined(self, order, answer)
        return answer

    def do_compare(self, order: CompareProbes) -> Event:
        """Carry out a comparison, and tell the world what it came to."""
        found = compare_answers(order.answers, order.round_index)
        self._world.note_compared(self, order, found)
        return ProbesCompared(order.number, found.distance)

    def _execute(self, machine: str, effect: Effect) -> None:
        match effect:
            case StartMixing() if self.toy is not None:
                self._tell(self.toy.begin(effect))
            case OpenRound():
                self._open(effect)
            case CombineParts():
                self._hand(machine, lambda: self.do_combine(effect))
            case CheckMean():
                self._hand(machine, lambda: check_mean(self.store, effect))
            case CompareProbes():
                self._hand(machine, lambda: self.do_compare(effect))
            case MixReady():
                self._take(effect)
            case StoreState():
                self.wants_state = True
            case SaveState(key, _) if key == MIXING_KEY and self.mixing is not None:
                self.durable_stands = self.mixing.stands()
                super()._execute(machine, effect)
            case StartMixing():
                pass
            case _:
                super()._execute(machine, effect)

    def _hand(self, machine: str, work: Callable[[], Event]) -> None:
        delay_seconds = self._world.chance.between(0.0, HAND_SECONDS_MAX)
        self._world.later_on(self, delay_seconds, lambda: self._world.schedule(self, machine, work()))

    def answer(self, request: Message, asker: PeerId) -> list[Message]:
        """Answer a peer's request; what is pushed is shown to the machines first."""
        if isinstance(request, MIXING_REQUESTS):
            return [self._answer_mixing(request, asker)]
        if isinstance(request, PushVote | PushTerm):
            self.deliver_to_all(event_of_round(request, asker))
            find_verdict = None if self.convener is None else self.convener.verdicts.find
            return [respond_to_round(request, self.ledger, find_verdict)]
        return respond(request, self.store)

    def _answer_mixing(self, request: MixingRequest, asker: PeerId) -> Message:
        event = event_of(request, asker)
        if event is not None:
            self.deliver_to_all(event)
        return respond_to_mixing(request, asker, self.ledger, self.rosters, self.mixing, self.convener)
