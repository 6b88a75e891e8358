"""Names of what is published: wrappers, ties, buffers, adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pulsenet.errors import ConfigError
from pulsenet.training.names import name_tensors
from pulsenet.training.snapshot import collect_tensors


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(5, 3)
        self.layer: torch.nn.Module = torch.nn.Linear(3, 3)
        self.lm_head = torch.nn.Linear(3, 5, bias=False)
        self.lm_head.weight = self.embed_tokens.weight


class Holder(torch.nn.Module):
    """Puts a module under a wrapper's name, as wrappers do."""

    def __init__(self, name: str, inner: torch.nn.Module) -> None:
        super().__init__()
        self.add_module(name, inner)


class AdapterLayer(torch.nn.Module):
    """As a PEFT layer shows itself: base layer, adapter weights, and whether they are merged."""

    def __init__(self, base_layer: torch.nn.Module, *, merged: bool) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(3, 2, bias=False)})
        self.merged = merged


class SavedLayer(torch.nn.Module):
    """As PEFT keeps a layer that is trained whole."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.original_module = torch.nn.Linear(3, 3)
        self.modules_to_save = torch.nn.ModuleDict({"default": layer})


def in_peft(model: torch.nn.Module) -> torch.nn.Module:
    return Holder("base_model", Holder("model", model))


def with_adapter(model: Tied, *, merged: bool) -> torch.nn.Module:
    model.layer = AdapterLayer(model.layer, merged=merged)
    return in_peft(model)


def with_saved(model: Tied) -> torch.nn.Module:
    model.layer = SavedLayer(model.layer)
    return in_peft(model)


WRAPPERS: dict[str, Callable[[Tied], torch.nn.Module]] = {
    "compile": lambda model: Holder("_orig_mod", model),
    "DDP of compile": lambda model: Holder("module", Holder("_orig_mod", model)),
    "DDP": lambda model: Holder("module", model),
    "FSDP": lambda model: Holder("_fsdp_wrapped_module", model),
    "PEFT": in_peft,
    "PEFT merged": lambda model: with_adapter(model, merged=True),
    "PEFT modules_to_save": with_saved,
}


def test_tied_weights_are_published_once_under_the_first_name() -> None:
    """A-NAME-1."""
    table, tensors = collect_tensors(Tied())
    assert [name for name, _ in tensors] == ["embed_tokens.weight", "layer.bias", "layer.weight"]
    assert table.aliases == (("lm_head.weight", "embed_tokens.weight"),)


def test_equal_values_in_two_memories_are_not_tied() -> None:
    table, _ = collect_tensors({"a": torch.ones(3), "b": torch.ones(3)})
    assert table.aliases == ()
    assert len(table.tensors) == 2


def test_two_views_of_one_memory_read_differently_are_not_tied() -> None:
    square = torch.arange(4.0).reshape(2, 2)
    table, tensors = collect_tensors({"a": square, "b": square.t(), "c": square[:1]})
    assert table.aliases == ()
    assert len({data for _, data in tensors}) == 3


def test_empty_tensors_are_not_tied_though_they_share_no_memory() -> None:
    table, _ = collect_tensors({"a": torch.ones(0), "b": torch.ones(0)})
    assert len(table.tensors) == 2


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_model_publishes_the_plain_models_names_and_bytes(wrapper: str) -> None:
    """A-NAME-2."""
    model = Tied()
    plain_table, plain_tensors = collect_tensors(model)
    plain = dict(plain_tensors)
    table, tensors = collect_tensors(WRAPPERS[wrapper](model))
    assert table.tensors == plain_table.tensors
    assert table.aliases == plain_table.aliases
    assert dict(tensors) == plain


def test_merged_adapter_weights_are_listed_as_excluded() -> None:
    table, _ = collect_tensors(with_adapter(Tied(), merged=True))
    assert table.excluded == ("base_model.model.layer.lora_A.default.weight",)


@pytest.mark.parametrize("as_state_dict", [False, True])
def test_adapters_that_are_not_merged_are_refused_with_what_to_call(as_state_dict: bool) -> None:
    model = with_adapter(Tied(), merged=False)
    with pytest.raises(ConfigError, match=r"call model\.merge_adapter"):
        collect_tensors(model.state_dict() if as_state_dict else model)


def test_a_non_persistent_buffer_is_listed_under_its_plain_name() -> None:
    """A-NAME-5."""
    model = torch.nn.Linear(2, 2)
    model.register_buffer("inv_freq", torch.ones(2), persistent=False)
    table, _ = collect_tensors(Holder("module", model))
    assert table.excluded == ("inv_freq",)


def test_a_state_dict_with_variables_tells_buffers_from_parameters() -> None:
    model = torch.nn.BatchNorm1d(2)
    by_variables = collect_tensors(model.state_dict(keep_vars=True))[0]
    assert by_variables == collect_tensors(model)[0]
    assert {spec.name: spec.dtype for spec in by_variables.tensors}["running_mean"] == "F32"
    assert {spec.name: spec.dtype for spec in collect_tensors(model.state_dict())[0].tensors}["running_mean"] == "BF16"


def test_two_tensors_that_end_with_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two tensors are both called w"):
        collect_tensors({"w": torch.ones(2), "module.w": torch.zeros(2)})


def test_one_tensor_under_two_spellings_of_one_name_is_taken_once() -> None:
    weight = torch.ones(2)
    table, _ = collect_tensors({"w": weight, "module.w": weight})
    assert [spec.name for spec in table.tensors] == ["w"]
    assert table.aliases == ()


def test_a_name_that_is_an_alias_and_another_tensor_is_refused() -> None:
    weight = torch.ones(2)
    with pytest.raises(ConfigError, match="two tensors are both called b"):
        collect_tensors({"a": weight, "b": weight, "module.b": torch.zeros(2)})


def test_a_keep_pattern_that_matches_nothing_is_refused_with_the_first_names() -> None:
    with pytest.raises(ConfigError, match=r"'\*\.nrom' matches none of 2 tensors \(first: weight, bias\)"):
        collect_tensors(torch.nn.Linear(2, 2), keep=("*.nrom",))


def test_a_model_without_tensors_is_refused() -> None:
    with pytest.raises(ConfigError, match="no tensors to publish"):
        collect_tensors(torch.nn.ReLU())


@pytest.mark.parametrize("source", [None, [torch.ones(2)], torch.ones(2), {1: torch.ones(2)}, {("a",): torch.ones(2)}])
def test_what_is_neither_module_nor_state_dict_is_refused(source: Any) -> None:
    with pytest.raises(ConfigError, match=r"state dict"):
        name_tensors(source, keep=())


def test_a_layer_that_never_ran_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tensor weight is not initialised"):
        name_tensors(torch.nn.LazyLinear(3), keep=())


def test_memory_that_was_freed_is_refused() -> None:
    freed = torch.ones(5)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ConfigError, match=r"the memory of tensor a was freed"):
        name_tensors({"a": freed}, keep=())


def test_a_nested_tensor_is_refused() -> None:
    with pytest.warns(UserWarning, match="nested"):
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(ConfigError, match=r"tensor a is a nested tensor"):
        name_tensors({"a": nested}, keep=())


def test_partitions_of_deepspeed_are_refused_with_what_to_do() -> None:
    layer = torch.nn.Linear(2, 3)
    layer.weight.ds_shape = layer.weight.shape
    assert len(name_tensors(layer, keep=()).tensors) == 2
    layer.weight.data = torch.empty(0)
    with pytest.raises(ConfigError, match=r"parameter weight is partitioned .*GatheredParameters"):
        name_tensors(layer, keep=())


def test_a_tensor_and_its_negation_are_not_tied() -> None:
    weight = torch.ones(3)
    named = name_tensors({"a": weight, "b": torch._neg_view(weight)}, keep=())
    assert [name for name, _, _ in named.tensors] == ["a", "b"]


def test_a_value_that_is_no_tensor_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="entry step of the state dict is int"):
        collect_tensors({"w": torch.ones(1), "step": 3})  # type: ignore[dict-item]


class FullyShardedDataParallel(torch.nn.Module):
    """Named as FSDP1's wrapper is, on two ranks."""

    world_size = 2


def test_fsdp1_shards_are_refused_with_what_to_use() -> None:
    with pytest.raises(ConfigError, match="fully_shard"):
        collect_tensors(Holder("model", FullyShardedDataParallel()))
