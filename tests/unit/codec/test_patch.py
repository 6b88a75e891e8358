import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import numpy as np
import pytest
from numba import config as numba_config

from pulsenet import limits
from pulsenet.codec import patch
from pulsenet.codec.blocks import Codec
from pulsenet.codec.changes import Changes, apply_changes, compose_changes
from pulsenet.codec.patch import (
    BATCH_BLOCKS_MAX,
    CODEC_CHOICES,
    PatchTotals,
    decode_patch,
    encode_absolute,
    encode_parts,
    encode_patch,
    is_beyond_budget,
    list_records,
    peek_header,
    resolve_codec,
)
from pulsenet.codec.stream import Form
from pulsenet.errors import LocalProtocolError, PatchMismatchError, RemoteProtocolError
from pulsenet.tensors.params import ParameterTable, TensorSpec, make_table

needs_jit = pytest.mark.skipif(bool(numba_config.DISABLE_JIT), reason="loops over millions of elements need numba")

MIXED = make_table(
    [
        TensorSpec("bias", "F32", (3,)),
        TensorSpec("empty", "BF16", (0, 5)),
        TensorSpec("hollow", "F32", (3, 0)),
        TensorSpec("mask", "BOOL", (4,)),
        TensorSpec("norm", "F32", ()),
        TensorSpec("scalar", "BF16", ()),
        TensorSpec("steps", "I64", (2,)),
        TensorSpec("weight", "BF16", (50, 20)),
    ]
)


def region_of(table: ParameterTable, seed: int = 0) -> np.ndarray:
    region = np.zeros(table.layout_size_bytes, np.uint8)
    generator = np.random.default_rng(seed)
    for index, spec in enumerate(table.tensors):
        view = table.view(region, index).view(np.uint8)
        view[:] = generator.integers(0, 2 if spec.dtype == "BOOL" else 256, view.size, np.uint8)
    return region


def edited(table: ParameterTable, region: np.ndarray, edits: list[tuple[str, int, int]]) -> np.ndarray:
    new = region.copy()
    for name, index, bits in edits:
        table.view(new, table.index_of(name))[index] = bits
    return new


def apply(table: ParameterTable, blob: bytes | list[bytes], region: np.ndarray) -> np.ndarray:
    result = region.copy()
    for changes in decode_patch([blob] if isinstance(blob, bytes) else blob, table, region):
        apply_changes(table.view(result, changes.tensor_index), changes)
    return result


@pytest.mark.parametrize("codec", sorted(CODEC_CHOICES))
def test_mixed_dtypes_scalars_and_empty_tensors_arrive_bit_for_bit(codec: str) -> None:
    """A-DT-1, A-DT-2."""
    old = edited(MIXED, region_of(MIXED), [("norm", 0, 0x3F800000)])
    edits = [
        ("norm", 0, 0x3F800001),
        ("bias", 2, 0x7FC00001),
        ("mask", 1, 1 - int(MIXED.view(old, 3)[1])),
        ("scalar", 0, 0x8000),
        ("steps", 1, (1 << 64) - 1),
        ("weight", 999, 0x7F81),
    ]
    new = edited(MIXED, old, edits)
    totals = PatchTotals()
    blob = b"".join(encode_patch(MIXED, old, new, codec=codec, totals=totals))
    assert np.array_equal(apply(MIXED, blob, old), new)
    assert (totals.changed_count, totals.record_count) == (6, 6)
    assert totals.encoded_size_bytes == len(blob)
    assert totals.codec_id == max(record.codec_id for record in list_records([blob], MIXED))


@pytest.mark.parametrize("codec", sorted(CODEC_CHOICES))
def test_parts_give_the_bytes_of_the_whole_and_the_changes_a_receiver_decodes(codec: str) -> None:
    old, new = region_of(MIXED), region_of(MIXED, seed=1)
    MIXED.view(new, 7)[:-3] = MIXED.view(old, 7)[:-3]
    whole = b"".join(encode_patch(MIXED, old, new, codec=codec))
    indices = range(len(MIXED.tensors))
    for cut in range(len(indices) + 1):
        seen: list[Changes] = []
        parts = (
            [(index, MIXED.view(old, index), MIXED.view(new, index)) for index in chosen]
            for chosen in (indices[:cut], indices[cut:])
        )
        blob = b"".join(encode_parts(MIXED, parts, codec=codec, on_changes=seen.append))
        assert blob == whole
        assert seen == list(decode_patch([whole], MIXED, old))


def test_a_part_is_encoded_and_let_go_before_the_next_is_asked_for() -> None:
    old, new = region_of(MIXED), region_of(MIXED, seed=1)
    log: list[str] = []
    held: list[weakref.ref[np.ndarray]] = []

    def read_parts() -> Iterator[list[tuple[int, np.ndarray, np.ndarray]]]:
        for index in (0, 7):
            log.append(f"part {index}, {sum(memory() is not None for memory in held)} held")
            copy = MIXED.view(new, index).copy()
            held.append(weakref.ref(copy))
            pair = [(index, MIXED.view(old, index), copy)]
            del copy
            yield pair
            del pair

    for _ in encode_parts(
        MIXED, read_parts(), on_changes=lambda changes: log.append(f"changes {changes.tensor_index}")
    ):
        pass
    assert log == ["part 0, 0 held", "changes 0", "part 7, 0 held", "changes 7"]


def test_fewer_blocks_at_a_time_give_changes_before_the_last_piece_came() -> None:
    old, new = region_of(MIXED), region_of(MIXED, seed=1)
    blob = b"".join(encode_patch(MIXED, old, new))
    taken: list[int] = []

    def read_pieces() -> Iterator[bytes]:
        for index in range(len(blob)):
            taken.append(index)
            yield blob[index : index + 1]

    decoded = decode_patch(read_pieces(), MIXED, old, batch_blocks_max=1)
    first = next(decoded)
    assert len(taken) < len(blob) // 2
    assert [first, *decoded] == list(decode_patch([blob], MIXED, old))


def test_an_unknown_codec_of_parts_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="'best' is none of"):
        encode_parts(MIXED, [], codec="best")


def test_patch_without_changes_is_a_header_and_an_end() -> None:
    """A-ENC-6."""
    region = region_of(MIXED)
    totals = PatchTotals()
    blob = b"".join(encode_patch(MIXED, region, region.copy(), totals=totals))
    assert len(blob) == 43
    assert (totals.changed_count, totals.codec_id) == (0, 0)
    assert list(decode_patch([blob], MIXED, region)) == []
    assert peek_header(blob).table_digest == MIXED.digest


def test_patch_of_a_table_without_tensors_works() -> None:
    table = make_table([])
    blob = b"".join(encode_patch(table, b"", b""))
    assert list(decode_patch([blob], table, b"")) == []
    assert list(decode_patch(encode_absolute(table, []), table, b"")) == []


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7F7F, 0x0001, 0x8001, 0x7FC1, 0x8000])
def test_extreme_values_travel_both_ways(bits: int) -> None:
    """A-ENC-4."""
    old = edited(MIXED, region_of(MIXED), [("weight", 5, 0x3F80)])
    new = edited(MIXED, old, [("weight", 5, bits)])
    for before, after in ((old, new), (new, old)):
        blob = b"".join(encode_patch(MIXED, before, after))
        assert np.array_equal(apply(MIXED, blob, before), after)


def test_padding_between_tensors_is_never_compared() -> None:
    old = region_of(MIXED)
    new = old.copy()
    new[13] ^= 1
    assert sum(len(changes) for changes in decode_patch(encode_patch(MIXED, old, new), MIXED, old)) == 0


def test_threads_write_the_same_bytes_and_find_the_same_changes() -> None:
    table = make_table(TensorSpec(f"{number:03}", "BF16", (300,)) for number in range(100))
    old = region_of(table)
    new = old.copy()
    new[::97] ^= 3
    alone = list(encode_patch(table, old, new))
    with ThreadPoolExecutor(4) as pool:
        assert list(encode_patch(table, old, new, run_blocks=pool.map)) == alone
        shared = list(decode_patch(alone, table, old, run_blocks=pool.map))
    assert shared == list(decode_patch(alone, table, old))


def test_patch_against_wrong_base_is_refused() -> None:
    old = region_of(MIXED)
    new = edited(MIXED, old, [("steps", 0, 5)])
    blob = b"".join(encode_patch(MIXED, old, new))
    with pytest.raises(PatchMismatchError):
        list(decode_patch([blob], MIXED, new))


def test_patch_for_another_table_is_refused() -> None:
    """A-NAME-3, A-NAME-4: a missing tensor or another size is another table."""
    old = region_of(MIXED)
    blob = b"".join(encode_patch(MIXED, old, old))
    other = make_table(MIXED.tensors[:-1])
    with pytest.raises(RemoteProtocolError) as raised:
        list(decode_patch([blob], other, old))
    assert raised.value.code == "patch-table"


def test_auto_is_tight_unless_the_caller_says_that_cpu_is_scarce() -> None:
    assert resolve_codec("auto", is_cpu_scarce=False) == "tight"
    assert resolve_codec("auto", is_cpu_scarce=True) == "plain"
    # 8 billion weights take about 4 seconds.
    assert not is_beyond_budget(8_000_000_000, 4.1)
    assert is_beyond_budget(8_000_000_000, 3.9)
    for codec in ("tight", "plain", "absolute", "dense"):
        assert resolve_codec(codec, is_cpu_scarce=True) == resolve_codec(codec, is_cpu_scarce=False) == codec
    with pytest.raises(LocalProtocolError, match="none of auto, tight, plain"):
        resolve_codec("best", is_cpu_scarce=False)


def test_misuse_is_refused_before_anything_is_read() -> None:
    region, short = bytes(MIXED.layout_size_bytes), bytes(MIXED.layout_size_bytes - 1)
    with pytest.raises(LocalProtocolError, match="codec"):
        encode_patch(MIXED, region, region, codec="best")
    for old, new in ((short, region), (region, short)):
        with pytest.raises(LocalProtocolError, match="layout"):
            encode_patch(MIXED, old, new)
    with pytest.raises(LocalProtocolError, match="layout"):
        decode_patch([], MIXED, short)


def test_composed_changes_become_an_absolute_patch() -> None:
    base = region_of(MIXED)
    middle = edited(MIXED, base, [("weight", 3, 1), ("weight", 40, 2), ("bias", 0, 7)])
    last = edited(MIXED, middle, [("weight", 3, int(MIXED.view(base, 7)[3])), ("weight", 41, 9)])
    first = {c.tensor_index: c for c in decode_patch(encode_patch(MIXED, base, middle), MIXED, base)}
    second = {c.tensor_index: c for c in decode_patch(encode_patch(MIXED, middle, last), MIXED, middle)}
    composed = [first[0], compose_changes(first[7], second[7])]
    totals = PatchTotals()
    blob = b"".join(encode_absolute(MIXED, composed, totals=totals))
    assert peek_header(blob).form is Form.ABSOLUTE
    assert totals.changed_count == 3
    assert totals.codec_id == Codec.ABSOLUTE
    assert np.array_equal(apply(MIXED, blob, base), last)


def rows(*indices: int, tensor_index: int = 7, bits: type = np.uint16) -> Changes:
    filler = np.zeros(len(indices), bits)
    return Changes(tensor_index, np.array(indices, np.uint32), filler, filler + bits(1))


@pytest.mark.parametrize(
    "changes",
    [
        [rows(5), rows(5)],
        [rows(5, 4)],
        [rows(4, 4)],
        [rows(5), rows(5, tensor_index=6)],
        [rows(5, 7), rows(6)],
        [rows(1000)],
        [rows(5, 1000)],
        [rows(0, tensor_index=8)],
        [rows(0, tensor_index=9)],
        [rows(0, tensor_index=-1)],
        [rows(0, bits=np.uint32)],
        [Changes(7, np.zeros(1, np.uint32), np.ones(1, np.uint16), np.ones(1, np.uint16))],
    ],
    ids=[
        "twice",
        "unsorted",
        "duplicate",
        "tensor-order",
        "overlap",
        "outside",
        "end-outside",
        "tensor",
        "far-tensor",
        "negative",
        "width",
        "unchanged",
    ],
)
def test_changes_that_are_no_patch_are_refused(changes: list[Changes]) -> None:
    """A-APP-5 at the sender."""
    with pytest.raises(LocalProtocolError):
        list(encode_absolute(MIXED, changes))


def test_changes_are_cut_and_joined_at_block_bounds() -> None:
    size = limits.BLOCK_ELEMENTS
    table = make_table([TensorSpec("w", "U8", (2 * size + 5,))])
    indices = [0, size - 1, size, 2 * size, 2 * size + 4]
    whole = [rows(*indices, tensor_index=0, bits=np.uint8)]
    parts = [rows(*indices[:1], tensor_index=0, bits=np.uint8), rows(tensor_index=0, bits=np.uint8)]
    parts += [rows(index, tensor_index=0, bits=np.uint8) for index in indices[1:]]
    blob = b"".join(encode_absolute(table, whole))
    assert b"".join(encode_absolute(table, parts)) == blob
    found = list(decode_patch([blob], table, np.zeros(table.layout_size_bytes, np.uint8)))
    assert [changes.indices.tolist() for changes in found] == [indices[:2], indices[2:3], indices[3:]]


@pytest.mark.parametrize(("element_count", "index"), [((1 << 31) + 8, 2_147_483_653), ((1 << 32) + 8, 4_294_967_303)])
def test_index_beyond_2_to_the_31_arrives(element_count: int, index: int) -> None:
    """A-DT-4: the region is address space only; one page of it is ever touched."""
    table = make_table([TensorSpec("w", "U8", (element_count,))])
    dtype = table.tensors[0].index_dtype
    far = Changes(0, np.array([index], dtype), np.zeros(1, np.uint8), np.ones(1, np.uint8))
    blob = b"".join(encode_absolute(table, [far]))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    region = mmap.mmap(-1, table.layout_size_bytes, flags=flags)
    (found,) = decode_patch([blob], table, region)
    assert found == far
    apply_changes(table.view(region, 0), found)
    assert region[index] == 1


def test_many_tiny_tensors_cost_a_few_bytes_each() -> None:
    table = make_table(TensorSpec(f"{number:03}.norm", "BF16", (576,)) for number in range(200))
    old = region_of(table)
    new = old.copy()
    for index in range(200):
        table.view(new, index)[[100, 300, 500]] ^= 1
    blob = b"".join(encode_patch(table, old, new))
    assert len(blob) <= 200 * 15 + 50
    assert np.array_equal(apply(table, blob, old), new)


def test_no_patch_exceeds_the_bound() -> None:
    table = make_table(
        [TensorSpec(f"{dtype}{n}", dtype, (n,)) for n in (1, 3, 100) for dtype in ("U8", "BF16", "F32", "I64")]
    )
    old, new = region_of(table, 1), region_of(table, 2)
    bound = limits.PATCH_OVERHEAD_RATIO_MAX * table.size_bytes + 64 * len(table.tensors) + 1024
    for codec in CODEC_CHOICES:
        blob = b"".join(encode_patch(table, old, new, codec=codec))
        assert len(blob) <= bound
        assert np.array_equal(apply(table, blob, old), new)


def test_changes_come_while_the_blob_is_still_arriving() -> None:
    table = make_table(TensorSpec(f"{number:03}", "BF16", (10,)) for number in range(200))
    old = region_of(table)
    taken = count()
    pieces = list(encode_patch(table, old, old ^ np.uint8(1)))
    found = decode_patch((piece for piece in pieces if next(taken) >= 0), table, old)
    next(found)
    assert next(taken) < BATCH_BLOCKS_MAX + 5


def test_blocks_in_work_are_bounded_by_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch, "BATCH_SIZE_BYTES", 1000)
    table = make_table(TensorSpec(f"{number:03}", "BF16", (250,)) for number in range(20))
    old = region_of(table)
    batches: list[int] = []

    def run_blocks(function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterable[Any]:
        listed = list(tasks)
        batches.append(sum(map(len, listed)))
        return map(function, listed)

    dense = list(encode_patch(table, old, ~old, run_blocks=run_blocks))
    # Two halves of a batch are in work.
    assert batches == [1] * 20 + [0]
    batches.clear()
    assert sum(len(changes) for changes in decode_patch(dense, table, old, run_blocks=run_blocks)) == 5000
    assert batches == [1] * 20 + [0]

    # Of a block that changed throughout: 500 bytes to compare, twice that with what is decoded again; its body and
    # 8 bytes a change.
    monkeypatch.setattr(patch, "BATCH_SIZE_BYTES", 9000)
    pairs = [(index, table.view(old, index), table.view(~old, index)) for index in range(20)]
    found: list[Changes] = []
    for on_changes, expected in ((None, [9, 9, 2]), (found.append, [5, 5, 5, 5, 0])):
        batches.clear()
        assert list(encode_parts(table, [pairs], run_blocks=run_blocks, on_changes=on_changes)) == dense
        assert batches == expected
    batches.clear()
    assert len(list(decode_patch(dense, table, old, run_blocks=run_blocks))) == 20
    assert batches == [4, 4, 4, 4, 4, 0]


def test_a_batch_holds_no_more_blocks_than_it_may() -> None:
    handed: list[list[list[int]]] = []

    def run_blocks(function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterable[Any]:
        handed.append(list(tasks))
        return map(function, handed[-1])

    assert list(patch.run_in_batches(run_blocks, abs, range(7), lambda item: 1, 3)) == list(range(7))
    assert handed == [[[0, 1, 2]], [[3, 4, 5]], [[6]]]


@pytest.mark.parametrize(
    ("looks_ahead", "expected"),
    [
        (False, [[[0], [1], [2], [3]], 0, 1, 2, 3, [[4]], 4]),
        (True, [[[0], [1]], [[2], [3]], 0, 1, [[4]], 2, 3, 4]),
    ],
)
def test_results_come_in_order_and_the_next_half_may_begin_before_they_are_taken(
    looks_ahead: bool, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patch, "BATCH_SIZE_BYTES", 4)
    monkeypatch.setattr(patch, "TASK_SIZE_BYTES", 1)
    events: list[Any] = []

    def run_blocks(function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterable[Any]:
        listed = list(tasks)
        events.append(listed)
        return map(function, listed)

    for result in patch.run_in_batches(run_blocks, int, range(5), lambda item: 1, looks_ahead=looks_ahead):
        events.append(result)
    assert events == expected


def test_small_blocks_share_a_hand_over_and_large_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch, "TASK_SIZE_BYTES", 1000)
    sizes = [10] * 40 + [600] * 3
    table = make_table(TensorSpec(f"{number:03}", "BF16", (size,)) for number, size in enumerate(sizes))
    old = region_of(table)
    handed: list[list[int]] = []

    def run_blocks(function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterable[Any]:
        listed = list(tasks)
        handed.append([len(task) for task in listed])
        return map(function, listed)

    encoded = list(encode_patch(table, old, ~old, run_blocks=run_blocks))
    assert sum(map(len, encoded)) == sum(map(len, encode_patch(table, old, ~old)))
    assert len(list(decode_patch(encoded, table, old, run_blocks=run_blocks))) == len(sizes)
    assert handed == [[41, 1, 1], [41, 1, 1]]


@pytest.mark.parametrize("codec", sorted(CODEC_CHOICES))
def test_no_flipped_bit_escapes_as_anything_but_a_protocol_or_mismatch_error(codec: str) -> None:
    old = region_of(MIXED)
    new = edited(MIXED, old, [("weight", index, index) for index in range(0, 1000, 40)] + [("bias", 1, 3)])
    blob = b"".join(encode_patch(MIXED, old, new, codec=codec))
    is_padding = np.ones(old.size, np.bool_)
    for offset, spec in zip(MIXED.offsets, MIXED.tensors, strict=True):
        is_padding[offset : offset + spec.size_bytes] = False
    for position in range(0, len(blob) * 8, 1 if len(blob) < 500 else 7):
        damaged = bytearray(blob)
        damaged[position >> 3] ^= 1 << (position & 7)
        try:
            result = apply(MIXED, bytes(damaged), old)
        except (RemoteProtocolError, PatchMismatchError):
            continue
        # What passes is a patch to other values, which the root refuses; it still lies inside the tensors.
        assert np.array_equal(result[is_padding], old[is_padding])


@needs_jit
@pytest.mark.parametrize(
    ("density", "reduction_min"), [(0.001, 500), (0.005, 135), (0.0077, 95), (0.01, 75), (0.05, 17)]
)
def test_plain_reaches_the_stated_reduction(density: float, reduction_min: float) -> None:
    """A-PRF-1: 8 M values, changes of one step scattered at random."""
    generator = np.random.default_rng(11)
    table = make_table([TensorSpec("w", "BF16", (8_000_000,))])
    old = np.full(8_000_000, 0x3C00, np.uint16)
    changed = np.flatnonzero(generator.random(old.size) < density)
    new = old.copy()
    new[changed] += generator.choice(np.array([1, 0xFFFF], np.uint16), changed.size)
    totals = PatchTotals()
    for _ in encode_patch(table, old.view(np.uint8), new.view(np.uint8), totals=totals):
        pass
    assert totals.changed_count == changed.size
    assert old.nbytes / totals.encoded_size_bytes >= reduction_min
