"""``verify`` and ``patch make | apply | show`` on files and directories."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pulsenet.errors import IntegrityError, PatchMismatchError, StorageError, StructureError, UsageError
from pulsenet.ids import Digest
from pulsenetd.files import offline
from pulsenetd.files.patch_files import PatchFileHeader, open_patch, write_patch
from pulsenetd.files.safetensors_files import INDEX_NAME

State = dict[str, torch.Tensor]


def bits(values: list[int], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    width = {torch.bfloat16: torch.int16, torch.float32: torch.int32}[dtype]
    limit = 1 << (8 * dtype.itemsize)
    return torch.tensor([value - limit if value >= limit // 2 else value for value in values], dtype=width).view(dtype)


def make_states() -> tuple[State, State]:
    """Return two versions with every kind of change (A-ENC-1 to 4, A-DT-1, A-DT-2)."""
    generator = torch.Generator().manual_seed(1)
    layer = torch.randn(300, 40, generator=generator).to(torch.bfloat16)
    changed = layer.clone()
    positions = torch.randperm(layer.numel(), generator=generator)[:60]
    changed.view(-1)[positions] = (layer.view(torch.int16).view(-1)[positions] + 1).view(torch.bfloat16)
    old = {
        "edge": bits([0x0000, 0x3F80, 0x7FC0, 0x7FC0, 0x3F80, 0x3F80, 0x3F80, 0x3F80, 0x3F80, 0x0001]),
        "layer": layer,
        "mask": torch.tensor([True, False, True]),
        "none": torch.zeros(0, 5),
        "norm": bits([0x3F800000, 0x7FC00001], torch.float32),
        "scalar": torch.tensor(1.0, dtype=torch.bfloat16),
        "steps": torch.tensor([1, 2**40]),
    }
    new = {
        "edge": bits([0x8000, 0x3F80, 0x7FC0, 0x7FC1, 0x4080, 0xBF80, 0x7F80, 0xFF80, 0x7F7F, 0x8001]),
        "layer": changed,
        "mask": torch.tensor([True, True, True]),
        "none": torch.zeros(0, 5),
        "norm": bits([0x3F800001, 0x7FC00001], torch.float32),
        "scalar": torch.tensor(2.0, dtype=torch.bfloat16),
        "steps": torch.tensor([1, 2**40 + 1]),
    }
    return old, new


CHANGED_COUNT = 8 + 60 + 1 + 1 + 1 + 1


def write_sharded(state: State, directory: Path) -> None:
    directory.mkdir()
    weight_map = {}
    for number, name in enumerate(sorted(state)):
        file = f"model-{number}.safetensors"
        save_file({name: state[name]}, directory / file, metadata={"format": "pt"})
        weight_map[name] = file
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text('{"model_type": "test"}')
    (directory / "pytorch_model.bin").write_text("other weights")


def same(first: State, second: State) -> bool:
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype
        and first[name].shape == second[name].shape
        and torch.equal(first[name].reshape(-1).view(torch.uint8), second[name].reshape(-1).view(torch.uint8))
        for name in first
    )


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    old, new = make_states()
    save_file(old, tmp_path / "old.safetensors", metadata={"format": "pt"})
    save_file(new, tmp_path / "new.safetensors")
    return tmp_path / "old.safetensors", tmp_path / "new.safetensors"


def listing(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("codec", ["auto", "plain", "absolute", "dense"])
def test_a_patch_turns_old_into_new_bit_by_bit_and_back(codec: str, models: tuple[Path, Path], tmp_path: Path) -> None:
    """A-ENC-1 to A-ENC-4, A-DT-1, A-DT-2."""
    old, new = models
    for base, target in ((old, new), (new, old)):
        made = offline.patch_make(base, target, tmp_path / "p", codec=codec)
        assert made["changed_count"] == CHANGED_COUNT
        result = offline.patch_apply(base, tmp_path / "p", tmp_path / "out.safetensors")
        assert same(load_file(tmp_path / "out.safetensors"), load_file(target))
        assert result["root"] == made["root"] == offline.verify(target)["root"]
        assert result["base_root"] == made["base_root"] == offline.verify(base)["root"]
    assert listing(tmp_path) == ["new.safetensors", "old.safetensors", "out.safetensors", "p"]


def test_sharded_and_single_models_mix(models: tuple[Path, Path], tmp_path: Path) -> None:
    _, new = models
    write_sharded(make_states()[0], tmp_path / "base")
    offline.patch_make(tmp_path / "base", new, tmp_path / "p")
    offline.patch_apply(tmp_path / "base", tmp_path / "p", tmp_path / "out")
    assert offline.verify(tmp_path / "out")["root"] == offline.verify(new)["root"]
    assert listing(tmp_path / "out") == [name for name in listing(tmp_path / "base") if name != "pytorch_model.bin"]
    assert (tmp_path / "out" / "config.json").read_text() == '{"model_type": "test"}'
    offline.patch_apply(models[0], tmp_path / "p", tmp_path / "out.safetensors")
    assert same(load_file(tmp_path / "out.safetensors"), make_states()[1])


def test_what_the_files_engine_says_of_its_version_is_not_said_of_another(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    write_sharded(make_states()[0], tmp_path / "base")
    (tmp_path / "base" / "pulsenet.json").write_text("{}")
    offline.patch_make(tmp_path / "base", models[1], tmp_path / "p")
    offline.patch_apply(tmp_path / "base", tmp_path / "p", tmp_path / "out")
    assert "config.json" in listing(tmp_path / "out")
    assert "pulsenet.json" not in listing(tmp_path / "out")


def test_the_report_says_what_a_patch_saves(models: tuple[Path, Path], tmp_path: Path) -> None:
    made = offline.patch_make(*models, tmp_path / "p")
    assert made == offline.patch_show(tmp_path / "p")
    element_count = sum(tensor.numel() for tensor in make_states()[0].values())
    assert made["element_count"] == element_count
    assert made["density_ratio"] == CHANGED_COUNT / element_count
    assert made["changed_tensor_count"] == 6
    assert made["most_changed_tensors"]["layer"] == 60
    assert made["dense_size_bytes"] == offline.verify(models[0])["size_bytes"]
    assert made["compression_ratio"] == made["dense_size_bytes"] / made["patch_size_bytes"]
    assert made["bits_per_change"] == made["patch_size_bytes"] * 8 / CHANGED_COUNT
    assert made["file_size_bytes"] == (tmp_path / "p").stat().st_size
    assert "hint" not in made
    json.dumps(made)


def test_equal_models_make_an_empty_patch(models: tuple[Path, Path], tmp_path: Path) -> None:
    """A-ENC-6."""
    made = offline.patch_make(models[0], models[0], tmp_path / "p")
    assert (made["changed_count"], made["density_ratio"], made["bits_per_change"]) == (0, 0.0, 0.0)
    assert made["root"] == made["base_root"]
    offline.patch_apply(models[0], tmp_path / "p", tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").read_bytes() == models[0].read_bytes()


def test_an_fp32_model_gets_a_hint(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "m.safetensors")
    assert "BF16" in offline.patch_make(tmp_path / "m.safetensors", tmp_path / "m.safetensors", tmp_path / "p")["hint"]


def test_verify_counts_what_is_there(models: tuple[Path, Path]) -> None:
    result = offline.verify(models[0])
    assert len(result["root"]) == 64
    assert (result["file_count"], result["tensor_count"]) == (1, 7)
    assert result["elements_by_dtype"] == {"BF16": 12_011, "BOOL": 3, "F32": 2, "I64": 2}


def test_another_base_is_refused_and_nothing_is_written(models: tuple[Path, Path], tmp_path: Path) -> None:
    offline.patch_make(*models, tmp_path / "p")
    with pytest.raises(PatchMismatchError, match="give the model it was made from"):
        offline.patch_apply(models[1], tmp_path / "p", tmp_path / "out.safetensors")
    assert listing(tmp_path) == ["new.safetensors", "old.safetensors", "p"]


def test_models_of_another_structure_are_refused(models: tuple[Path, Path], tmp_path: Path) -> None:
    """A-NAME-3."""
    state = make_states()[1]
    state["norm"] = state["norm"].to(torch.bfloat16)
    state["extra"] = state.pop("mask")
    save_file(state, tmp_path / "other.safetensors")
    with pytest.raises(StructureError, match=r"3 \(extra, mask, norm\) tensors"):
        offline.patch_make(models[0], tmp_path / "other.safetensors", tmp_path / "p")
    offline.patch_make(*models, tmp_path / "p")
    with pytest.raises(StructureError, match=r"3 \(extra, mask, norm\) tensors"):
        offline.patch_apply(tmp_path / "other.safetensors", tmp_path / "p", tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


def rewrite_header(path: Path, **changes: object) -> None:
    opened = open_patch(path)
    fields = {name: getattr(opened.header, name) for name in PatchFileHeader.__slots__}
    blob = list(opened.read_blob())
    with path.open("wb") as file:
        write_patch(file, PatchFileHeader(**{**fields, **changes}), blob)


def test_a_result_without_the_promised_root_gets_no_name(models: tuple[Path, Path], tmp_path: Path) -> None:
    offline.patch_make(*models, tmp_path / "p")
    rewrite_header(tmp_path / "p", root=Digest(bytes(32)))
    with pytest.raises(IntegrityError, match="promises 00000000"):
        offline.patch_apply(models[0], tmp_path / "p", tmp_path / "out.safetensors")
    assert listing(tmp_path) == ["new.safetensors", "old.safetensors", "p"]


def test_a_blob_that_is_no_patch_is_damaged(models: tuple[Path, Path], tmp_path: Path) -> None:
    from blake3 import blake3

    offline.patch_make(*models, tmp_path / "p")
    opened = open_patch(tmp_path / "p")
    blob = b"".join(opened.read_blob())[:-1]
    fields = {name: getattr(opened.header, name) for name in PatchFileHeader.__slots__}
    fields.update(blob_size_bytes=len(blob), blob_digest=Digest(blake3(blob).digest()))
    with (tmp_path / "p").open("wb") as file:
        write_patch(file, PatchFileHeader(**fields), [blob])
    with pytest.raises(StorageError, match="damaged"):
        offline.patch_show(tmp_path / "p")
    with pytest.raises(StorageError, match="damaged"):
        offline.patch_apply(models[0], tmp_path / "p", tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


def test_a_file_whose_tensors_start_at_odd_bytes_is_patched(models: tuple[Path, Path], tmp_path: Path) -> None:
    offline.patch_make(*models, tmp_path / "p")
    raw = models[0].read_bytes()
    header_size_bytes = int.from_bytes(raw[:8], "little")
    odd = (
        (header_size_bytes + 1).to_bytes(8, "little")
        + raw[8 : 8 + header_size_bytes]
        + b" "
        + raw[8 + header_size_bytes :]
    )
    (tmp_path / "odd.safetensors").write_bytes(odd)
    offline.patch_apply(tmp_path / "odd.safetensors", tmp_path / "p", tmp_path / "out.safetensors")
    assert offline.verify(tmp_path / "out.safetensors")["root"] == offline.verify(models[1])["root"]


def test_outputs_in_the_way_are_refused(models: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a directory"):
        offline.patch_make(*models, tmp_path)
    with pytest.raises(UsageError, match="make it first"):
        offline.patch_make(*models, tmp_path / "missing" / "p")
    offline.patch_make(*models, tmp_path / "p")
    write_sharded(make_states()[0], tmp_path / "base")
    with pytest.raises(UsageError, match="already exists"):
        offline.patch_apply(tmp_path / "base", tmp_path / "p", tmp_path / "base")


def test_what_stands_in_the_way_of_an_output_is_said_and_not_that_space_is_lacking(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    offline.patch_make(*models, tmp_path / "p")
    write_sharded(make_states()[0], tmp_path / "base")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="already exists"):
        offline.patch_apply(tmp_path / "base", tmp_path / "p", tmp_path / "link")
    for make in (
        lambda output: offline.patch_make(*models, output),
        lambda output: offline.patch_apply(models[0], tmp_path / "p", output),
    ):
        with pytest.raises(StorageError, match=r"into /proc: No such file or directory$") as caught:
            make(Path("/proc/output"))
        assert caught.value.reason == "io"
    with pytest.raises(StorageError, match=r"name: File name too long$"):
        offline.patch_make(*models, tmp_path / ("long" * 61 + "name"))


def test_a_device_or_pipe_is_never_replaced_by_the_output(models: tuple[Path, Path], tmp_path: Path) -> None:
    offline.patch_make(*models, tmp_path / "p")
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for output in (pipe, link):
        with pytest.raises(UsageError, match="no regular file"):
            offline.patch_make(*models, output)
        with pytest.raises(UsageError, match="no regular file"):
            offline.patch_apply(models[0], tmp_path / "p", output)
    assert pipe.is_fifo()
    assert link.is_symlink()


def test_an_input_is_never_overwritten_by_what_is_made_of_it(models: tuple[Path, Path], tmp_path: Path) -> None:
    offline.patch_make(*models, tmp_path / "p")
    write_sharded(make_states()[0], tmp_path / "base")
    shard = next((tmp_path / "base").glob("*.safetensors"))
    for old, new, output in ((*models, models[0]), (*models, models[1]), (tmp_path / "base", models[1], shard)):
        with pytest.raises(UsageError, match="one of the inputs"):
            offline.patch_make(old, new, output)
    with pytest.raises(UsageError, match="one of the inputs"):
        offline.patch_apply(models[0], tmp_path / "p", tmp_path / "p")
    assert same(load_file(models[0]), make_states()[0])
    assert offline.patch_show(tmp_path / "p")["changed_count"]


def test_a_patch_over_its_own_base_replaces_it(models: tuple[Path, Path], tmp_path: Path) -> None:
    offline.patch_make(*models, tmp_path / "p")
    offline.patch_apply(models[0], tmp_path / "p", models[0])
    assert same(load_file(models[0]), make_states()[1])


def test_a_full_disk_is_one_line_and_leaves_nothing(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offline.patch_make(*models, tmp_path / "p")

    def refuse(source: object, destination: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", refuse)
    with pytest.raises(StorageError, match="No space left on device") as caught:
        offline.patch_apply(models[0], tmp_path / "p", tmp_path / "out.safetensors")
    assert caught.value.reason == "enospc"
    assert listing(tmp_path) == ["new.safetensors", "old.safetensors", "p"]
