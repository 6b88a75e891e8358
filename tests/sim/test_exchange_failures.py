"""A-GOS-4 beside rounds with receipts: one exchange in twenty fails, for a whole round, and what that costs each.

``test_mixing.py`` has the same faults for the variants that mix. Inner steps take the published time of a round, and
transfers of the small vectors here next to none: what shows is what waiting and missed rounds cost.
"""

from __future__ import annotations

import pytest

from pulsenet.node.effects import Fate, RunInnerSteps, SendRequest
from pulsenet.testing.rounds_node import RoundsNode, TrainingOrder
from pulsenet.testing.rounds_world import RoundsWorld

INNER_SECONDS = 236.0
"""Of the published utilisation figures (docs/planning.md)."""

FAILURES_PER_MILLE = 50
TRAINER_COUNT = 4

ALWAYS_SLICED_BITS = 0x7149_F2CA
"""1e30: contributions are summed by slice, as dense ones always are."""

ROUND_SECONDS_MAX = INNER_SECONDS + 120.0


class FailingWorld(RoundsWorld):
    """Rounds with receipts, in each of which some pairs of nodes cannot reach each other.

    Args:
        seed: As for :class:`RoundsWorld`.
        failures_per_mille: How often two nodes cannot, for a whole round of the one that asks.
    """

    def __init__(self, seed: int, failures_per_mille: int) -> None:
        self.failed_count = 0
        """Requests that got nowhere."""
        self.work_seconds = 0.0
        """Of inner steps that ended, of all trainers together."""
        constants = {"all_gather_ratio_min": ALWAYS_SLICED_BITS, "contribution_wait_seconds": 30}
        counts = {"authority_count": 1, "trainer_count": TRAINER_COUNT - 1, "failures_per_mille": failures_per_mille}
        super().__init__(seed, constants=constants, **counts)

    def train(self, node: RoundsNode, machine: str, order: TrainingOrder) -> None:
        """Let inner steps take their time, and count it once they are done."""
        if not isinstance(order, RunInnerSteps):
            super().train(node, machine, order)
            return
        seconds = self.chance.between(0.99 * INNER_SECONDS, 1.01 * INNER_SECONDS)
        ends_at = node.training_free_at = max(self.now, node.training_free_at) + seconds
        training = node.training

        def act() -> None:
            if node.is_training and node.training is training:
                self.work_seconds += seconds
                self.schedule(node, machine, node.do(order))

        self.later_on(node, ends_at - self.now, act)

    def send(self, node: RoundsNode, machine: str, request: SendRequest) -> None:
        """Carry a request, unless the two cannot reach each other in this round."""
        round_index = node.ledger.next_round_index
        self.draw_failing(round_index, self.nodes)
        if self.is_failing(node, request.peer_id, round_index):
            self.failed_count += 1
            self.fail(node, machine, request, "timeout")
        else:
            super().send(node, machine, request)

    @property
    def utilization(self) -> float:
        """Time in inner steps over all time, of all trainers together."""
        return self.work_seconds / (self.now * TRAINER_COUNT)

    @property
    def missed_count(self) -> int:
        """Contributions that no receipt counted."""
        return sum(node.counts.get(("contributions", Fate.MISSED), 0) for node in self.nodes.values())


@pytest.mark.parametrize("round_count", [5, pytest.param(200, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])])
def test_with_receipts_rounds_close_as_well_and_whoever_was_not_heard_misses_them(round_count: int) -> None:
    """A-GOS-4, DiLoCo with receipts under the same faults."""
    utilization = {}
    for failures_per_mille in (0, FAILURES_PER_MILLE):
        world = FailingWorld(4, failures_per_mille)
        world.run_rounds(round_count, round_count * ROUND_SECONDS_MAX)
        utilization[failures_per_mille] = world.utilization
        print(
            f"{failures_per_mille} per mille fail: utilization {world.utilization:.4f}, {world.failed_count} requests "
            f"failed, {world.missed_count} of {TRAINER_COUNT * round_count} contributions missed"
        )
        # A round without a receipt would have been aborted.
        assert world.round_index >= round_count
    # A barrier: all wait for whoever is not heard, where mixing leaves them out (95 % is asked of it).
    assert utilization[FAILURES_PER_MILLE] >= 0.85 * utilization[0]
