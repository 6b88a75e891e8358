"""What every simulated world is: nodes on virtual time, and a trace and a check of all that happens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from blake3 import blake3

from pulsenet.chain.records import SignedRecord
from pulsenet.ids import PeerId
from pulsenet.node.effects import SendRequest
from pulsenet.node.events import Event, TimerFired
from pulsenet.testing.checkers import StuckError
from pulsenet.testing.clock import VirtualClock
from pulsenet.testing.fakes import Chance
from pulsenet.testing.network import Faults, Network
from pulsenet.testing.outline import outline

if TYPE_CHECKING:
    from pulsenet.testing.simulated_node import SimulatedNode

WALL_START_MS: Final = 1_700_000_000_000
"""Unix time at which every simulation begins."""

Node = TypeVar("Node", bound="SimulatedNode")


class Simulation(ABC, Generic[Node]):
    """Nodes of one seed; the same seed gives the same run, to the last event.

    Args:
        seed: Decides everything that chance decides.
        faults: How bad the network is; see :func:`pulsenet.testing.network.draw_faults`.
    """

    genesis: SignedRecord
    """The run's first descriptor."""

    events_max = 1_000_000
    """A run with more events is called stuck."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.seed = seed
        self.chance = Chance(seed)
        self.clock = VirtualClock()
        self.network = Network(self.chance.fork(), faults)
        self.nodes: dict[PeerId, Node] = {}
        self.event_count = 0
        self.on_event: Callable[[], None] = lambda: None
        """Called after every event and its check, for those who watch."""
        self._trace = blake3()

    @abstractmethod
    def describe(self) -> str:
        """Return one line on where every node stands."""

    @abstractmethod
    def _check(self) -> None:
        """Look at what the event that is just over has done.

        Raises:
            SimulationError: a rule is broken.
        """

    # Time

    @property
    def now(self) -> float:
        """Virtual monotonic time in seconds."""
        return self.clock.now

    def wall_ms(self, node: Node) -> int:
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

    @property
    def trace_digest(self) -> str:
        """Digest of everything that happened, in order."""
        return self._trace.hexdigest()

    def _step(self, end: float) -> bool:
        if not self.clock.step(end):
            return False
        self.event_count += 1
        if self.event_count > self.events_max:
            raise StuckError(self.seed, f"more than {self.events_max} events: {self.describe()}")
        self._check()
        self.on_event()
        return True

    def later_on(self, node: Node, delay_seconds: float, action: Callable[[], None]) -> None:
        """Let something happen to this life of a node after a delay."""
        life = node.life

        def act() -> bool:
            is_same_life = node.is_up and node.life == life
            if is_same_life:
                action()
            return is_same_life

        self.clock.after(delay_seconds, act)

    # What nodes ask of the world

    @abstractmethod
    def send(self, node: Node, machine: str, request: SendRequest) -> None:
        """Carry a request to its receiver and the replies back."""

    def schedule(self, node: Node, machine: str, event: Event, delay_seconds: float = 0.0) -> None:
        """Deliver an event to one machine of this life of the node."""
        self.later_on(node, delay_seconds, lambda: self.deliver(node, machine, event))

    def notify(self, node: Node, event: Event, delay_seconds: float = 0.0) -> None:
        """Let every machine of this life of the node hear of something, as much later as a message takes."""
        seconds = delay_seconds + self.network.latency_seconds()
        self.later_on(node, seconds, lambda: self.deliver_to_all(node, event))

    def set_timer(self, node: Node, machine: str, moment: float) -> None:
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

    def deliver(self, node: Node, machine: str, event: Event) -> None:
        """Hand an event to a machine now."""
        self._trace.update(f"{self.clock.now:.6f} {node.name} {machine} {outline(event)}\n".encode())
        node.deliver(machine, event)

    def deliver_to_all(self, node: Node, event: Event) -> None:
        """Hand an event that names no request to every machine of a node now."""
        for machine in tuple(node.machines):
            self.deliver(node, machine, event)
