"""Sections: the parts of a contribution blob that can be fetched and decoded alone (SPEC codec, "Sections").

A section holds the blocks of about a million elements, wherever tensors end. A slice is a run of sections.
``wire/sections.py`` says which chunks hold them.
"""

from __future__ import annotations

import itertools

from pulsenet import limits
from pulsenet.codec.blocks import BlockMap
from pulsenet.tensors.params import ParameterTable


class SectionMap:
    """Which blocks of a table each section holds: those whose first element lies in one run of ``BLOCK_ELEMENTS``."""

    def __init__(self, table: ParameterTable) -> None:
        blocks = BlockMap(table)
        tensor_starts = list(itertools.accumulate((spec.element_count for spec in table.tensors), initial=0))
        starts: list[int] = []
        for block_index in range(blocks.block_count):
            block = blocks.block(block_index)
            section = (tensor_starts[block.tensor_index] + block.element_start) // limits.BLOCK_ELEMENTS
            # No block is longer than a section, so none is without a block.
            if section == len(starts):
                starts.append(block_index)
            assert section == len(starts) - 1
        self._starts = [*starts, blocks.block_count]
        self.section_count = len(starts)

    def blocks_of(self, sections: range) -> range:
        """Return the numbers of the blocks of a run of sections."""
        return range(self._starts[sections.start], self._starts[max(sections.start, sections.stop)])


def find_slice_sections(section_count: int, slice_index: int, slice_count: int) -> range:
    """Return the sections of one of ``slice_count`` slices: section s is in slice s * slice_count // section_count."""
    assert 0 <= slice_index < slice_count
    first, end = (-(-index * section_count // slice_count) for index in (slice_index, slice_index + 1))
    return range(first, end)


def count_pad_bytes(section_size_bytes: int) -> int:
    """Return how many zero bytes follow a section's end: one where it would fill whole chunks."""
    return int(section_size_bytes % limits.CHUNK_SIZE_BYTES == 0)
