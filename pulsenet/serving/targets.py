"""Where a version's tensors live in a model: names matched, tied copies found, bits written in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from pulsenet.errors import IntegrityError, StructureError
from pulsenet.ids import Digest
from pulsenet.local.torch_dtypes import BITS_DTYPES, DTYPE_NAMES
from pulsenet.serving.engine import describe_names
from pulsenet.tensors.digest import compute_root, hash_tensor
from pulsenet.tensors.params import ParameterTable, TensorSpec, canonical_name

BLOCK_SIZE_BYTES: Final = 8 << 20
"""Copied at once from a read-only region: small beside a tensor, large beside the cost of a call."""

Bits = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Indices = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """One tensor of the model as a place to write a version's tensor: same memory, padding rows left out."""

    name: str
    bits: torch.Tensor
    """The model's memory as integers of the element's width, in the version's shape."""

    def write_bits(self, indices: Indices, bits: Bits) -> None:
        """Store ``bits`` at flat row-major ``indices``, which the caller checked."""
        positions, values = self._to_device(indices, bits)
        if self.bits.is_contiguous():
            self.bits.view(-1).scatter_(0, positions, values)
        else:
            self.bits.put_(positions, values)

    def count_other_bits(self, indices: Indices, bits: Bits) -> int:
        """Return how many of these positions do not hold these bits."""
        positions, values = self._to_device(indices, bits)
        return int((self.bits.take(positions) != values).sum())

    def write_bytes(self, data: Bytes) -> None:
        """Overwrite all elements with row-major bytes."""
        source = data.view(_numpy_bits(self.bits.dtype))
        if not self.bits.is_contiguous():
            self.bits.copy_(torch.from_numpy(source.copy()).view(self.bits.shape))
            return
        flat = self.bits.view(-1)
        block_elements = BLOCK_SIZE_BYTES // self.bits.element_size()
        for start in range(0, source.size, block_elements):
            # Copied because torch takes only writable memory; regions are not.
            block = torch.from_numpy(source[start : start + block_elements].copy())
            flat[start : start + block_elements].copy_(block)

    def hash(self) -> bytes:
        """Return the hash of the tensor's row-major bytes."""
        return hash_tensor(self.bits.contiguous().cpu().numpy())

    def _to_device(self, indices: Indices, bits: Bits) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.from_numpy(indices.astype(np.int64))
        values = torch.from_numpy(bits.view(_numpy_bits(self.bits.dtype)).copy())
        return positions.to(self.bits.device), values.to(self.bits.device)


def find_targets(
    model: torch.nn.Module, table: ParameterTable, *, vocabulary_size: int | None
) -> list[tuple[Target, ...]]:
    """Return, per tensor of the table, each memory of the model that holds it.

    A weight the trainer ties may be one memory here or two: all are listed, none twice.

    Raises:
        StructureError: The model lacks a tensor or has one the version lacks, dtype or shape differ, or the
            model ties what the version holds apart.
    """
    held = {canonical_name(name): tensor for name, tensor in model.state_dict().items()}
    names_of: list[list[str]] = [[spec.name] for spec in table.tensors]
    for alias, canonical in table.aliases:
        names_of[table.index_of(canonical)].append(alias)
    missing = [names[0] for names in names_of if not any(name in held for name in names)]
    if missing:
        raise StructureError(f"the engine lacks tensors of the version: {describe_names(missing)}")
    known = {name for names in names_of for name in names} | set(table.excluded)
    unknown = [name for name in held if name not in known]
    if unknown:
        raise StructureError(f"the version lacks tensors of the engine: {describe_names(unknown)}")

    owner_by_memory: dict[tuple[object, ...], str] = {}
    targets: list[tuple[Target, ...]] = []
    for spec, names in zip(table.tensors, names_of, strict=True):
        copies: list[Target] = []
        for name in names:
            if name not in held:
                continue
            target = Target(name=name, bits=_logical_bits(name, held[name], spec, vocabulary_size))
            memory = (held[name].device, held[name].data_ptr())
            owner = owner_by_memory.setdefault(memory, spec.name) if target.bits.numel() else spec.name
            if owner != spec.name:
                raise StructureError(
                    f"the engine ties {name} to {owner}, which the version holds apart: load the model untied"
                )
            if not any(copy.bits.data_ptr() == target.bits.data_ptr() for copy in copies):
                copies.append(target)
        targets.append(tuple(copies))
    return targets


def compute_model_root(targets: Sequence[Sequence[Target]], table: ParameterTable) -> Digest:
    """Hash every memory of the model and return the root.

    Raises:
        IntegrityError: Two copies of a tied weight differ.
    """
    hashes = []
    for copies in targets:
        first, *others = [target.hash() for target in copies]
        if any(other != first for other in others):
            raise IntegrityError(f"the copies of tied weight {copies[0].name} differ: load them in full")
        hashes.append(first)
    return compute_root(table, hashes)


def _logical_bits(name: str, tensor: torch.Tensor, spec: TensorSpec, vocabulary_size: int | None) -> torch.Tensor:
    """Return the part of a model's tensor that a version's tensor fills, as integers."""
    dtype = DTYPE_NAMES.get(tensor.dtype)
    if dtype != spec.dtype:
        raise StructureError(
            f"tensor {name} is {tensor.dtype} in the engine and {spec.dtype} in the version: load the model with the "
            "published dtypes"
        )
    shape = tuple(tensor.shape)
    if shape != spec.shape:
        is_padded = len(shape) == len(spec.shape) > 0 and shape[1:] == spec.shape[1:] and shape[0] > spec.shape[0]
        if not is_padded or spec.shape[0] != vocabulary_size:
            raise StructureError(
                f"tensor {name} has shape {list(shape)} in the engine and {list(spec.shape)} in the version; rows may "
                f"only be padded beyond the vocabulary size, which is {vocabulary_size}"
            )
        tensor = tensor[: spec.shape[0]]
    return tensor.detach().view(BITS_DTYPES[tensor.element_size()])


def _numpy_bits(dtype: torch.dtype) -> np.dtype[Any]:
    """Return the numpy dtype of one of ``BITS_DTYPES``."""
    return np.dtype(np.uint8) if dtype == torch.uint8 else np.dtype(f"<i{dtype.itemsize}")
