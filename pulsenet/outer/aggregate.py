"""The aggregate of a round, read block by block from all its contributions at once.

A contribution is walked in the order of the table, so the members of a round are walked side by side: in memory are one
block of each and the sums of one tensor, whatever the size of the model. The bits are those of
:mod:`pulsenet.outer.reduce` over whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from pulsenet import limits
from pulsenet.codec.contribution import TensorEntries
from pulsenet.errors import LocalProtocolError
from pulsenet.outer.contribution import Contribution, Entries, find_run
from pulsenet.outer.reduce import Counted, combine
from pulsenet.outer.residual import SCALE_ONE
from pulsenet.outer.settings import OuterSettings
from pulsenet.tensors.params import ParameterTable, index_dtype


@dataclass(frozen=True, slots=True, eq=False)
class MemberParts:
    """One counted contribution."""

    parts: Iterable[TensorEntries]
    """Its entries, ascending by tensor and position, cut anywhere."""
    scale: np.float32 = SCALE_ONE
    """Given by the receipt."""


def list_parts(contribution: Contribution) -> Iterator[TensorEntries]:
    """Yield the entries of a contribution in memory, dense ones block by block, as the codec takes and yields them."""
    for entries in contribution.entries:
        bits = entries.values.view(np.uint32)
        if entries.indices is not None:
            yield TensorEntries(entries.tensor_index, entries.indices, bits)
            continue
        dtype = index_dtype(bits.size)
        for start in range(0, bits.size, limits.BLOCK_ELEMENTS):
            part = bits[start : start + limits.BLOCK_ELEMENTS]
            yield TensorEntries(entries.tensor_index, np.arange(start, start + part.size, dtype=dtype), part)


class AggregateReader:
    """Combines a round's contributions tensor by tensor, each once and in table order.

    Args:
        members: By sender's key.
        table: FP32 masters.
        settings: How they are combined.

    Raises:
        LocalProtocolError: nothing to combine.
    """

    def __init__(self, members: Mapping[bytes, MemberParts], table: ParameterTable, settings: OuterSettings) -> None:
        if not members:
            raise LocalProtocolError("a round without contributions has no aggregate")
        self._walks = {key: _Walk(members[key].parts) for key in sorted(members)}
        self._scales = {key: member.scale for key, member in members.items()}
        self._table = table
        self._settings = settings
        self._next_index = 0

    @property
    def contributor_count(self) -> int:
        """Contributions combined."""
        return len(self._walks)

    def entries(self, tensor_index: int) -> Entries:
        """Return what the round moves a tensor by.

        Raises:
            LocalProtocolError: out of order, or a contribution that does not fit the table or the settings.
            RemoteProtocolError: a contribution that breaks its specification.
        """
        if tensor_index != self._next_index:
            raise LocalProtocolError(f"tensor {tensor_index} is asked for, the next is {self._next_index}")
        self._next_index += 1
        element_count = self._table.tensors[tensor_index].element_count
        dtype = index_dtype(element_count)
        indices, values = [np.empty(0, dtype)], [np.empty(0, np.float32)]
        is_dense = self._settings.is_dense
        for start in range(0, element_count, limits.BLOCK_ELEMENTS):
            end = min(start + limits.BLOCK_ELEMENTS, element_count)
            block = self._combine(tensor_index, start, end)
            values.append(block.values)
            if block.indices is not None:
                indices.append(block.indices.astype(dtype) + dtype.type(start))
        return Entries(tensor_index, None if is_dense else np.concatenate(indices), np.concatenate(values))

    def _combine(self, tensor_index: int, start: int, end: int) -> Entries:
        """Return the aggregate of one block, with positions in it."""
        counted = {}
        for key, walk in self._walks.items():
            indices, values = walk.take(tensor_index, start, end)
            if self._settings.is_dense and values.size != end - start:
                raise LocalProtocolError(f"{values.size} values of {end - start} in a dense contribution")
            entries = Entries(tensor_index, None if self._settings.is_dense else indices, values)
            counted[key] = Counted(entries, self._scales[key])
        return combine(counted, self._settings, tensor_index=tensor_index, element_count=end - start)


class _Walk:
    """Takes a contribution's entries block by block, in order."""

    def __init__(self, parts: Iterable[TensorEntries]) -> None:
        self._parts = iter(parts)
        self._held: TensorEntries | None = None

    def take(self, tensor_index: int, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return positions from ``start``, and values, of the entries before ``end``."""
        indices, values = [np.empty(0, np.uint32)], [np.empty(0, np.uint32)]
        while True:
            if self._held is None:
                self._held = next(self._parts, None)
            part = self._held
            if part is None or part.tensor_index != tensor_index:
                break
            _, cut = find_run(part.indices, start, end)
            indices.append((part.indices[:cut] - part.indices.dtype.type(start)).astype(np.uint32))
            values.append(part.value_bits[:cut])
            if cut < part.indices.size:
                self._held = TensorEntries(tensor_index, part.indices[cut:], part.value_bits[cut:])
                break
            self._held = None
        return np.concatenate(indices), np.concatenate(values).view(np.float32)
