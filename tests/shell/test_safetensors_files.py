"""Models as files and directories, written by the safetensors library itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pulsenet.errors import StorageError, UsageError
from pulsenet.tensors.digest import compute_region_root
from pulsenetd.files.safetensors_files import INDEX_NAME, open_model

STATE = {
    "a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "b": torch.tensor(2.5),
    "c": torch.tensor([True, False, True]),
    "d": torch.zeros(0, 4),
}


def write_sharded(directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    weight_map = {}
    for number, names in enumerate((("a", "c"), ("b", "d")), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: STATE[name] for name in names}, directory / file)
        weight_map.update(dict.fromkeys(names, file))
    (directory / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_model_has_one_root_however_it_is_cut(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "one.safetensors", metadata={"format": "pt"})
    single = tmp_path / "single"
    single.mkdir()
    save_file(STATE, single / "model.safetensors")
    save_file({"zzz": torch.ones(1)}, single / "training_args.safetensors")
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file({"a": STATE["a"]}, plain / "x.safetensors")
    save_file({name: STATE[name] for name in "bcd"}, plain / "y.safetensors")
    write_sharded(tmp_path / "sharded")
    engine = tmp_path / "engine"
    engine.mkdir()
    (engine / "current").symlink_to(single)
    paths = [tmp_path / "one.safetensors", single, plain, tmp_path / "sharded", engine]
    models = [open_model(path) for path in paths]
    assert len({model.compute_root() for model in models}) == 1
    assert [len(model.files) for model in models] == [1, 1, 2, 2, 1]
    assert {model.table for model in models} == {models[0].table}


def test_tensors_are_views_of_their_bytes(tmp_path: Path) -> None:
    """A-DT-1, A-DT-2."""
    save_file(STATE, tmp_path / "m.safetensors")
    model = open_model(tmp_path / "m.safetensors")
    data = {spec.name: model.tensor_bytes(index) for index, spec in enumerate(model.table.tensors)}
    assert data["a"].tobytes() == STATE["a"].reshape(-1).view(torch.uint8).numpy().tobytes()
    assert data["b"].tobytes() == np.float32(2.5).tobytes()
    assert data["c"].tolist() == [1, 0, 1]
    assert data["d"].size == 0
    assert not data["a"].flags.writeable


def test_the_region_is_the_dense_layout_and_leaves_no_file(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "m.safetensors")
    model = open_model(tmp_path / "m.safetensors")
    region, root = model.copy_to_region(tmp_path)
    assert compute_region_root(model.table, region) == root == model.compute_root()
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]


def test_a_model_of_nothing_but_empty_tensors_has_a_region(tmp_path: Path) -> None:
    save_file({"d": torch.zeros(0, 4)}, tmp_path / "m.safetensors")
    model = open_model(tmp_path / "m.safetensors")
    region, root = model.copy_to_region(tmp_path)
    assert region.size == 0
    assert root == model.compute_root()


def test_no_room_for_the_region_is_one_line(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "m.safetensors")
    with pytest.raises(StorageError, match=r"cannot put \d+ temporary bytes into"):
        open_model(tmp_path / "m.safetensors").copy_to_region(tmp_path / "missing")


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        open_model(tmp_path / "missing")
    with pytest.raises(UsageError, match=r"holds no \.safetensors files"):
        open_model(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    save_file({"a": STATE["a"]}, tmp_path / "x.safetensors")
    save_file({"a": STATE["a"]}, tmp_path / "y.safetensors")
    with pytest.raises(StorageError, match=r"tensor a is in both .*x\.safetensors and .*y\.safetensors"):
        open_model(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(StorageError, match=r"names model-00002-of-00002\.safetensors, which is missing"):
        open_model(tmp_path)


def test_shards_that_contradict_the_index_are_refused(tmp_path: Path) -> None:
    """A-NAME-3."""
    write_sharded(tmp_path)
    save_file({"b": STATE["b"], "new": STATE["a"]}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(StorageError, match=r"disagree on 2 \(d, new\) tensors"):
        open_model(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"weight_map": {}}',
        '{"weight_map": []}',
        '{"weight_map": {"a": "../a.safetensors"}}',
        '{"weight_map": {"a": "/etc/passwd"}}',
        '{"weight_map": {"a": 1}}',
        '{"other": 1}',
    ],
)
def test_a_damaged_or_hostile_index_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / INDEX_NAME).write_text(content)
    with pytest.raises(StorageError) as caught:
        open_model(tmp_path)
    assert caught.value.reason == "damaged"
