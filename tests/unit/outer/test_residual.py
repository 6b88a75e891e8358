import numpy as np
import pytest

from pulsenet.errors import LocalProtocolError
from pulsenet.outer.contribution import Entries
from pulsenet.outer.flush import TensorFlush
from pulsenet.outer.gate import correct_delta, gate_entries
from pulsenet.outer.residual import clear_sent, settle_counted, split_scaled


def random_round(seed: int, count: int = 4000) -> tuple[np.ndarray, np.ndarray, np.ndarray, Entries]:
    generator = np.random.default_rng(seed)
    theta = generator.standard_normal(count).astype(np.float32)
    local = theta - (generator.standard_normal(count) * 0.003).astype(np.float32)
    residual = (generator.standard_normal(count) * 0.001).astype(np.float32)
    return theta, local, residual, gate_entries(theta, local, residual, tensor_index=0)


@pytest.mark.parametrize("scale", [1.0, 0.75, 0.5, 0.3, 1e-7, 0.0])
def test_counted_and_held_make_up_what_was_sent_exactly(scale: float) -> None:
    generator = np.random.default_rng(2)
    bits = generator.integers(0, 0x7F000000, 20_000, np.uint32) | (generator.integers(0, 2, 20_000, np.uint32) << 31)
    values = bits.astype(np.uint32).view(np.float32)
    values[:4] = np.array([1, 3, 0x807FFFFF, 0x80000000], np.uint32).view(np.float32)
    counted, held = split_scaled(values, np.float32(scale))
    assert np.array_equal(counted.astype(np.float64) + held.astype(np.float64), values.astype(np.float64))
    assert np.array_equal(counted + held, values)
    exact = values.astype(np.float64) * float(np.float32(scale))
    assert (np.abs(counted - exact) <= np.abs(values) * 2.0**-23 + 2.0**-149).all()


def test_an_unclipped_contribution_counts_as_it_is_and_nothing_is_held() -> None:
    values = np.array([3e-6, -1.0, -0.0, np.inf], np.float32)
    counted, held = split_scaled(values, np.float32(1.0))
    assert held.view(np.uint32).tolist() == [0, 0, 0, 0]
    assert counted.view(np.uint32).tolist() == values.view(np.uint32).tolist()


@pytest.mark.parametrize("mantissa_bits", [0, 1, 7, 23])
def test_what_was_cut_off_sent_values_stays_exactly(mantissa_bits: int) -> None:
    theta, local, residual, _ = random_round(6)
    flush = TensorFlush((slice(500, 2500),), mantissa_bits)
    sent = gate_entries(theta, local, residual, tensor_index=0, flush=flush)
    corrected = correct_delta(theta, local, residual)
    settled = residual.copy()
    settle_counted(settled, theta, local, sent, keeps_rest=True)
    total = settled.astype(np.float64)
    total[sent.indices] += sent.values
    assert np.array_equal(total, corrected.astype(np.float64))
    rest = settled[500:2500]
    assert (np.count_nonzero(rest) > 1000) == (mantissa_bits < 23)
    assert (np.abs(rest) < np.abs(corrected[500:2500]) * 2.0**-mantissa_bits).all()


def test_a_clipped_flush_loses_at_most_a_rounding() -> None:
    theta, local, residual, _ = random_round(7)
    sent = gate_entries(theta, local, residual, tensor_index=0, flush=TensorFlush((slice(0, 4000),), 1))
    corrected = correct_delta(theta, local, residual).astype(np.float64)
    scale = np.float32(0.3)
    settled = residual.copy()
    settle_counted(settled, theta, local, sent, scale=scale, keeps_rest=True)
    counted = split_scaled(sent.values, scale)[0].astype(np.float64)
    assert (np.abs(counted + settled - corrected) <= np.abs(corrected) * 2.0**-24).all()


def test_a_restored_trainer_keeps_no_rest_of_work_it_does_not_have() -> None:
    residual = np.array([0.5, 0.25, 0.125], np.float32)
    clear_sent(residual, Entries(0, np.array([0, 2], np.uint32), np.array([4.0, 2.0], np.float32)))
    assert residual.tolist() == [0.0, 0.25, 0.0]


@pytest.mark.parametrize("scale", [-0.1, 1.1, float("nan")])
def test_a_scale_outside_0_to_1_is_refused(scale: float) -> None:
    with pytest.raises(LocalProtocolError):
        split_scaled(np.ones(1, np.float32), np.float32(scale))


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_a_counted_round_leaves_what_was_not_counted(scale: float) -> None:
    theta, local, residual, sent = random_round(3)
    corrected = correct_delta(theta, local, residual)
    settled = residual.copy()
    settle_counted(settled, theta, local, sent, scale=np.float32(scale))
    counted = np.zeros_like(settled)
    counted[sent.indices] = split_scaled(sent.values, np.float32(scale))[0]
    assert 0 < len(sent) < theta.size
    assert np.array_equal(counted + settled, corrected)


def test_dense_entries_clear_everything() -> None:
    residual = np.array([1.0, 2.0], np.float32)
    clear_sent(residual, Entries(0, None, np.array([4.0, 8.0], np.float32)), scale=np.float32(0.5))
    assert residual.tolist() == [2.0, 4.0]
