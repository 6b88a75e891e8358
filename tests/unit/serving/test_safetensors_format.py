"""The safetensors format, checked against its own library."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pulsenet.errors import StorageError
from pulsenet.serving.safetensors_format import (
    copy_companions,
    encode_header,
    file_order,
    map_file,
    read_header,
    write_safetensors,
)
from pulsenet.tensors.params import TensorSpec

SPECS = [
    TensorSpec("a.mask", "BOOL", (3,)),
    TensorSpec("b.weight", "BF16", (2, 2)),
    TensorSpec("c.scalar", "F32", ()),
    TensorSpec("d.empty", "I64", (0, 5)),
]
DATA = {"a.mask": b"\x01\x00\x01", "b.weight": bytes(range(8)), "c.scalar": b"\x00\x00\x80\x3f", "d.empty": b""}


def write_sample(path: Path) -> None:
    ordered = file_order(SPECS)
    write_safetensors(path, ordered, (DATA[spec.name] for spec in ordered), {"format": "pt"})


def write_raw(path: Path, header: object, data: bytes = b"") -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    """A-DT-2."""
    write_sample(tmp_path / "m.safetensors")
    loaded = load_file(tmp_path / "m.safetensors")
    assert loaded["a.mask"].tolist() == [True, False, True]
    assert loaded["b.weight"].view(torch.uint8).reshape(-1).tolist() == list(range(8))
    assert loaded["c.scalar"].item() == 1.0
    assert loaded["d.empty"].shape == (0, 5)


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "x": torch.tensor(3)}, path, {"k": "v"})
    places = {place.spec.name: place for place in read_header(path)}
    assert places["w"].spec == TensorSpec("w", "BF16", (2, 3))
    assert places["x"].spec == TensorSpec("x", "I64", ())
    raw = path.read_bytes()[places["x"].offset_bytes :][:8]
    assert raw == (3).to_bytes(8, "little")


def test_tensors_are_aligned_to_their_elements(tmp_path: Path) -> None:
    write_sample(tmp_path / "m.safetensors")
    for place in read_header(tmp_path / "m.safetensors"):
        assert place.offset_bytes % place.spec.element_size_bytes == 0


def test_header_and_places_agree() -> None:
    assert len(encode_header(SPECS, {})) % 8 == 0
    assert b"__metadata__" not in encode_header(SPECS, {})


def test_an_existing_file_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(b"kept")
    with pytest.raises(StorageError, match="already exists"):
        write_sample(tmp_path / "m.safetensors")
    assert (tmp_path / "m.safetensors").read_bytes() == b"kept"


def test_a_name_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be written"):
        write_sample(tmp_path / "missing" / "m.safetensors")


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (b"{", b""),
        (b"[]", b""),
        (b'{"a":1}', b""),
        (b"[" * 100_000, b""),
        (b'{"a":%s,"a":%s}' % ((b'{"dtype":"U8","shape":[],"data_offsets":[0,1]}',) * 2), b"x"),
        ({"a": entry("U8", [2], 0, 2)}, b"x"),
        ({"a": entry("U8", [2], 0, 2)}, b"xxx"),
        ({"a": entry("U8", [2], 0, 1)}, b"x"),
        ({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, b"xxx"),
        ({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, b"xxx"),
        ({"a": entry("U8", [1], -1, 0)}, b""),
        ({"a": entry("Q4", [1], 0, 1)}, b"x"),
        ({"a": entry("U8", [1 << 62, 1 << 62], 0, 1)}, b"x"),
        ({"a": entry("U8", [-1], 0, 1)}, b"x"),
        ({"a": {"dtype": "U8", "shape": ["x"], "data_offsets": [0, 1]}}, b"x"),
        ({"a": {"dtype": "U8", "shape": [1.0], "data_offsets": [0, 1]}}, b"x"),
        ({"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, b"x"),
        ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [False, True]}}, b"x"),
        ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1.0]}}, b"x"),
    ],
)  # fmt: skip
def test_a_damaged_header_is_refused_in_one_line(header: object, data: bytes, tmp_path: Path) -> None:
    write_raw(tmp_path / "m.safetensors", header, data)
    with pytest.raises(StorageError) as caught:
        read_header(tmp_path / "m.safetensors")
    assert caught.value.reason == "damaged"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"1234567", b"\xff" * 8, b"\xff" * 16, b"\x10" + bytes(7)])
def test_a_cut_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(StorageError, match="cut short"):
        read_header(tmp_path / "m.safetensors")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be read"):
        read_header(tmp_path / "m.safetensors")
    with pytest.raises(StorageError, match="cannot be mapped"):
        map_file(tmp_path / "m.safetensors")


def test_a_writable_map_changes_the_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    mapping = map_file(tmp_path / "f", writable=True)
    np.frombuffer(mapping, dtype=np.uint8)[1:2] = ord("x")
    mapping.flush()
    assert (tmp_path / "f").read_bytes() == b"axc"


def test_companions_are_all_but_weights(tmp_path: Path) -> None:
    source, destination = tmp_path / "source", tmp_path / "destination"
    source.mkdir()
    destination.mkdir()
    (source / "nested").mkdir()
    for name in ("config.json", "tokenizer.model", "model.safetensors", "old.bin", "model.safetensors.index.json"):
        (source / name).write_text(name)
    (destination / "tokenizer.model").write_text("own")
    copy_companions(source, destination)
    assert sorted(path.name for path in destination.iterdir()) == ["config.json", "tokenizer.model"]
    assert (destination / "tokenizer.model").read_text() == "own"
