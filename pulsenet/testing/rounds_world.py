"""Trainers and authorities in one process, on virtual time: the same seed gives the same rounds, to the last event.

The machines are the real ones; network, disks and training are fakes that fail by draw. After every event the
checkers look at everything: one outcome a round, one vote a term, one state a round, nothing counted twice or lost.
"""

from __future__ import annotations

from pulsenet.chain.records import Receipt, Vote
from pulsenet.chain.signing import decode_signed
from pulsenet.ids import Digest
from pulsenet.node.effects import RunInnerSteps, SendRequest
from pulsenet.testing.ledger_world import LedgerWorld
from pulsenet.testing.network import CALM, Faults
from pulsenet.testing.rounds_checkers import RoundsChecker
from pulsenet.testing.rounds_node import RoundsNode, TrainingOrder
from pulsenet.testing.toy_training import Exact
from pulsenet.wire.messages import PushVote
from pulsenet.wire.schema import decode_value

INNER_SECONDS_MAX = 2.0
"""Longest time of the inner steps of one round."""

ORDER_SECONDS_MAX = 0.2
"""Longest time of anything else the training process does."""

ANSWER_SECONDS_MAX = 0.05
"""Longest time until the machine hears of it."""


class RoundsWorld(LedgerWorld[RoundsNode]):
    """The trainers of one seed.

    Args:
        seed: As for :class:`Simulation`.
        faults: Likewise.
        constants: Changes to the round constants.
        counts: As for :class:`LedgerWorld`.
    """

    node_class: type[RoundsNode] = RoundsNode

    def __init__(
        self,
        seed: int,
        *,
        faults: Faults = CALM,
        constants: dict[str, int] | None = None,
        **counts: int,
    ) -> None:
        # Whole contributions, unless a scenario is about slices.
        usual = {
            "contribution_wait_seconds": 5,
            "inner_steps": 2,
            "state_anchor_interval": 4,
            "all_gather_ratio_min": 0,
        }
        signed = tuple(sorted((usual | (constants or {})).items()))
        super().__init__(seed, faults, algorithm="pulseloco", constants=signed, **counts)
        self._checker = RoundsChecker(seed)

    # Scenario

    @property
    def round_index(self) -> int:
        """The most rounds that any node knows as final."""
        return max((node.ledger.next_round_index for node in self.nodes.values() if node.is_up), default=0)

    @property
    def receipts(self) -> dict[int, Receipt]:
        """The final receipt of each round, as far as any live node keeps it."""
        return dict(self._checker.receipts)

    def content(self, contribution_digest: Digest) -> Exact:
        """Return what a contribution holds, as the checkers know it."""
        return self._checker.content(contribution_digest)

    def is_settled(self) -> bool:
        """Say whether all live trainers hold one state, the newest."""
        trainers = [node for node in self.nodes.values() if node.is_up and node.rounds is not None and node.is_training]
        rounds = {(n.rounds.round_index, n.rounds.state_root) for n in trainers if n.rounds is not None}
        return len(rounds) == 1 and next(iter(rounds))[0] == self.round_index

    def run_rounds(self, count: int, limit_seconds: float) -> None:
        """Run until ``count`` more rounds are final."""
        goal = self.round_index + count
        self.run_until(lambda: self.round_index >= goal, limit_seconds)

    def describe(self) -> str:
        """Return one line on where every node stands."""
        parts = []
        for node in self.nodes.values():
            where = "down"
            if node.is_up:
                where = f"knows {node.ledger.next_round_index}"
                if node.rounds is not None:
                    where += f", {node.rounds.phase} {node.rounds.round_index}"
                if node.coordinator is not None and node.coordinator.is_leading(self.now):
                    where += ", leads"
            parts.append(f"{node.name} {where}")
        return "; ".join(parts)

    def _check(self) -> None:
        self._checker.check(self.nodes)

    # What nodes ask of the world

    def train(self, node: RoundsNode, machine: str, order: TrainingOrder) -> None:
        """Let the node's training process do something that takes time, after what it is at."""
        longest = INNER_SECONDS_MAX if isinstance(order, RunInnerSteps) else ORDER_SECONDS_MAX
        if not isinstance(order, RunInnerSteps):
            # Whatever else is ordered ends running inner steps.
            node.training_free_at = min(node.training_free_at, self.now + ORDER_SECONDS_MAX)
        at = max(self.now, node.training_free_at) + self.chance.between(0.0, longest)
        node.training_free_at = at
        training = node.training

        def act() -> None:
            if node.is_training and node.training is training:
                # What is done is on disk; that it is done, a crash may keep from the machine.
                answer = node.do(order)
                self.schedule(node, machine, answer, self.chance.between(0.0, ANSWER_SECONDS_MAX))

        self.later_on(node, at - self.now, act)

    def send(self, node: RoundsNode, machine: str, request: SendRequest) -> None:
        """Carry a request to its receiver and the replies back."""
        if isinstance(request.message, PushVote):
            signed = decode_signed(request.message.vote)
            self._checker.note_vote(signed.signers[0], decode_value(Vote, signed.payload))
        super().send(node, machine, request)
