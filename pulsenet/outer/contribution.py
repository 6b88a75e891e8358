"""What one trainer gives to a round: the entries of its pseudo-gradient that passed the gate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pulsenet.codec.changes import Indices as Indices
from pulsenet.errors import LocalProtocolError
from pulsenet.ids import Digest
from pulsenet.outer.floats import FP32s


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """Some or all elements of one FP32 tensor.

    Raises:
        LocalProtocolError: arrays of other dtypes, dimensions or lengths than documented.
    """

    tensor_index: int
    """Position of the tensor in the table."""
    indices: Indices | None
    """Flat positions, strictly ascending; ``None`` means every element, in order."""
    values: FP32s

    def __post_init__(self) -> None:
        if self.values.dtype != np.dtype(np.float32) or self.values.ndim != 1:
            raise LocalProtocolError(f"values are flat float32, not {self.values.ndim}-d {self.values.dtype}")
        if self.indices is None:
            return
        if self.indices.dtype not in (np.dtype(np.uint32), np.dtype(np.uint64)) or self.indices.ndim != 1:
            raise LocalProtocolError(f"indices are flat uint32 or uint64, not {self.indices.dtype}")
        if self.indices.size != self.values.size:
            raise LocalProtocolError(f"{self.indices.size} indices for {self.values.size} values")

    def __len__(self) -> int:
        return int(self.values.size)

    def same_as(self, other: Entries) -> bool:
        """Tell whether both hold the same positions and the same bits."""
        if self.tensor_index != other.tensor_index or (self.indices is None) != (other.indices is None):
            return False
        if self.indices is not None and other.indices is not None and not np.array_equal(self.indices, other.indices):
            return False
        return np.array_equal(self.values.view(np.uint32), other.values.view(np.uint32))


def find_run(indices: Indices, start: int, end: int) -> tuple[int, int]:
    """Return where the positions from ``start`` to before ``end`` begin and end among ascending ones."""
    # Bounds of another type would have numpy convert all positions, for each run of a tensor anew.
    low, high = np.searchsorted(indices, np.array([start, end], indices.dtype))
    return int(low), int(high)


@dataclass(frozen=True, slots=True, eq=False)
class Contribution:
    """One trainer's gated pseudo-gradient of one round."""

    round_index: int
    """The round it belongs to: as many rounds were stepped before."""
    state_root: Digest
    """Root of the state it starts from."""
    inner_step_count: int
    """Inner steps taken since that state."""
    entries: tuple[Entries, ...]
    """One per tensor of the table, in table order; a tensor of which nothing is sent has empty entries."""

    @property
    def sent_count(self) -> int:
        return sum(len(entries) for entries in self.entries)

    def same_as(self, other: Contribution) -> bool:
        """Tell whether both say the same, bit by bit."""
        mine = (self.round_index, self.state_root, self.inner_step_count, len(self.entries))
        theirs = (other.round_index, other.state_root, other.inner_step_count, len(other.entries))
        return mine == theirs and all(
            one.same_as(another) for one, another in zip(self.entries, other.entries, strict=True)
        )
