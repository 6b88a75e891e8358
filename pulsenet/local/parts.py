"""Parts: how a snapshot crosses to the daemon in several sealed memories, so that neither side holds it whole.

A part holds consecutive tensors, laid out among themselves as in the table's dense layout. Parts cover the table
in order and without gaps; both sides compute sizes from the table, so a part is described by its tensor count.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pulsenet.errors import LocalProtocolError
from pulsenet.tensors.params import ParameterTable, Region

PART_SIZE_BYTES_MIN: Final = 8 << 20
"""Smaller tensors share a part up to this: a memory and a round trip for each would cost more than they save."""


@dataclass(frozen=True, slots=True)
class PartLayout:
    """Where the tensors of one part lie.

    Raises:
        LocalProtocolError: Tensors the table does not have.
    """

    table: ParameterTable
    first: int
    """Position in the table of the part's first tensor."""
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.first + self.count <= len(self.table.tensors):
            raise LocalProtocolError(
                f"tensors {self.first} to {self.first + self.count} of {len(self.table.tensors)} make no part"
            )

    @property
    def end(self) -> int:
        """Position after the part's last tensor."""
        return self.first + self.count

    @property
    def tensor_indices(self) -> range:
        """Positions of the part's tensors."""
        return range(self.first, self.end)

    @property
    def size_bytes(self) -> int:
        """Bytes of the part's memory, padding between tensors included."""
        return 0 if self.count == 0 else self.offset_of(self.end - 1) + self.table.tensors[self.end - 1].size_bytes

    def offset_of(self, tensor_index: int) -> int:
        """Return where a tensor starts in the part's memory, in bytes."""
        return self.table.offsets[tensor_index] - self.table.offsets[self.first]

    def view(self, memory: Region, tensor_index: int) -> npt.NDArray[Any]:
        """Return one tensor as a flat array of ``bits_dtype`` that shares the part's memory."""
        spec = self.table.tensors[tensor_index]
        start = self.offset_of(tensor_index)
        return np.frombuffer(memory, np.uint8)[start : start + spec.size_bytes].view(spec.bits_dtype)


def cut_parts(table: ParameterTable) -> Iterator[PartLayout]:
    """Yield the fewest parts of which none is larger than the largest tensor (or ``PART_SIZE_BYTES_MIN``)."""
    size_bytes_max = max([PART_SIZE_BYTES_MIN, *(spec.size_bytes for spec in table.tensors)])
    first = 0
    for index, spec in enumerate(table.tensors):
        end = table.offsets[index] + spec.size_bytes
        if index > first and spec.size_bytes and end - table.offsets[first] > size_bytes_max:
            yield PartLayout(table, first, index - first)
            first = index
    if first < len(table.tensors):
        yield PartLayout(table, first, len(table.tensors) - first)


@dataclass(slots=True)
class SealedPart:
    """A part in memory nobody can change, on its way to the daemon."""

    layout: PartLayout
    descriptor: int
    """Owned by this object."""
    changed_size_bytes: int | None = None
    """Of the memory, if it is a changed part (:mod:`pulsenet.local.changed_parts`)."""

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
