"""The outer step: Nesterov's momentum on the mean pseudo-gradient (SPEC outer, "Outer step")."""

from __future__ import annotations

import numpy as np

from pulsenet.outer.floats import NAN_BITS, FP32s, check_flat, settle_nans
from pulsenet.tensors.jit import compile_loop


def step_nesterov_twin(
    theta: FP32s, momentum: FP32s, gradient: FP32s, *, learning_rate: np.float32, momentum_factor: np.float32
) -> None:
    """Define :func:`step_nesterov` in numpy."""
    with np.errstate(all="ignore"):
        momentum[:] = momentum_factor * momentum + gradient
        settle_nans(momentum)
        theta[:] = theta - learning_rate * (gradient + momentum_factor * momentum)
    settle_nans(theta)


@compile_loop
def _step_loop(
    theta: FP32s,
    momentum: FP32s,
    gradient: FP32s,
    learning_rate: np.float32,
    momentum_factor: np.float32,
    nan: np.float32,
) -> None:
    for i in range(theta.size):
        velocity = momentum_factor * momentum[i] + gradient[i]
        velocity = velocity if velocity == velocity else nan
        momentum[i] = velocity
        value = theta[i] - learning_rate * (gradient[i] + momentum_factor * velocity)
        theta[i] = value if value == value else nan


def step_nesterov(
    theta: FP32s, momentum: FP32s, gradient: FP32s, *, learning_rate: np.float32, momentum_factor: np.float32
) -> None:
    """Do ``momentum = mu * momentum + gradient; theta = theta - lr * (gradient + mu * momentum)`` in place.

    Every multiplication, addition and subtraction is an FP32 operation of its own.

    Args:
        theta: Masters of one tensor, flat.
        momentum: Its outer momentum.
        gradient: The round's mean pseudo-gradient, dense: momentum moves entries that nobody sent, too.
        learning_rate: Outer learning rate (lr).
        momentum_factor: Outer momentum factor (mu).

    Raises:
        LocalProtocolError: arrays that are not flat FP32 of one length.
    """
    for values in (theta, momentum, gradient):
        check_flat(values, theta.size)
    with np.errstate(all="ignore"):
        _step_loop(
            theta,
            momentum,
            gradient,
            np.float32(learning_rate),
            np.float32(momentum_factor),
            np.uint32(NAN_BITS).view(np.float32),
        )
