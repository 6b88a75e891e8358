import numpy as np

from pulsenet.outer.contribution import Entries
from pulsenet.outer.floats import FP32s
from pulsenet.outer.reduce import Counted
from pulsenet.outer.self_test import SELF_TEST_DIGEST, NumpyMaths, make_self_test_input, run_self_test


class Reciprocal(NumpyMaths):
    """Divides as CUDA does by a Python number."""

    def mean(self, contributions: dict[bytes, Counted], element_count: int) -> FP32s:
        return super().mean(contributions, element_count) * np.float32(3.0) * np.float32(1 / 3)


class Flushing(NumpyMaths):
    """Treats subnormals as zero."""

    def settle(self, residual: FP32s, theta: FP32s, local: FP32s, sent: Entries, scale: np.float32) -> FP32s:
        settled = super().settle(residual, theta, local, sent, scale)
        settled[np.abs(settled) < np.float32(2.0**-126)] = 0.0
        return settled


class Fused(NumpyMaths):
    """Rounds once for a multiplication and an addition."""

    def step(
        self, theta: FP32s, momentum: FP32s, gradient: FP32s, learning_rate: np.float32, momentum_factor: np.float32
    ) -> tuple[FP32s, FP32s]:
        fused = (float(momentum_factor) * momentum.astype(np.float64) + gradient).astype(np.float32)
        stepped, _ = super().step(theta, momentum, gradient, learning_rate, momentum_factor)
        return stepped, fused


def test_this_machine_is_sound() -> None:
    assert run_self_test() == SELF_TEST_DIGEST


def test_the_input_is_one_kilobyte_of_all_kinds() -> None:
    arrays = make_self_test_input()
    assert sum(array.nbytes for array in arrays) == 1024
    for array in arrays:
        assert np.isfinite(array).all()
        assert {0x00000001, 0x80000000} <= set(array.view(np.uint32).tolist())


def test_unsound_machines_get_another_digest() -> None:
    digests = {run_self_test(maths) for maths in (Reciprocal(), Flushing(), Fused())}
    assert len(digests) == 3
    assert SELF_TEST_DIGEST not in digests
