import numpy as np
import pytest

from pulsenet.errors import LocalProtocolError
from pulsenet.outer.optimizer import step_nesterov, step_nesterov_twin

RATE, FACTOR = np.float32(0.7), np.float32(0.9)


def test_a_golden_history_of_one_weight() -> None:
    """As the exact reference rounds it: v = 0.9 v + g; theta = theta - 0.7 (g + 0.9 v)."""
    theta, momentum = np.array([1.0], np.float32), np.zeros(1, np.float32)
    history = []
    for gradient in (0.1, 0.1, -0.3):
        step_nesterov(theta, momentum, np.array([gradient], np.float32), learning_rate=RATE, momentum_factor=FACTOR)
        history.append((int(theta.view(np.uint32)[0]), int(momentum.view(np.uint32)[0])))
    assert history == [(0x3F5DF3B6, 0x3DCCCCCD), (0x3F2D6388, 0x3E428F5C), (0x3F77F434, 0xBE041895)]


def test_momentum_moves_entries_that_nobody_sent() -> None:
    theta, momentum = np.zeros(1, np.float32), np.ones(1, np.float32)
    step_nesterov(theta, momentum, np.zeros(1, np.float32), learning_rate=RATE, momentum_factor=FACTOR)
    assert theta[0] == -(RATE * (FACTOR * (FACTOR * np.float32(1.0))))


def test_loop_equals_its_twin_on_random_bits_and_keeps_subnormals() -> None:
    generator = np.random.default_rng(8)
    arrays = [generator.integers(0, 1 << 32, 20_000, np.uint32).view(np.float32) for _ in range(3)]
    arrays[0][:3] = np.array([1, 0x807FFFFF, 0x80000000], np.uint32).view(np.float32)
    arrays[1][:3] = np.array([3, 5, 0], np.uint32).view(np.float32)
    arrays[2][:3] = 0.0
    mine, twin = [array.copy() for array in arrays], [array.copy() for array in arrays]
    step_nesterov(*mine, learning_rate=RATE, momentum_factor=FACTOR)
    step_nesterov_twin(*twin, learning_rate=RATE, momentum_factor=FACTOR)
    for one, other in zip(mine, twin, strict=True):
        assert np.array_equal(one.view(np.uint32), other.view(np.uint32))
    assert mine[1].view(np.uint32)[:2].tolist() == [3, 4]


def test_it_is_torch_sgd_with_nesterov_but_for_the_rounding() -> None:
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = torch.optim.SGD([parameter], lr=float(RATE), momentum=float(FACTOR), nesterov=True)
    theta, momentum = np.array([1.0, -2.0], np.float32), np.zeros(2, np.float32)
    for gradient in ([0.5, 0.25], [-0.125, 1.0], [0.3, 0.3]):
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
        step_nesterov(theta, momentum, np.array(gradient, np.float32), learning_rate=RATE, momentum_factor=FACTOR)
    assert np.allclose(theta, parameter.detach().numpy(), atol=1e-6)


def test_arrays_of_other_lengths_are_refused() -> None:
    with pytest.raises(LocalProtocolError):
        step_nesterov(
            np.zeros(2, np.float32),
            np.zeros(2, np.float32),
            np.zeros(3, np.float32),
            learning_rate=RATE,
            momentum_factor=FACTOR,
        )
