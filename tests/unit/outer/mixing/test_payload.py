from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pulsenet import limits
from pulsenet.codec.blocks import EncodedBlock
from pulsenet.codec.contribution import EntryCodec, write_sections
from pulsenet.codec.gated import encode_gated
from pulsenet.codec.patch import PatchTotals
from pulsenet.codec.sections import SectionMap
from pulsenet.errors import LocalProtocolError, RemoteProtocolError
from pulsenet.ids import Digest
from pulsenet.outer.contribution import Entries
from pulsenet.outer.mixing.mean import mean_entries
from pulsenet.outer.mixing.payload import (
    MIXING_HEADER_SIZE_BYTES,
    JobTable,
    MixingHeader,
    combine_parts,
    decode_part,
    encode_part,
    inspect_part,
    make_job_table,
    peek_mixing_header,
    spread_all,
    write_slice_values,
)
from pulsenet.outer.mixing.settings import Job, MixingSettings, MixingVariant, Vector
from pulsenet.tensors.params import ParameterTable, TensorSpec

law = settings(derandomize=True, deadline=None, max_examples=60)
TABLE = ParameterTable((TensorSpec("a", "F32", (3, 7)), TensorSpec("b", "F32", ()), TensorSpec("c", "F32", (0,))))
NORM_MAX = 1e6


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BLOCK_ELEMENTS", 4)


def table_of(
    job: Job = Job.MIX2, *, round_index: int = 3, subset: tuple[int, ...] | None = None, **changes: object
) -> JobTable:
    found = make_job_table(TABLE, MixingSettings(**changes), job, round_index=round_index, subset=subset)  # type: ignore[arg-type]
    assert found is not None
    return found


def header_of(job_table: JobTable, **changes: object) -> MixingHeader:
    return replace(MixingHeader(job_table.digest, job_table.job, 3), **changes)  # type: ignore[arg-type]


def draw_entries(job_table: JobTable, seed: int) -> list[Entries]:
    generator = np.random.default_rng(seed)
    entries = []
    for place, spec in enumerate(job_table.table.tensors):
        values = generator.normal(size=spec.element_count).astype(np.float32)
        if job_table.is_dense(place):
            entries.append(Entries(place, None, values))
        else:
            positions = np.flatnonzero(generator.random(values.size) < 0.4).astype(np.uint32)
            entries.append(Entries(place, positions, values[positions]))
    return entries


def encode(job_table: JobTable, entries: list[Entries], **changes: object) -> bytes:
    return b"".join(encode_part(job_table, entries, header=header_of(job_table, **changes)))


def test_the_joint_table_has_each_tensor_once_for_each_vector() -> None:
    found = table_of(mixes_momentum=True)
    assert [spec.name for spec in found.table.tensors] == ["2/a", "2/b", "2/c", "3/a", "3/b", "3/c"]
    assert [found.source(place) for place in (0, 4)] == [(Vector.GRADIENT, 0), (Vector.MOMENTUM, 1)]
    assert found.place(Vector.MOMENTUM, 1) == 4
    assert found.digest == found.table.digest
    assert found.digest != table_of().digest


def test_a_variant_that_mixes_nothing_has_no_table() -> None:
    assert make_job_table(TABLE, MixingSettings(variant=MixingVariant.GLOBAL_M1), Job.MIX2, round_index=0) is None


def test_a_subset_is_of_mix2_alone_and_ascending() -> None:
    variant = MixingVariant.GLOBAL_M1_LOCAL_M2_SUBSET
    found = table_of(variant=variant, subset=(1, 2))
    assert [spec.name for spec in found.table.tensors] == ["2/b", "2/c"]
    assert found.source(0) == (Vector.GRADIENT, 1)
    assert found.place(Vector.GRADIENT, 2) == 1
    assert len(table_of(Job.MIX1, variant=variant, subset=(1,)).table.tensors) == 3
    for subset in (None, (), (1, 0), (1, 1), (-1, 0), (0, 3)):
        with pytest.raises(LocalProtocolError):
            table_of(variant=variant, subset=subset)


def test_masters_are_fp32() -> None:
    table = ParameterTable((TensorSpec("a", "BF16", (2,)),))
    with pytest.raises(LocalProtocolError, match="masters are F32"):
        make_job_table(table, MixingSettings(), Job.MIX1, round_index=0)


@pytest.mark.parametrize("slice_count", [1, 2, 3, 50])
@pytest.mark.parametrize("gate", [False, True])
def test_slices_of_means_put_together_are_the_mean(slice_count: int, gate: bool) -> None:
    job_table = table_of(mixes_momentum=True, mixing_gate=gate)
    parts = {key: draw_entries(job_table, seed) for seed, key in enumerate((b"x", b"a", b"m"))}
    values = spread_all(job_table, parts[b"x"])
    for index in range(slice_count):
        header = header_of(job_table, slice_index=index, slice_count=slice_count)
        blobs = {key: [b"".join(encode_part(job_table, entries, header=header))] for key, entries in parts.items()}
        mean = b"".join(combine_parts(blobs, job_table, header=header))
        received = decode_part([mean], job_table, header=replace(header, contributor_count=3))
        write_slice_values(values, received, job_table, slice_index=index, slice_count=slice_count)
    for place, spec in enumerate(job_table.table.tensors):
        counted = {key: entries[place] for key, entries in parts.items()}
        expected = mean_entries(counted, tensor_index=place, element_count=spec.element_count)
        whole = spread_all(job_table, [expected if own == place else e for own, e in enumerate(parts[b"x"])])[place]
        assert values[place].tobytes() == whole.tobytes()


def test_a_block_that_no_part_names_is_in_no_mean() -> None:
    job_table = table_of(mixing_gate=True)
    header = header_of(job_table)
    none = [Entries(place, np.empty(0, np.uint32), np.empty(0, np.float32)) for place in (1, 2)]
    parts = {
        key: [Entries(0, np.array([index], np.uint32), np.array([2.0], np.float32)), *none]
        for key, index in ((b"a", 1), (b"b", 9))
    }
    blobs = {key: [b"".join(encode_part(job_table, entries, header=header))] for key, entries in parts.items()}
    mean = b"".join(combine_parts(blobs, job_table, header=header))
    received = list(decode_part([mean], job_table, header=replace(header, contributor_count=2)))
    # Of blocks of 4 elements that from 4 to 8 lies between.
    found = [(entries.indices.tolist(), entries.value_bits.view(np.float32).tolist()) for entries in received]
    assert found == [([1], [1.0]), ([9], [1.0])]


def test_a_lost_slice_leaves_own_values() -> None:
    job_table = table_of(Job.MIX1)
    entries = {b"a": draw_entries(job_table, 0), b"b": draw_entries(job_table, 1)}
    own = spread_all(job_table, entries[b"a"])
    values = [tensor.copy() for tensor in own]
    header = header_of(job_table, slice_index=1, slice_count=2)
    blobs = {key: [b"".join(encode_part(job_table, part, header=header))] for key, part in entries.items()}
    mean = b"".join(combine_parts(blobs, job_table, header=header))
    received = decode_part([mean], job_table, header=replace(header, contributor_count=2))
    write_slice_values(values, received, job_table, slice_index=1, slice_count=2)
    lost, came = job_table.list_blocks(0, 2), job_table.list_blocks(1, 2)
    assert lost
    assert came
    for place, start, end in lost:
        assert values[place][start:end].tobytes() == own[place][start:end].tobytes()
    assert any((values[place][start:end] != own[place][start:end]).all() for place, start, end in came)


def test_blocks_of_all_slices_cover_everything_once() -> None:
    job_table = table_of(mixes_momentum=True)
    for slice_count in (1, 2, 7, 100):
        blocks = [block for index in range(slice_count) for block in job_table.list_blocks(index, slice_count)]
        assert blocks == job_table.list_blocks(0, 1)
    assert sum(end - start for _, start, end in job_table.list_blocks(0, 1)) == job_table.table.element_count
    with pytest.raises(LocalProtocolError):
        job_table.list_blocks(2, 2)


@pytest.mark.parametrize("slice_count", [2, 3, 4, 8, 50])
@pytest.mark.parametrize("block_count", [1, 8, 9, 64])
def test_owners_have_the_same_to_carry_however_small_a_model_is(
    monkeypatch: pytest.MonkeyPatch, slice_count: int, block_count: int
) -> None:
    monkeypatch.setattr(limits, "BLOCK_ELEMENTS", 1 << 20)
    table = ParameterTable(tuple(TensorSpec(f"layer.{index:02}", "F32", (1000,)) for index in range(block_count)))
    job_table = make_job_table(table, MixingSettings(), Job.MIX1, round_index=3)
    assert job_table is not None
    sizes = [
        sum(end - start for _, start, end in job_table.list_blocks(index, slice_count)) for index in range(slice_count)
    ]
    assert max(sizes) - min(sizes) <= 1000
    assert sum(sizes) == 1000 * block_count


@law
@given(st.integers(0, 1 << 32), st.booleans(), st.integers(1, 40))
def test_parts_come_back_however_they_are_cut(seed: int, gate: bool, size: int) -> None:
    job_table = table_of(mixing_gate=gate)
    entries = draw_entries(job_table, seed)
    blob = encode(job_table, entries)
    pieces = [blob[start : start + size] for start in range(0, len(blob), size)]
    found = list(decode_part(pieces, job_table, header=header_of(job_table)))
    for place, own in enumerate(entries):
        bits = [part.value_bits for part in found if part.tensor_index == place]
        assert np.concatenate([np.empty(0, np.uint32), *bits]).tobytes() == own.values.tobytes()
        if own.indices is not None:
            indices = [part.indices for part in found if part.tensor_index == place]
            assert np.concatenate([np.empty(0, np.uint32), *indices]).tolist() == own.indices.tolist()


def test_a_header_says_what_a_blob_is_and_comes_back() -> None:
    job_table = table_of(Job.MIX1)
    header = header_of(job_table, base_root=Digest(bytes(range(32))), slice_index=2, slice_count=5, contributor_count=3)
    assert len(header.encode()) == MIXING_HEADER_SIZE_BYTES
    assert peek_mixing_header(header.encode() + b"more") == header


@pytest.mark.parametrize(
    ("place", "value"), [(0, ord("X")), (4, 2), (5, 0), (5, 3), (6, 1), (80, 0xFF), (84, 0), (88, 0)]
)
def test_headers_that_are_none_are_refused(place: int, value: int) -> None:
    data = bytearray(header_of(table_of()).encode())
    data[place] = value
    with pytest.raises(RemoteProtocolError, match="mixing-header"):
        peek_mixing_header(data)
    with pytest.raises(RemoteProtocolError, match="truncated"):
        peek_mixing_header(data[:-1])


@pytest.mark.parametrize(
    "changes",
    [{"round_index": 4}, {"slice_count": 2}, {"contributor_count": 2}, {"base_root": Digest(b"\1" * 32)}],
)
def test_a_part_of_something_else_is_refused(changes: dict[str, object]) -> None:
    job_table = table_of()
    blob = encode(job_table, draw_entries(job_table, 0))
    with pytest.raises(RemoteProtocolError, match="mixing-header"):
        list(decode_part([blob], job_table, header=header_of(job_table, **changes)))


def test_own_mistakes_are_ours() -> None:
    job_table, other = table_of(), table_of(Job.MIX1)
    entries = draw_entries(job_table, 0)
    header = header_of(job_table)
    with pytest.raises(LocalProtocolError, match="another job"):
        encode_part(job_table, entries, header=header_of(other))
    with pytest.raises(LocalProtocolError, match="another job"):
        list(decode_part([], job_table, header=header_of(other)))
    with pytest.raises(LocalProtocolError, match="2 tensors"):
        encode_part(job_table, entries[:2], header=header)
    with pytest.raises(LocalProtocolError, match="not as dense"):
        encode_part(table_of(mixing_gate=True), entries, header=header)
    short = [Entries(0, None, np.zeros(3, np.float32)), *entries[1:]]
    with pytest.raises(LocalProtocolError, match="do not fit"):
        encode_part(job_table, short, header=header)
    gated = table_of(mixing_gate=True)
    for positions in ([21], [2, 1]):
        outside = Entries(0, np.array(positions, np.uint32), np.zeros(len(positions), np.float32))
        with pytest.raises(LocalProtocolError, match="do not fit"):
            encode_part(gated, [outside, *draw_entries(gated, 0)[1:]], header=header)
    with pytest.raises(LocalProtocolError, match="no parts"):
        combine_parts({}, job_table, header=header)


def reason(job_table: JobTable, blob: bytes) -> str:
    return inspect_part([blob], job_table, header=header_of(job_table), norm_max=NORM_MAX).reason


def test_a_good_part_says_what_is_in_it() -> None:
    job_table = table_of()
    entries = draw_entries(job_table, 0)
    totals = PatchTotals()
    blob = b"".join(encode_part(job_table, entries, header=header_of(job_table), totals=totals))
    found = inspect_part([blob], job_table, header=header_of(job_table), norm_max=NORM_MAX)
    assert (found.reason, found.entry_count) == ("", 22)
    assert found.norm == pytest.approx(float(np.linalg.norm(np.concatenate([own.values for own in entries]))))
    assert totals.encoded_size_bytes == len(blob)


@pytest.mark.parametrize(("value", "expected"), [(np.nan, "finite"), (np.inf, "finite"), (2e6, "norm")])
def test_values_that_would_spoil_a_mean_are_found(value: float, expected: str) -> None:
    job_table = table_of()
    entries = draw_entries(job_table, 0)
    entries[0].values[5] = value
    assert reason(job_table, encode(job_table, entries)) == expected


def test_a_dense_vector_with_elements_left_out_is_found() -> None:
    """A hostile sender writes the same table as if it were gated."""
    job_table, gated = table_of(), table_of(mixing_gate=True)
    assert job_table.digest == gated.digest
    listed = draw_entries(gated, 0)
    assert reason(job_table, encode(gated, listed)) == "shape"
    left_out = [Entries(0, np.arange(8, dtype=np.uint32), np.ones(8, np.float32)), *listed[1:]]
    assert reason(job_table, encode(gated, left_out)) == "shape"


def test_parts_that_turn_out_bad_while_they_are_combined_stop_it() -> None:
    """Blobs may change between the look into them and the mean."""
    job_table, gated = table_of(), table_of(mixing_gate=True)
    good = encode(job_table, draw_entries(job_table, 0))
    nothing = [Entries(place, np.empty(0, np.uint32), np.empty(0, np.float32)) for place in range(3)]
    for bad in (encode(gated, draw_entries(gated, 0)), encode(gated, nothing), good[:-1], good + b"\0"):
        with pytest.raises(RemoteProtocolError):
            list(combine_parts({b"a": [good], b"b": [bad]}, job_table, header=header_of(job_table)))


def test_a_record_that_needs_shared_weights_is_refused() -> None:
    job_table = table_of(mixing_gate=True)
    body = encode_gated(np.zeros(4, np.uint32), np.array([1], np.uint32), np.array([0x3F800000], np.uint32))
    sections = SectionMap(job_table.table, 1)
    blob = write_sections(
        header_of(job_table).encode(),
        iter([(0, EncodedBlock(EntryCodec.GATED, 1, body))]),
        sections,
        range(1),
        PatchTotals(),
    )
    assert reason(job_table, b"".join(blob)) == "codec-unknown"


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.integers(0, 1 << 16), st.integers(0, 255), st.booleans())
def test_any_flipped_byte_is_refused_or_decodes(place: int, value: int, gate: bool) -> None:
    job_table = table_of(mixing_gate=gate)
    blob = bytearray(encode(job_table, draw_entries(job_table, 1)))
    blob[place % len(blob)] = value
    found = inspect_part([bytes(blob)], job_table, header=header_of(job_table), norm_max=NORM_MAX)
    assert found.reason or found.entry_count <= job_table.table.element_count


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_behind_a_header_are_refused_or_decode(tail: bytes, gate: bool) -> None:
    job_table = table_of(mixing_gate=gate)
    found = inspect_part(
        [header_of(job_table).encode() + tail], job_table, header=header_of(job_table), norm_max=NORM_MAX
    )
    assert found.reason or found.entry_count <= job_table.table.element_count
