"""Trainers that mix, in one process on virtual time: members in place of contributors, means in place of
receipts. After every event the checker of mixing looks at all.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pulsenet.ids import PeerId
from pulsenet.node.effects import SendRequest
from pulsenet.node.events import Event
from pulsenet.node.mixing.effects import CombineParts, CompareProbes, MixReady
from pulsenet.outer.mixing.probe import Comparison
from pulsenet.outer.mixing.settings import ALGORITHM, MixingSettings
from pulsenet.testing.ledger_world import LedgerWorld
from pulsenet.testing.mixing_checkers import TOLERANCE, TOLERANCE_FP32, MixingChecker
from pulsenet.testing.mixing_node import MixingNode
from pulsenet.testing.network import CALM, Faults
from pulsenet.testing.toy_mixing import Values


class MixingWorld(LedgerWorld[MixingNode]):
    """The members of one seed.

    Args:
        seed: Decides everything that chance decides.
        settings: Of the run.
        faults: How bad the network is.
        inner_seconds: Shortest and longest time of a round's inner steps.
        spread: How far apart the members' z are at the start; 0 begins with one z.
        step: Largest pseudo-gradient of the inner steps.
        learning_rate: Of the outer step.
        dtype: Of all vectors.
        counts: As for :class:`LedgerWorld`.
    """

    node_class = MixingNode

    def __init__(
        self,
        seed: int,
        settings: MixingSettings,
        *,
        faults: Faults = CALM,
        inner_seconds: tuple[float, float] = (1.0, 2.0),
        spread: float = 1.0,
        step: float = 0.0,
        learning_rate: float = 0.5,
        dtype: npt.DTypeLike = np.float64,
        **counts: int,
    ) -> None:
        self.settings = settings
        self.spread, self.step, self.learning_rate, self.dtype = spread, step, learning_rate, dtype
        self._inner_seconds = inner_seconds
        self.waits: list[tuple[str, MixReady, float]] = []
        """Who waited for a result, and how long."""
        self.comparisons: list[tuple[int, float]] = []
        """Rounds whose answers were compared, and how far apart trainers were."""
        self.touched: set[PeerId] = set()
        """Who was told something in the event under way."""
        is_double = np.dtype(dtype) == np.float64
        self.mixing_checker = MixingChecker(seed, TOLERANCE if is_double else TOLERANCE_FP32)
        super().__init__(seed, faults, algorithm=ALGORITHM, constants=settings.to_constants(), **counts)

    # Scenario

    @property
    def members(self) -> list[MixingNode]:
        """All trainers, up or not."""
        return [node for node in self.nodes.values() if node.is_trainer]

    @property
    def round_index(self) -> int:
        """The newest round that any live member opened."""
        rounds = [m.mixing.round_index for m in self.members if m.is_up and m.mixing is not None]
        return max((index for index in rounds if index is not None), default=0)

    def run_rounds(self, count: int, limit_seconds: float) -> None:
        """Run until every live member went through ``count`` more rounds."""
        goals = {member.name: member.round_count + count for member in self.members}
        self.run_until(
            lambda: all(m.round_count >= goals[m.name] for m in self.members if m.toy is not None), limit_seconds
        )

    def stop_daemon(self, node: MixingNode) -> None:
        """Let a node's process die while its training process lives; its peers notice."""
        node.stop_daemon()
        for pair in sorted((pair for pair in self._connections if node.peer_id in pair), key=sorted):
            self._disconnect(pair)

    def mean_of(self) -> Values:
        """Return the mean of the members' z, in FP64."""
        mean: Values = np.mean([member.z.astype(np.float64) for member in self.members], axis=0)
        return mean

    @property
    def utilization(self) -> float:
        """Time in inner steps over all time, of all members together."""
        return sum(member.busy_seconds for member in self.members) / (self.now * len(self.members))

    def describe(self) -> str:
        """Return one line on where every node stands."""
        parts = []
        for node in self.nodes.values():
            where = "down"
            if node.is_up and node.mixing is not None:
                where = f"round {node.mixing.round_index}, {node.toy.doing if node.toy else 'no training'}"
                where += f", {node.reports.get('mixing_phase')}"
            if node.convener is not None and node.convener.is_leading(self.now):
                where += ", leads"
            parts.append(f"{node.name} {where}")
        return "; ".join(parts)

    # What nodes ask of the world

    def open_round(self, node: MixingNode, round_index: int) -> float:
        """Return how long the inner steps of a round that a node opens take; draw which exchanges fail in it."""
        self.draw_failing(round_index, [member.peer_id for member in self.members])
        return self.chance.between(*self._inner_seconds)

    def note_wait(self, node: MixingNode, ready: MixReady, since: float) -> None:
        """A member's training process was given a result that it waited for."""
        self.waits.append((node.name, ready, self.now - since))
        self.mixing_checker.note_result(node, ready, self.now - since, self.settings)

    def note_combined(self, node: MixingNode, order: CombineParts, answer: Event) -> None:
        """A shell combined parts."""
        self.mixing_checker.note_combined(node, order, answer)

    def note_compared(self, node: MixingNode, order: CompareProbes, found: Comparison) -> None:
        """A coordinator's shell compared the answers of a round."""
        if found.distance is not None:
            self.comparisons.append((order.round_index, found.distance))

    def send(self, node: MixingNode, machine: str, request: SendRequest) -> None:
        """Carry a request to its receiver, unless the exchange of the two fails in this round."""
        round_index = None if node.mixing is None else node.mixing.round_index
        if self.is_failing(node, request.peer_id, round_index):
            self.fail(node, machine, request, "timeout")
        else:
            super().send(node, machine, request)

    def _arrive(self, node: MixingNode, machine: str, request: SendRequest) -> None:
        receiver = self.nodes[request.peer_id]
        if self.network.faults.lose_per_mille and self.network.loses_reply(receiver.peer_id, node.peer_id):
            # Heard, and the asker will never know.
            if receiver.is_up:
                receiver.answer(request.message, node.peer_id)
            self.fail(node, machine, request, "timeout")
        else:
            super()._arrive(node, machine, request)

    # Inside

    def _check(self) -> None:
        self.mixing_checker.check(self.members, self.touched, self.now)
        self.touched = set()
