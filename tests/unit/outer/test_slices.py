"""Sums by slice: whoever makes them writes the same bytes, and together they are the aggregate of the whole."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import config as numba_config

from pulsenet import limits
from pulsenet.codec.contribution import HEADER_SIZE_BYTES
from pulsenet.codec.slices import SliceHeader
from pulsenet.errors import LocalProtocolError, RemoteProtocolError
from pulsenet.ids import Digest
from pulsenet.outer.blob import encode_blob
from pulsenet.outer.contribution import Contribution, Entries
from pulsenet.outer.flush import FlushPlan
from pulsenet.outer.gate import gate_entries
from pulsenet.outer.reduce import Counted, combine, compute_trim_count
from pulsenet.outer.settings import Algorithm, Combination, OuterSettings
from pulsenet.outer.slices import SlicePart, read_slices, sum_all_slices, sum_slice
from pulsenet.tensors.params import ParameterTable, TensorSpec, make_table
from pulsenet.wire.sections import SectionCutter, find_slice_chunks

ROOT = Digest(bytes(range(32)))
BLOCK_ELEMENTS = 16


@pytest.fixture(autouse=True)
def small_blocks() -> Iterator[None]:
    # Not by a monkeypatch: Hypothesis runs many examples in one test.
    before = limits.BLOCK_ELEMENTS
    limits.BLOCK_ELEMENTS = BLOCK_ELEMENTS  # type: ignore[misc]
    yield
    limits.BLOCK_ELEMENTS = before  # type: ignore[misc]


def table_of(counts: Iterable[int]) -> ParameterTable:
    return make_table([TensorSpec(f"t{index:02}", "F32", (count,)) for index, count in enumerate(counts)])


def make_round(
    counts: list[int], member_count: int, *, is_dense: bool, seed: int, outer: OuterSettings | None = None
) -> tuple[ParameterTable, list[np.ndarray], dict[bytes, tuple[Contribution, np.float32]]]:
    """Return a table, theta, and what each member contributed with which scale."""
    generator = np.random.default_rng(seed)
    table = table_of(counts)
    flushes = FlushPlan(table, outer or OuterSettings())
    theta = [generator.standard_normal(count).astype(np.float32) * np.float32(0.05) for count in counts]
    members = {}
    for index in range(member_count):
        entries = []
        for tensor_index, own in enumerate(theta):
            local = own - (generator.standard_normal(own.size) * 2e-4).astype(np.float32)
            if is_dense:
                entries.append(Entries(tensor_index, None, own - local))
            else:
                flush = flushes.of(tensor_index, 4)
                entries.append(gate_entries(own, local, np.zeros_like(own), tensor_index=tensor_index, flush=flush))
        scale = np.float32(generator.choice([1.0, 1.0, 0.3, 0.75]))
        key = bytes(generator.permutation(32).astype(np.uint8))[:3] + bytes([index])
        members[key] = (Contribution(4, ROOT, 8, tuple(entries)), scale)
    return table, theta, members


def cut_part(blob: bytes, slice_index: int, slice_count: int) -> list[bytes]:
    """Return the chunks that an owner of the slice fetches."""
    cutter = SectionCutter(HEADER_SIZE_BYTES)
    chunks = [*cutter.feed(blob), *cutter.finish()]
    header, body = find_slice_chunks(cutter.chunk_list, slice_index, slice_count)
    return [chunks[place][1] for place in (*header, *body)]


def make_slices(
    table: ParameterTable,
    theta: list[np.ndarray],
    members: dict[bytes, tuple[Contribution, np.float32]],
    outer: OuterSettings,
    slice_count: int,
) -> list[bytes]:
    blobs = {key: b"".join(encode_blob(given, table, theta)) for key, (given, _) in members.items()}
    slices = []
    for index in range(slice_count):
        parts = {key: SlicePart(cut_part(blobs[key], index, slice_count), members[key][1]) for key in members}
        header = SliceHeader(table.digest, ROOT, 4, index, slice_count)
        slices.append(b"".join(sum_slice(parts, table, theta, header=header, settings=outer)))
    return slices


def combine_whole(
    table: ParameterTable, members: dict[bytes, tuple[Contribution, np.float32]], outer: OuterSettings
) -> list[Entries]:
    found = []
    for index, spec in enumerate(table.tensors):
        counted = {key: Counted(given.entries[index], scale) for key, (given, scale) in members.items()}
        found.append(combine(counted, outer, tensor_index=index, element_count=spec.element_count))
    return found


def read(
    table: ParameterTable, theta: list[np.ndarray], slices: list[bytes], outer: OuterSettings, member_count: int
) -> list[Entries]:
    header = SliceHeader(table.digest, ROOT, 4, 0, len(slices))
    blobs = [[blob[start : start + 11] for start in range(0, len(blob), 11)] for blob in slices]
    return list(read_slices(blobs, table, theta, header=header, contributor_count=member_count, settings=outer))


SETTINGS = [
    OuterSettings(),
    OuterSettings(algorithm=Algorithm.DILOCO),
    OuterSettings(algorithm=Algorithm.DILOCO, combination=Combination.MEDIAN),
    OuterSettings(algorithm=Algorithm.DILOCO, combination=Combination.TRIMMED, trim_count=2),
    OuterSettings(flush_interval=2, flush_mantissa_bits=1),
]


@settings(derandomize=True, deadline=None, max_examples=20 if numba_config.DISABLE_JIT else 60)
@given(
    counts=st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 40, 70]), max_size=6),
    member_count=st.integers(1, 16),
    slice_count=st.one_of(st.none(), st.integers(1, 20)),
    outer=st.sampled_from(SETTINGS),
    seed=st.integers(0, 1 << 16),
)
def test_slices_together_are_the_whole_aggregate_in_bits(
    counts: list[int], member_count: int, slice_count: int | None, outer: OuterSettings, seed: int
) -> None:
    table, theta, members = make_round(counts, member_count, is_dense=outer.is_dense, seed=seed, outer=outer)
    slices = make_slices(table, theta, members, outer, slice_count or member_count)
    found = read(table, theta, slices, outer, member_count)
    whole = combine_whole(table, members, outer)
    assert all(one.same_as(other) for one, other in zip(found, whole, strict=True))


def test_the_bytes_depend_on_nothing_but_the_contributions() -> None:
    table, theta, members = make_round([50, 30, 1], 3, is_dense=False, seed=1)
    first = make_slices(table, theta, members, OuterSettings(), 3)
    backwards = dict(reversed(members.items()))
    assert make_slices(table, theta, backwards, OuterSettings(), 3) == first
    header = SliceHeader(table.digest, ROOT, 4, 1, 3)
    blobs = {key: b"".join(encode_blob(given, table, theta)) for key, (given, _) in members.items()}
    with ThreadPoolExecutor(3) as pool:
        parts = {key: SlicePart(cut_part(blobs[key], 1, 3), members[key][1]) for key in members}
        pieces = sum_slice(parts, table, theta, header=header, settings=OuterSettings(), run_blocks=pool.map)
        assert b"".join(pieces) == first[1]


def sum_all(
    table: ParameterTable,
    theta: list[np.ndarray],
    members: dict[bytes, tuple[Contribution, np.float32]],
    outer: OuterSettings,
    slice_count: int,
    *,
    tail: bytes = b"",
) -> list[tuple[int, bytes]]:
    parts = {
        key: SlicePart([b"".join(encode_blob(given, table, theta)), tail], scale)
        for key, (given, scale) in members.items()
    }
    header = SliceHeader(table.digest, ROOT, 4, 0, slice_count)
    slices = sum_all_slices(parts, table, theta, header=header, settings=outer)
    return [(place, b"".join(pieces)) for place, pieces in slices]


@pytest.mark.parametrize("counts", [[50, 30, 1], [0, 16, 0], [0], []])
@pytest.mark.parametrize("outer", SETTINGS[:4])
@pytest.mark.parametrize("slice_count", [1, 3, 9])
def test_whoever_sums_all_slices_at_once_writes_what_their_owners_would(
    counts: list[int], outer: OuterSettings, slice_count: int
) -> None:
    table, theta, members = make_round(counts, 4, is_dense=outer.is_dense, seed=3)
    owners = make_slices(table, theta, members, outer, slice_count)
    assert sum_all(table, theta, members, outer, slice_count) == list(enumerate(owners))


@pytest.mark.parametrize("counts", [[50, 30, 1], [0, 16, 0], [0], []])
def test_a_contribution_that_goes_on_after_its_last_section_is_in_no_sum(counts: list[int]) -> None:
    table, theta, members = make_round(counts, 2, is_dense=False, seed=3)
    with pytest.raises(RemoteProtocolError, match="patch-trailing"):
        sum_all(table, theta, members, OuterSettings(), 3, tail=b"x")


def test_positions_whose_entries_cancel_are_kept() -> None:
    table = table_of([20])
    theta = [np.ones(20, np.float32)]
    members = {}
    for key, value in ((b"a", 1.0), (b"b", -1.0)):
        entries = Entries(0, np.array([3], np.uint32), np.array([value], np.float32))
        members[key] = (Contribution(4, ROOT, 8, (entries,)), np.float32(1.0))
    slices = make_slices(table, theta, members, OuterSettings(), 2)
    (found,) = read(table, theta, slices, OuterSettings(), 2)
    assert found.indices is not None
    assert found.indices.tolist() == [3]
    assert found.values.view(np.uint32).tolist() == [0]


def test_sums_that_are_no_number_have_one_pattern() -> None:
    table = table_of([4])
    theta = [np.ones(4, np.float32)]
    members = {}
    for key, bits in ((b"a", 0x7F800000), (b"b", 0xFF800000)):
        entries = Entries(0, np.array([3], np.uint32), np.array([bits], np.uint32).view(np.float32))
        members[key] = (Contribution(4, ROOT, 8, (entries,)), np.float32(1.0))
    (found,) = read(table, theta, make_slices(table, theta, members, OuterSettings(), 1), OuterSettings(), 2)
    assert found.values.view(np.uint32).tolist() == [0x7FC00000]


def test_a_dense_round_needs_every_element_of_everybody() -> None:
    outer = OuterSettings(algorithm=Algorithm.DILOCO)
    table, theta, members = make_round([40], 3, is_dense=False, seed=2)
    with pytest.raises(RemoteProtocolError, match="shape"):
        make_slices(table, theta, members, outer, 1)
    table, theta, members = make_round([40], 3, is_dense=True, seed=2)
    key = min(members)
    members[key] = (
        Contribution(4, ROOT, 8, (Entries(0, np.empty(0, np.uint32), np.empty(0, np.float32)),)),
        members[key][1],
    )
    with pytest.raises(RemoteProtocolError, match="shape"):
        make_slices(table, theta, members, outer, 1)
    # A slice that leaves elements out is refused by its readers too.
    sparse = make_slices(*make_round([40], 3, is_dense=False, seed=2), OuterSettings(), 1)
    with pytest.raises(RemoteProtocolError, match="shape"):
        read(table, theta, sparse, outer, 3)


def test_nothing_cannot_be_combined() -> None:
    table = table_of([3])
    header = SliceHeader(table.digest, ROOT, 4, 0, 1)
    with pytest.raises(LocalProtocolError, match="no aggregate"):
        sum_slice({}, table, [np.zeros(3, np.float32)], header=header, settings=OuterSettings())


def test_few_contributions_are_trimmed_to_one_or_two() -> None:
    trimmed = SETTINGS[3]
    assert [compute_trim_count(trimmed, count) for count in (1, 2, 3, 4, 5, 6)] == [0, 0, 1, 1, 2, 2]
    assert [compute_trim_count(SETTINGS[2], count) for count in (1, 2, 3, 4, 5)] == [0, 0, 1, 1, 2]
    assert compute_trim_count(SETTINGS[1], 5) == 0
