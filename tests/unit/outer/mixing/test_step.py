import numpy as np
import pytest

from pulsenet.errors import LocalProtocolError
from pulsenet.outer.mixing.step import compute_gradient, step_mixed, step_mixed_twin
from pulsenet.outer.optimizer import step_nesterov

RATE, FACTOR = np.float32(0.7), np.float32(0.9)
CONSTANTS = {"learning_rate": RATE, "momentum_factor": FACTOR}


def test_the_step_is_taken_from_the_mixed_iterate_and_leaves_it_alone() -> None:
    mixed, momentum = np.array([1.0, 2.0], np.float32), np.array([0.5, 0.0], np.float32)
    gradient = np.array([0.1, -0.2], np.float32)
    expected_momentum = FACTOR * momentum + gradient
    iterate = step_mixed(mixed, momentum, gradient, **CONSTANTS)
    assert momentum.tobytes() == expected_momentum.tobytes()
    assert iterate.tobytes() == (mixed - RATE * (gradient + FACTOR * expected_momentum)).tobytes()
    assert mixed.tolist() == [1.0, 2.0]


def test_from_the_own_iterate_it_is_the_step_of_diloco() -> None:
    generator = np.random.default_rng(3)
    theta, momentum, gradient = (generator.normal(size=100).astype(np.float32) for _ in range(3))
    other = momentum.copy()
    iterate = step_mixed(theta, momentum, gradient, **CONSTANTS)
    step_nesterov(theta, other, gradient, **CONSTANTS)
    assert iterate.tobytes() == theta.tobytes()
    assert momentum.tobytes() == other.tobytes()


def test_loop_equals_its_twin_on_any_bits() -> None:
    generator = np.random.default_rng(8)
    arrays = [generator.integers(0, 1 << 32, 20_000, np.uint32).view(np.float32) for _ in range(3)]
    mine, twin = [array.copy() for array in arrays], [array.copy() for array in arrays]
    one, other = step_mixed(*mine, **CONSTANTS), step_mixed_twin(*twin, **CONSTANTS)
    assert one.tobytes() == other.tobytes()
    assert mine[1].tobytes() == twin[1].tobytes()


def test_a_gradient_points_from_now_to_the_start() -> None:
    found = compute_gradient(np.array([1.0, 2.0], np.float32), np.array([0.5, 2.5], np.float32))
    assert found.tolist() == [0.5, -0.5]
    with pytest.raises(LocalProtocolError):
        compute_gradient(np.zeros(2, np.float32), np.zeros(3, np.float32))
    with pytest.raises(LocalProtocolError):
        compute_gradient(np.zeros(2, np.float64), np.zeros(2, np.float64))  # type: ignore[arg-type]
