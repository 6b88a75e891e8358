"""The outer step from a mixed iterate (SPEC outer, "Mixing")."""

from __future__ import annotations

import numpy as np

from pulsenet.outer.floats import FP32s, check_flat
from pulsenet.outer.optimizer import step_nesterov, step_nesterov_twin


def compute_gradient(iterate: FP32s, local: FP32s) -> FP32s:
    """Return the pseudo-gradient ``iterate - local``: masters at the round's start minus masters now.

    Raises:
        LocalProtocolError: arrays that are not flat FP32 of one length.
    """
    check_flat(iterate)
    check_flat(local, iterate.size)
    with np.errstate(all="ignore"):
        return iterate - local


def step_mixed(
    mixed: FP32s, momentum: FP32s, gradient: FP32s, *, learning_rate: np.float32, momentum_factor: np.float32
) -> FP32s:
    """Return the next outer iterate: ``v = mu * v + D; z = x - lr * (D + mu * v)``, each operation rounded by itself.

    It is :func:`pulsenet.outer.optimizer.step_nesterov` taken from what was mixed, not from the own iterate.

    Args:
        mixed: Of one tensor, flat: the mean of the outer iterates as far as it arrived (x).
        momentum: Its outer momentum (v); changed in place.
        gradient: Its pseudo-gradient, mixed as far as that arrived (D).
        learning_rate: Outer learning rate (lr).
        momentum_factor: Outer momentum factor (mu).

    Raises:
        LocalProtocolError: arrays that are not flat FP32 of one length.
    """
    iterate = mixed.copy()
    step_nesterov(iterate, momentum, gradient, learning_rate=learning_rate, momentum_factor=momentum_factor)
    return iterate


def step_mixed_twin(
    mixed: FP32s, momentum: FP32s, gradient: FP32s, *, learning_rate: np.float32, momentum_factor: np.float32
) -> FP32s:
    """Define :func:`step_mixed` in numpy."""
    iterate = mixed.copy()
    step_nesterov_twin(iterate, momentum, gradient, learning_rate=learning_rate, momentum_factor=momentum_factor)
    return iterate
