"""What is handed over against a copy on the device gives the bits of the model, whatever became of earlier tries."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pulsenet.local.changed_parts import read_changed_part
from pulsenet.local.parts import SealedPart
from pulsenet.local.shared_memory import Region
from pulsenet.tensors.params import ParameterTable, TensorSpec
from pulsenet.training import device_baseline, snapshot
from pulsenet.training.device_baseline import DeviceBaseline, find_moved, find_moved_on_device
from pulsenet.training.snapshot import Snapshot, cast_to_bf16, take_snapshot

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64]
SPECIAL_BITS = [0x7FC12345, 0xFF800001, 0x7F800000, 0x80000000, 0x00000000, 0x00000001, 0x3F808000, 0x3F818000]


def make_state() -> dict[str, torch.Tensor]:
    """Return tensors of every dtype, and an empty, a scalar and a strided one."""
    generator = torch.Generator().manual_seed(3)
    state = {str(dtype): torch.randn(40, 30, generator=generator).to(dtype) for dtype in DTYPES}
    state["special"] = torch.tensor(SPECIAL_BITS, dtype=torch.int64).to(torch.int32).view(torch.float32).clone()
    state["kept"] = torch.randn(50, 7, generator=generator)
    state["strided"] = torch.randn(30, 20, generator=generator).t()
    state["mask"] = torch.tensor([True, False, True])
    state["steps"] = torch.tensor(7)
    state["empty"] = torch.zeros(0, 4)
    return state


def change(state: dict[str, torch.Tensor], share: float, seed: int) -> None:
    """Flip some bits, in a few tensors or in all."""
    draw = np.random.default_rng(seed)
    for tensor in state.values():
        if draw.random() < 0.3:
            continue
        view = tensor.t() if not tensor.is_contiguous() else tensor
        bits = view.view(-1).view(torch.uint8).numpy()
        chosen = np.flatnonzero(draw.random(bits.size) < share)
        bits[chosen] ^= (1 << draw.integers(0, 1 if tensor.dtype == torch.bool else 8, chosen.size)).astype(np.uint8)


def collect(plan: Snapshot) -> bytes:
    """Return the bits in the dense layout, as a hand-over without a device baseline gives them."""
    region = np.zeros(plan.table.layout_size_bytes, np.uint8)
    for tensor_index, offset_bytes, data in plan.blocks():
        start = plan.table.offsets[tensor_index] + offset_bytes
        region[start : start + data.size] = data
    return region.tobytes()


def write_part(table: ParameterTable, region: Any, part: SealedPart) -> None:
    """Do with a part what the daemon does."""
    layout = part.layout
    size_bytes = layout.size_bytes if part.changed_size_bytes is None else part.changed_size_bytes
    memory = Region.open_snapshot(os.dup(part.descriptor), size_bytes)
    if part.changed_size_bytes is None:
        for index in layout.tensor_indices:
            table.view(region, index)[:] = layout.view(memory.bytes, index)
    else:
        for content in read_changed_part(layout, memory.bytes):
            view = table.view(region, content.tensor_index)
            if content.indices is None:
                view[:] = content.bits
            else:
                assert np.all(content.indices[1:] > content.indices[:-1])
                view[content.indices] = content.bits
    memory.close()


@dataclass
class HandOvers:
    """A model, its baseline, and every hand-over that came to its end."""

    state: dict[str, torch.Tensor] = field(default_factory=make_state)
    whole: dict[int, bytes] = field(default_factory=dict)
    held: int | None = None
    """What the daemon holds."""
    handed_size_bytes: int = 0

    def __post_init__(self) -> None:
        self.baseline = DeviceBaseline(self.plan())

    def plan(self) -> Snapshot:
        return take_snapshot(self.state, keep=("kept",) if "kept" in self.state else ())

    def hand_over(self, *, parts_max: int | None = None) -> int:
        """Hand the model over against what the daemon holds, and check it against all that it may hold by then."""
        plan = self.plan()
        number = self.baseline.begin().number
        bases = [base for base in self.whole if self.held is not None and self.held <= base < number]
        regions = [np.frombuffer(self.whole[base], np.uint8).copy() for base in bases]
        regions = regions or [np.zeros(plan.table.layout_size_bytes, np.uint8)]
        self.handed_size_bytes = 0
        with closing(self.baseline.make_parts(plan, self.held)) as parts:
            for count, part in enumerate(parts, start=1):
                for region in regions:
                    write_part(plan.table, region, part)
                self.handed_size_bytes += os.fstat(part.descriptor).st_size
                if part.layout.end == len(plan.table.tensors):
                    # As the client does: the generator is not asked again.
                    self.whole[number] = collect(plan)
                    assert all(region.tobytes() == self.whole[number] for region in regions)
                    break
                if count == parts_max:
                    break
        return number

    def commit(self, number: int) -> None:
        self.held = number if number in self.whole else self.held


@pytest.fixture(params=["host", "device"])
def operations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run with the compiled loops, or with the operations that an accelerator would run."""
    if request.param == "device":
        use_device_operations(monkeypatch)
    return str(request.param)


def use_device_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_baseline, "find_moved", find_moved_on_device)
    monkeypatch.setattr(snapshot, "_cast_block", lambda flat: cast_to_bf16(flat).view(torch.int16))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_baseline, "BLOCK_ELEMENTS_HOST", 250)
    monkeypatch.setattr("pulsenet.local.parts.PART_SIZE_BYTES_MIN", 3000)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_moved_elements_are_found_alike_by_both_ways(dtype: torch.dtype, share: float) -> None:
    held = torch.randint(0, 100, (5000,), dtype=dtype)
    bits = held + (torch.rand(5000) < share).to(dtype)
    found = find_moved(held, bits)
    assert found.dtype == torch.int32
    assert torch.equal(found, find_moved_on_device(held, bits))
    assert found.tolist() == np.flatnonzero(held.numpy() != bits.numpy()).tolist()


@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.3, 1.0])
def test_every_hand_over_has_the_bits_of_the_model(operations: str, share: float) -> None:
    """Every dtype, NaN, -0.0, strided tensors; few, many, all or no changes."""
    run = HandOvers()
    for seed in range(4):
        run.commit(run.hand_over())
        assert run.baseline.is_listed == (seed > 0)
        change(run.state, share, seed)
    run.commit(run.hand_over())


def test_nan_payloads_and_signs_of_zero_count_as_changes(operations: str) -> None:
    run = HandOvers(state={"w": torch.zeros(1000)})
    run.commit(run.hand_over())
    bits = run.state["w"].view(torch.int32)
    bits[3], bits[700] = -(1 << 31), 0x7FC12345
    run.commit(run.hand_over())
    bits[700] = 0x7FC22345
    run.commit(run.hand_over())
    assert run.baseline.is_listed
    assert run.handed_size_bytes < 200


def test_few_changes_make_small_parts_and_many_make_whole_ones() -> None:
    run = HandOvers(state={"w": torch.zeros(256_000, dtype=torch.bfloat16)})
    run.commit(run.hand_over())
    sizes = []
    for gap in (1_000_000, 100, 5, 3):
        run.state["w"].view(torch.int16)[gap - 1 :: gap] += 1
        run.commit(run.hand_over())
        assert run.baseline.is_listed
        sizes.append(run.handed_size_bytes)
    assert sizes == [64, 64 + 2560 * 6, 64 + 51_200 * 6, 64 + 512_000]


OPERATIONS = st.sampled_from(["commit", "commit", "late", "lost", "cut", "restart", "other"])


@pytest.mark.parametrize("way", ["host", "device"])
@given(steps=st.lists(st.tuples(OPERATIONS, st.sampled_from([0.0, 0.002, 0.1, 0.9])), max_size=12))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_outcome_of_earlier_hand_overs_spoils_a_later_one(way: str, steps: list[tuple[str, float]]) -> None:
    """Each hand-over gives the model's bits on every version that the daemon may hold when it encodes it.

    ``commit``: it was committed. ``late``: it is, but only after the next one was offered. ``lost``: replaced or
    failed. ``cut``: its parts did not all come. ``restart``, ``other``: the daemon holds nothing of this process.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        if way == "device":
            use_device_operations(monkeypatch)
        run, late = HandOvers(), 0
        for seed, (outcome, share) in enumerate(steps):
            change(run.state, share, seed)
            number = run.hand_over(parts_max=2 if outcome == "cut" else None)
            run.commit(late)
            late = number if outcome == "late" else 0
            if outcome == "commit":
                run.commit(number)
            elif outcome in ("restart", "other"):
                run.held = None
        run.commit(run.hand_over())
        assert run.baseline.positions_size_bytes <= 0.75 * run.baseline.size_bytes


def test_a_cut_first_hand_over_is_no_base() -> None:
    run = HandOvers()
    run.hand_over(parts_max=1)
    run.held = 1
    run.hand_over()
    assert not run.baseline.is_listed
    run.commit(2)
    change(run.state, 0.01, 1)
    run.hand_over()
    assert run.baseline.is_listed


def test_what_a_stuck_daemon_has_not_taken_is_bounded() -> None:
    run = HandOvers(state={"w": torch.zeros(20_000, dtype=torch.bfloat16)})
    run.commit(run.hand_over())
    for seed in range(60):
        change(run.state, 0.02, seed)
        run.hand_over()
        assert run.baseline.positions_size_bytes <= 0.75 * run.baseline.size_bytes
    assert run.handed_size_bytes == 64 + 40_000
    run.commit(61)
    run.hand_over()
    assert run.handed_size_bytes == 64
    assert run.baseline.positions_size_bytes == 0


def test_hand_overs_one_behind_list_no_more_than_the_last_two_moved() -> None:
    """The daemon is always at work on the one before: that must not add up."""
    run = HandOvers(state={"w": torch.zeros(20_000, dtype=torch.bfloat16)})
    run.commit(run.hand_over())
    before = 1
    for step in range(30):
        run.state["w"].view(torch.int16)[step::200] += 1
        number = run.hand_over()
        assert run.handed_size_bytes <= 64 + 200 * 6 + 64
        run.commit(before)
        before = number


def test_a_baseline_is_of_one_model_in_one_place() -> None:
    state = {"w": torch.zeros(4, 6), "v": torch.zeros(3)}
    baseline = DeviceBaseline(take_snapshot(state))
    assert baseline.size_bytes == 2 * 27
    assert baseline.fits(take_snapshot(dict(reversed(state.items()))))
    others: list[Callable[[], Any]] = [
        lambda: take_snapshot(state, compute_dtype=None),
        lambda: take_snapshot({**state, "w": state["w"].t().contiguous().t()}),
        lambda: take_snapshot({**state, "w": torch.zeros(6, 4)}),
        lambda: take_snapshot({**state, "v": torch.zeros(3, dtype=torch.bfloat16)}),
        lambda: take_snapshot({"w": state["w"]}),
    ]
    assert not any(baseline.fits(other()) for other in others)
    assert DeviceBaseline(take_snapshot(state)).begin().sender != baseline.begin().sender


def test_progress_is_told_tensor_by_tensor(operations: str) -> None:
    run = HandOvers()
    for _ in range(2):
        seen: list[int] = []
        run.baseline.begin()
        parts: Iterator[SealedPart] = run.baseline.make_parts(run.plan(), run.held, seen.append)
        assert len(list(parts)) > 3
        assert seen == list(range(len(run.state)))
        run.held = 1


@pytest.mark.parametrize(("element_count", "start"), [((1 << 32) - 8, (1 << 31) + 5), (1 << 33, (1 << 32) + 5)])
def test_positions_beyond_2_to_the_31_are_right(element_count: int, start: int) -> None:
    """Blocks count from their own start in 32 bits; in the tensor they have the width of its indices."""
    spec = TensorSpec("w", "U8", (element_count,))
    first, later = (device_baseline._Block(at, torch.zeros(100, dtype=torch.uint8)) for at in (0, start))
    for block in (first, later):
        block.move(block.bits.clone(), 1)
        changed = block.bits.clone()
        changed[[3, 99]] = torch.tensor([7, 8], dtype=torch.uint8)
        block.move(changed, 2)
    listed = device_baseline._list_moved(spec, [first, later])
    assert listed is not None
    indices, bits = listed
    assert indices.dtype == spec.index_dtype
    assert indices.tolist() == [3, 99, start + 3, start + 99]
    assert bits.tolist() == [7, 8, 7, 8]
