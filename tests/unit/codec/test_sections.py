"""Sections of a table, and the slices that they make up."""

import pytest

from pulsenet import limits
from pulsenet.codec.sections import SectionMap, count_pad_bytes, find_slice_sections
from pulsenet.tensors.params import ParameterTable, TensorSpec, make_table


def table_of(*counts: int) -> ParameterTable:
    return make_table([TensorSpec(f"t{index:02}", "F32", (count,)) for index, count in enumerate(counts)])


def test_a_section_holds_the_blocks_that_start_among_its_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BLOCK_ELEMENTS", 16)
    sections = SectionMap(table_of(1, 40, 0, 7, 16, 3))
    # Blocks start at 0, 1, 17, 33, 41, 48 and 64.
    assert sections.section_count == 5
    held = [list(sections.blocks_of(range(index, index + 1))) for index in range(5)]
    assert held == [[0, 1], [2], [3, 4], [5], [6]]
    assert sections.blocks_of(range(1, 3)) == range(2, 5)
    assert sections.blocks_of(range(5, 5)) == range(7, 7)
    assert SectionMap(table_of()).section_count == 0
    assert SectionMap(table_of(0, 0)).section_count == 0


def test_a_table_can_be_cut_into_so_many_sections_of_like_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BLOCK_ELEMENTS", 16)
    table = table_of(1, 40, 0, 7, 16, 3)
    # Blocks start at 0, 1, 17, 33, 41, 48 and 64, of 67 elements.
    for count, expected in (
        (1, [[0, 1, 2, 3, 4, 5, 6]]),
        (2, [[0, 1, 2, 3], [4, 5, 6]]),
        (3, [[0, 1, 2], [3, 4], [5, 6]]),
        (8, [[0, 1], [], [2], [3], [4], [5], [], [6]]),
    ):
        sections = SectionMap(table, count)
        assert sections.section_count == count
        assert [list(sections.blocks_of(range(index, index + 1))) for index in range(count)] == expected
    assert [SectionMap(table_of(0), 3).blocks_of(range(index, index + 1)) for index in range(3)] == [range(0)] * 3


@pytest.mark.parametrize("section_count", [0, 1, 2, 5, 16, 100])
@pytest.mark.parametrize("slice_count", [1, 2, 3, 7, 16])
def test_slices_take_every_section_once_and_equally(section_count: int, slice_count: int) -> None:
    slices = [find_slice_sections(section_count, index, slice_count) for index in range(slice_count)]
    assert [section for part in slices for section in part] == list(range(section_count))
    assert max(map(len, slices)) - min(map(len, slices)) <= 1
    assert all(section * slice_count // section_count == index for index, part in enumerate(slices) for section in part)


def test_a_section_never_fills_whole_chunks() -> None:
    assert [count_pad_bytes(size) for size in (1, limits.CHUNK_SIZE_BYTES - 1, limits.CHUNK_SIZE_BYTES)] == [0, 0, 1]
