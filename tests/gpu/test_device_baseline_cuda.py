"""Hand-overs of what changed leave a CUDA device with the bits of the CPU, within the memory that is promised."""

from __future__ import annotations

import os
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from pulsenet.local.changed_parts import read_changed_part
from pulsenet.local.shared_memory import Region
from pulsenet.training.baseline_keeper import BaselineKeeper
from pulsenet.training.device_baseline import BLOCK_ELEMENTS_DEVICE, DeviceBaseline
from pulsenet.training.snapshot import Snapshot, take_snapshot

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64]
SPECIAL_BITS = [0x7FC12345, 0xFF800001, 0x7F800000, 0x80000000, 0x00000000, 0x00000001, 0x3F808000, 0x3F818000]
MIB = 1 << 20


def make_state() -> dict[str, torch.Tensor]:
    """Return tensors of every dtype on the CPU; one is larger than a block, others are strided, empty or a scalar."""
    generator = torch.Generator().manual_seed(3)
    state = {str(dtype): torch.randn(300, 200, generator=generator).to(dtype) for dtype in DTYPES}
    random_bits = np.random.default_rng(3).integers(0, 1 << 32, BLOCK_ELEMENTS_DEVICE + 1000, dtype=np.uint32)
    random_bits[: len(SPECIAL_BITS)] = SPECIAL_BITS
    state["random"] = torch.from_numpy(random_bits.view(np.float32))
    state["strided"] = torch.randn(60, 50, generator=generator).t()
    state["mask"] = torch.tensor([True, False, True])
    state["steps"] = torch.tensor(7)
    state["empty"] = torch.zeros(0, 4)
    return state


def change(state: dict[str, torch.Tensor], share: float, seed: int) -> None:
    """Flip some bits on the CPU."""
    draw = np.random.default_rng(seed)
    for tensor in state.values():
        view = tensor.t() if not tensor.is_contiguous() else tensor
        bits = view.reshape(-1).view(torch.uint8).numpy()
        chosen = np.flatnonzero(draw.random(bits.size) < share)
        bits[chosen] ^= (1 << draw.integers(0, 1 if tensor.dtype == torch.bool else 8, chosen.size)).astype(np.uint8)


def to_device(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    moved = {}
    for name, tensor in state.items():
        moved[name] = tensor.cuda() if tensor.is_contiguous() else tensor.t().contiguous().cuda().t()
    return moved


def collect(plan: Snapshot) -> Any:
    region = np.zeros(plan.table.layout_size_bytes, np.uint8)
    for tensor_index, offset_bytes, data in plan.blocks():
        start = plan.table.offsets[tensor_index] + offset_bytes
        region[start : start + data.size] = data
    return region


def hand_over(baseline: DeviceBaseline, plan: Snapshot, base_number: int | None, region: Any) -> int:
    """Do what client and daemon do; return the bytes that crossed."""
    size_bytes = 0
    baseline.begin()
    with closing(baseline.make_parts(plan, base_number)) as parts:
        for part in parts:
            layout = part.layout
            memory_size_bytes = os.fstat(part.descriptor).st_size
            size_bytes += memory_size_bytes
            memory = Region.open_snapshot(os.dup(part.descriptor), memory_size_bytes)
            if part.changed_size_bytes is None:
                for index in layout.tensor_indices:
                    plan.table.view(region, index)[:] = layout.view(memory.bytes, index)
            else:
                for content in read_changed_part(layout, memory.bytes):
                    view = plan.table.view(region, content.tensor_index)
                    if content.indices is None:
                        view[:] = content.bits
                    else:
                        assert np.all(content.indices[1:] > content.indices[:-1])
                        view[content.indices] = content.bits
            memory.close()
    return size_bytes


@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 1.0])
def test_hand_overs_from_the_device_have_the_bits_of_the_cpu(share: float) -> None:
    """Committed, one behind, and whole; every dtype, NaN, -0.0, strided."""
    state = make_state()
    baseline = DeviceBaseline(take_snapshot(to_device(state)))
    regions = [np.zeros(take_snapshot(state).table.layout_size_bytes, np.uint8)]
    for number, base in enumerate([None, 1, 2, 2, 3, None, 6], start=1):
        plan = take_snapshot(to_device(state))
        assert baseline.fits(plan)
        region = regions[0 if base is None else base].copy()
        hand_over(baseline, plan, base, region)
        assert baseline.is_listed == (base is not None)
        assert np.array_equal(region, collect(take_snapshot(state))), f"hand-over {number} on {base}"
        regions.append(region)
        change(state, share, number)


def test_memory_of_the_device_stays_within_the_promise() -> None:
    """One copy, positions of what moved, and a few blocks while comparing."""
    state = {f"{index}": torch.randn(64 * MIB, device="cuda") for index in range(4)}
    size_bytes = 4 * 64 * MIB * 2
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    baseline = DeviceBaseline(take_snapshot(state))
    assert torch.cuda.memory_allocated() - before == baseline.size_bytes == size_bytes
    region = np.zeros(take_snapshot(state).table.layout_size_bytes, np.uint8)
    for base in (None, 1, 2):
        torch.cuda.reset_peak_memory_stats()
        crossed = hand_over(baseline, take_snapshot(state), base, region)
        scratch = torch.cuda.max_memory_allocated() - before - size_bytes - baseline.positions_size_bytes
        assert scratch <= 2 * 64 * MIB * 2
        assert (crossed < size_bytes // 10) == (base is not None)
        for tensor in state.values():
            tensor[::200] *= 1.01
    assert baseline.positions_size_bytes < size_bytes // 50


def test_a_tensor_of_more_than_2_to_the_31_elements() -> None:
    count = (1 << 31) + 4096
    weights = torch.zeros(count, dtype=torch.uint8, device="cuda")
    plan = take_snapshot({"w": weights})
    baseline = DeviceBaseline(plan)
    region = np.zeros(count, np.uint8)
    hand_over(baseline, plan, None, region)
    for position in (5, (1 << 31) - 1, 1 << 31, count - 1):
        weights[position] = 9
    assert hand_over(baseline, plan, 1, region) < 1000
    assert np.flatnonzero(region).tolist() == [5, (1 << 31) - 1, 1 << 31, count - 1]


def test_auto_keeps_a_baseline_for_a_model_on_the_device() -> None:
    plan = take_snapshot({"w": torch.zeros(100, 10, device="cuda")})
    with BaselineKeeper("auto").lend(plan) as baseline:
        assert baseline is not None
