"""What every simulated node is: machines over a store, and a driver like the daemon's that carries out their orders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from pulsenet.ids import PeerId
from pulsenet.node.effects import (
    EXECUTION_ORDER,
    Count,
    Effect,
    Log,
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
from pulsenet.node.events import Event, TimerFired
from pulsenet.node.machine import Machine
from pulsenet.node.order import arrange
from pulsenet.testing.fakes import Chance, FakeStore
from pulsenet.testing.simulation import Simulation
from pulsenet.wire.messages import Message


class SimulatedNode(ABC):
    """A node that can crash and come back with what its store holds.

    Args:
        name: For people.
        peer_id: The node's key.
        world: Its world.
        chance: Everything this node leaves to chance.
        store: Its disk.
    """

    skew_ms = 0
    """How far its wall clock is off."""

    def __init__(self, name: str, peer_id: PeerId, world: Simulation[Any], chance: Chance, store: FakeStore) -> None:
        self.name = name
        self.peer_id = peer_id
        self.store = store
        self.is_up = False
        self.life = 0
        """Counts starts; what an earlier life scheduled is lost with it."""
        self.counts: dict[tuple[str, str], int] = {}
        self.reports: dict[str, object] = {}
        self.log: list[str] = []
        self.machines: dict[str, Machine] = {}
        self.timers: dict[str, float] = {}
        """When each machine wants to be woken."""
        self._world = world
        self._chance = chance

    @abstractmethod
    def start(self) -> None:
        """Build the machines from what the store holds and let them begin."""

    @abstractmethod
    def answer(self, request: Message, asker: PeerId) -> list[Message]:
        """Answer a peer's request; pushed items are shown to the machines first."""

    def _come_up(self) -> None:
        """Begin a life; machines are added next."""
        assert not self.is_up
        self.is_up = True
        self.life += 1

    def _add_machines(self, machines: Mapping[str, Machine]) -> None:
        """Let the machines of this life begin."""
        self.machines = arrange(machines)
        for machine in self.machines:
            self._world.schedule(self, machine, TimerFired())

    def crash(self) -> None:
        """Die at once: machines and all they hold in memory are gone, the store stays."""
        self.is_up = False
        self.machines, self.timers = {}, {}

    # Driver

    def deliver(self, machine: str, event: Event) -> None:
        """Hand an event to one machine and carry out what it orders."""
        if machine in self.machines:
            effects = self.machines[machine].handle(event, self._world.now, self._world.wall_ms(self))
            self.carry_out(machine, effects)

    def deliver_to_all(self, event: Event) -> None:
        """Hand an event that names no request to every machine."""
        for machine in tuple(self.machines):
            self.deliver(machine, event)

    def carry_out(self, machine: str, effects: Iterable[Effect]) -> None:
        """Carry out what a machine orders, by rank."""
        for effect in sorted(effects, key=lambda effect: EXECUTION_ORDER[type(effect)]):
            self._execute(machine, effect)

    def _execute(self, machine: str, effect: Effect) -> None:
        match effect:
            case SendRequest():
                self._world.send(self, machine, effect)
            case SetTimer(at):
                self._world.set_timer(self, machine, at)
            case ShowToMachines(event):
                for name in self.machines:
                    self._world.schedule(self, name, event)
            case StoreRecord() | StoreChunkList() | SaveState() | Release():
                self.store.keep((effect,))
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
