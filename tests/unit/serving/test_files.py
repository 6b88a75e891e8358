"""The files engine: whole versions, one switch, the one before kept."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pulsenet.codec.changes import Changes, apply_changes
from pulsenet.errors import IntegrityError, LocalProtocolError, PatchMismatchError, StorageError, StructureError
from pulsenet.ids import Digest, Version
from pulsenet.serving import files
from pulsenet.serving.engine import FullUpdate, RecordsUpdate, apply_update
from pulsenet.serving.files import FilesEngine

State = Mapping[str, torch.Tensor]
MakeFull = Callable[[State, Version], FullUpdate]
MakeRecords = Callable[[FullUpdate, FullUpdate], RecordsUpdate]


def make_state(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    embed = torch.randn(5, 3, generator=generator).to(torch.bfloat16)
    return {
        "embed": embed,
        "head": embed,
        "mask": torch.tensor([True, False, True]),
        "norm": torch.randn(3, generator=generator),
        "scale": torch.tensor(float(seed), dtype=torch.bfloat16),
        "none": torch.zeros(0, 2),
    }


@pytest.fixture
def versions(make_full: MakeFull) -> list[FullUpdate]:
    return [make_full(make_state(seed), Version(0, seed)) for seed in range(5)]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FilesEngine]:
    engine = FilesEngine(tmp_path / "engine")
    yield engine
    engine.close()


def assert_holds(engine: FilesEngine, seed: int) -> None:
    assert engine.version == Version(0, seed)
    loaded = load_file(engine.current / "model.safetensors")
    state = make_state(seed)
    del state["head"]
    assert set(loaded) == set(state)
    for name, tensor in state.items():
        assert torch.equal(loaded[name], tensor)
        assert loaded[name].dtype == tensor.dtype


def test_versions_follow_each_other_and_the_last_two_stay(
    engine: FilesEngine, versions: list[FullUpdate], make_records: MakeRecords
) -> None:
    assert engine.version is None
    apply_update(engine, versions[0])
    assert_holds(engine, 0)
    for number in range(1, 5):
        apply_update(engine, make_records(versions[number - 1], versions[number]))
        assert_holds(engine, number)
    assert sorted(path.name for path in (engine.directory / "versions").iterdir()) == ["0.3", "0.4"]
    assert os.readlink(engine.current) == "versions/0.4"


def test_the_marker_names_version_root_and_ties(engine: FilesEngine, versions: list[FullUpdate]) -> None:
    apply_update(engine, versions[1])
    marker = json.loads((engine.current / "pulsenet.json").read_text())
    assert marker == {"version": "0.1", "root": versions[1].root.hex(), "aliases": {"head": "embed"}}


def test_a_reader_inside_the_old_version_can_finish(
    engine: FilesEngine, versions: list[FullUpdate], make_records: MakeRecords
) -> None:
    apply_update(engine, versions[0])
    opened = engine.current.resolve()
    apply_update(engine, make_records(versions[0], versions[1]))
    assert torch.equal(load_file(opened / "model.safetensors")["embed"], make_state(0)["embed"])


def test_a_directory_may_be_named_by_text(tmp_path: Path, versions: list[FullUpdate]) -> None:
    companions = tmp_path / "model"
    companions.mkdir()
    (companions / "config.json").write_text("{}")
    named = FilesEngine(str(tmp_path / "weights"), companions=str(companions))
    apply_update(named, versions[0])
    assert sorted(path.name for path in (tmp_path / "weights" / "current").iterdir()) == [
        "config.json",
        "model.safetensors",
        "pulsenet.json",
    ]
    named.close()


def test_a_version_without_changes_takes_no_space(
    engine: FilesEngine, versions: list[FullUpdate], make_records: MakeRecords
) -> None:
    """A-ENC-6."""
    apply_update(engine, versions[0])
    first = (engine.current / "model.safetensors").stat().st_ino
    apply_update(engine, replace(make_records(versions[0], versions[0]), version=Version(0, 1)))
    assert engine.version == Version(0, 1)
    assert (engine.current / "model.safetensors").stat().st_ino == first
    apply_update(engine, replace(make_records(versions[0], versions[2]), base_version=Version(0, 1)))
    assert_holds(engine, 2)
    old = load_file(engine.directory / "versions" / "0.1" / "model.safetensors")
    assert torch.equal(old["embed"], make_state(0)["embed"])


def test_a_version_without_changes_is_copied_where_files_have_one_name(
    engine: FilesEngine, versions: list[FullUpdate], make_records: MakeRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on network shares that have no hard links."""

    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    apply_update(engine, versions[0])
    apply_update(engine, replace(make_records(versions[0], versions[0]), version=Version(0, 1)))
    assert engine.version == Version(0, 1)
    engine.read_back()


def test_an_error_half_way_leaves_the_old_version_and_no_rest(
    engine: FilesEngine, versions: list[FullUpdate], make_records: MakeRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A-APP-1."""
    apply_update(engine, versions[0])
    calls: list[int] = []

    def fail_second_time(view: object, changes: Changes) -> None:
        calls.append(changes.tensor_index)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        apply_changes(view, changes)  # type: ignore[arg-type]

    monkeypatch.setattr(files, "apply_changes", fail_second_time)
    with pytest.raises(StorageError, match="No space left on device") as caught:
        apply_update(engine, make_records(versions[0], versions[1]))
    assert caught.value.reason == "enospc"
    assert_holds(engine, 0)
    assert [path.name for path in (engine.directory / "versions").iterdir()] == ["0.0"]


def test_a_result_with_another_root_is_refused(
    engine: FilesEngine, versions: list[FullUpdate], make_records: MakeRecords
) -> None:
    apply_update(engine, versions[0])
    with pytest.raises(IntegrityError, match="have root"):
        apply_update(engine, replace(make_records(versions[0], versions[1]), root=Digest(bytes(32))))
    with pytest.raises(IntegrityError, match="have root"):
        apply_update(engine, replace(versions[1], root=Digest(bytes(32))))
    assert_holds(engine, 0)


def test_records_for_another_base_are_refused(
    engine: FilesEngine, versions: list[FullUpdate], make_records: MakeRecords
) -> None:
    apply_update(engine, versions[0])
    with pytest.raises(PatchMismatchError, match="ask for a full load"):
        apply_update(engine, make_records(versions[1], versions[2]))
    assert_holds(engine, 0)


def test_records_of_another_structure_are_refused(
    engine: FilesEngine, versions: list[FullUpdate], make_full: MakeFull
) -> None:
    """A-NAME-3."""
    apply_update(engine, versions[0])
    other = make_full({"embed": torch.zeros(5, 3, dtype=torch.bfloat16), "new": torch.ones(1)}, Version(0, 1))
    update = RecordsUpdate(Version(0, 0), Version(0, 1), other.root, other.table, lambda: iter(()))
    with pytest.raises(StructureError, match=r"differ in 5 \(new, mask, none, norm, scale\) tensors"):
        apply_update(engine, update)
    assert_holds(engine, 0)


def test_another_structure_may_be_loaded_in_full(
    engine: FilesEngine, versions: list[FullUpdate], make_full: MakeFull
) -> None:
    apply_update(engine, versions[0])
    apply_update(engine, make_full({"other": torch.ones(2)}, Version(1, 9)))
    assert engine.version == Version(1, 9)
    assert list(load_file(engine.current / "model.safetensors")) == ["other"]


def test_a_restart_takes_over_what_is_whole_and_removes_the_rest(
    tmp_path: Path, versions: list[FullUpdate], make_records: MakeRecords
) -> None:
    """A-APP-1: killed while it wrote version 2."""
    first = FilesEngine(tmp_path)
    apply_update(first, versions[1])
    first.close()
    (tmp_path / "versions" / ".partial-0.2").mkdir()
    (tmp_path / "versions" / ".partial-0.2" / "model.safetensors").write_bytes(b"half")
    second = FilesEngine(tmp_path)
    assert_holds(second, 1)
    assert [path.name for path in (tmp_path / "versions").iterdir()] == ["0.1"]
    apply_update(second, make_records(versions[1], versions[2]))
    assert_holds(second, 2)
    second.close()


@pytest.mark.parametrize("name", ["model.safetensors", "pulsenet.json"])
def test_a_restart_over_damaged_files_asks_for_a_full_load(
    name: str, tmp_path: Path, versions: list[FullUpdate]
) -> None:
    first = FilesEngine(tmp_path)
    apply_update(first, versions[1])
    first.close()
    damaged = bytearray((tmp_path / "current" / name).read_bytes())
    damaged[-3] ^= 1
    (tmp_path / "current" / name).write_bytes(damaged)
    second = FilesEngine(tmp_path)
    assert second.version is None
    apply_update(second, versions[1])
    assert_holds(second, 1)
    apply_update(second, versions[1])
    assert_holds(second, 1)
    second.close()


@pytest.mark.parametrize("is_relative", [True, False])
def test_a_version_written_again_leaves_the_one_before_to_its_readers(
    is_relative: bool, tmp_path: Path, versions: list[FullUpdate], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the directory is named: by a link or from here."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    engine = FilesEngine(Path("real") if is_relative else tmp_path / "link")
    apply_update(engine, versions[1])
    for _ in range(3):
        opened = engine.current.resolve()
        apply_update(engine, versions[1])
        assert_holds(engine, 1)
        assert torch.equal(load_file(opened / "model.safetensors")["embed"], make_state(1)["embed"])
        assert engine.current.resolve() != opened
    engine.close()


def test_one_process_keeps_a_directory(tmp_path: Path) -> None:
    engine = FilesEngine(tmp_path)
    with pytest.raises(StorageError, match="another process") as caught:
        FilesEngine(tmp_path)
    assert caught.value.reason == "locked"
    engine.close()
    FilesEngine(tmp_path).close()


def test_companions_go_with_every_version(tmp_path: Path, versions: list[FullUpdate]) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    (base / "model.safetensors").write_text("weights")
    engine = FilesEngine(tmp_path / "engine", companions=base)
    apply_update(engine, versions[0])
    assert (engine.current / "config.json").read_text() == "{}"
    assert_holds(engine, 0)
    engine.close()


def test_companions_that_are_gone_are_named(tmp_path: Path, versions: list[FullUpdate]) -> None:
    engine = FilesEngine(tmp_path / "engine", companions=tmp_path / "model")
    with pytest.raises(StorageError, match=r"No such file or directory: .*/model$"):
        engine.stage(versions[0])
    engine.close()


def test_a_directory_that_cannot_be_made_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot keep a model in"):
        FilesEngine(tmp_path / "file" / "engine")


def test_a_staged_version_is_nobodys_until_the_commit(
    engine: FilesEngine, versions: list[FullUpdate], make_records: MakeRecords
) -> None:
    engine.rollback()
    apply_update(engine, versions[0])
    engine.stage(make_records(versions[0], versions[1]))
    assert_holds(engine, 0)
    engine.rollback()
    with pytest.raises(LocalProtocolError, match="nothing is staged"):
        engine.commit()
    assert [path.name for path in (engine.directory / "versions").iterdir()] == ["0.0"]
    engine.stage(versions[1])
    engine.stage(make_records(versions[0], versions[2]))
    engine.commit()
    assert_holds(engine, 2)


def test_closing_removes_what_is_staged(tmp_path: Path, versions: list[FullUpdate]) -> None:
    engine = FilesEngine(tmp_path / "engine")
    engine.stage(versions[0])
    engine.close()
    assert list((tmp_path / "engine" / "versions").iterdir()) == []


def test_a_commit_that_the_disk_refuses_leaves_the_old_version(
    engine: FilesEngine, versions: list[FullUpdate], make_records: MakeRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply_update(engine, versions[0])
    engine.stage(make_records(versions[0], versions[1]))

    def refuse(self: Path, target: Path) -> Path:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(StorageError, match="Read-only"):
        engine.commit()
    monkeypatch.undo()
    assert_holds(engine, 0)
    assert [path.name for path in (engine.directory / "versions").iterdir()] == ["0.0"]


def test_reading_back_finds_files_that_changed(engine: FilesEngine, versions: list[FullUpdate]) -> None:
    with pytest.raises(LocalProtocolError, match="no version is held"):
        engine.read_back()
    apply_update(engine, versions[0])
    engine.read_back()
    assert_holds(engine, 0)
    weights = engine.current / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"no longer version 0\.0"):
        engine.read_back()
    assert engine.version is None


def test_names_of_tensors_are_never_paths(tmp_path: Path, make_full: MakeFull, make_records: MakeRecords) -> None:
    """A publisher chooses them; what is written stays in the engine's directory under names of our own."""
    names = ["../../escape", "/tmp/escape", "..", "a/b/c", "line\nbreak", "\x1b[31m", "CON", "-rf"]

    def make(seed: int) -> dict[str, torch.Tensor]:
        return {name: torch.full((3,), float(seed)) for name in names}

    root = tmp_path / "deep" / "er" / "engine"
    engine = FilesEngine(root)
    first, second = (make_full(make(seed), Version(0, seed)) for seed in (1, 2))
    apply_update(engine, first)
    apply_update(engine, make_records(first, second))
    assert set(load_file(engine.current / "model.safetensors")) == set(names)
    engine.close()
    written = {path.relative_to(root).as_posix() for path in tmp_path.rglob("*") if not path.is_dir()}
    wholes = ("model.safetensors", "pulsenet.json")
    assert written == {".lock"} | {f"versions/0.{number}/{name}" for number in (1, 2) for name in wholes}
    assert not list(Path("/tmp").glob("escape"))
