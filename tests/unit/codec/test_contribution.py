import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import config as numba_config

from pulsenet import limits
from pulsenet.codec.contribution import (
    HEADER_SIZE_BYTES,
    ContributionHeader,
    EntryCodec,
    TensorEntries,
    collect_entries,
    decode_contribution,
    encode_contribution,
    peek_contribution_header,
    view_weights,
)
from pulsenet.codec.patch import PatchTotals
from pulsenet.codec.varint import encode_varint
from pulsenet.errors import LocalProtocolError, RemoteProtocolError
from pulsenet.ids import Digest
from pulsenet.tensors.bf16 import cast_to_bf16_bits
from pulsenet.tensors.params import ParameterTable, TensorSpec, make_table

WINDOW = Path(__file__).parents[4] / "shared" / "trace" / "loco_window_20_16.safetensors"

needs_jit = pytest.mark.skipif(bool(numba_config.DISABLE_JIT), reason="loops over millions of elements need numba")

TABLE = make_table(
    [TensorSpec("a", "F32", (40, 50)), TensorSpec("b", "F32", (0, 3)), TensorSpec("c", "F32", ())], [("tied", "a")]
)
ROOT = Digest(bytes(range(32)))
HEADER = ContributionHeader(TABLE.digest, ROOT, round_index=7, inner_step_count=8)


def state(seed: int = 0) -> tuple[list[np.ndarray], list[TensorEntries]]:
    """Return weights and the gated entries of what a few steps change."""
    generator = np.random.default_rng(seed)
    theta = [(generator.standard_normal(spec.element_count) * 0.05).astype(np.float32) for spec in TABLE.tensors]
    entries = []
    for index, weights in enumerate(theta):
        local = weights - (generator.standard_normal(weights.size) * 2e-5).astype(np.float32)
        sent = np.flatnonzero(cast_to_bf16_bits(weights) != cast_to_bf16_bits(local)).astype(np.uint32)
        entries.append(TensorEntries(index, sent, (weights - local)[sent].view(np.uint32)))
    return theta, entries


def same(found: list[TensorEntries], expected: list[TensorEntries]) -> bool:
    return len(found) == len(expected) and all(
        one.tensor_index == other.tensor_index
        and np.array_equal(one.indices, other.indices)
        and np.array_equal(one.value_bits, other.value_bits)
        for one, other in zip(found, expected, strict=True)
    )


def decode(blob: bytes, theta: list[np.ndarray], table: ParameterTable = TABLE) -> list[TensorEntries]:
    pieces = [blob[start : start + 7] for start in range(0, len(blob), 7)]
    return collect_entries(table, decode_contribution(pieces, table, theta, state_root=ROOT))


def test_entries_come_back_and_are_counted() -> None:
    theta, entries = state()
    totals = PatchTotals()
    blob = b"".join(encode_contribution(TABLE, theta, entries, header=HEADER, totals=totals))
    assert same(decode(blob, theta), entries)
    assert totals.encoded_size_bytes == len(blob)
    assert totals.changed_count == sum(part.indices.size for part in entries)
    assert totals.codec_id == EntryCodec.GATED
    assert peek_contribution_header(blob) == HEADER
    as_bits = [weights.view(np.uint32) for weights in theta]
    assert b"".join(encode_contribution(TABLE, as_bits, entries, header=HEADER)) == blob


def test_parts_of_a_tensor_and_threads_give_the_same_bytes() -> None:
    theta, entries = state()
    whole = list(encode_contribution(TABLE, theta, entries, header=HEADER))
    first = entries[0]
    parts = [
        TensorEntries(0, first.indices[:3], first.value_bits[:3]),
        TensorEntries(0, first.indices[3:3], first.value_bits[3:3]),
        TensorEntries(0, first.indices[3:], first.value_bits[3:]),
        *entries[1:],
    ]
    with ThreadPoolExecutor(3) as pool:
        assert list(encode_contribution(TABLE, theta, parts, header=HEADER, run_blocks=pool.map)) == whole
        shared = decode_contribution(whole, TABLE, theta, state_root=ROOT, run_blocks=pool.map)
        assert same(collect_entries(TABLE, shared), entries)


def test_contribution_without_entries_is_a_header_and_an_end() -> None:
    theta, _ = state()
    blob = b"".join(encode_contribution(TABLE, theta, [], header=HEADER))
    assert len(blob) == HEADER_SIZE_BYTES + 3
    assert [part.indices.size for part in decode(blob, theta)] == [0, 0, 0]


def test_dense_contribution_of_random_bits_is_full_and_bounded() -> None:
    generator = np.random.default_rng(4)
    theta, _ = state()
    entries = [
        TensorEntries(
            index,
            np.arange(spec.element_count, dtype=np.uint32),
            generator.integers(0, 1 << 32, spec.element_count, np.uint32),
        )
        for index, spec in enumerate(TABLE.tensors)
    ]
    totals = PatchTotals()
    blob = b"".join(encode_contribution(TABLE, theta, entries, header=HEADER, totals=totals))
    assert same(decode(blob, theta), entries)
    assert totals.codec_id == EntryCodec.FULL
    assert len(blob) <= TABLE.size_bytes * limits.PATCH_OVERHEAD_RATIO_MAX + 64 * 3 + 1024


@needs_jit
def test_blocks_of_a_large_tensor_are_independent() -> None:
    table = make_table([TensorSpec("w", "F32", (limits.BLOCK_ELEMENTS + 100,))])
    header = ContributionHeader(table.digest, ROOT, 0, 1)
    theta = [np.full(limits.BLOCK_ELEMENTS + 100, 0.1, np.float32)]
    indices = np.array([5, limits.BLOCK_ELEMENTS - 1, limits.BLOCK_ELEMENTS, limits.BLOCK_ELEMENTS + 99], np.uint32)
    entries = [TensorEntries(0, indices, np.array([1, 2, 3, 4], np.uint32))]
    totals = PatchTotals()
    blob = b"".join(encode_contribution(table, theta, entries, header=header, totals=totals))
    assert totals.record_count == 2
    parts = list(decode_contribution([blob], table, theta, state_root=ROOT))
    assert [part.indices.tolist() for part in parts] == [indices[:2].tolist(), indices[2:].tolist()]
    assert same(collect_entries(table, parts), entries)


def test_weights_that_lie_elsewhere_are_taken_when_their_tensor_is_in_work() -> None:
    theta, entries = state()
    taken: list[int] = []

    class Elsewhere(Sequence[np.ndarray]):
        def __len__(self) -> int:
            return len(theta)

        def __getitem__(self, index: Any) -> Any:
            taken.append(index)
            return theta[index].copy()

    away = Elsewhere()
    blob = b"".join(encode_contribution(TABLE, theta, entries, header=HEADER))
    assert b"".join(encode_contribution(TABLE, away, entries, header=HEADER)) == blob
    written = [entry.tensor_index for entry in entries if entry.indices.size]
    assert set(taken) == set(written)
    taken.clear()
    parts = decode_contribution([blob], TABLE, away, state_root=ROOT)
    assert taken == []
    next(parts)
    assert taken == written[:1]
    assert same(collect_entries(TABLE, decode_contribution([blob], TABLE, away, state_root=ROOT)), entries)
    assert [one.dtype for one in view_weights(TABLE, away)[0:2]] == [np.dtype(np.uint32)] * 2
    theta[written[0]] = theta[written[0]][:1]
    with pytest.raises(LocalProtocolError, match="not flat FP32"):
        list(encode_contribution(TABLE, away, entries, header=HEADER))


def test_misuse_is_refused_before_anything_is_written() -> None:
    theta, entries = state()
    first = entries[0]
    other = ContributionHeader(Digest(bytes(32)), ROOT, 0, 1)
    with pytest.raises(LocalProtocolError, match="another table"):
        encode_contribution(TABLE, theta, entries, header=other)
    for weights in (theta[:2], [theta[0][:5], *theta[1:]], [theta[0].astype(np.float64), *theta[1:]]):
        with pytest.raises(LocalProtocolError, match="weights"):
            encode_contribution(TABLE, weights, entries, header=HEADER)
    half = make_table([TensorSpec("w", "BF16", (2,))])
    with pytest.raises(LocalProtocolError, match="masters are F32"):
        decode_contribution([], half, [np.zeros(2, np.uint32)], state_root=ROOT)
    wrong = [
        [entries[0], entries[0]],
        [TensorEntries(0, first.indices[::-1].copy(), first.value_bits)],
        [TensorEntries(0, np.array([2000], np.uint32), np.array([1], np.uint32))],
        [TensorEntries(3, np.array([0], np.uint32), np.array([1], np.uint32))],
        [TensorEntries(-1, np.array([0], np.uint32), np.array([1], np.uint32))],
    ]
    for parts in wrong:
        with pytest.raises(LocalProtocolError):
            list(encode_contribution(TABLE, theta, parts, header=HEADER))
    for indices, values in (
        (np.zeros(1, np.int64), np.zeros(1, np.uint32)),
        (np.zeros(1, np.uint32), np.zeros(1, np.float32)),
        (np.zeros(1, np.uint32), np.zeros(2, np.uint32)),
        (np.zeros((1, 1), np.uint32), np.zeros((1, 1), np.uint32)),
    ):
        with pytest.raises(LocalProtocolError):
            TensorEntries(0, indices, values)


def test_contribution_to_another_state_or_table_is_refused() -> None:
    theta, entries = state()
    blob = b"".join(encode_contribution(TABLE, theta, entries, header=HEADER))
    with pytest.raises(RemoteProtocolError, match=r"^contribution-base:"):
        decode_contribution([blob], TABLE, theta, state_root=Digest(bytes(32)))
    other = make_table(TABLE.tensors)
    with pytest.raises(RemoteProtocolError, match=r"^contribution-table:"):
        decode_contribution([blob], other, theta, state_root=ROOT)


def test_header_of_a_cut_blob_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="patch-truncated"):
        peek_contribution_header(HEADER.encode()[:-1])


def small_blob(record: bytes, records: int = 1, count: int = 1) -> bytes:
    return HEADER.encode() + record + b"\0" + encode_varint(records) + encode_varint(count)


LISTED = b"\1\0\x0b" + b"\2" + b"\2\5" + b"\2\1" * 4
"""A record of one entry, at 5."""


@pytest.mark.parametrize(
    ("blob", "code"),
    [
        (b"", "patch-truncated"),
        (b"PLSB" + HEADER.encode()[4:], "contribution-header"),
        (b"PLSC\2" + HEADER.encode()[5:], "contribution-header"),
        (b"PLSC\1\1" + HEADER.encode()[6:], "contribution-header"),
        (HEADER.encode(), "patch-truncated"),
        (small_blob(b"\1\0\x0a" + LISTED[3:-1]), "patch-truncated"),
        (small_blob(b"\1\0\x0c" + LISTED[3:] + b"\0"), "patch-trailing"),
        (small_blob(b"\4" + LISTED[1:]), "codec-unknown"),
        (small_blob(b"\1\2" + LISTED[2:]), "patch-block"),
        (small_blob(b"\1\0" + encode_varint(9000)), "patch-size"),
        (small_blob(b"\1\0\1\0"), "patch-count"),
        (small_blob(b"\2\0\1\0"), "patch-count"),
        (small_blob(b"\2\0\2" + encode_varint(2001)), "patch-count"),
        (small_blob(LISTED, records=2), "patch-count"),
        (small_blob(LISTED, count=2), "patch-count"),
        (small_blob(LISTED) + b"\0", "patch-trailing"),
    ],
    ids=range(16),
)
def test_blob_with_a_fault_is_refused_by_name(blob: bytes, code: str) -> None:
    theta, _ = state()
    with pytest.raises(RemoteProtocolError) as raised:
        decode(blob, theta)
    assert raised.value.code == code


def test_listed_blob_made_by_hand_decodes() -> None:
    theta, _ = state()
    found = decode(small_blob(LISTED), theta)
    assert found[0].indices.tolist() == [5]
    assert found[0].value_bits.tolist() == [0x01010101]


@needs_jit
@pytest.mark.skipif(not WINDOW.exists(), reason="the training trace is not beside this checkout")
@pytest.mark.parametrize(("scale", "bits_max"), [(1.0, 19.0), (0.5, 19.0)])
def test_entry_of_a_real_window_costs_far_less_than_three_and_a_half_bytes(scale: float, bits_max: float) -> None:
    """A-LOC-1: H = 16 (density 7 %), and half as far (4 %)."""
    data = WINDOW.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])

    def read(kind: str) -> np.ndarray:
        start, end = header[f"dense_{kind}/model.layers.20.self_attn.o_proj.weight"]["data_offsets"]
        return np.frombuffer(data[8 + size + start : 8 + size + end], np.float32)

    theta, delta = read("theta"), read("delta")
    local = theta - delta * np.float32(scale)
    corrected = theta - local
    sent = np.flatnonzero(cast_to_bf16_bits(theta) != cast_to_bf16_bits(theta - corrected)).astype(np.uint32)
    table = make_table([TensorSpec("w", "F32", theta.shape)])
    totals = PatchTotals()
    entries = TensorEntries(0, sent, corrected[sent].view(np.uint32))
    own = ContributionHeader(table.digest, ROOT, 0, 16)
    blob = list(encode_contribution(table, [theta], [entries], header=own, totals=totals))
    assert 0.035 < sent.size / theta.size < 0.08
    assert totals.encoded_size_bytes * 8 / sent.size <= bits_max
    found = collect_entries(table, decode_contribution(blob, table, [theta], state_root=ROOT))
    assert same(found, [entries])
