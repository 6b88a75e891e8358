"""Decoders of blobs: patches, anchors, contributions, slices, states, spools and tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from targets import Target, require

from pulsenet.codec.anchor import AnchorReader, encode_anchor
from pulsenet.codec.blocks import BlockMap
from pulsenet.codec.changes import Changes, apply_changes, decode_changes, encode_changes
from pulsenet.codec.contribution import (
    ContributionHeader,
    TensorEntries,
    decode_contribution,
    encode_contribution,
    encode_entries,
)
from pulsenet.codec.patch import CODEC_CHOICES, decode_patch, encode_absolute, encode_patch
from pulsenet.codec.sections import SectionMap
from pulsenet.codec.slices import SliceHeader, decode_slice, make_plane_encoder, write_slice
from pulsenet.errors import PatchMismatchError, RemoteProtocolError
from pulsenet.ids import Digest
from pulsenet.outer.blob import decode_blob
from pulsenet.outer.inner_state import Slot, decode_slots, encode_slots
from pulsenet.outer.mixing.disagreement import encode_probe
from pulsenet.outer.mixing.probe import Answer, compare_answers, read_answer
from pulsenet.outer.state_anchor import StateHeader, decode_state, encode_state
from pulsenet.tensors.digest import compute_region_root
from pulsenet.tensors.params import ParameterTable, TensorSpec, make_table

TABLE = make_table(
    [
        TensorSpec("wide", "BF16", (64, 48)),
        TensorSpec("real", "F32", (21, 3)),
        TensorSpec("small", "F8_E4M3", (33,)),
        TensorSpec("scalar", "I64", ()),
        TensorSpec("empty", "BF16", (0, 4)),
        TensorSpec("half", "F16", (120,)),
    ]
)
MASTERS = make_table(
    [TensorSpec("wide", "F32", (40, 30)), TensorSpec("one", "F32", (1,)), TensorSpec("b", "F32", (65,))]
)
STATE = Digest(bytes(range(32)))


def _draw_region(seed: int) -> Any:
    region = np.random.default_rng(seed).integers(0, 256, TABLE.layout_size_bytes, dtype=np.uint8)
    _clear_padding(region)
    return region


def _clear_padding(region: Any) -> None:
    kept = np.zeros(region.size, np.bool_)
    for index, spec in enumerate(TABLE.tensors):
        kept[TABLE.offsets[index] : TABLE.offsets[index] + spec.size_bytes] = True
    region[~kept] = 0


OLD = _draw_region(1)


def _change_region(share: float, step: int) -> Any:
    """Move a share of the elements: by so many steps in their bits, or anywhere if that is 0."""
    draw = np.random.default_rng(int(share * 1000) + step)
    region = OLD.copy()
    for index in range(len(TABLE.tensors)):
        view = TABLE.view(region, index)
        chosen = draw.random(view.size) < share
        info = np.iinfo(view.dtype)
        moved = draw.integers(0, info.max, view.size, dtype=view.dtype) if step == 0 else view ^ view.dtype.type(step)
        view[chosen] = moved[chosen]
    return region


def _list_changes(new: Any) -> list[Changes]:
    found = []
    for index, spec in enumerate(TABLE.tensors):
        old_bits, new_bits = TABLE.view(OLD, index), TABLE.view(new, index)
        indices = np.flatnonzero(old_bits != new_bits).astype(spec.index_dtype)
        if indices.size:
            found.append(Changes(index, indices, old_bits[indices], new_bits[indices]))
    return found


def _patch_targets() -> Iterator[Target]:
    news = [_change_region(*how) for how in ((0.02, 1), (0.3, 1), (1.0, 0), (0.1, 0), (0.0, 1))]
    for name in CODEC_CHOICES:
        seeds = tuple(b"".join(encode_patch(TABLE, OLD, new, codec=name)) for new in news)
        yield Target(
            f"patch-{name}", _apply_patch, (RemoteProtocolError, PatchMismatchError), seeds, has_spec_codes=True
        )
    absolute = tuple(b"".join(encode_absolute(TABLE, _list_changes(new))) for new in news)
    yield Target(
        "absolute-patch", _apply_patch, (RemoteProtocolError, PatchMismatchError), absolute, has_spec_codes=True
    )
    spools = tuple(b"".join(map(encode_changes, _list_changes(new))) for new in news)
    yield Target("spool", _read_spool, (RemoteProtocolError,), spools, has_spec_codes=True)
    yield Target("spool-applied", _apply_spool, (RemoteProtocolError, PatchMismatchError), spools, has_spec_codes=True)


def _check_changes(changes: Changes) -> None:
    spec = TABLE.tensors[changes.tensor_index]
    indices = changes.indices
    require(bool((indices[1:] > indices[:-1]).all()), "indices that do not ascend")
    require(not indices.size or int(indices[-1]) < spec.element_count, "an index beyond its tensor")
    require(len(changes.new_bits) == len(changes.old_bits) == indices.size, "lists of different lengths")


def _apply_patch(data: bytes) -> None:
    """Decode and apply: what is accepted names places of the base, and the base's own bits in them."""
    region = OLD.copy()
    for changes in decode_patch([data[:100], data[100:]], TABLE, OLD):
        _check_changes(changes)
        own = TABLE.view(OLD, changes.tensor_index)[changes.indices]
        require(bool((own == changes.old_bits).all()), "a patch of another base")
        apply_changes(TABLE.view(region, changes.tensor_index), changes)
    _clear_padding(region)
    compute_region_root(TABLE, region)


def _read_spool(data: bytes) -> None:
    for changes in decode_changes(data, TABLE):
        _check_changes(changes)


def _apply_spool(data: bytes) -> None:
    region = OLD.copy()
    for changes in decode_changes(data, TABLE):
        apply_changes(TABLE.view(region, changes.tensor_index), changes)


def _anchor_targets() -> Iterator[Target]:
    anchor = b"".join(bytes(piece.data) for piece in encode_anchor(TABLE, OLD))

    def read(data: bytes) -> None:
        reader = AnchorReader([data[:50], data[50:]])
        for piece in reader.read_tensors():
            spec = reader.table.tensors[piece.tensor_index]
            require(piece.offset_bytes + len(piece.data) <= spec.size_bytes, "bytes beyond a tensor")

    yield Target("anchor", read, (RemoteProtocolError,), (anchor,), has_spec_codes=True)

    def read_table(data: bytes) -> None:
        table = ParameterTable.decode(data)
        require(table.encode() == data, "a table with two encodings")
        require(all(spec.element_count >= 0 for spec in table.tensors), "a negative size")
        require(BlockMap(table).block_count >= 0, "a negative number of blocks")

    tables = (TABLE.encode(), MASTERS.encode(), make_table([]).encode())
    yield Target("table", read_table, (RemoteProtocolError,), tables, True, has_spec_codes=True)


def _make_entries(share: float) -> tuple[list[Any], list[TensorEntries]]:
    draw = np.random.default_rng(int(share * 100))
    theta, entries = [], []
    for index, spec in enumerate(MASTERS.tensors):
        weights = draw.standard_normal(spec.element_count, dtype=np.float32)
        theta.append(weights.view(np.uint32))
        chosen = np.flatnonzero(draw.random(spec.element_count) < share)
        values = (draw.standard_normal(chosen.size) * 1e-3).astype(np.float32)
        entries.append(TensorEntries(index, chosen.astype(spec.index_dtype), values.view(np.uint32)))
    return theta, entries


THETA = _make_entries(0.1)[0]


def _contribution_targets() -> Iterator[Target]:
    header = ContributionHeader(MASTERS.digest, STATE, 3, 8)
    seeds = tuple(
        b"".join(encode_contribution(MASTERS, THETA, _make_entries(share)[1], header=header))
        for share in (0.02, 0.3, 1.0, 0.0)
    )

    def check(found: TensorEntries) -> None:
        spec = MASTERS.tensors[found.tensor_index]
        require(not found.indices.size or int(found.indices[-1]) < spec.element_count, "an entry beyond its tensor")
        require(bool((found.indices[1:] > found.indices[:-1]).all()), "entries that do not ascend")

    def read(data: bytes) -> None:
        for found in decode_contribution([data], MASTERS, THETA, state_root=STATE):
            check(found)

    def read_dense(data: bytes) -> None:
        theta = [weights.view(np.float32) for weights in THETA]
        decode_blob(data, MASTERS, theta, is_dense=bool(len(data) % 2))

    yield Target("contribution", read, (RemoteProtocolError,), seeds, has_spec_codes=True)
    yield Target("contribution-whole", read_dense, (RemoteProtocolError,), (seeds[2],), has_spec_codes=True)

    slice_header = SliceHeader(MASTERS.digest, STATE, 3, 0, 1)
    blocks, sections = BlockMap(MASTERS), SectionMap(MASTERS)

    def write(share: float) -> bytes:
        records = []
        for found in _make_entries(share)[1]:
            if found.indices.size:
                number = blocks.index_of(found.tensor_index, 0)
                own = blocks.block(number).cut(THETA[found.tensor_index])
                positions = found.indices.astype(np.uint32)
                records.append((number, encode_entries(own, positions, found.value_bits, make_plane_encoder())))
        assert slice_header.sections(sections) == range(sections.section_count)
        return b"".join(write_slice(MASTERS, iter(records), slice_header))

    def read_slice(data: bytes) -> None:
        for found in decode_slice([data], MASTERS, THETA, header=slice_header):
            check(found)

    slices = tuple(map(write, (0.02, 0.3, 1.0, 0.0)))
    yield Target("slice", read_slice, (RemoteProtocolError,), slices, has_spec_codes=True)


def _state_targets() -> Iterator[Target]:
    slots = (Slot("exp_avg", (40, 30), np.ones(1200, np.float32)), Slot("step", (), np.ones(1, np.float32)))

    def read_beside(index: int) -> Any:
        spec = MASTERS.tensors[index]
        fitting = slots if spec.element_count == 1200 else slots[1:]
        return THETA[index].view(np.float32), encode_slots(fitting)

    def read_momentum(index: int) -> Any:
        return THETA[index].view(np.float32), np.zeros(MASTERS.tensors[index].element_count, np.float32)

    for name, has_inner, read in (("state", False, read_momentum), ("state-inner", True, read_beside)):
        header = StateHeader(STATE, 7, has_inner)
        seed = b"".join(bytes(piece) for piece in encode_state(MASTERS, header, read))

        def decode(data: bytes, header: StateHeader = header) -> None:
            for index, theta, _ in decode_state([data], MASTERS, header):
                require(theta.size == MASTERS.tensors[index].element_count, "another number of weights")

        yield Target(name, decode, (RemoteProtocolError,), (seed,), has_spec_codes=True)
    packed = encode_slots(slots).tobytes()

    def decode_packed(data: bytes) -> None:
        found = decode_slots(np.frombuffer(data, np.uint8), 1200)
        require(encode_slots(found).tobytes() == data, "slots with two encodings")

    yield Target(
        "slots", decode_packed, (RemoteProtocolError,), (packed, encode_slots(()).tobytes()), has_spec_codes=True
    )


def _probe_targets() -> Iterator[Target]:
    draw = np.random.default_rng(11)
    rows = [draw.dirichlet(np.full(bins, 0.3), size=count) for count, bins in ((1, 2), (3, 5), (4, 256), (9, 17))]
    seeds = tuple(encode_probe(each, round_index=8) for each in rows)
    other = Answer(STATE, STATE, seeds[1])

    def compare(data: bytes) -> None:
        """What is accepted are probabilities, whose distance to any others is one."""
        found = read_answer(data, 8)
        require(bool((found >= 0.0).all()) and bool(np.allclose(found.sum(axis=1), 1.0)), "no probabilities")
        compared = compare_answers([Answer(STATE, STATE, data), other], 8)
        require(compared.distance is None or 0.0 <= compared.distance <= 1.0, "a distance outside 0 to 1")

    yield Target("probe-answer", compare, (RemoteProtocolError,), seeds, has_spec_codes=True)


def make_targets() -> list[Target]:
    return [
        *_patch_targets(),
        *_anchor_targets(),
        *_contribution_targets(),
        *_state_targets(),
        *_probe_targets(),
    ]
