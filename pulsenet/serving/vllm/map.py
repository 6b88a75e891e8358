"""Finds where an engine keeps each published tensor, by asking its own loader.

The loader is called with tensors that have a shape and no memory. Where it would copy one into the model, both views
are written down and nothing is copied: fused, transposed and sharded weights need no code of their own. The map says
where bits would go, not that they arrive unchanged: :mod:`pulsenet.serving.vllm.attest` compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pulsenet.errors import StructureError
from pulsenet.local.torch_dtypes import BITS_DTYPES, DTYPE_NAMES
from pulsenet.serving.engine import describe_names
from pulsenet.serving.vllm.windows import Window, find_shared, make_window
from pulsenet.tensors.params import ParameterTable

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
"""A model's own loader, as vLLM and SGLang models have it."""

_DTYPES: Final = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """One parameter's memory as flat integers of its element's width: writing to it writes to the model."""

    name: str
    bits: torch.Tensor

    @property
    def address(self) -> int:
        """Where it starts; captured graphs rely on it."""
        return self.bits.data_ptr()


@dataclass(frozen=True, slots=True, eq=False)
class EngineMap:
    """Windows of every tensor of a table into the memories of one rank of an engine."""

    table: ParameterTable
    memories: tuple[Memory, ...]
    windows: tuple[tuple[tuple[int, Window], ...], ...]
    """By tensor of the table: (index in ``memories``, window). Empty where this rank holds nothing of it."""

    def walk(self) -> Iterator[tuple[int, Memory, Window]]:
        """Yield every window with its tensor's index and its memory, tensor by tensor."""
        for tensor_index, windows in enumerate(self.windows):
            for memory_index, window in windows:
                yield tensor_index, self.memories[memory_index], window


def trace_map(model: torch.nn.Module, table: ParameterTable, load_weights: LoadWeights | None = None) -> EngineMap:
    """Let a model's loader say where each tensor of a table goes; nothing is written.

    Args:
        model: One rank's model.
        table: The published tensors. A tied weight is offered under all its names.
        load_weights: The loader; ``None`` takes ``model.load_weights``.

    Raises:
        StructureError: The loader refuses a tensor, computes with it, or puts it where no parameter is; or an element
            has another dtype there.
    """
    loader: LoadWeights = model.load_weights if load_weights is None else load_weights  # type: ignore[assignment]
    offered: list[tuple[str, torch.Tensor]] = []
    tensor_by_storage: dict[int, int] = {}
    names = [(spec.name, index) for index, spec in enumerate(table.tensors)]
    names += [(alias, table.index_of(canonical)) for alias, canonical in table.aliases]
    for name, tensor_index in names:
        spec = table.tensors[tensor_index]
        if spec.element_count == 0:
            continue
        meta = torch.empty(spec.shape, dtype=_DTYPES[spec.dtype], device="meta")
        tensor_by_storage[_storage_key(meta)] = tensor_index
        offered.append((name, meta))
    recorder = _Recorder(tensor_by_storage)
    kept = _Kept(model)
    try:
        with torch.no_grad(), recorder:
            loader(iter(offered))
    except StructureError:
        raise
    except Exception as error:
        raise StructureError(
            f"the engine's loader refuses the published tensors ({type(error).__name__}: {error}): it holds them in "
            "another form, so patches cannot go in place"
        ) from error
    finally:
        replaced = kept.restore()
    if replaced:
        raise StructureError(
            f"the engine's loader replaces parameters instead of filling them: {describe_names(replaced)}: patches "
            "cannot go in place"
        )
    return _build_map(model, table, recorder.copies)


class _Kept:
    """Remembers a model's parameters and what memory they have, because a loader may put others in their place."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._places = [
            (f"{path}.{name}" if path else name, module, name, parameter, parameter.data)
            for path, module in model.named_modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]

    def restore(self) -> list[str]:
        """Put back every parameter that is not what it was, and return their names."""
        replaced = []
        for full_name, module, name, parameter, data in self._places:
            is_other = module._parameters.get(name) is not parameter
            if is_other or _storage_key(parameter) != _storage_key(data):
                replaced.append(full_name)
                module._parameters[name] = parameter
                parameter.data = data
        return replaced


@dataclass(frozen=True, slots=True)
class _Copy:
    """One copy that the loader would have made."""

    tensor_index: int
    source: torch.Tensor
    target: torch.Tensor


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down copies of tensors without memory into real ones, and keeps every real tensor as it is."""

    def __init__(self, tensor_by_storage: dict[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensor_by_storage = tensor_by_storage
        self.copies: list[_Copy] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func._schema.is_mutable:
            return func(*args, **(kwargs or {}))
        target = args[0]
        if target.is_meta:
            return func(*args, **(kwargs or {}))
        sources = [argument for argument in args[1:] if isinstance(argument, torch.Tensor) and argument.is_meta]
        if sources:
            self._note(func, target, sources)
        # A write of something else, such as zeros into padding rows, changes nothing that is published.
        return target

    def _note(self, func: Any, target: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        tensor_index = self._tensor_by_storage.get(_storage_key(sources[0]))
        if func is not torch.ops.aten.copy_.default or tensor_index is None:
            raise StructureError(
                f"the engine's loader computes with a published tensor before it stores it (at {func.name()}): "
                "patches cannot go in place"
            )
        source = sources[0]
        if source.dtype != target.dtype:
            raise StructureError(
                f"the engine holds as {target.dtype} what is published as {source.dtype}: start it with the "
                "published dtype (for vLLM --dtype bfloat16)"
            )
        self.copies.append(_Copy(tensor_index, source.expand(target.shape), target))


def _storage_key(tensor: torch.Tensor) -> int:
    """Return what all views of one storage have in common, memory or not."""
    return int(tensor.untyped_storage()._cdata)


def _build_map(model: torch.nn.Module, table: ParameterTable, copies: Sequence[_Copy]) -> EngineMap:
    owners = {
        _storage_key(tensor): name
        for name, tensor in (*model.named_buffers(), *model.named_parameters())
        if tensor.numel() and not tensor.is_meta
    }
    memories: list[Memory] = []
    memory_index_of: dict[int, int] = {}
    windows: list[dict[tuple[int, Window], None]] = [{} for _ in table.tensors]
    homeless: list[str] = []
    for copy in copies:
        spec = table.tensors[copy.tensor_index]
        key = _storage_key(copy.target)
        if key not in owners:
            homeless.append(spec.name)
            continue
        if key not in memory_index_of:
            memory_index_of[key] = len(memories)
            memories.append(Memory(owners[key], _flat_bits(copy.target)))
        try:
            window = make_window(
                source_offset=int(copy.source.storage_offset()),
                source_strides=copy.source.stride(),
                target_offset=int(copy.target.storage_offset()),
                target_strides=copy.target.stride(),
                sizes=copy.target.shape,
            )
        except StructureError as error:
            raise StructureError(f"tensor {spec.name} cannot be patched in place: {error}") from error
        if window is not None:
            windows[copy.tensor_index][memory_index_of[key], window] = None
    if homeless:
        raise StructureError(
            f"the engine stores tensors outside its parameters: {describe_names(homeless)}: patches cannot reach them"
        )
    _check_apart(table, memories, windows)
    return EngineMap(table, tuple(memories), tuple(tuple(found) for found in windows))


def _check_apart(
    table: ParameterTable, memories: Sequence[Memory], windows: Sequence[dict[tuple[int, Window], None]]
) -> None:
    """Refuse a map in which two published tensors share memory: a patch of one would change the other."""
    found: list[list[tuple[int, Window]]] = [[] for _ in memories]
    for tensor_index, places in enumerate(windows):
        for memory_index, window in places:
            found[memory_index].append((tensor_index, window))
    for memory, owned in zip(memories, found, strict=True):
        shared = find_shared(memory.bits.numel(), owned)
        if shared is not None:
            first, second = sorted(shared)
            raise StructureError(
                f"the engine ties {table.tensors[second].name} to {table.tensors[first].name}, which the version "
                "holds apart: load the model untied"
            )


def _flat_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's whole storage as flat integers of its element's width."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=BITS_DTYPES[tensor.element_size()], device=tensor.device)
    return flat.set_(storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))
