"""Moves of the outer state: whole, or known not to be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pulsenet.errors import LocalProtocolError, UnavailableError
from pulsenet.ids import Digest
from pulsenet.outer.contribution import Contribution, Entries
from pulsenet.outer.settings import OuterSettings
from pulsenet.training.exchange import FinalRound, Outcome, Restoration
from pulsenet.training.local_exchange import HeldState
from pulsenet.training.masters import adopt_masters
from pulsenet.training.outer_state import OuterState
from pulsenet.training.stepper import NO_ROOT, Stepper

Lone = Callable[..., Any]


@pytest.fixture
def stepper(lone: Lone) -> Stepper:
    """After a round, with a residual and inner steps in the masters."""
    trainer = lone()
    trainer.run_rounds(1)
    trainer.train_step()
    found = trainer.sync._stepper
    assert isinstance(found, Stepper)
    return found


class Ones:
    """Moves every element by 1."""

    contributor_count = 3

    def __init__(self, stepper: Stepper, fails_at: int = -1) -> None:
        self._tensors = stepper.state.table.tensors
        self._fails_at = fails_at

    def entries(self, tensor_index: int) -> Entries:
        if tensor_index == self._fails_at:
            raise OSError("the disk went away")
        return Entries(tensor_index, None, np.ones(self._tensors[tensor_index].element_count, np.float32))


def final_of(stepper: Stepper, **fields: Any) -> FinalRound:
    root = stepper.state_root
    assert root is not None
    return FinalRound(stepper.round_index, root, **{"aggregate": Ones(stepper), **fields})


def residuals(stepper: Stepper) -> list[torch.Tensor]:
    return [residual.clone() for residual in stepper.state.residual]


def own_of(stepper: Stepper) -> Contribution:
    """One entry a tensor, at position 0."""
    root = stepper.state_root
    assert root is not None
    entries = (
        Entries(index, np.zeros(1, np.uint32), np.full(1, 0.5, np.float32))
        for index in range(len(stepper.state.table.tensors))
    )
    return Contribution(stepper.round_index, root, 3, tuple(entries))


def test_a_step_moves_theta_and_the_root(stepper: Stepper) -> None:
    before, root = [theta.clone() for theta in stepper.state.theta], stepper.state_root
    stepper.step(final_of(stepper), has_work=True)
    assert (stepper.round_index, stepper.contributor_count, stepper.is_torn) == (2, 3, False)
    assert stepper.state_root not in (root, None)
    assert stepper.state_root == stepper.state.compute_root(2)
    assert all(bool((a > b).all()) for a, b in zip(before, stepper.state.theta, strict=True))
    assert stepper.theta(0).tobytes() == stepper.state.theta[0].numpy().tobytes()
    assert stepper.momentum(0).tobytes() == stepper.state.momentum[0].numpy().tobytes()


@pytest.mark.parametrize("outcome", list(Outcome)[:4])
@pytest.mark.parametrize("has_work", [True, False])
def test_what_becomes_of_the_residual(stepper: Stepper, outcome: Outcome, has_work: bool) -> None:
    """Also of a round whose work this process does not hold, because an earlier life of it sent it."""
    before = residuals(stepper)
    folded = [
        residual + (theta - local.detach().reshape(-1))
        for residual, theta, local in zip(before, stepper.state.theta, stepper._masters.tensors, strict=True)
    ]
    assert any(not torch.equal(a, b) for a, b in zip(before, folded, strict=True))
    own = own_of(stepper) if outcome is Outcome.COUNTED else None
    stepper.step(final_of(stepper, own=own, outcome=outcome), has_work=has_work)
    expected = folded if has_work and outcome in (Outcome.COUNTED, Outcome.MISSED) else before
    if outcome is Outcome.COUNTED:
        for residual in expected:
            residual[0] = 0.0
    elif outcome is Outcome.DROPPED:
        expected = [torch.zeros_like(residual) for residual in before]
    assert all(torch.equal(a, b) for a, b in zip(expected, stepper.state.residual, strict=True))


def test_only_work_that_is_here_leaves_a_rest_of_what_was_cut(stepper: Stepper) -> None:
    stepper._settings = OuterSettings(flush_interval=2, flush_mantissa_bits=1)
    held = float(stepper.state.residual[1][0])
    folded = held + (stepper.state.theta[1][0] - stepper._masters.tensors[1].detach().reshape(-1)[0])
    stepper.step(final_of(stepper, own=own_of(stepper), outcome=Outcome.COUNTED), has_work=True)
    assert float(stepper.state.residual[1][0]) == pytest.approx(float(folded) - 0.5)
    stepper.step(final_of(stepper, own=own_of(stepper), outcome=Outcome.COUNTED), has_work=False)
    assert [float(residual[0]) for residual in stepper.state.residual] == [0.0] * len(stepper.state.residual)


def test_a_round_that_does_not_go_on_from_here_moves_nothing(stepper: Stepper) -> None:
    root = stepper.state_root
    for wrong in (replace(final_of(stepper), round_index=3), replace(final_of(stepper), base_state_root=NO_ROOT)):
        with pytest.raises(LocalProtocolError):
            stepper.step(wrong, has_work=False)
    assert (stepper.state_root, stepper.is_torn) == (root, False)


def test_a_step_that_breaks_off_is_known_and_a_state_anchor_heals_it(stepper: Stepper) -> None:
    sound = HeldState(
        1,
        stepper.state.compute_root(1),
        tuple(
            (theta.numpy().copy(), momentum.numpy().copy())
            for theta, momentum in zip(stepper.state.theta, stepper.state.momentum, strict=True)
        ),
    )
    root, kept = stepper.state_root, residuals(stepper)
    with pytest.raises(OSError, match="went away"):
        stepper.step(final_of(stepper, aggregate=Ones(stepper, fails_at=2)), has_work=False)
    assert stepper.is_torn
    assert stepper.state_root is None
    with pytest.raises(LocalProtocolError):
        stepper.step(replace(final_of_root(1, root), aggregate=None), has_work=False)
    stepper.restore(Restoration(sound, drops_residual=False))
    assert (stepper.round_index, stepper.state_root, stepper.is_torn) == (1, root, False)
    assert all(torch.equal(a, b) for a, b in zip(kept, stepper.state.residual, strict=True))
    stepper.restore(Restoration(sound))
    assert stepper.state.residual_norm() == 0.0
    stepper.restart()
    for theta, local in zip(stepper.state.theta, stepper._masters.tensors, strict=True):
        assert torch.equal(theta.view(local.shape), local)


def final_of_root(round_index: int, root: Digest | None) -> FinalRound:
    assert root is not None
    return FinalRound(round_index, root, None)


def test_an_anchor_that_changes_between_hashing_and_reading_is_no_state(stepper: Stepper) -> None:
    class Changing:
        round_index = 1
        state_root = Digest(bytes(32))

        def tensors(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
            yield 0, stepper.theta(0) + np.float32(1), stepper.momentum(0)

    with pytest.raises(UnavailableError, match="damaged while it was read"):
        stepper.restore(Restoration(Changing()))
    assert stepper.is_torn


def test_without_a_state_there_is_nothing_to_move(stepper: Stepper) -> None:
    model = torch.nn.Linear(2, 2)
    masters = adopt_masters(model, torch.optim.SGD(model.parameters(), lr=0.1))
    empty = Stepper(masters, stepper._settings, None)
    assert empty.state_root == NO_ROOT
    with pytest.raises(LocalProtocolError, match="only rank 0"):
        _ = empty.state
    assert isinstance(stepper.state, OuterState)
