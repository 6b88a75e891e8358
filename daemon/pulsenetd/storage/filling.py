"""Makes whole tensors of changed parts and the baseline, so that everything after sees the same as of whole parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from pulsenet.codec.changes import Bits, Indices
from pulsenet.codec.patch import RunBlocks
from pulsenet.local.shared_memory import Bytes
from pulsenetd.storage.parts import ChangedPart, Part, PublishFailedError
from pulsenetd.storage.rebuild import Weights

COPY_ELEMENTS: Final = 1 << 21
"""Elements copied at once: several cores share a large tensor."""


@dataclass(frozen=True, slots=True)
class FilledPart:
    """A part whose tensors lie in several memories; good until the next one is filled."""

    tensor_indices: range
    views: dict[int, Bits]
    unchanged: frozenset[int]

    def view(self, tensor_index: int) -> Bits:
        """Return a tensor as a flat array of ``bits_dtype``."""
        return self.views[tensor_index]

    def close(self) -> None:
        """Let go of the memory."""
        self.views.clear()


WholePart = Part | FilledPart


class Filler:
    """Fills the parts of one snapshot, one after the other, in memory for one part.

    Args:
        baseline: What changed parts start from; ``None`` if they have nothing to start from any more.
        run_blocks: ``map``, or an executor's ``map``.
    """

    def __init__(self, baseline: Weights | None, run_blocks: RunBlocks) -> None:
        self._baseline = baseline
        self._run_blocks = run_blocks
        self._memory: Bytes = np.zeros(0, np.uint8)

    def fill(self, part: Part | ChangedPart) -> WholePart:
        """Return the part with every tensor whole; a part that is so already is returned itself.

        Raises:
            PublishFailedError: ``other_base``: there is no baseline to start from. ``bad_changes``: indices are out of
                order, twice, or outside their tensor.
        """
        if isinstance(part, Part):
            return part
        if self._baseline is None:
            raise PublishFailedError("other_base")
        layout, baseline = part.layout, self._baseline
        if self._memory.size < layout.size_bytes:
            self._memory = np.empty(layout.size_bytes, np.uint8)
        views: dict[int, Bits] = {}
        unchanged = set()
        for content in part.contents:
            index = content.tensor_index
            if content.indices is None:
                views[index] = content.bits
                continue
            views[index] = old = baseline.table.view(baseline.region.bytes, index)
            if content.indices.size == 0:
                unchanged.add(index)
                continue
            _check_order(content.indices, old.size)
            views[index] = self._copy(old, layout.view(self._memory, index))
            views[index][content.indices] = content.bits
        return FilledPart(layout.tensor_indices, views, frozenset(unchanged))

    def _copy(self, source: Bits, target: Bits) -> Bits:
        def copy(start: int) -> None:
            target[start : start + COPY_ELEMENTS] = source[start : start + COPY_ELEMENTS]

        for _ in self._run_blocks(copy, range(0, source.size, COPY_ELEMENTS)):
            pass
        return target


def _check_order(indices: Indices, element_count: int) -> None:
    if int(indices[-1]) >= element_count or not bool(np.all(indices[1:] > indices[:-1])):
        raise PublishFailedError("bad_changes")
