"""Laws of the rounds' maths over all inputs: numpy, its compiled loops, torch and the reference agree in bits."""

import importlib.util
from functools import cache
from itertools import permutations
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pulsenet import limits
from pulsenet.outer.contribution import Entries
from pulsenet.outer.flush import TensorFlush
from pulsenet.outer.gate import correct_delta, correct_delta_twin, gate_entries, gate_entries_twin
from pulsenet.outer.optimizer import step_nesterov, step_nesterov_twin
from pulsenet.outer.reduce import Counted, reduce_mean
from pulsenet.outer.residual import settle_counted, split_scaled
from pulsenet.outer.self_test import NumpyMaths, OuterMaths

law = settings(derandomize=True, deadline=None, max_examples=60)
REFERENCE = Path(__file__).parents[2] / "proto" / "reference" / "pulse_reference_outer.py"
RATE, FACTOR = np.float32(0.7), np.float32(0.9)
SPECIAL_BITS = [
    0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x3F808000, 0x3F818000, 0xBF7F8000, 0x7F7FFFFF,
    0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001,
]  # fmt: skip


@cache
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pulse_reference_outer", REFERENCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def torch_maths() -> Any:
    pytest.importorskip("torch")
    from pulsenet.training.outer_torch import TorchMaths

    return TorchMaths("cpu")


BITS = st.one_of(st.sampled_from(SPECIAL_BITS), st.integers(0, (1 << 32) - 1))
NEAR = st.integers(0x3F7F0000, 0x3F820000)
"""Around 1, where steps meet rounding boundaries."""


@st.composite
def arrays(draw: st.DrawFn, count: int, *, size_max: int = 40) -> list[np.ndarray]:
    """Arrays of one length: any bits, or weights near 1 with small changes."""
    size = draw(st.integers(0, size_max))
    element = draw(st.sampled_from([BITS, NEAR]))
    rows = [draw(st.lists(element, min_size=size, max_size=size)) for _ in range(count)]
    return [np.array(row, np.uint32).view(np.float32) for row in rows]


def bits(values: np.ndarray) -> list[int]:
    return np.ascontiguousarray(values).view(np.uint32).tolist()


@law
@given(arrays(3))
def test_the_gate_is_one_on_every_backend(given_arrays: list[np.ndarray]) -> None:
    theta, local, residual = given_arrays
    found = gate_entries(theta, local, residual, tensor_index=0)
    assert found.same_as(gate_entries_twin(theta, local, residual, tensor_index=0))
    assert found.same_as(torch_maths().gate(theta, local, residual))
    indices, values = reference().gate(bits(theta), bits(local), bits(residual))
    assert found.indices is not None
    assert (found.indices.tolist(), bits(found.values)) == (indices, values)
    corrected = correct_delta(theta, local, residual)
    assert bits(corrected) == bits(correct_delta_twin(theta, local, residual))
    assert bits(corrected) == reference().correct(bits(theta), bits(local), bits(residual))


@st.composite
def flushed(draw: st.DrawFn) -> tuple[list[np.ndarray], TensorFlush]:
    """Arrays as of the gate, and what of them passes whole."""
    given_arrays = draw(arrays(3))
    cuts = sorted(draw(st.lists(st.integers(0, given_arrays[0].size), max_size=6, unique=True)))
    parts = tuple(slice(start, stop) for start, stop in zip(cuts[::2], cuts[1::2], strict=False))
    return given_arrays, TensorFlush(parts, draw(st.integers(0, 23)))


@law
@given(flushed(), st.sampled_from([1.0, 0.3]))
def test_a_flush_is_one_on_every_backend_and_loses_nothing(
    case: tuple[list[np.ndarray], TensorFlush], scale: float
) -> None:
    (theta, local, residual), flush = case
    sent = gate_entries(theta, local, residual, tensor_index=0, flush=flush)
    assert sent.same_as(gate_entries_twin(theta, local, residual, tensor_index=0, flush=flush))
    assert sent.same_as(torch_maths().gate(theta, local, residual, flush=flush))
    parts = [(part.start, part.stop) for part in flush.parts]
    indices, values = reference().gate(bits(theta), bits(local), bits(residual), parts, flush.mantissa_bits)
    assert sent.indices is not None
    assert (sent.indices.tolist(), bits(sent.values)) == (indices, values)
    scale32, corrected = np.float32(scale), correct_delta(theta, local, residual)
    settled = residual.copy()
    settle_counted(settled, theta, local, sent, scale=scale32, keeps_rest=True)
    assert bits(settled) == bits(torch_maths().settle(residual, theta, local, sent, scale32, keeps_rest=True))
    assert bits(settled) == reference().settle(
        bits(theta), bits(local), bits(residual), indices, values, bits(scale32)[0], "counted", keeps_rest=True
    )
    total = settled.copy()
    with np.errstate(all="ignore"):
        total[sent.indices] += split_scaled(sent.values, scale32)[0]
    finite = np.isfinite(corrected)
    if scale == 1.0:
        assert np.array_equal(total[finite], corrected[finite])
    else:
        np.testing.assert_allclose(total[finite], corrected[finite], rtol=2.0**-22, atol=0.0)


@law
@given(arrays(3), st.sampled_from([1.0, 0.75, 0.3, 1e-6, 0.0]))
def test_sent_and_residual_make_up_the_corrected_pseudo_gradient(given_arrays: list[np.ndarray], scale: float) -> None:
    theta, local, residual = given_arrays
    scale32 = np.float32(scale)
    sent = gate_entries(theta, local, residual, tensor_index=0)
    settled = residual.copy()
    settle_counted(settled, theta, local, sent, scale=scale32)
    assert bits(settled) == bits(torch_maths().settle(residual, theta, local, sent, scale32))
    assert sent.indices is not None
    assert bits(settled) == reference().settle(
        bits(theta), bits(local), bits(residual), sent.indices, bits(sent.values), bits(scale32)[0], "counted"
    )
    corrected = correct_delta(theta, local, residual)
    total = settled.copy()
    with np.errstate(all="ignore"):
        total[sent.indices] += split_scaled(sent.values, scale32)[0]
    finite = np.isfinite(corrected)
    assert np.array_equal(total[finite], corrected[finite])


@law
@given(arrays(3))
def test_the_outer_step_is_one_on_every_backend(given_arrays: list[np.ndarray]) -> None:
    theta, momentum, gradient = given_arrays
    rates = {"learning_rate": RATE, "momentum_factor": FACTOR}
    mine, twin = [theta.copy(), momentum.copy()], [theta.copy(), momentum.copy()]
    step_nesterov(*mine, gradient, **rates)
    step_nesterov_twin(*twin, gradient, **rates)
    by_torch = torch_maths().step(theta, momentum, gradient, RATE, FACTOR)
    by_reference = reference().step(bits(theta), bits(momentum), bits(gradient), bits(RATE)[0], bits(FACTOR)[0])
    for one, other, third, exact in zip(mine, twin, by_torch, by_reference, strict=True):
        assert bits(one) == bits(other) == bits(third) == exact


@st.composite
def rounds(draw: st.DrawFn) -> tuple[int, dict[bytes, Counted]]:
    """One to five contributions of one tensor, sparse or dense, some of them scaled."""
    size, contributions = draw(st.integers(1, 30)), {}
    for key in draw(st.lists(st.binary(min_size=1, max_size=2), min_size=1, max_size=5, unique=True)):
        positions = draw(st.one_of(st.none(), st.lists(st.integers(0, size - 1), unique=True).map(sorted)))
        count = size if positions is None else len(positions)
        values = np.array(draw(st.lists(BITS, min_size=count, max_size=count)), np.uint32).view(np.float32)
        indices = None if positions is None else np.array(positions, np.uint32)
        contributions[key] = Counted(Entries(0, indices, values), np.float32(draw(st.sampled_from([1.0, 0.3]))))
    return size, contributions


@law
@given(rounds(), st.randoms(use_true_random=False))
def test_the_mean_is_one_in_any_order_and_on_every_backend(case: tuple[int, dict[bytes, Counted]], chance) -> None:  # type: ignore[no-untyped-def]
    size, contributions = case
    mean = reduce_mean(contributions, tensor_index=0, element_count=size)
    keys = list(contributions)
    chance.shuffle(keys)
    assert mean.same_as(reduce_mean({key: contributions[key] for key in keys}, tensor_index=0, element_count=size))
    dense = np.zeros(size, np.float32)
    dense[slice(None) if mean.indices is None else mean.indices] = mean.values
    assert bits(dense) == bits(torch_maths().mean(contributions, size))
    listed = {
        key: (
            None if one.entries.indices is None else one.entries.indices.tolist(),
            bits(one.entries.values),
            bits(one.scale)[0],
        )
        for key, one in contributions.items()
    }
    positions, values = reference().mean(listed, size)
    assert (None if mean.indices is None else mean.indices.tolist(), bits(mean.values)) == (positions, values)


def make_round(seed: int) -> tuple[list[np.ndarray], list[list[np.ndarray]]]:
    """Tensors of theta, and three trainers' local masters."""
    generator = np.random.default_rng(seed)
    thetas = [generator.standard_normal(size).astype(np.float32) * 0.05 for size in (9000, 1, 0, 3000)]
    thetas = [theta.astype(np.float32) for theta in thetas]
    trainers = [
        [theta - (generator.standard_normal(theta.size) * 1e-4).astype(np.float32) for theta in thetas]
        for _ in range(3)
    ]
    return thetas, trainers


def run_round(
    thetas: list[np.ndarray], trainers: list[list[np.ndarray]], maths: OuterMaths, threads: int, order: tuple[int, ...]
) -> list[bytes]:
    """Return theta, momentum and residuals of a round, tensor by tensor, worked on by ``threads`` threads."""

    def work(index: int) -> bytes:
        theta, zeros = thetas[index], np.zeros_like(thetas[index])
        contributions, residuals = {}, {}
        for trainer in order:
            local = trainers[trainer][index]
            sent = maths.gate(theta, local, zeros)
            residuals[trainer] = maths.settle(zeros, theta, local, sent, np.float32(1.0))
            contributions[bytes([trainer])] = Counted(sent)
        stepped = maths.step(theta, zeros, maths.mean(contributions, theta.size), RATE, FACTOR)
        return b"".join(array.tobytes() for array in (*stepped, *(residuals[trainer] for trainer in sorted(order))))

    with ThreadPool(threads) as pool:
        return pool.map(work, range(len(thetas)), chunksize=1)


def test_a_round_has_the_same_bits_in_any_order_on_any_threads_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A-LOC-5 for whole rounds, by numpy and by torch."""
    thetas, trainers = make_round(11)
    known = run_round(thetas, trainers, NumpyMaths(), 1, (0, 1, 2))
    for order in permutations(range(3)):
        assert run_round(thetas, trainers, NumpyMaths(), 4, order) == known
    assert run_round(thetas, trainers, torch_maths(), 4, (2, 0, 1)) == known
    from pulsenet.training import outer_torch

    for block_elements in (1000, 4096):
        monkeypatch.setattr(limits, "BLOCK_ELEMENTS", block_elements)
        monkeypatch.setattr(outer_torch, "BLOCK_ELEMENTS", block_elements)
        assert run_round(thetas, trainers, NumpyMaths(), 1, (1, 2, 0)) == known
        assert run_round(thetas, trainers, torch_maths(), 1, (1, 2, 0)) == known


def test_nothing_is_lost_over_fifty_rounds() -> None:
    """A-LOC-2: 100 000 elements, 50 rounds, in FP64."""
    generator = np.random.default_rng(5)
    count = 100_000
    theta = (generator.standard_normal(count) * 0.1).astype(np.float32)
    residual = np.zeros(count, np.float32)
    steps, sent_sum = np.zeros(count), np.zeros(count)
    density = []
    for _ in range(50):
        local = theta - (generator.standard_normal(count) * 3e-6).astype(np.float32)
        steps += theta.astype(np.float64) - local.astype(np.float64)
        sent = gate_entries(theta, local, residual, tensor_index=0)
        settle_counted(residual, theta, local, sent)
        sent_sum[sent.indices] += sent.values.astype(np.float64)
        density.append(len(sent) / count)
    assert np.abs(steps - (sent_sum + residual.astype(np.float64))).max() <= 1e-10
    assert 0.0 < max(density) < 0.1
    assert np.count_nonzero(residual) > count / 2
