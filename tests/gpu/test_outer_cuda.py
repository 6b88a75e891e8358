"""Rounds on a CUDA device give the bits of the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pulsenet.outer.flush import TensorFlush
from pulsenet.outer.gate import gate_entries
from pulsenet.outer.reduce import Counted
from pulsenet.outer.residual import settle_counted
from pulsenet.outer.self_test import SELF_TEST_DIGEST, NumpyMaths
from pulsenet.outer.settings import OuterSettings
from pulsenet.training import LocalExchange, OuterOptimizer
from pulsenet.training.outer_torch import TorchMaths, run_device_self_test

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SPECIAL_BITS = [
    0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000,
    0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001,
]  # fmt: skip


def make_arrays(seed: int) -> list[np.ndarray]:
    """Random bits with special values among them, and weights with small steps: 2^20 elements each."""
    generator = np.random.default_rng(seed)
    count = 1 << 20
    theta, local, residual = (generator.integers(0, 1 << 32, count, dtype=np.uint32) for _ in range(3))
    for array in (theta, local, residual):
        array[:4096] = generator.choice(np.array(SPECIAL_BITS, np.uint32), 4096)
    theta, local, residual = (array.view(np.float32) for array in (theta, local, residual))
    half = count // 2
    theta[half:] = generator.standard_normal(half).astype(np.float32)
    local[half:] = theta[half:] - (generator.standard_normal(half) * 1e-3).astype(np.float32)
    residual[half:] = (generator.standard_normal(half) * 1e-4).astype(np.float32)
    return [theta, local, residual]


def test_the_device_passes_the_self_test() -> None:
    assert run_device_self_test("cuda") == SELF_TEST_DIGEST


@pytest.mark.parametrize("seed", [1, 2])
def test_every_operation_gives_the_bits_of_the_cpu(seed: int) -> None:
    theta, local, residual = make_arrays(seed)
    here, there = NumpyMaths(), TorchMaths("cuda")
    sent = here.gate(theta, local, residual)
    assert there.gate(theta, local, residual).same_as(sent)
    for scale in (1.0, 0.3):
        mine = here.settle(residual, theta, local, sent, np.float32(scale))
        assert np.array_equal(
            mine.view(np.uint32), there.settle(residual, theta, local, sent, np.float32(scale)).view(np.uint32)
        )
    parts = {
        bytes([key]): Counted(here.gate(*make_arrays(10 + key)), np.float32(scale))
        for key, scale in enumerate((1.0, 0.3, 0.75))
    }
    mean = here.mean(parts, theta.size)
    assert np.array_equal(mean.view(np.uint32), there.mean(parts, theta.size).view(np.uint32))
    rates = (np.float32(0.7), np.float32(0.9))
    for mine, theirs in zip(
        here.step(theta, residual, local, *rates), there.step(theta, residual, local, *rates), strict=True
    ):
        assert np.array_equal(mine.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("mantissa_bits", [0, 1, 23])
def test_a_flush_gives_the_bits_of_the_cpu(mantissa_bits: int) -> None:
    theta, local, residual = make_arrays(3)
    flush = TensorFlush((slice(100, 5000), slice(theta.size - 7000, theta.size)), mantissa_bits)
    there, sent = TorchMaths("cuda"), gate_entries(theta, local, residual, tensor_index=0, flush=flush)
    assert there.gate(theta, local, residual, flush=flush).same_as(sent)
    mine = residual.copy()
    settle_counted(mine, theta, local, sent, keeps_rest=True)
    theirs = there.settle(residual, theta, local, sent, np.float32(1.0), keeps_rest=True)
    assert np.array_equal(mine.view(np.uint32), theirs.view(np.uint32))


def test_copies_on_device_and_host_give_the_same_state() -> None:
    """The inner steps run on the device in both; only the place of the copies differs."""
    roots = []
    for placement in ("device", "host"):
        torch.manual_seed(0)
        model = torch.nn.Linear(512, 256).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        sync = OuterOptimizer(
            model,
            optimizer,
            exchange=LocalExchange(OuterSettings(inner_steps=2), 1).member(0),
            theta=placement,
            residual=placement,
            momentum=placement,
        )
        for step in range(6):
            data = torch.randn(32, 512, generator=torch.Generator().manual_seed(step)).cuda()
            model(data).square().mean().backward()
            optimizer.step()
            sync.step()
            optimizer.zero_grad()
        roots.append(sync.state_root)
    assert roots[0] == roots[1]
