"""The loader's own copies are the map; nothing is written while it is drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch

from pulsenet.errors import StructureError
from pulsenet.ids import Version
from pulsenet.serving.engine import FullUpdate
from pulsenet.serving.vllm.map import EngineMap, trace_map
from pulsenet.serving.vllm.windows import find_uncovered
from pulsenet.tensors.params import ParameterTable, TensorSpec, make_table

Weights = Iterable[tuple[str, torch.Tensor]]
Published = Callable[..., dict[str, torch.Tensor]]
Bits = Callable[..., dict[str, bytes]]
MakeFull = Callable[..., FullUpdate]


def write_through(mapped: EngineMap, update: FullUpdate) -> None:
    """Copy a whole version through the map, element by element."""
    for tensor_index, memory, window in mapped.walk():
        spec = mapped.table.tensors[tensor_index]
        indices = np.arange(spec.element_count, dtype=spec.index_dtype)
        chosen, positions = window.route(indices)
        bits = mapped.table.view(update.region, tensor_index)[chosen]
        memory.bits.numpy().view(bits.dtype)[positions] = bits


@pytest.mark.parametrize(("ranks", "tied"), [(1, True), (1, False), (2, True), (4, False)])
def test_writing_through_the_map_equals_loading(
    ranks: int,
    tied: bool,
    served_model: Any,
    make_published: Published,
    fresh_bits: Bits,
    get_bits: Bits,
    make_full: MakeFull,
) -> None:
    """A-NAME-1, A-NAME-4, A-DT-1: fused, sharded, transposed, padded, tied, FP32 and scalar weights."""
    state = make_published(1, tied=tied)
    update = make_full(state, Version(0, 1))
    found: list[list[Any]] = [[] for _ in update.table.tensors]
    for rank in range(ranks):
        model = served_model(rank, ranks, tied=tied)
        before = get_bits(model)
        mapped = trace_map(model, update.table)
        assert get_bits(model) == before
        write_through(mapped, update)
        expected = fresh_bits(state, rank, ranks, tied=tied)
        with torch.no_grad():  # an ordinary load clears padding rows; patches never touch them
            model.embed[10:] = model.head[10:] = 0
        assert get_bits(model) == expected
        for tensor_index, windows in enumerate(mapped.windows):
            found[tensor_index] += [window for _, window in windows]
    for spec, windows in zip(update.table.tensors, found, strict=True):
        assert find_uncovered(spec.element_count, windows) == 0


def test_padding_rows_are_not_in_the_map(served_model: Any, make_published: Published, make_full: MakeFull) -> None:
    """A-NAME-4."""
    model = served_model()
    update = make_full(make_published(2), Version(0, 1))
    write_through(trace_map(model, update.table), update)
    assert torch.equal(model.embed[10:], torch.full((6, 8), 3.0, dtype=torch.bfloat16))


def table_of(**shapes: tuple[int, ...]) -> ParameterTable:
    return make_table([TensorSpec(name, "BF16", shape) for name, shape in shapes.items()])


class One(torch.nn.Module):
    """One parameter and a loader given by the test."""

    def __init__(self, load: Callable[[One, Weights], object], dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=dtype), requires_grad=False)
        self.elsewhere = {"weight": torch.zeros(4, 4, dtype=torch.bfloat16)}
        self._load = load

    def load_weights(self, weights: Weights) -> object:
        return self._load(self, weights)


def copy_all(model: One, weights: Weights) -> None:
    for _, tensor in weights:
        model.weight.data.copy_(tensor)


def add_one(model: One, weights: Weights) -> None:
    for _, tensor in weights:
        model.weight.data.copy_(tensor + 1)


def add_in_place(model: One, weights: Weights) -> None:
    for _, tensor in weights:
        model.weight.data.add_(tensor)


def look_at_values(model: One, weights: Weights) -> None:
    for _, tensor in weights:
        model.weight.data.fill_(float(tensor.sum().item()))


def store_elsewhere(model: One, weights: Weights) -> None:
    for _, tensor in weights:
        model.elsewhere["weight"].copy_(tensor)


def replace_data(model: One, weights: Weights) -> None:
    for _, tensor in weights:
        model.weight.data = torch.ones(tensor.shape, dtype=tensor.dtype)


def replace_parameter(model: One, weights: Weights) -> None:
    for _, tensor in weights:
        model.weight = torch.nn.Parameter(tensor, requires_grad=False)


def spread(model: One, weights: Weights) -> None:
    for _, tensor in weights:
        model.weight.data.copy_(tensor[:1])


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (add_one, "computes with a published tensor"),
        (add_in_place, "computes with a published tensor"),
        (look_at_values, "loader refuses the published tensors"),
        (store_elsewhere, r"outside its parameters: 1 \(weight\)"),
        (replace_data, r"replaces parameters instead of filling them: 1 \(weight\)"),
        (replace_parameter, r"replaces parameters instead of filling them: 1 \(weight\)"),
        (spread, "one element has two places"),
    ],
)
def test_loaders_that_do_more_than_copy_are_refused_and_change_nothing(load: Any, reason: str) -> None:
    model = One(load)
    parameter, address = model.weight, model.weight.data_ptr()
    with pytest.raises(StructureError, match=reason):
        trace_map(model, table_of(weight=(4, 4)))
    assert model.weight is parameter
    assert model.weight.data_ptr() == address
    assert not model.weight.any()


def test_another_dtype_is_refused_with_what_to_change() -> None:
    """A-DT-1."""
    with pytest.raises(StructureError, match=r"holds as torch.float16 .* published as torch.bfloat16.*--dtype"):
        trace_map(One(copy_all, torch.float16), table_of(weight=(4, 4)))


def test_a_packed_parameter_without_elements_is_refused() -> None:
    model = One(copy_all)
    model.weight.data = torch.empty(0, dtype=torch.bfloat16)
    with pytest.raises(StructureError, match="another form"):
        trace_map(model, table_of(weight=(4, 4)))


def test_an_unknown_name_and_another_shape_are_refused(served_model: Any) -> None:
    """A-NAME-3, A-NAME-4."""
    with pytest.raises(StructureError, match="KeyError: 'gate'"):
        trace_map(served_model(), table_of(gate=(4, 4)))
    with pytest.raises(StructureError, match="loader refuses"):
        trace_map(served_model(), table_of(embed=(11, 8)))


def test_two_published_tensors_in_one_memory_are_refused() -> None:
    """A-NAME-1: an engine that ties what the version holds apart."""
    with pytest.raises(StructureError, match="ties weight to head, which the version holds apart"):
        trace_map(One(copy_all), table_of(weight=(4, 4), head=(4, 4)))


def test_a_tensor_the_engine_leaves_out_has_no_window(served_model: Any) -> None:
    """A patch of lm_head on a tied model: the loader skips it."""
    table = table_of(embed=(10, 8), head=(10, 8))
    mapped = trace_map(served_model(tied=True), table)
    assert [len(windows) for windows in mapped.windows] == [1, 0]


def test_empty_tensors_are_not_offered() -> None:
    """A-DT-2."""
    mapped = trace_map(One(copy_all), table_of(weight=(4, 4), nothing=(0, 4)))
    assert [len(windows) for windows in mapped.windows] == [0, 1]


def test_a_loader_may_be_given() -> None:
    model = One(add_one)
    mapped = trace_map(model, table_of(weight=(4, 4)), lambda weights: copy_all(model, weights))
    assert mapped.memories[0].name == "weight"
    assert mapped.memories[0].address == model.weight.data_ptr()
