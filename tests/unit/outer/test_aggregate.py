"""Aggregates read block by block have the bits of whole tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pulsenet import limits
from pulsenet.codec.contribution import TensorEntries
from pulsenet.errors import LocalProtocolError
from pulsenet.ids import Digest
from pulsenet.outer.aggregate import AggregateReader, MemberParts, list_parts
from pulsenet.outer.contribution import Contribution, Entries
from pulsenet.outer.reduce import Counted, combine
from pulsenet.outer.settings import Algorithm, Combination, OuterSettings
from pulsenet.tensors.params import ParameterTable, TensorSpec

TABLE = ParameterTable(
    (
        TensorSpec("a", "F32", (3, 7)),
        TensorSpec("b", "F32", ()),
        TensorSpec("c", "F32", (0,)),
        TensorSpec("d", "F32", (9,)),
    )
)
SPARSE = OuterSettings()
DENSE = OuterSettings(algorithm=Algorithm.DILOCO)
SPECIALS = np.array([0, 0x80000000, 1, 0x7F7FFFFF, 0x3F800000, 0xBF000001, 0x7F800000], np.uint32).view(np.float32)


def draw_contribution(random: np.random.Generator, *, is_dense: bool) -> Contribution:
    entries = []
    for index, spec in enumerate(TABLE.tensors):
        count = spec.element_count
        positions = np.flatnonzero(random.random(count) < 0.5).astype(np.uint32)
        values = random.choice(SPECIALS, count if is_dense else positions.size)
        entries.append(Entries(index, None if is_dense else positions, values))
    return Contribution(0, Digest(bytes(32)), 1, tuple(entries))


def cut(parts: Iterator[TensorEntries], size: int) -> Iterator[TensorEntries]:
    for part in parts:
        for start in range(0, part.indices.size, size):
            chosen = slice(start, start + size)
            yield TensorEntries(part.tensor_index, part.indices[chosen], part.value_bits[chosen])


def reduce_whole(counted: dict[bytes, Counted], tensor_index: int, chosen: OuterSettings) -> Entries:
    element_count = TABLE.tensors[tensor_index].element_count
    return combine(counted, chosen, tensor_index=tensor_index, element_count=element_count)


CHOICES = [
    SPARSE,
    DENSE,
    replace(DENSE, combination=Combination.MEDIAN),
    replace(DENSE, combination=Combination.TRIMMED, trim_count=1),
]


@pytest.mark.parametrize("chosen", CHOICES, ids=lambda one: f"{one.algorithm}-{one.combination}")
@given(seed=st.integers(0, 2**32), count=st.integers(1, 5), block=st.sampled_from([4, 5, 64]), size=st.integers(1, 9))
@settings(deadline=None, max_examples=25)
def test_blocks_give_the_bits_of_whole_tensors(
    chosen: OuterSettings, seed: int, count: int, block: int, size: int
) -> None:
    random = np.random.default_rng(seed)
    given_ = {
        bytes([key]): (draw_contribution(random, is_dense=chosen.is_dense), random.choice(np.float32([1, 0.3])))
        for key in random.permutation(count)
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "BLOCK_ELEMENTS", block)
        members = {key: MemberParts(cut(list_parts(one), size), scale) for key, (one, scale) in given_.items()}
        reader = AggregateReader(members, TABLE, chosen)
        assert reader.contributor_count == count
        found = [reader.entries(index) for index in range(len(TABLE.tensors))]
    for index, entries in enumerate(found):
        counted = {key: Counted(one.entries[index], scale) for key, (one, scale) in given_.items()}
        assert entries.same_as(reduce_whole(counted, index, chosen))


def test_tensors_are_read_once_and_in_order() -> None:
    contribution = draw_contribution(np.random.default_rng(0), is_dense=False)
    reader = AggregateReader({b"a": MemberParts(list_parts(contribution))}, TABLE, SPARSE)
    reader.entries(0)
    for wrong in (0, 2):
        with pytest.raises(LocalProtocolError, match="the next is 1"):
            reader.entries(wrong)


def test_what_cannot_be_combined_is_our_own_fault() -> None:
    with pytest.raises(LocalProtocolError, match="without contributions"):
        AggregateReader({}, TABLE, SPARSE)
    sparse = draw_contribution(np.random.default_rng(0), is_dense=False)
    reader = AggregateReader({b"a": MemberParts(list_parts(sparse))}, TABLE, DENSE)
    with pytest.raises(LocalProtocolError, match="dense contribution"):
        reader.entries(0)
