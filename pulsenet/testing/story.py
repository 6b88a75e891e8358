"""A whole run of a swarm under drawn trouble: publish, afflict, heal, and wait until everybody is current.

The same plan plays the same story on every machine: chance comes from the seed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pulsenet.errors import PulsenetError, UsageError
from pulsenet.ids import PeerId
from pulsenet.testing.checkers import ALL_CHECKERS, Checker, SimulationError, StuckError
from pulsenet.testing.fakes import Chance
from pulsenet.testing.faults import ALL_FAULTS, Fault, draw_rates, format_faults
from pulsenet.testing.links import MEGABIT, Link, draw_home_link
from pulsenet.testing.network import Faults
from pulsenet.testing.node import SimNode
from pulsenet.testing.world import World

NODES_MIN, NODES_MAX = 2, 2_000
STEPS_DEFAULT, STEPS_MAX = 6, 1_000

NAT_PER_MILLE = 300
"""Followers that cannot be dialled."""

PUBLISHER_LINK = Link(up_rate=200 * MEGABIT, down_rate=1_000 * MEGABIT, delay_seconds=0.010)

SCALES = (1.0, 2_000.0, 20_000.0)
"""Bytes on the wire for one byte of a chunk: chunks of 256 bytes, 0.5 MB or 5 MB."""

STEP_SECONDS_MIN, STEP_SECONDS_MAX = 0.5, 12.0
TROUBLE_SECONDS_MAX = 40.0
"""Longest time of one partition, clog or absence."""

NOTICE_SECONDS = 15.0
"""How long a cut connection looks alive."""

HEAL_SECONDS_MAX = 400.0
"""Virtual time in which every live follower must be current after faults stop."""

SKEW_MS_MAX = 2_000

_FOLLOWER_TROUBLES = (Fault.CRASH, Fault.LIE, Fault.SILENCE, Fault.ROT, Fault.CLOG)
_SWARM_TROUBLES = (Fault.PARTITION, Fault.ONE_WAY)


@dataclass(frozen=True, slots=True)
class Plan:
    """What decides a story.

    Raises:
        UsageError: a number is outside its limits.
    """

    seed: int
    node_count: int = 12
    """One trainer, about one seed in eight, inferencers."""
    faults: frozenset[Fault] = ALL_FAULTS
    steps: int = STEPS_DEFAULT
    """Versions published under trouble; one more follows when it is over."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 1 << 64:
            raise UsageError(f"--seed: {self.seed} is not from 0 to 2^64 - 1")
        if not NODES_MIN <= self.node_count <= NODES_MAX:
            raise UsageError(f"--nodes: {self.node_count} is not from {NODES_MIN} to {NODES_MAX}")
        if not 0 <= self.steps <= STEPS_MAX:
            raise UsageError(f"--steps: {self.steps} is not from 0 to {STEPS_MAX}")

    @property
    def command(self) -> str:
        """The command that plays it again."""
        faults = format_faults(self.faults)
        return f"pulsenet sim --seed {self.seed} --nodes {self.node_count} --faults {faults} --steps {self.steps}"


@dataclass(slots=True)
class Outcome:
    """What became of a story."""

    plan: Plan
    violations: list[str] = field(default_factory=list)
    """Rules that were broken; the first one ends the story."""
    converged: bool = False
    """Whether every follower had the newest version in time after the faults stopped."""
    shortfall: str = ""
    """Where everybody stood when time was over."""
    trace_hash: str = ""
    """Digest of every event, in order."""
    publisher_payloads: float = 0.0
    """Content of chunks the publisher sent, divided by the encoded size of every blob it published."""
    versions: int = 0
    event_count: int = 0
    virtual_seconds: float = 0.0
    heal_seconds: float = 0.0
    """Virtual time from the end of the faults until everybody was current."""
    troubles: dict[str, int] = field(default_factory=dict)
    """How often what was done to the swarm."""
    rejected: dict[str, int] = field(default_factory=dict)
    """What honest nodes refused, by reason."""

    @property
    def is_good(self) -> bool:
        """Whether no rule was broken and everybody arrived."""
        return self.converged and not self.violations


class Story:
    """One story while it is played.

    Args:
        plan: What decides it.
        checkers: What is checked after every event.
    """

    def __init__(self, plan: Plan, checkers: Sequence[Callable[[], Checker]] = ALL_CHECKERS) -> None:
        self.plan = plan
        self.troubles: dict[str, int] = {}
        self.healed_at: float | None = None
        """When faults stopped."""
        self._chance = Chance(plan.seed ^ 0x5EED)
        self._rates: Faults = draw_rates(self._chance, plan.faults)
        anchor_interval = 2 + self._chance(12)
        scale = SCALES[self._chance(len(SCALES))]
        self.world = World(
            plan.seed, faults=self._rates, anchor_interval=anchor_interval, checkers=checkers, scale=scale
        )
        self.world.tears_writes = Fault.TORN in plan.faults
        self._trainer = self.world.add_node("trainer", "trainer", link=PUBLISHER_LINK)
        self._followers = [self._add_follower(index) for index in range(plan.node_count - 1)]

    def play(self) -> None:
        """Play it to its end.

        Raises:
            SimulationError: a rule was broken, or not everybody arrived.
        """
        for _ in range(self.plan.steps):
            if self._trainer.is_up:
                self.world.publish(change_count=self._chance(60))
            self.world.run_for(self._chance.between(STEP_SECONDS_MIN, STEP_SECONDS_MAX))
            self._afflict()
        self._heal()
        self._publish_once_more()
        self.world.run_until(self.world.is_settled, HEAL_SECONDS_MAX)

    def _publish_once_more(self) -> None:
        count = len(self.world.versions)
        # What the trainer was offered while it looks for the newest head may be refused: a training loop goes on.
        for _ in range(round(HEAL_SECONDS_MAX / STEP_SECONDS_MAX)):
            self.world.publish(change_count=20)
            self.world.run_for(STEP_SECONDS_MAX)
            if len(self.world.versions) > count:
                return
        raise StuckError(self.plan.seed, f"the trainer commits nothing more: {self.world.describe()}")

    def _add_follower(self, index: int) -> SimNode:
        # The first is an inferencer, so that there always is one.
        role = "seed" if index and self._chance(8) == 0 else "inferencer"
        link = draw_home_link(self._chance.fork(), nat_per_mille=NAT_PER_MILLE)
        node = self.world.add_node(f"{role} {index}", role, link=link)
        skew_ms = self._chance(2 * SKEW_MS_MAX) - SKEW_MS_MAX
        node.skew_ms = skew_ms if Fault.SKEW in self.plan.faults else 0
        return node

    # Trouble

    def _afflict(self) -> None:
        for _ in range(1 + len(self._followers) // 16):
            node = self._followers[self._chance(len(self._followers))]
            kind = _FOLLOWER_TROUBLES[self._chance(len(_FOLLOWER_TROUBLES))]
            if kind in self.plan.faults:
                self._trouble(kind, node)
        kind = _SWARM_TROUBLES[self._chance(len(_SWARM_TROUBLES))]
        if self._chance(3) == 0 and kind in self.plan.faults:
            self._part(kind)
        if self._chance(6) == 0 and Fault.CRASH in self.plan.faults:
            self._crash(self._trainer)

    def _trouble(self, kind: Fault, node: SimNode) -> None:
        network = self.world.network
        match kind:
            case Fault.CRASH:
                self._crash(node)
            case Fault.LIE:
                self._for_a_while(network.liars, node)
            case Fault.SILENCE:
                self._for_a_while(network.silent, node)
            case Fault.CLOG:
                other = [self._trainer, *self._followers][self._chance(len(self._followers) + 1)]
                until = self.world.now + self._draw_seconds()
                network.clogs[node.peer_id, other.peer_id] = until
                network.clogs[other.peer_id, node.peer_id] = until
            case _:
                node.store.flip_bit(self._chance)
                if node.is_up and node.versions.hands.mirror.region is not None:
                    node.versions.hands.mirror.flip_bit(self._chance)
        self._count(kind)

    def _crash(self, node: SimNode) -> None:
        """Kill a node within its next effects, and bring it back later."""
        if not node.is_up:
            return
        node.dies_after = self._chance(40)
        self._count(Fault.CRASH)

        def come_back() -> bool:
            if node.is_up and node.dies_after is not None:
                self.world.crash(node)
            if not node.is_up:
                self.world.start(node)
            return False

        self.world.clock.after(self._draw_seconds(), come_back)

    def _part(self, kind: Fault) -> None:
        """Cut some of the followers off."""
        network = self.world.network
        network.islands = {node.peer_id: 1 for node in self._followers if self._chance(4) == 0}
        network.one_way = kind is Fault.ONE_WAY
        islands = network.islands
        self._count(kind)

        def notice() -> bool:
            if network.islands is islands:
                self.world.break_cut_connections()
            return False

        def end() -> bool:
            if network.islands is islands:
                network.islands = {}
            return False

        self.world.clock.after(NOTICE_SECONDS, notice)
        self.world.clock.after(self._draw_seconds(), end)

    def _for_a_while(self, afflicted: set[PeerId], node: SimNode) -> None:
        afflicted.add(node.peer_id)

        def end() -> bool:
            afflicted.discard(node.peer_id)
            return False

        self.world.clock.after(self._draw_seconds(), end)

    def _heal(self) -> None:
        self.healed_at = self.world.now
        self.world.heal()
        self.world.tears_writes = False
        for node in (self._trainer, *self._followers):
            node.dies_after = None
            if not node.is_up:
                self.world.start(node)

    def _draw_seconds(self) -> float:
        return self._chance.between(1.0, TROUBLE_SECONDS_MAX)

    def _count(self, kind: Fault) -> None:
        self.troubles[kind] = self.troubles.get(kind, 0) + 1


def play(
    plan: Plan,
    checkers: Sequence[Callable[[], Checker]] = ALL_CHECKERS,
    on_event: Callable[[World], None] = lambda _: None,
) -> Outcome:
    """Play a story and say what became of it; a broken rule is in the outcome and raises nothing.

    Args:
        plan: What decides it.
        checkers: What is checked after every event.
        on_event: Told of the world after every event; a large swarm takes minutes.
    """
    story = Story(plan, checkers)
    world = story.world
    world.on_event = lambda: on_event(world)
    outcome = Outcome(plan)
    try:
        story.play()
        outcome.converged = True
    except StuckError as error:
        if story.healed_at is None:
            outcome.violations.append(str(error))
        outcome.shortfall = str(error)
    except SimulationError as error:
        outcome.violations.append(str(error))
    except (AssertionError, ArithmeticError, LookupError, TypeError, ValueError, PulsenetError) as error:
        # A machine that breaks on what its driver may tell it is a rule broken as well.
        outcome.violations.append(f"{type(error).__name__}: {error} (simulation seed {plan.seed})")
    outcome.trace_hash = world.trace_digest
    sent_size_bytes = world.links.meter_of(world.trainer_key).sent_content_size_bytes
    outcome.publisher_payloads = sent_size_bytes / max(world.published_size_bytes, 1)
    outcome.versions = len(world.versions)
    outcome.event_count = world.event_count
    outcome.virtual_seconds = world.now
    outcome.heal_seconds = 0.0 if story.healed_at is None else world.now - story.healed_at
    outcome.troubles = dict(sorted(story.troubles.items()))
    for node in world.nodes.values():
        for (name, label), count in node.counts.items():
            if name == "rejected":
                outcome.rejected[label] = outcome.rejected.get(label, 0) + count
    outcome.rejected = dict(sorted(outcome.rejected.items()))
    return outcome
