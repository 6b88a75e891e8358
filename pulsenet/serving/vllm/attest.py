"""Compares an engine's memory with weights that are known, bit by bit, through the map.

A map alone would believe a loader that repacks what it stores. A map under which a whole checkpoint agrees with the
engine that was started from it does not lie.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from pulsenet.errors import IntegrityError, StorageError, StructureError
from pulsenet.ids import Digest
from pulsenet.local.torch_dtypes import BITS_DTYPES
from pulsenet.serving.engine import describe_names
from pulsenet.serving.safetensors_format import TensorPlace, read_header
from pulsenet.serving.vllm.map import EngineMap
from pulsenet.serving.vllm.windows import Window
from pulsenet.tensors.digest import compute_root, hash_tensor
from pulsenet.tensors.params import ParameterTable


class Checkpoint:
    """The safetensors files of a model directory, as the tensors of a table.

    Args:
        directory: Holds one or more ``*.safetensors``.
        table: The published tensors; a tied one may be stored under any of its names.

    Raises:
        StorageError: No such files, or damaged ones.
        StructureError: The files lack a tensor, or hold it with another dtype or shape.
    """

    def __init__(self, directory: Path, table: ParameterTable) -> None:
        paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            raise StorageError(
                f"no safetensors files in {directory}: the engine's weights cannot be compared with them"
            )
        self._table = table
        places = {place.spec.name: place for path in paths for place in read_header(path)}
        self._places = [_find_place(index, table, places, directory) for index in range(len(table.tensors))]
        self._mappings: dict[Path, mmap.mmap] = {}

    def tensor_bytes(self, tensor_index: int) -> npt.NDArray[np.uint8]:
        """Return one tensor's bytes."""
        place = self._places[tensor_index]
        if place.spec.size_bytes == 0:
            return np.zeros(0, dtype=np.uint8)
        mapping = self._mappings.get(place.path)
        if mapping is None:
            with place.path.open("rb") as file:
                # Private and writable, because torch takes no read-only memory; it is never written.
                mapping = self._mappings[place.path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return np.frombuffer(mapping, np.uint8, place.spec.size_bytes, place.offset_bytes)

    def compute_root(self) -> Digest:
        """Return the root of the version that the files are."""
        hashes = [hash_tensor(self.tensor_bytes(index)) for index in range(len(self._table.tensors))]
        return compute_root(self._table, hashes)


@dataclass(frozen=True, slots=True)
class RegionTensors:
    """A whole version in the dense layout, tensor by tensor."""

    table: ParameterTable
    region: npt.NDArray[np.uint8]
    """Mapped privately, so that torch takes it."""

    def tensor_bytes(self, tensor_index: int) -> npt.NDArray[np.uint8]:
        """Return one tensor's bytes."""
        offset_bytes = self.table.offsets[tensor_index]
        return self.region[offset_bytes : offset_bytes + self.table.tensors[tensor_index].size_bytes]


Tensors = Checkpoint | RegionTensors


def find_differing(mapped: EngineMap, tensors: Tensors) -> list[str]:
    """Return the names of the tensors whose bits differ from what the map reaches, in the table's order."""
    differing: dict[str, None] = {}
    for tensor_index, target, source in walk_views(mapped, tensors):
        if not torch.equal(target, source.to(target.device)):
            differing[mapped.table.tensors[tensor_index].name] = None
    return list(differing)


def attest(mapped: EngineMap, tensors: Tensors, what: str) -> None:
    """Compare everything the map reaches with ``tensors``, which are called ``what``; nothing is written.

    Raises:
        IntegrityError: The message names the tensors whose bits differ.
    """
    differing = find_differing(mapped, tensors)
    if differing:
        raise IntegrityError(f"the engine holds other bits than {what} for tensors: {describe_names(differing)}")


def overwrite(mapped: EngineMap, tensors: Tensors) -> None:
    """Copy everything the map reaches from ``tensors`` into the engine's memory, in place."""
    for _, target, source in walk_views(mapped, tensors):
        target.copy_(source)


def walk_views(mapped: EngineMap, tensors: Tensors) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield (tensor index, view on the engine's memory, view on the published tensor) of every window."""
    cached: tuple[int, torch.Tensor] | None = None
    for tensor_index, memory, window in mapped.walk():
        if cached is None or cached[0] != tensor_index:
            cached = tensor_index, _as_bits(tensors.tensor_bytes(tensor_index), memory.bits.element_size())
        yield tensor_index, view_target(memory.bits, window), _view_source(cached[1], window)


def view_target(bits: torch.Tensor, window: Window) -> torch.Tensor:
    """Return the part of a memory that a window covers."""
    return bits.as_strided(window.sizes, window.target_strides, window.target_offset)


def _view_source(bits: torch.Tensor, window: Window) -> torch.Tensor:
    return bits.as_strided(window.sizes, window.source_strides, window.source_offset)


def _as_bits(data: npt.NDArray[np.uint8], element_size_bytes: int) -> torch.Tensor:
    """Return bytes as a flat tensor of integers that nobody writes to."""
    dtype = BITS_DTYPES[element_size_bytes]
    return torch.from_numpy(data).view(dtype) if data.size else torch.empty(0, dtype=dtype)


def _find_place(
    tensor_index: int, table: ParameterTable, places: dict[str, TensorPlace], directory: Path
) -> TensorPlace:
    spec = table.tensors[tensor_index]
    names = [spec.name, *(alias for alias, canonical in table.aliases if canonical == spec.name)]
    place = next((places[name] for name in names if name in places), None)
    if place is None:
        raise StructureError(f"{directory} has no tensor {spec.name}: the engine was started from another model")
    if (place.spec.dtype, place.spec.shape) != (spec.dtype, spec.shape):
        raise StructureError(
            f"tensor {spec.name} is {place.spec.dtype} {list(place.spec.shape)} in {directory} and {spec.dtype} "
            f"{list(spec.shape)} in the version: start the engine from the run's model"
        )
    return place
