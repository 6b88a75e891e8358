"""Laws of the codec over all inputs."""

import importlib
import importlib.util
import random
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pulsenet import limits
from pulsenet.codec import cells, classes, indices, rice, values
from pulsenet.codec.blocks import Block, Codec, decode_block
from pulsenet.codec.changes import (
    Changes,
    _check_loop,
    apply_changes,
    check_changes_twin,
    compose_changes,
    decode_changes,
    encode_changes,
    undo_changes,
)
from pulsenet.codec.compare import find_changes, find_changes_twin, list_changes, list_changes_twin
from pulsenet.codec.compress import PlaneReader
from pulsenet.codec.contribution import ContributionHeader, TensorEntries, encode_contribution
from pulsenet.codec.gated import decode_gated, encode_gated
from pulsenet.codec.patch import CODEC_CHOICES, decode_patch, encode_absolute, encode_patch
from pulsenet.codec.stream import Form, PatchHeader
from pulsenet.errors import PatchMismatchError, RemoteProtocolError
from pulsenet.ids import Digest
from pulsenet.tensors.bf16 import cast_to_bf16_bits, cast_to_bf16_bits_twin
from pulsenet.tensors.floats import from_ordered, to_ordered
from pulsenet.tensors.params import ELEMENT_SIZES_BYTES, ParameterTable, TensorSpec, make_table

law = settings(derandomize=True, deadline=None, max_examples=60)
REFERENCE = Path(__file__).parents[2] / "proto" / "reference" / "pulse_reference_codec.py"
ALLOWED = {name: {int(codec) for codec in codecs} for name, codecs in CODEC_CHOICES.items()}


@cache
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pulse_reference_codec", REFERENCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@st.composite
def tables(draw: st.DrawFn) -> ParameterTable:
    names = draw(st.lists(st.text("abé.", min_size=1, max_size=4), max_size=4, unique=True))
    dtypes = st.sampled_from(sorted(ELEMENT_SIZES_BYTES))
    shapes = st.lists(st.integers(0, 12), max_size=3).map(tuple)
    return make_table(TensorSpec(name, draw(dtypes), draw(shapes)) for name in names)


def region_of(table: ParameterTable, seed: int) -> np.ndarray:
    region = np.zeros(table.layout_size_bytes, np.uint8)
    generator = np.random.default_rng(seed)
    for index in range(len(table.tensors)):
        view = table.view(region, index).view(np.uint8)
        view[:] = generator.integers(0, 256, view.size, np.uint8)
    return region


@st.composite
def region_pairs(draw: st.DrawFn) -> tuple[ParameterTable, np.ndarray, np.ndarray]:
    """A table and two versions of it that differ anywhere from nowhere to everywhere, often by one step."""
    table = draw(tables())
    generator = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    old = region_of(table, draw(st.integers(0, 1 << 32)))
    new = old.copy()
    density, one_step = draw(st.sampled_from([0.0, 0.01, 0.3, 1.0])), draw(st.booleans())
    for index in range(len(table.tensors)):
        view = table.view(new, index)
        hit = generator.random(view.size) < density
        other = np.frombuffer(generator.bytes(view.nbytes), view.dtype)
        view[hit] = view[hit] ^ view.dtype.type(1) if one_step else other[hit]
    return table, old, new


def apply(table: ParameterTable, pieces: list[bytes], region: np.ndarray) -> np.ndarray:
    result = region.copy()
    for changes in decode_patch(pieces, table, region):
        apply_changes(table.view(result, changes.tensor_index), changes)
    return result


@law
@given(region_pairs(), st.sampled_from(sorted(CODEC_CHOICES)), st.integers(1, 60))
def test_applying_what_was_computed_gives_the_new_bits(
    pair: tuple[ParameterTable, np.ndarray, np.ndarray], codec: str, piece_size: int
) -> None:
    table, old, new = pair
    blob = b"".join(encode_patch(table, old, new, codec=codec))
    bound = limits.PATCH_OVERHEAD_RATIO_MAX * table.size_bytes + 64 * len(table.tensors) + 1024
    assert len(blob) <= bound
    pieces = [blob[start : start + piece_size] for start in range(0, len(blob), piece_size)]
    assert np.array_equal(apply(table, pieces, old), new)


@law
@given(region_pairs(), st.sampled_from(sorted(CODEC_CHOICES)))
def test_reference_writes_the_same_bytes_and_reads_the_same_changes(
    pair: tuple[ParameterTable, np.ndarray, np.ndarray], codec: str
) -> None:
    table, old, new = pair
    tensors = [(spec.name, spec.dtype, spec.shape) for spec in table.tensors]
    before = [table.view(old, index).tobytes() for index in range(len(tensors))]
    after = [table.view(new, index).tobytes() for index in range(len(tensors))]
    blob = b"".join(encode_patch(table, old, new, codec=codec))
    assert reference().encode_patch(tensors, before, after, ALLOWED[codec]) == blob
    found = [
        (changes.tensor_index, *row)
        for changes in decode_patch([blob], table, old)
        for row in zip(changes.indices.tolist(), changes.old_bits.tolist(), changes.new_bits.tolist(), strict=True)
    ]
    assert reference().decode_patch(blob, tensors, before) == found


@law
@given(region_pairs())
def test_changes_spool_undo_and_travel_as_an_absolute_patch(
    pair: tuple[ParameterTable, np.ndarray, np.ndarray],
) -> None:
    table, old, new = pair
    found = list(decode_patch(encode_patch(table, old, new), table, old))
    spool = b"".join(encode_changes(changes) for changes in found)
    assert list(decode_changes(spool, table)) == found
    assert np.array_equal(apply(table, list(encode_absolute(table, found)), old), new)
    undone = new.copy()
    for changes in found:
        undo_changes(table.view(undone, changes.tensor_index), changes)
    assert np.array_equal(undone, old)


@st.composite
def histories(draw: st.DrawFn) -> list[np.ndarray]:
    size = draw(st.integers(0, 40))
    element = st.integers(0, 3)
    return [np.array(draw(st.lists(element, min_size=size, max_size=size)), np.uint16) for _ in range(3)]


def between(old: np.ndarray, new: np.ndarray) -> Changes:
    positions = find_changes(old, new)
    return Changes(0, positions, old[positions], new[positions])


@law
@given(histories())
def test_composition_is_the_direct_change(history: list[np.ndarray]) -> None:
    first, second, third = history
    assert compose_changes(between(first, second), between(second, third)) == between(first, third)


@law
@given(st.binary(max_size=300), st.sampled_from([Form.RELATIVE, Form.ABSOLUTE]))
def test_any_bytes_after_a_header_decode_or_are_refused(tail: bytes, form: Form) -> None:
    table = make_table([TensorSpec("a", "BF16", (30,)), TensorSpec("b", "U8", (9,))])
    region = region_of(table, 0)
    blob = PatchHeader(form, table.digest).encode() + tail

    def outcome(pieces: list[bytes]) -> bytes | str:
        try:
            return apply(table, pieces, region).tobytes()
        except (RemoteProtocolError, PatchMismatchError) as error:
            return str(error)

    whole = outcome([blob])
    assert outcome([bytes([byte]) for byte in blob]) == whole
    if isinstance(whole, bytes):
        assert whole[60:64] == region[60:64].tobytes()


@law
@given(st.integers(0, 5), st.binary(max_size=80), st.sampled_from(["BF16", "U8", "F32"]))
def test_any_body_decodes_to_changes_inside_its_block_or_is_refused(codec_id: int, body: bytes, dtype: str) -> None:
    block = Block(0, TensorSpec("w", dtype, (120,)), 100, 20)
    old = np.arange(20).astype(block.spec.bits_dtype)
    try:
        found = decode_block(block, codec_id, body, old)
    except (RemoteProtocolError, PatchMismatchError):
        return
    assert codec_id in set(Codec)
    listed = found.indices.tolist()
    assert listed == sorted(set(listed))
    assert all(100 <= index < 120 for index in listed)


@law
@given(st.binary(max_size=200))
def test_any_bytes_decode_as_a_table_or_are_refused(data: bytes) -> None:
    for candidate in (data, b"\x83\xa7aliases\x90\xa8excluded\x90\xa7tensors" + data):
        try:
            table = ParameterTable.decode(candidate)
        except RemoteProtocolError:
            continue
        assert table.encode() == candidate


@law
@given(tables(), st.lists(st.text("xyz", min_size=1, max_size=3), max_size=3, unique=True))
def test_table_comes_back_from_its_bytes(table: ParameterTable, excluded: list[str]) -> None:
    aliases = [(f"tied.{spec.name}", spec.name) for spec in table.tensors[:2]]
    whole = make_table(table.tensors, aliases, excluded)
    assert ParameterTable.decode(whole.encode()) == whole


widths = st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64])


@law
@given(st.binary(max_size=700), st.binary(max_size=90), widths, st.integers(0, 8))
def test_compare_loop_equals_its_twin(data: bytes, edits: bytes, width: type, offset: int) -> None:
    raw = np.frombuffer(data, np.uint8)[offset:]
    old = raw[: raw.size // np.dtype(width).itemsize * np.dtype(width).itemsize].view(width)
    new = old.copy()
    for position, edit in enumerate(edits):
        if new.size:
            new[(position * 31 + edit) % new.size] ^= width(edit)
    found = find_changes(old, new)
    assert np.array_equal(found, find_changes_twin(old, new))
    assert all(map(np.array_equal, list_changes(old, new), list_changes_twin(old, new)))


ascending = st.lists(st.integers(0, (1 << 20) - 1), unique=True, max_size=60).map(
    lambda listed: np.array(sorted(listed), np.uint32)
)


@law
@given(ascending, st.sampled_from([indices.NARROW_ESCAPE, indices.WIDE_ESCAPE]))
def test_gap_loops_equal_their_twins_and_come_back(positions: np.ndarray, escape: int) -> None:
    codes = indices.encode_gaps(positions, escape)
    assert np.array_equal(codes, indices.encode_gaps_twin(positions, escape))
    found = indices.decode_gaps(codes, escape, 1 << 20, positions.size)
    assert found is not None
    assert np.array_equal(found, positions)
    ranks = indices.encode_ranks(positions)
    assert np.array_equal(ranks, indices.encode_ranks_twin(positions))
    back = indices.decode_ranks(ranks, 1 << 20, positions.size)
    assert back is not None
    assert np.array_equal(back, positions)


def same(first: np.ndarray | None, second: np.ndarray | None) -> bool:
    if first is None or second is None:
        return first is second
    return np.array_equal(first, second)


bytes_around_escapes = st.lists(st.sampled_from([0, 1, 2, 127, 128, 129, 254, 255]), max_size=30).map(
    lambda listed: np.array(listed, np.uint8)
)


@law
@given(bytes_around_escapes, st.integers(1, 3000), st.integers(0, 30))
def test_decoding_loops_refuse_exactly_what_their_twins_refuse(data: np.ndarray, end: int, count: int) -> None:
    narrow = indices.NARROW_ESCAPE
    for stated in (count, int(np.count_nonzero(data != narrow))):
        assert same(indices.decode_gaps(data, narrow, end, stated), indices.decode_gaps_twin(data, narrow, end, stated))
    for stated in (count, int(np.count_nonzero(data < 128))):
        assert same(indices.decode_ranks(data, end, stated), indices.decode_ranks_twin(data, end, stated))


bits16 = st.lists(st.one_of(st.integers(0, 0xFFFF), st.sampled_from([0, 0x7FFF, 0x8000, 0xFFFF])), max_size=50)


@law
@given(bits16, st.lists(st.integers(-2, 2), min_size=50, max_size=50))
def test_step_loops_equal_their_twins_and_come_back(old_list: list[int], steps: list[int]) -> None:
    old = np.array(old_list, np.uint16)
    moved = (to_ordered(old).astype(np.int64) + np.array(steps[: old.size], np.int64)) & 0xFFFF
    new = from_ordered(moved.astype(np.uint16))
    ups, exceptions = values.split_steps(old, new)
    twin_ups, twin_exceptions = values.split_steps_twin(old, new)
    assert np.array_equal(ups, twin_ups)
    assert np.array_equal(exceptions, twin_exceptions)
    joined = values.join_steps(old, ups)
    assert np.array_equal(joined, values.join_steps_twin(old, ups))
    joined[exceptions] = new[exceptions]
    assert np.array_equal(joined, new)


numbers32 = st.one_of(st.integers(0, 40), st.integers(0, 0xFFFFFFFF))


@law
@given(st.lists(numbers32, max_size=40))
def test_best_parameter_equals_its_twin(listed: list[int]) -> None:
    numbers = np.array(listed, np.uint32)
    assert rice.choose_parameter(numbers) == rice.choose_parameter_twin(numbers)


@law
@given(st.lists(st.integers(0, 400), max_size=40), st.integers(0, 31), st.integers(0, 20))
def test_rice_codes_equal_their_twins_and_come_back(listed: list[int], parameter: int, start_bit: int) -> None:
    numbers = np.array(listed, np.uint32)
    room = np.zeros(3 + sum((number >> parameter) + 1 + parameter for number in listed) // 8 + 1, np.uint8)
    other = room.copy()
    end_bit = rice.write_codes(numbers, parameter, room, start_bit)
    assert end_bit == rice.write_codes_twin(numbers, parameter, other, start_bit)
    assert np.array_equal(room, other)
    found = np.empty_like(numbers)
    assert rice.read_codes(room, start_bit, parameter, 400, found) == end_bit
    assert np.array_equal(found, numbers)


@law
@given(st.binary(max_size=24), st.integers(0, 30), st.integers(0, 31), st.integers(0, 9), numbers32)
def test_rice_reader_refuses_exactly_what_its_twin_refuses(
    data: bytes, start_bit: int, parameter: int, count: int, value_max: int
) -> None:
    raw = np.frombuffer(data, np.uint8)
    start_bit = min(start_bit, 8 * raw.size)
    found, twin_found = np.zeros(count, np.uint32), np.zeros(count, np.uint32)
    outcome = rice.read_codes(raw, start_bit, parameter, value_max, found)
    assert outcome == rice.read_codes_twin(raw, start_bit, parameter, value_max, twin_found)
    assert outcome < 0 or np.array_equal(found, twin_found)


@st.composite
def streams(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(gaps, ups, extras, starts) of a few classes."""
    counts = draw(st.lists(st.integers(0, 12), min_size=1, max_size=5))
    total = sum(counts)
    extra = draw(st.sampled_from([st.just(0), st.sampled_from([0] * 9 + [1, 70]), numbers32]))
    columns = [draw(st.lists(kind, min_size=total, max_size=total)) for kind in (numbers32, st.integers(0, 1), extra)]
    gaps, ups, extras = (np.array(column, np.uint32) for column in columns)
    return gaps, ups.astype(np.uint8), extras, np.concatenate(([0], np.cumsum(counts))).astype(np.int64)


@law
@given(streams(), st.data())
def test_tight_streams_equal_their_twins_and_come_back(
    parts: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray], data: st.DataObject
) -> None:
    gaps, ups, extras, starts = parts
    plans, size_bits = rice.plan_stream(gaps, extras, starts)
    twin_plans, twin_size_bits = rice.plan_stream_twin(gaps, extras, starts)
    assert np.array_equal(plans, twin_plans)
    assert size_bits == twin_size_bits
    stream = rice.write_stream(gaps, ups, extras, starts, plans, size_bits)
    assert np.array_equal(stream, rice.write_stream_twin(gaps, ups, extras, starts, plans, size_bits))
    end_bit, *found = rice.read_stream(stream, plans, (1 << 32) - 1, (1 << 32) - 1)
    assert end_bit == size_bits
    assert all(np.array_equal(a, b) for a, b in zip(found, (gaps, ups, extras), strict=True))
    damaged = np.array(data.draw(st.lists(st.integers(0, 255), max_size=stream.size + 4)), np.uint8)
    gap_max, extra_max = data.draw(numbers32), data.draw(numbers32)
    outcome, *found = rice.read_stream(damaged, plans, gap_max, extra_max)
    twin_outcome, *twin_found = rice.read_stream_twin(damaged, plans, gap_max, extra_max)
    assert outcome == twin_outcome
    assert outcome < 0 or all(np.array_equal(a, b) for a, b in zip(found, twin_found, strict=True))


@law
@given(st.lists(st.integers(0, 19), min_size=1, max_size=60), st.data())
def test_class_walks_equal_their_twins_and_come_back(listed: list[int], data: st.DataObject) -> None:
    kinds = np.array(listed, np.uint8)
    chosen = data.draw(st.lists(st.integers(0, kinds.size - 1), min_size=1, unique=True))
    positions = np.array(sorted(chosen), np.uint32)
    gaps, order, starts = classes.count_gaps(kinds, positions)
    assert all(map(np.array_equal, (gaps, order, starts), classes.count_gaps_twin(kinds, positions)))
    other = np.array(data.draw(st.lists(st.integers(0, 19), max_size=60)), np.uint8)
    for walked in (kinds, other):
        found = classes.find_members(walked, gaps, starts)
        twin_found = classes.find_members_twin(walked, gaps, starts)
        assert (found is None) == (twin_found is None)
        assert found is None or twin_found is None or all(map(np.array_equal, found, twin_found))
    found = classes.find_members(kinds, gaps, starts)
    assert found is not None
    assert np.array_equal(found[0], positions)
    assert np.array_equal(order[found[1]], np.arange(positions.size))


weights32 = st.one_of(
    numbers32,
    st.integers(0, 0x2FFFF).map(lambda low: 0x3C7F0000 + low),
    st.sampled_from([0, 1 << 31, 0x3F808000, 0x3F807FFF, 0x7F800000, 0x7FC00000, 0x007FFFFF, 0x00800000]),
)


@st.composite
def gated_entries(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(weights, positions, values): values of any bits, or a few last places of their weight."""
    theta = np.array(draw(st.lists(weights32, min_size=1, max_size=50)), np.uint32)
    chosen = draw(st.lists(st.integers(0, theta.size - 1), min_size=1, unique=True))
    positions = np.array(sorted(chosen), np.uint32)
    steps = draw(st.lists(st.integers(-70_000, 70_000), min_size=positions.size, max_size=positions.size))
    values = (theta[positions].astype(np.int64) + np.array(steps)) & 0xFFFFFFFF
    with np.errstate(all="ignore"):
        near = theta[positions].view(np.float32) - values.astype(np.uint32).view(np.float32)
    values = np.where(draw(st.booleans()), near.view(np.uint32), values.astype(np.uint32))
    return theta, positions, values


@law
@given(gated_entries(), st.integers(0, 600))
def test_views_from_the_weights_equal_their_twins(
    parts: tuple[np.ndarray, np.ndarray, np.ndarray], number: int
) -> None:
    theta, positions, bits = parts
    assert np.array_equal(cells.measure_reach(theta), cells.measure_reach_twin(theta))
    weights = theta[positions]
    numbers, aways, escapes = cells.measure_values(weights, bits)
    twin_numbers, twin_aways, twin_escapes = cells.measure_values_twin(weights, bits)
    assert np.array_equal(escapes, twin_escapes)
    regular = np.setdiff1d(np.arange(weights.size), escapes)
    assert np.array_equal(numbers[regular], twin_numbers[regular])
    assert np.array_equal(aways[regular], twin_aways[regular])
    for restore in (cells.restore_values, cells.restore_values_twin):
        restored = restore(weights[regular], numbers[regular], aways[regular])
        assert restored is not None
        assert np.array_equal(restored, bits[regular])
    any_numbers = numbers * np.uint32(number) + np.uint32(number << 22)
    assert same(
        cells.restore_values(weights, any_numbers, aways), cells.restore_values_twin(weights, any_numbers, aways)
    )


@law
@given(gated_entries(), st.binary(max_size=40), st.integers(0, 60))
def test_gated_entries_come_back_and_damage_decodes_or_is_refused(
    parts: tuple[np.ndarray, np.ndarray, np.ndarray], damage: bytes, at: int
) -> None:
    theta, positions, bits = parts
    body = encode_gated(theta, positions, bits)
    found, values_found = decode_gated(PlaneReader(body), theta)
    assert np.array_equal(found, positions)
    assert np.array_equal(values_found, bits)
    try:
        found, _ = decode_gated(PlaneReader(body[:at] + damage + body[at + len(damage) :]), theta)
    except RemoteProtocolError:
        return
    assert found.tolist() == sorted(set(found.tolist()))
    assert int(found[-1]) < theta.size


@law
@given(
    st.lists(st.tuples(numbers32, numbers32), max_size=40),
    st.sampled_from([np.uint8, np.uint16, np.uint32]),
    st.randoms(use_true_random=False),
)
def test_measured_steps_equal_their_twins_and_come_back(
    pairs: list[tuple[int, int]], width: type, chance: random.Random
) -> None:
    listed = np.array(pairs, np.uint32).reshape(-1, 2).astype(width)
    old, new = listed[listed[:, 0] != listed[:, 1]].T.copy()
    order = np.array(chance.sample(range(old.size), old.size), np.uint32)
    ups, extras = values.measure_steps(old, new, order)
    twin_ups, twin_extras = values.measure_steps_twin(old, new, order)
    assert np.array_equal(ups, twin_ups)
    assert np.array_equal(extras, twin_extras)
    for take in (values.take_steps, values.take_steps_twin):
        assert np.array_equal(take(old, ups, extras, np.argsort(order).astype(np.uint32)), new)


@law
@given(
    st.lists(st.integers(0, 12), max_size=8),
    st.lists(st.integers(0, 2), min_size=8, max_size=8),
    st.sampled_from([np.uint32, np.uint64]),
)
def test_check_before_a_write_equals_its_twin(listed: list[int], expected: list[int], index_type: type) -> None:
    view = (np.arange(10) % 3).astype(np.uint16)
    positions = np.array(listed, index_type)
    bits = np.array(expected[: positions.size], np.uint16)
    assert tuple(_check_loop(view, positions, bits)) == check_changes_twin(view, positions, bits)


@law
@given(st.lists(st.integers(0, 0xFFFFFFFF), max_size=40))
def test_cast_loop_equals_its_twin(fp32_bits: list[int]) -> None:
    floats = np.array(fp32_bits, np.uint32).view(np.float32)
    assert np.array_equal(cast_to_bf16_bits(floats), cast_to_bf16_bits_twin(floats))


@cache
def contribution_reference() -> ModuleType:
    sys.path.insert(0, str(REFERENCE.parent))
    try:
        return importlib.import_module("pulse_reference_contribution")
    finally:
        sys.path.pop(0)


@law
@given(gated_entries())
def test_reference_writes_the_same_contribution_and_reads_the_same_entries(
    parts: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    theta, positions, bits = parts
    table = make_table([TensorSpec("w", "F32", (theta.size,))])
    root = Digest(bytes(32))
    header = ContributionHeader(table.digest, root, round_index=1, inner_step_count=2)
    blob = b"".join(encode_contribution(table, [theta], [TensorEntries(0, positions, bits)], header=header))
    masters, entries = (
        [("w", (theta.size,))],
        [(0, *row) for row in zip(positions.tolist(), bits.tolist(), strict=True)],
    )
    assert contribution_reference().encode_contribution(masters, [theta.tolist()], entries, root, 1, 2) == blob
    assert contribution_reference().decode_contribution(masters, [theta.tolist()], blob, root) == entries
