"""What leaves the training process: dtypes, bits and row-major bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pulsenet.errors import ConfigError
from pulsenet.tensors.bf16 import cast_to_bf16_bits
from pulsenet.tensors.digest import compute_root, hash_tensor
from pulsenet.training import snapshot
from pulsenet.training.snapshot import cast_to_bf16, collect_tensors, take_snapshot

SPECIAL_BITS = [
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00007FFF, 0x00008000, 0x00008001, 0x00018000,
    0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000,
    0x7F800001, 0xFF800001, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC12345, 0x7F8000FF, 0xFFBFFFFF,
]  # fmt: skip


def test_cast_gives_the_bits_of_the_core_rule_on_every_edge_and_on_random_bits() -> None:
    random_bits = np.random.default_rng(7).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    bits = np.concatenate([np.array(SPECIAL_BITS, dtype=np.uint32), random_bits])
    cast = cast_to_bf16(torch.from_numpy(bits.view(np.float32)))
    assert cast.dtype == torch.bfloat16
    assert np.array_equal(cast.view(torch.int16).numpy().view(np.uint16), cast_to_bf16_bits(bits.view(np.float32)))


def test_nan_keeps_its_payload_where_torch_would_replace_it() -> None:
    nan = torch.tensor([0x7FC12345, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert cast_to_bf16(nan).view(torch.int16).tolist() == [0x7FC1, 0x7FC0]


class Mixed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1.0, 1.00390625, -0.0]))
        self.half_width = torch.nn.Parameter(torch.tensor([1.5, 2.5], dtype=torch.float16))
        self.brain = torch.nn.Parameter(torch.tensor([1.5, 2.5], dtype=torch.bfloat16))
        self.norm = torch.nn.Parameter(torch.tensor([0x3F800001], dtype=torch.int32).view(torch.float32).clone())
        self.register_buffer("router_bias", torch.tensor([0x3F800001], dtype=torch.int32).view(torch.float32).clone())
        self.register_buffer("steps", torch.tensor(2**40 + 1))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("cache", torch.ones(3), persistent=False)


def test_parameters_are_cast_and_everything_else_keeps_its_dtype_and_bits() -> None:
    """A-DT-1, A-NAME-5."""
    table, tensors = collect_tensors(Mixed(), keep=("nor?",))
    data = dict(tensors)
    assert {spec.name: spec.dtype for spec in table.tensors} == {
        "weight": "BF16", "half_width": "F16", "brain": "BF16", "norm": "F32",
        "router_bias": "F32", "steps": "I64", "mask": "BOOL",
    }  # fmt: skip
    assert data["weight"] == np.array([0x3F80, 0x3F80, 0x8000], dtype="<u2").tobytes()
    assert data["norm"] == data["router_bias"] == (0x3F800001).to_bytes(4, "little")
    assert data["steps"] == (2**40 + 1).to_bytes(8, "little")
    assert data["mask"] == b"\x01\x00\x01"
    assert table.excluded == ("cache",)


def test_without_a_compute_dtype_fp32_parameters_stay_exact() -> None:
    table, tensors = collect_tensors({"w": torch.tensor([1.0000001])}, compute_dtype=None)
    assert table.tensors[0].dtype == "F32"
    assert dict(tensors)["w"] == (0x3F800001).to_bytes(4, "little")


@pytest.mark.parametrize("shape", [(), (0, 5), (3, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_scalars_and_empty_tensors_pass(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A-DT-2."""
    table, tensors = collect_tensors({"x": torch.ones(shape, dtype=dtype)})
    ((name, data),) = tensors
    assert name == "x"
    assert table.tensors[0].shape == shape
    assert len(data) == table.tensors[0].size_bytes


def strided_tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    values = torch.arange(24).to(dtype)
    return {
        "transposed": values[:6].reshape(2, 3).t(),
        "stepped": values[::2],
        "shifted": values[1:],
        "expanded": values[:3].reshape(3, 1).expand(3, 4),
        "permuted": values.reshape(2, 3, 4).permute(2, 0, 1),
        "flipped_rows": values.reshape(4, 6)[:, 1:5:2],
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("block_elements", [1, 3, 5, 1 << 18])
def test_strided_tensors_leave_as_their_row_major_values(
    dtype: torch.dtype, block_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A-DT-3, for every way of cutting them into blocks."""
    monkeypatch.setattr(snapshot, "BLOCK_ELEMENTS", block_elements)
    strided = strided_tensors(dtype)
    dense = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in strided.items()}
    assert dict(collect_tensors(strided)[1]) == dict(collect_tensors(dense)[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_a_view_that_negates_leaves_negated(dtype: torch.dtype) -> None:
    values = torch.arange(1, 5).to(dtype)
    ((_, sent),) = collect_tensors({"a": torch._neg_view(values)})[1]
    ((_, expected),) = collect_tensors({"a": -values})[1]
    assert sent == expected


def test_blocks_are_ascending_without_gaps_and_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "BLOCK_ELEMENTS", 7)
    taken = take_snapshot({"b": torch.arange(20.0), "a": torch.arange(40.0).reshape(4, 10).t()})
    ends = [0, 0]
    for tensor_index, offset_bytes, data in taken.blocks():
        assert offset_bytes == ends[tensor_index]
        assert 0 < data.size <= 14
        ends[tensor_index] += data.size
    assert ends == [spec.size_bytes for spec in taken.table.tensors]


def test_nothing_is_copied_before_the_blocks_are_walked() -> None:
    weight = torch.zeros(2, dtype=torch.bfloat16)
    taken = take_snapshot({"w": weight})
    weight.fill_(1.0)
    assert dict(taken.tensor_bytes())["w"] == b"\x80\x3f" * 2


def test_the_root_is_that_of_the_dense_values() -> None:
    table, tensors = collect_tensors(torch.nn.Linear(3, 2))
    assert len(compute_root(table, [hash_tensor(data) for _, data in tensors])) == 32


class ShardedStub(torch.Tensor):
    """As a sharded tensor shows itself: this rank's values, and a gather."""

    def full_tensor(self) -> torch.Tensor:
        return torch.arange(4.0)

    def to_local(self) -> torch.Tensor:
        return torch.zeros(2)


def test_sharded_tensors_are_gathered_one_by_one() -> None:
    taken = snapshot.Snapshot(
        table=take_snapshot({"w": torch.zeros(4)}).table,
        sources=(torch.zeros(2).as_subclass(ShardedStub),),
    )
    assert dict(taken.tensor_bytes())["w"] == np.array([0, 0x3F80, 0x4000, 0x4040], dtype="<u2").tobytes()


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(2, dtype=torch.complex64), "dtype torch.complex64"),
        (torch.zeros(2, 2).to_sparse(), "sparse"),
        (torch.zeros(2, device="meta"), "meta device"),
    ],
)
def test_tensors_without_plain_values_are_refused_with_the_reason(tensor: torch.Tensor, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        take_snapshot({"w": tensor})
