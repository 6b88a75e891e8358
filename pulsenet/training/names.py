"""Finds what a model publishes and under which names: wrappers stripped, tied weights once, adapters merged."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

import torch

from pulsenet.errors import ConfigError
from pulsenet.tensors.params import canonical_name

LORA_PATTERN: Final = re.compile(r"(^|\.)lora_[A-Za-z_]+(\.|$)")
SAVED_PATTERN: Final = re.compile(r"\.modules_to_save\.[^.]+(?=\.)")
ORIGINAL_PATTERN: Final = re.compile(r"\.original_module(?=\.)")
"""Segments that only parameter-efficient fine-tuning (PEFT) puts into a name: an adapter's own weights, a layer
trained whole, and that layer as it was before."""


@dataclass(frozen=True, slots=True, eq=False)
class NamedTensors:
    """What is published, by canonical name, in the order of the state dict."""

    tensors: tuple[tuple[str, torch.Tensor, bool], ...]
    """Name, tensor, and whether an FP32 tensor may be cast (it is a parameter and nothing asks to keep it)."""
    aliases: tuple[tuple[str, str], ...]
    """(alias, canonical) of tied weights."""
    excluded: tuple[str, ...]
    """Buffers that are not part of the state dict, and merged adapter weights."""


def name_tensors(source: torch.nn.Module | Mapping[str, torch.Tensor], *, keep: tuple[str, ...]) -> NamedTensors:
    """List the tensors of a module or state dict as :class:`NamedTensors`.

    Raises:
        ConfigError: Neither a module nor a state dict, un-merged adapters, shards that cannot be gathered, two tensors
            of one name, a value that is no tensor or has no memory, or a ``keep`` pattern that matches nothing.
    """
    if isinstance(source, torch.nn.Module):
        _refuse_flat_shards(source)
        _refuse_partitioned(source)
        state: Mapping[str, object] = source.state_dict()
        buffers = dict(source.named_buffers(remove_duplicate=False))
        excluded = [canonical_name(name) for name in buffers if name not in state]
        buffer_names = {name for name in buffers if name in state}
        adapters_merged = _adapters_merged(source)
    else:
        _refuse_other_sources(source)
        state = source
        excluded = []
        has_parameters = any(isinstance(value, torch.nn.Parameter) for value in source.values())
        buffer_names = {
            name for name, value in source.items() if has_parameters and not isinstance(value, torch.nn.Parameter)
        }
        adapters_merged = False

    tensors: dict[str, tuple[torch.Tensor, bool]] = {}
    aliases: dict[str, str] = {}
    canonical_by_memory: dict[tuple[object, ...], str] = {}
    for raw_name, tensor in _adapted(state, excluded, merged=adapters_merged):
        name = canonical_name(SAVED_PATTERN.sub("", raw_name))
        memory = _memory_key(tensor)
        tied_to = canonical_by_memory.get(memory) if memory is not None else None
        if name in tensors or name in aliases:
            if tied_to is not None and aliases.get(name, name) == tied_to:
                continue
            raise ConfigError(f"two tensors are both called {name} once wrapper prefixes are stripped: rename one")
        if tied_to is not None:
            aliases[name] = tied_to
            continue
        if memory is not None:
            canonical_by_memory[memory] = name
        is_kept = raw_name in buffer_names or any(fnmatchcase(name, pattern) for pattern in keep)
        tensors[name] = (tensor, not is_kept)
    _refuse_idle_patterns(keep, tensors)
    if not tensors:
        raise ConfigError("the model has no tensors to publish: pass a torch.nn.Module or its state dict")
    return NamedTensors(
        tensors=tuple((name, tensor, is_cast) for name, (tensor, is_cast) in tensors.items()),
        aliases=tuple(aliases.items()),
        excluded=tuple(dict.fromkeys(excluded)),
    )


def _adapted(state: Mapping[str, object], excluded: list[str], *, merged: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what is published of a state dict; adds what is left out because of merged adapters to ``excluded``."""
    adapters = [name for name in state if LORA_PATTERN.search(name)]
    if adapters and not merged:
        raise ConfigError(
            f"the model holds {len(adapters)} adapter tensors that are not merged ({', '.join(adapters[:5])}): "
            "call model.merge_adapter() before publish and model.unmerge_adapter() after it"
        )
    saved = {canonical_name(SAVED_PATTERN.sub("", name)) for name in state if SAVED_PATTERN.search(name)}
    for name, value in state.items():
        is_replaced = ORIGINAL_PATTERN.search(name) and canonical_name(ORIGINAL_PATTERN.sub("", name)) in saved
        if LORA_PATTERN.search(name) or is_replaced or name.endswith("_extra_state"):
            excluded.append(name)
        elif hasattr(value, "local_shards"):
            raise ConfigError(f"tensor {name} is a ShardedTensor: pass a full state dict, or use DTensor (FSDP2)")
        elif isinstance(value, torch.Tensor):
            _refuse_valueless(name, value)
            yield name, value.detach()
        else:
            raise ConfigError(f"entry {name} of the state dict is {type(value).__name__}, not a tensor: remove it")


def _adapters_merged(module: torch.nn.Module) -> bool:
    """Tell whether every adapter layer of the module says its base weights include it."""
    layers = [part for part in module.modules() if hasattr(part, "base_layer") and hasattr(part, "merged")]
    return bool(layers) and all(part.merged for part in layers)


def is_flat_sharded(module: torch.nn.Module) -> bool:
    """Tell whether FSDP1 shards it: parameters are pieces of a flat tensor, without names or shapes of their own."""
    return any(
        type(part).__name__ == "FullyShardedDataParallel" and getattr(part, "world_size", 1) > 1
        for part in module.modules()
    )


def _refuse_flat_shards(module: torch.nn.Module) -> None:
    if is_flat_sharded(module):
        raise ConfigError(
            "the model is sharded by FullyShardedDataParallel, whose tensors cannot be gathered one at a time: "
            "use torch.distributed.fsdp.fully_shard (FSDP2), or pass rank 0's full state dict"
        )


def _refuse_partitioned(module: torch.nn.Module) -> None:
    """Refuse DeepSpeed ZeRO-3 partitions: outside a gather its parameters are empty, and would be published so."""
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "ds_shape") and tuple(parameter.ds_shape) != tuple(parameter.shape):
            raise ConfigError(
                f"parameter {name} is partitioned by DeepSpeed ZeRO-3: publish inside "
                "deepspeed.zero.GatheredParameters(model.parameters())"
            )


def _refuse_other_sources(source: object) -> None:
    """Refuse what is neither a module nor tensors by name."""
    if not isinstance(source, Mapping):
        raise ConfigError(f"{type(source).__name__} cannot be published: pass a torch.nn.Module or its state dict")
    for name in source:
        if not isinstance(name, str):
            raise ConfigError(f"the state dict has the key {name!r}, which is no name: use text")


def _refuse_valueless(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose values are nowhere in memory, or not in one piece of it."""
    if torch.nn.parameter.is_lazy(tensor):
        raise ConfigError(f"tensor {name} is not initialised: run the model once before publishing")
    if tensor.is_nested:
        raise ConfigError(f"tensor {name} is a nested tensor: publish its parts as tensors of their own")
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    has_memory = local.layout == torch.strided and local.device.type != "meta"
    if has_memory and local.numel() and local.untyped_storage().nbytes() == 0:
        raise ConfigError(f"the memory of tensor {name} was freed: gather or load it before publishing")


def _memory_key(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Return what two names must share to be tied: memory, dtype and the way it is read; ``None`` if empty."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if tensor.numel() == 0 or local.layout != torch.strided or local.device.type == "meta":
        return None
    storage = local.untyped_storage()
    # A rank that holds nothing of a sharded tensor has to find it tied where the others do: all gather alike.
    place = storage.data_ptr() if local.numel() else storage._cdata
    shape, stride = tuple(tensor.shape), tuple(local.stride())
    return (local.device, place, local.storage_offset(), tensor.dtype, shape, stride, local.is_neg())


def _refuse_idle_patterns(keep: tuple[str, ...], tensors: Mapping[str, object]) -> None:
    """Refuse a ``keep`` pattern that matches no tensor: a typing mistake would silently round weights."""
    for pattern in keep:
        if not any(fnmatchcase(name, pattern) for name in tensors):
            first = ", ".join(list(tensors)[:5])
            raise ConfigError(f"keep pattern {pattern!r} matches none of {len(tensors)} tensors (first: {first})")
