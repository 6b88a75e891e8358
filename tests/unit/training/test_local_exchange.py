from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pulsenet.errors import LocalProtocolError, UnavailableError
from pulsenet.ids import Digest
from pulsenet.outer.contribution import Contribution, Entries
from pulsenet.outer.self_test import SELF_TEST_DIGEST
from pulsenet.outer.settings import Algorithm, Combination, OuterSettings
from pulsenet.tensors.params import ParameterTable, TensorSpec
from pulsenet.training.exchange import Outcome
from pulsenet.training.local_exchange import LocalExchange

ROOT = Digest(bytes(32))
TABLE = ParameterTable((TensorSpec("w", "F32", (3,)),))


def dense(*values: float, round_index: int = 0) -> Contribution:
    return Contribution(round_index, ROOT, 1, (Entries(0, None, np.array(values, np.float32)),))


def open_exchange(count: int, **fields: Any) -> LocalExchange:
    settings = OuterSettings(algorithm=Algorithm.DILOCO, **fields.pop("settings", {}))
    exchange = LocalExchange(settings, count, timeout_seconds=0.05, **fields)
    exchange.member(0).open(TABLE, SELF_TEST_DIGEST)
    return exchange


def test_who_waits_in_vain_hears_that_it_was_in_vain() -> None:
    exchange = open_exchange(2)
    with pytest.raises(UnavailableError, match="did not close"):
        exchange.member(0).submit(dense(1.0, 2.0, 3.0))
    assert exchange.rounds == []


def test_who_has_left_cannot_submit_and_nobody_is_ahead() -> None:
    exchange = open_exchange(2)
    exchange.leave(1)
    with pytest.raises(UnavailableError, match="has left"):
        exchange.member(1).submit(dense(1.0, 2.0, 3.0))
    with pytest.raises(LocalProtocolError, match="not open yet"):
        exchange.member(0).submit(dense(1.0, 2.0, 3.0, round_index=1))


def test_a_late_comer_hears_of_the_rounds_it_missed() -> None:
    exchange = open_exchange(2)
    exchange.leave(1)
    assert exchange.member(0).submit(dense(1.0, 2.0, 3.0)).outcome is Outcome.COUNTED
    exchange.join(1)
    result = exchange.member(1).submit(dense(9.0, 9.0, 9.0))
    assert result.outcome is Outcome.MISSED
    assert [final.round_index for final in result.rounds] == [0]
    assert result.rounds[0].own is None
    assert result.rounds[0].aggregate is not None
    assert result.rounds[0].aggregate.entries(0).values.tolist() == [1.0, 2.0, 3.0]


def test_submitting_again_after_a_restart_is_the_same_contribution() -> None:
    exchange = open_exchange(1)
    assert exchange.member(0).submit(dense(1.0, 2.0, 3.0)).outcome is Outcome.COUNTED
    assert exchange.member(0).submit(dense(1.0, 2.0, 3.0)).outcome is Outcome.COUNTED
    assert len(exchange.rounds) == 1


def test_a_round_nobody_can_be_counted_in_stays_open() -> None:
    exchange = open_exchange(1)
    refused = exchange.member(0).submit(dense(float("nan"), 0.0, 0.0))
    assert (refused.outcome, refused.rounds) == (Outcome.REJECTED, ())
    abstained = exchange.member(0).abstain(0, "own-reason")
    assert (abstained.outcome, abstained.reason, abstained.rounds) == (Outcome.REJECTED, "own-reason", ())
    late = open_exchange(1, is_late=lambda member, index: True)
    assert late.member(0).submit(dense(1.0, 2.0, 3.0)).outcome is Outcome.DEFERRED


@pytest.mark.parametrize(
    ("settings", "mean"),
    [
        ({"combination": Combination.MEDIAN}, [1.0, 0.0, 0.0]),
        ({"combination": Combination.TRIMMED, "trim_count": 5}, [1.0, 0.0, 0.0]),
        ({}, [(1.0 + 1.0 + 100.0) / 3, 0.0, 0.0]),
    ],
)
def test_dense_rounds_may_be_combined_robustly(settings: dict[str, Any], mean: list[float]) -> None:
    exchange = open_exchange(3, settings=settings)
    for member, value in ((1, 1.0), (2, 100.0)):
        exchange._arrived[member] = dense(value, 0.0, 0.0)
    result = exchange.member(0).submit(dense(1.0, 0.0, 0.0))
    assert result.rounds[0].aggregate is not None
    assert result.rounds[0].aggregate.entries(0).values.tolist() == np.array(mean, np.float32).tolist()
    assert result.rounds[0].aggregate.contributor_count == 3


class Anchor:
    def __init__(self, round_index: int, root: int) -> None:
        self.round_index = round_index
        self.state_root = Digest(bytes([root] * 32))

    def read(self, tensor_index: int) -> tuple[np.ndarray, np.ndarray]:
        return np.full(3, self.round_index, np.float32), np.zeros(3, np.float32)


def test_only_the_newest_anchor_is_kept_and_two_of_one_round_must_agree() -> None:
    member = open_exchange(1).member(0)
    assert member.fetch_state() is None
    for round_index in (2, 4, 3):
        member.offer_state(Anchor(round_index, round_index))
    held = member.fetch_state()
    assert held is not None
    assert held.round_index == 4
    assert held.read(0)[0].tolist() == [4.0, 4.0, 4.0]
    member.offer_state(Anchor(4, 4))
    with pytest.raises(LocalProtocolError, match="different states"):
        member.offer_state(Anchor(4, 9))


def test_median_rounds_train_past_a_wild_member(make_swarm: Callable[..., Any]) -> None:
    swarm = make_swarm(3, settings={"algorithm": Algorithm.DILOCO, "combination": Combination.MEDIAN})
    with torch.no_grad():
        swarm.trainers[2].optimizer.param_groups[0]["lr"] = 1e4
    swarm.run_rounds(2)
    assert len(swarm.thetas()) == 1
    assert all(float(theta.abs().max()) < 10 for theta in swarm.trainers[0].sync.state.theta)
