"""proto/vectors/codec both ways: pulsenet agrees with the reference on every byte and every refusal."""

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import zstandard

from pulsenet.codec.anchor import AnchorReader, compute_anchor_size_bytes, encode_anchor
from pulsenet.codec.blocks import BlockMap, EncodedBlock
from pulsenet.codec.changes import Changes, apply_changes, decode_changes, encode_changes
from pulsenet.codec.contribution import (
    HEADER_SIZE_BYTES,
    ContributionHeader,
    TensorEntries,
    decode_contribution,
    encode_contribution,
    encode_entries,
    peek_contribution_header,
)
from pulsenet.codec.patch import decode_patch, encode_absolute, encode_patch
from pulsenet.codec.sections import SectionMap
from pulsenet.codec.slices import SliceHeader, decode_slice, make_plane_encoder, write_slice
from pulsenet.errors import PatchMismatchError, RemoteProtocolError
from pulsenet.ids import Digest
from pulsenet.tensors.bf16 import cast_to_bf16_bits
from pulsenet.tensors.digest import compute_region_root, compute_root, hash_tensor
from pulsenet.tensors.floats import from_ordered, to_ordered
from pulsenet.tensors.params import ParameterTable, TensorSpec
from pulsenet.wire.sections import SectionCutter

PROTO = Path(__file__).parents[2] / "proto"
FILES = sorted((PROTO / "vectors" / "codec").glob("*.json"))
PATCH_FILES = [file for file in FILES if json.loads(file.read_text())["input"]["operation"] == "patch"]
CONTRIBUTION_FILES = [file for file in FILES if json.loads(file.read_text())["input"]["operation"] == "contribution"]
Json = dict[str, Any]

IS_VECTORS_ZSTD = zstandard.ZSTD_VERSION == (1, 5, 7)
"""Another release may compress to other bytes, which the specification allows a sender."""


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_codec_vectors", PROTO / "reference" / "make_codec_vectors.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(PROTO / "reference"))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def make(tensors: list[list[Any]], aliases: Any = (), excluded: Any = ()) -> ParameterTable:
    return ParameterTable(
        tensors=tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in tensors),
        aliases=tuple((alias, canonical) for alias, canonical in aliases),
        excluded=tuple(excluded),
    )


def expand(segments: list[Any]) -> bytes:
    return b"".join(bytes.fromhex(digits) * repeat for digits, repeat in segments)


def fill(table: ParameterTable, contents: list[Any]) -> np.ndarray:
    region = np.zeros(table.layout_size_bytes, np.uint8)
    for index, segments in enumerate(contents):
        table.view(region, index)[:] = np.frombuffer(expand(segments), table.tensors[index].bits_dtype)
    return region


def listed(changes: Changes) -> list[list[int]]:
    columns = (changes.indices.tolist(), changes.old_bits.tolist(), changes.new_bits.tolist())
    return [[changes.tensor_index, *row] for row in zip(*columns, strict=True)]


def gather(table: ParameterTable, rows: list[list[int]]) -> list[Changes]:
    return [
        Changes(
            index,
            np.array([row[1] for row in rows if row[0] == index], table.tensors[index].index_dtype),
            np.array([row[2] for row in rows if row[0] == index], table.tensors[index].bits_dtype),
            np.array([row[3] for row in rows if row[0] == index], table.tensors[index].bits_dtype),
        )
        for index in sorted({row[0] for row in rows})
    ]


def run_patch(tensors: Any, codec: str, old: Any, new: Any) -> Json:
    table = make(tensors)
    old_region, new_region = fill(table, old), fill(table, new)
    blob = b"".join(encode_patch(table, old_region, new_region, codec=codec))
    found = []
    for changes in decode_patch([blob], table, old_region):
        apply_changes(table.view(old_region, changes.tensor_index), changes)
        found += listed(changes)
    assert np.array_equal(old_region, new_region)
    return {"blob": blob.hex(), "changes": found}


def run_decode(tensors: Any, old: Any, blob: str) -> Json:
    table = make(tensors)
    pieces = [bytes([byte]) for byte in bytes.fromhex(blob)]
    return {"changes": [row for item in decode_patch(pieces, table, fill(table, old)) for row in listed(item)]}


def run_absolute(tensors: Any, changes: Any) -> Json:
    table = make(tensors)
    return {"blob": b"".join(encode_absolute(table, gather(table, changes))).hex()}


def run_table(tensors: Any, aliases: Any, excluded: Any) -> Json:
    table = make(tensors, aliases, excluded)
    encoded = table.encode()
    assert ParameterTable.decode(encoded) == table
    offsets, size = list(table.offsets), table.layout_size_bytes
    return {"encoded": encoded.hex(), "digest": table.digest.hex(), "offsets": offsets, "layout_size_bytes": size}


def run_table_decode(encoded: str) -> Json:
    table = ParameterTable.decode(bytes.fromhex(encoded))
    tensors = [[spec.name, spec.dtype, list(spec.shape)] for spec in table.tensors]
    return {"table": [tensors, [list(pair) for pair in table.aliases], list(table.excluded)]}


def run_root(tensors: Any, contents: Any) -> Json:
    table = make(tensors)
    hashes = [hash_tensor(expand(content)) for content in contents]
    root = compute_root(table, hashes)
    assert compute_region_root(table, fill(table, contents)) == root
    return {"hashes": [item.hex() for item in hashes], "root": root.hex()}


def run_anchor(tensors: Any, contents: Any) -> Json:
    table = make(tensors)
    blob = b"".join(bytes(piece.data) for piece in encode_anchor(table, fill(table, contents)))
    assert len(blob) == compute_anchor_size_bytes(table)
    found = run_anchor_decode(blob.hex())["contents"]
    assert found == [expand(content).hex() for content in contents]
    return {"blob": blob.hex()}


def run_anchor_decode(blob: str) -> Json:
    reader = AnchorReader(bytes([byte]) for byte in bytes.fromhex(blob))
    contents = [bytearray() for _ in reader.table.tensors]
    for piece in reader.read_tensors():
        contents[piece.tensor_index] += piece.data
    return {"contents": [content.hex() for content in contents]}


def run_changes(tensors: Any, tensor_index: int, changes: Any) -> Json:
    table = make(tensors)
    (gathered,) = gather(table, [[tensor_index, *row] for row in changes])
    encoded = encode_changes(gathered)
    assert list(decode_changes(encoded, table)) == [gathered]
    return {"encoded": encoded.hex()}


def run_changes_decode(tensors: Any, encoded: str) -> Json:
    spools = list(decode_changes(bytes.fromhex(encoded), make(tensors)))
    return {"spools": [[item.tensor_index, [row[1:] for row in listed(item)]] for item in spools]}


def run_cast(fp32_bits: list[int]) -> Json:
    return {"bits": cast_to_bf16_bits(np.array(fp32_bits, np.uint32).view(np.float32)).tolist()}


def run_ordered(bits: list[int]) -> Json:
    ordered = to_ordered(np.array(bits, np.uint16))
    assert from_ordered(ordered).tolist() == bits
    return {"ordered": ordered.tolist()}


def masters_of(masters: Any) -> ParameterTable:
    return make([[name, "F32", shape] for name, shape in masters])


def run_contribution(
    masters: Any, theta: Any, entries: Any, state_root: str, round_index: int, inner_step_count: int
) -> Json:
    table = masters_of(masters)
    weights = [np.frombuffer(expand(part), np.uint32) for part in theta]
    header = ContributionHeader(table.digest, Digest(bytes.fromhex(state_root)), round_index, inner_step_count)
    parts = [
        TensorEntries(
            index,
            np.array([row[1] for row in entries if row[0] == index], table.tensors[index].index_dtype),
            np.array([row[2] for row in entries if row[0] == index], np.uint32),
        )
        for index in range(len(table.tensors))
    ]
    blob = b"".join(encode_contribution(table, weights, parts, header=header))
    assert run_contribution_decode(masters, theta, state_root, blob.hex()) == {"entries": entries}
    assert peek_contribution_header(blob) == header
    cutter = SectionCutter(HEADER_SIZE_BYTES)
    for start in range(0, len(blob), 1000):
        cutter.feed(blob[start : start + 1000])
    cutter.finish()
    return {"blob": blob.hex(), "chunk_sizes": [size for size, _ in cutter.chunk_list.entries]}


def run_slice(
    masters: Any, theta: Any, entries: Any, state_root: str, round_index: int, slice_index: int, slice_count: int
) -> Json:
    table = masters_of(masters)
    weights = [np.frombuffer(expand(part), np.uint32) for part in theta]
    header = SliceHeader(table.digest, Digest(bytes.fromhex(state_root)), round_index, slice_index, slice_count)
    blocks, sections = BlockMap(table), SectionMap(table)

    def records() -> Iterator[tuple[int, EncodedBlock]]:
        for number in sections.blocks_of(header.sections(sections)):
            block = blocks.block(number)
            low, high = block.element_start, block.element_start + block.element_count
            here = [row for row in entries if row[0] == block.tensor_index and low <= row[1] < high]
            if here:
                positions = np.array([row[1] - low for row in here], np.uint32)
                values = np.array([row[2] for row in here], np.uint32)
                own = block.cut(weights[block.tensor_index])
                yield number, encode_entries(own, positions, values, make_plane_encoder())

    return {"blob": b"".join(write_slice(table, records(), header)).hex()}


def run_slice_decode(
    masters: Any, theta: Any, state_root: str, blob: str, round_index: int, slice_index: int, slice_count: int
) -> Json:
    table = masters_of(masters)
    weights = [np.frombuffer(expand(part), np.uint32) for part in theta]
    pieces = [bytes([byte]) for byte in bytes.fromhex(blob)]
    header = SliceHeader(table.digest, Digest(bytes.fromhex(state_root)), round_index, slice_index, slice_count)
    return {"entries": list_entries(decode_slice(pieces, table, weights, header=header))}


def run_contribution_decode(masters: Any, theta: Any, state_root: str, blob: str) -> Json:
    table = masters_of(masters)
    weights = [np.frombuffer(expand(part), np.uint32) for part in theta]
    pieces = [bytes([byte]) for byte in bytes.fromhex(blob)]
    found = decode_contribution(pieces, table, weights, state_root=Digest(bytes.fromhex(state_root)))
    return {"entries": list_entries(found)}


def list_entries(parts: Iterator[TensorEntries]) -> list[list[int]]:
    return [
        [part.tensor_index, *row]
        for part in parts
        for row in zip(part.indices.tolist(), part.value_bits.tolist(), strict=True)
    ]


OPERATIONS: dict[str, Callable[..., Json]] = {
    "contribution": run_contribution,
    "contribution-decode": run_contribution_decode,
    "slice": run_slice,
    "slice-decode": run_slice_decode,
    "patch": run_patch,
    "decode": run_decode,
    "absolute": run_absolute,
    "table": run_table,
    "table-decode": run_table_decode,
    "root": run_root,
    "anchor": run_anchor,
    "anchor-decode": run_anchor_decode,
    "changes": run_changes,
    "changes-decode": run_changes_decode,
    "cast": run_cast,
    "ordered": run_ordered,
}


def test_there_are_vectors_for_every_operation() -> None:
    assert {json.loads(file.read_text())["input"]["operation"] for file in FILES} == set(OPERATIONS)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_vector_holds_in_pulsenet(file: Path) -> None:
    vector = json.loads(file.read_text())
    assert set(vector) == {"name", "expect", "input", "output", "comment"}
    assert vector["name"] == file.stem
    # An operation's function takes exactly the vector's fields, so an unknown one is a TypeError.
    fields = dict(vector["input"])
    operation = OPERATIONS[fields.pop("operation")]
    found, output = "ok", None
    try:
        output = operation(**fields)
    except PatchMismatchError:
        found = "patch-mismatch"
    except RemoteProtocolError as error:
        found = error.code
    assert found == vector["expect"], vector["comment"]
    if output is not None and operation is not run_slice and not IS_VECTORS_ZSTD:
        output |= {key: vector["output"][key] for key in ("blob", "chunk_sizes") if key in output}
    assert output == vector["output"], vector["comment"]


@pytest.mark.skipif(not IS_VECTORS_ZSTD, reason="the vectors were made with zstandard 1.5.7")
def test_regenerating_the_vectors_changes_nothing(tmp_path: Path) -> None:
    load_generator().main(tmp_path)
    assert {file.name: file.read_text() for file in tmp_path.glob("*.json")} == {
        file.name: file.read_text() for file in FILES
    }


@pytest.mark.parametrize("file", PATCH_FILES, ids=lambda file: file.stem)
def test_blob_of_the_vector_decodes_to_its_changes(file: Path) -> None:
    vector = json.loads(file.read_text())
    fields, output = vector["input"], vector["output"]
    assert run_decode(fields["tensors"], fields["old"], output["blob"]) == {"changes": output["changes"]}


@pytest.mark.parametrize("file", CONTRIBUTION_FILES, ids=lambda file: file.stem)
def test_contribution_of_the_vector_decodes_to_its_entries(file: Path) -> None:
    vector = json.loads(file.read_text())
    fields, output = vector["input"], vector["output"]
    found = run_contribution_decode(fields["masters"], fields["theta"], fields["state_root"], output["blob"])
    assert found == {"entries": fields["entries"]}


@pytest.mark.parametrize("file", PATCH_FILES, ids=lambda file: file.stem)
def test_reference_decodes_what_pulsenet_writes(file: Path) -> None:
    vector = json.loads(file.read_text())
    fields = vector["input"]
    table = make(fields["tensors"])
    blob = b"".join(encode_patch(table, fill(table, fields["old"]), fill(table, fields["new"]), codec=fields["codec"]))
    old = [expand(content) for content in fields["old"]]
    found = load_generator().reference.decode_patch(blob, fields["tensors"], old)
    assert [list(change) for change in found] == vector["output"]["changes"]
