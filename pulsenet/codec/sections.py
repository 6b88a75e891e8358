"""Sections: the parts of a contribution blob that can be fetched and decoded alone (SPEC codec, "Sections").

A section holds the blocks of about a million elements, wherever tensors end. A slice is a run of sections.
``wire/sections.py`` says which chunks hold them.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left

from pulsenet import limits
from pulsenet.codec.blocks import BlockMap
from pulsenet.tensors.params import ParameterTable


class SectionMap:
    """Which blocks of a table each section holds: those whose first element lies in one run of ``BLOCK_ELEMENTS``.

    Args:
        table: Whose blocks they are.
        section_count: Cut the table into so many sections of like size instead, some of which may be empty: of E
            elements in n sections a block whose first element is e belongs to section e n // E.
    """

    def __init__(self, table: ParameterTable, section_count: int | None = None) -> None:
        blocks = BlockMap(table)
        *tensor_starts, total = itertools.accumulate((spec.element_count for spec in table.tensors), initial=0)
        held_by = []
        for block_index in range(blocks.block_count):
            block = blocks.block(block_index)
            first = tensor_starts[block.tensor_index] + block.element_start
            held_by.append(first // limits.BLOCK_ELEMENTS if section_count is None else first * section_count // total)
        if section_count is None:
            # No block is longer than a section, so none is without a block.
            section_count = held_by[-1] + 1 if held_by else 0
        self._held_by = held_by
        self.section_count = section_count

    def blocks_of(self, sections: range) -> range:
        """Return the numbers of the blocks of a run of sections."""
        return range(*(bisect_left(self._held_by, at) for at in (sections.start, max(sections.start, sections.stop))))


def find_slice_sections(section_count: int, slice_index: int, slice_count: int) -> range:
    """Return the sections of one of ``slice_count`` slices: section s is in slice s * slice_count // section_count."""
    assert 0 <= slice_index < slice_count
    first, end = (-(-index * section_count // slice_count) for index in (slice_index, slice_index + 1))
    return range(first, end)


def count_pad_bytes(section_size_bytes: int) -> int:
    """Return how many zero bytes follow a section's end: one where it would fill whole chunks."""
    return int(section_size_bytes % limits.CHUNK_SIZE_BYTES == 0)
