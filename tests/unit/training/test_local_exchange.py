from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from pulsenet.errors import ConfigError, LocalProtocolError, UnavailableError
from pulsenet.ids import Digest
from pulsenet.outer.contribution import Contribution, Entries
from pulsenet.outer.self_test import SELF_TEST_DIGEST
from pulsenet.outer.settings import Algorithm, Combination, OuterSettings
from pulsenet.tensors.params import ParameterTable, TensorSpec
from pulsenet.training.exchange import FinalRound, Outcome, Restoration
from pulsenet.training.local_exchange import LocalExchange, LocalMember

ROOT = Digest(bytes(32))
TABLE = ParameterTable((TensorSpec("w", "F32", (3,)),))


@dataclass
class State:
    """A state that says only which round it is in."""

    round_index: int = 0
    state_root: Digest | None = ROOT

    def theta(self, tensor_index: int) -> np.ndarray:
        return np.full(3, self.round_index, np.float32)

    def momentum(self, tensor_index: int) -> np.ndarray:
        return np.zeros(3, np.float32)


def dense(*values: float, round_index: int = 0) -> Contribution:
    return Contribution(round_index, ROOT, 1, (Entries(0, None, np.array(values, np.float32)),))


def open_exchange(count: int, **fields: Any) -> tuple[LocalExchange, list[LocalMember], list[State]]:
    settings = OuterSettings(algorithm=Algorithm.DILOCO, **fields.pop("settings", {}))
    exchange = LocalExchange(settings, count, timeout_seconds=0.05, **fields)
    members, states = [exchange.member(index) for index in range(count)], [State() for _ in range(count)]
    for member, state in zip(members, states, strict=True):
        member.open(TABLE, SELF_TEST_DIGEST, state)
    return exchange, members, states


@pytest.mark.parametrize("count", [0, 257])
def test_more_members_than_there_are_keys_are_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=f"{count} members"):
        LocalExchange(OuterSettings(), count)


def test_who_waits_in_vain_hears_that_it_was_in_vain() -> None:
    exchange, members, _ = open_exchange(2)
    with pytest.raises(UnavailableError, match="did not close"):
        members[0].submit(dense(1.0, 2.0, 3.0))
    assert exchange.rounds == []


def test_who_has_left_cannot_submit_and_nobody_is_ahead() -> None:
    exchange, members, _ = open_exchange(2)
    exchange.leave(1)
    with pytest.raises(UnavailableError, match="has left"):
        members[1].submit(dense(1.0, 2.0, 3.0))
    with pytest.raises(LocalProtocolError, match="not open yet"):
        members[0].submit(dense(1.0, 2.0, 3.0, round_index=1))


def test_a_late_comer_hears_of_the_rounds_it_missed() -> None:
    exchange, members, _ = open_exchange(2)
    exchange.leave(1)
    assert members[0].submit(dense(1.0, 2.0, 3.0)).outcome is Outcome.COUNTED
    exchange.join(1)
    result = members[1].submit(dense(9.0, 9.0, 9.0))
    assert result.outcome is Outcome.MISSED
    (final,) = result.rounds
    assert isinstance(final, FinalRound)
    assert (final.round_index, final.own, final.outcome) == (0, None, Outcome.MISSED)
    assert final.aggregate is not None
    assert final.aggregate.entries(0).values.tolist() == [1.0, 2.0, 3.0]


def test_submitting_again_after_a_restart_is_the_same_contribution() -> None:
    exchange, members, _ = open_exchange(1)
    assert members[0].submit(dense(1.0, 2.0, 3.0)).outcome is Outcome.COUNTED
    assert members[0].submit(dense(1.0, 2.0, 3.0)).outcome is Outcome.COUNTED
    assert len(exchange.rounds) == 1


def test_what_an_earlier_life_sent_is_what_counts() -> None:
    _, members, _ = open_exchange(1)
    members[0].submit(dense(1.0, 2.0, 3.0))
    result = members[0].submit(dense(7.0, 7.0, 7.0))
    assert result.outcome is Outcome.COUNTED
    (final,) = result.rounds
    assert isinstance(final, FinalRound)
    assert final.own is not None
    assert final.own.entries[0].values.tolist() == [1.0, 2.0, 3.0]


def test_a_round_nobody_can_be_counted_in_stays_open() -> None:
    _, members, _ = open_exchange(1)
    refused = members[0].submit(dense(float("nan"), 0.0, 0.0))
    assert (refused.outcome, refused.reason, list(refused.rounds)) == (Outcome.REJECTED, "finite", [])
    abstained = members[0].abstain(0, "own-reason")
    assert (abstained.outcome, abstained.reason, list(abstained.rounds)) == (Outcome.REJECTED, "own-reason", [])
    _, late, _ = open_exchange(1, is_late=lambda member, index: True)
    assert late[0].submit(dense(1.0, 2.0, 3.0)).outcome is Outcome.DEFERRED


def test_every_second_missed_round_drops_what_was_held_back() -> None:
    exchange, members, _ = open_exchange(2, settings={"missed_rounds_max": 2})
    exchange.leave(1)
    for round_index in range(5):
        members[0].submit(dense(1.0, 2.0, 3.0, round_index=round_index))
    outcomes = [final.outcome for final in exchange.final_rounds(1, 0)]
    assert outcomes == [Outcome.MISSED, Outcome.DROPPED, Outcome.MISSED, Outcome.DROPPED, Outcome.MISSED]
    assert exchange.final_rounds(1, 3)[0].outcome is Outcome.DROPPED


@pytest.mark.parametrize(
    ("settings", "mean"),
    [
        ({"combination": Combination.MEDIAN}, [1.0, 0.0, 0.0]),
        ({"combination": Combination.TRIMMED, "trim_count": 5}, [1.0, 0.0, 0.0]),
        ({}, [(1.0 + 1.0 + 100.0) / 3, 0.0, 0.0]),
    ],
)
def test_dense_rounds_may_be_combined_robustly(settings: dict[str, Any], mean: list[float]) -> None:
    exchange, members, _ = open_exchange(3, settings=settings)
    for member, value in ((1, 1.0), (2, 100.0)):
        exchange._arrived[member] = dense(value, 0.0, 0.0)
    (final,) = members[0].submit(dense(1.0, 0.0, 0.0)).rounds
    assert isinstance(final, FinalRound)
    assert final.aggregate is not None
    assert final.aggregate.entries(0).values.tolist() == np.array(mean, np.float32).tolist()
    assert final.aggregate.contributor_count == 3


def test_only_the_newest_state_anchor_is_kept_and_two_of_one_round_must_agree() -> None:
    exchange, _, _ = open_exchange(1, settings={"state_anchor_interval": 2})
    for round_index in (2, 4, 3, 2):
        exchange.hold_state(State(round_index, Digest(bytes([round_index] * 32))))
    assert exchange.anchor is not None
    assert exchange.anchor.round_index == 4
    ((index, theta, momentum),) = exchange.anchor.tensors()
    assert (index, theta.tolist(), momentum.tolist()) == (0, [4.0] * 3, [0.0] * 3)
    exchange.hold_state(State(4, Digest(bytes([4] * 32))))
    with pytest.raises(LocalProtocolError, match="different states"):
        exchange.hold_state(State(4, Digest(bytes([9] * 32))))


@pytest.mark.parametrize("trouble", ["diverged", "torn", "forgotten"])
def test_whom_no_kept_round_leads_on_is_given_the_state_anchor(trouble: str) -> None:
    exchange, members, states = open_exchange(1, settings={"state_anchor_interval": 1})
    members[0].submit(dense(1.0, 2.0, 3.0))
    state = states[0]
    if trouble == "diverged":
        state.state_root = Digest(bytes([7] * 32))
    elif trouble == "torn":
        state.state_root = None
    else:
        exchange.forget_rounds(1)
    with pytest.raises(UnavailableError, match="no state anchor yet"):
        list(members[0].catch_up())
    exchange.hold_state(State(1, ROOT))
    moves = members[0].catch_up()
    restoration = next(moves)
    assert isinstance(restoration, Restoration)
    assert restoration.drops_residual
    assert restoration.anchor.round_index == 1
    state.round_index, state.state_root = 1, ROOT
    assert list(moves) == []


def test_median_rounds_train_past_a_wild_member(make_swarm: Callable[..., Any]) -> None:
    swarm = make_swarm(3, settings={"algorithm": Algorithm.DILOCO, "combination": Combination.MEDIAN})
    with torch.no_grad():
        swarm.trainers[2].optimizer.param_groups[0]["lr"] = 1e4
    swarm.run_rounds(2)
    assert len(swarm.thetas()) == 1
    assert all(float(theta.abs().max()) < 10 for theta in swarm.trainers[0].sync.state.theta)
