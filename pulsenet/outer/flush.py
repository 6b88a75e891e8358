"""Which blocks pass the gate whole in a round, so that nothing waits for ever (SPEC outer, "Flush").

The gate holds back what is below the BF16 step of its weight, and a large weight may never reach its step. So every
block in turn sends all it has, as few bits a value: what is cut off stays in the residual and goes out with later
turns. Everyone derives the turn from the round index alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from pulsenet import limits
from pulsenet.codec.blocks import BlockMap
from pulsenet.outer.floats import FP32s
from pulsenet.outer.settings import MANTISSA_BITS, OuterSettings
from pulsenet.tensors.params import ParameterTable


@dataclass(frozen=True, slots=True)
class TensorFlush:
    """What of one tensor passes whole in one round."""

    parts: tuple[slice, ...] = ()
    """Blocks that pass whole, as elements of the tensor, ascending."""
    mantissa_bits: int = MANTISSA_BITS
    """Of each value there, how many bits below the leading one are sent."""

    def split(self, element_count: int) -> Iterator[tuple[slice, bool]]:
        """Yield parts that cover the tensor in order, and whether each passes whole; none is empty."""
        done = 0
        for part in self.parts:
            if done < part.start:
                yield slice(done, part.start), False
            yield part, True
            done = part.stop
        if done < element_count:
            yield slice(done, element_count), False


NO_FLUSH: Final = TensorFlush()
"""The gate alone."""


class FlushPlan:
    """The turns of all blocks of a table.

    Args:
        table: FP32 masters.
        settings: Of the run.
    """

    def __init__(self, table: ParameterTable, settings: OuterSettings) -> None:
        self._table = table
        self._blocks = BlockMap(table)
        self._interval = settings.flush_interval
        self._mantissa_bits = settings.flush_mantissa_bits

    def of(self, tensor_index: int, round_index: int) -> TensorFlush:
        """Return what of a tensor passes whole in a round: blocks whose number is the round index, both modulo N."""
        if self._interval == 0:
            return NO_FLUSH
        element_count = self._table.tensors[tensor_index].element_count
        numbers = self._blocks.indices_of(tensor_index)
        first = (round_index - numbers.start) % self._interval
        parts = tuple(
            slice(place * limits.BLOCK_ELEMENTS, min((place + 1) * limits.BLOCK_ELEMENTS, element_count))
            for place in range(first, len(numbers), self._interval)
        )
        return TensorFlush(parts, self._mantissa_bits)


def cut_values(values: FP32s, mantissa_bits: int) -> FP32s:
    """Return the values with all but their highest ``mantissa_bits`` mantissa bits cleared: rounded toward zero.

    So ``values - cut`` is exact, subnormals included.
    """
    mask = np.uint32(0xFFFFFFFF << (MANTISSA_BITS - mantissa_bits) & 0xFFFFFFFF)
    return (values.view(np.uint32) & mask).view(np.float32)
