"""What is asked of SGLang and when, on a stand-in of its HTTP surface. Never run on SGLang itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from pulsenet.errors import (
    ConfigError,
    IntegrityError,
    LocalProtocolError,
    PatchMismatchError,
    StorageError,
    UnavailableError,
)
from pulsenet.ids import Version
from pulsenet.serving.engine import FullUpdate, RecordsUpdate, apply_update
from pulsenet.serving.sglang import SglangEngine

MakeFull = Callable[[Mapping[str, torch.Tensor], Version], FullUpdate]
MakeRecords = Callable[[FullUpdate, FullUpdate], RecordsUpdate]

PAUSE = ("/pause_generation", {"mode": "retract"})
RESUME = ("/continue_generation", {})
LABEL = ("/model_info", None)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "engine"


@pytest.fixture
def engine(sglang: Any, directory: Path, tmp_path: Path) -> Iterator[SglangEngine]:
    companions = tmp_path / "model"
    companions.mkdir()
    (companions / "config.json").write_text("{}")
    url = sglang.url + "/"
    with closing(SglangEngine(url, directory, companions=companions, api_key="secret", timeout_seconds=10.0)) as engine:
        yield engine


@pytest.fixture
def versions(make_full: MakeFull) -> list[FullUpdate]:
    made = []
    for number in range(3):
        state = {"weight": torch.full((3, 4), float(number), dtype=torch.bfloat16)}
        made.append(make_full(state, Version(0, number)))
    return made


def load_order(directory: Path, label: str) -> tuple[str, dict[str, Any]]:
    body = {"model_path": str(directory / "current"), "flush_cache": True, "weight_version": label}
    return "/update_weights_from_disk", body


def weight(update: FullUpdate) -> dict[str, bytes]:
    return {"weight": update.tensor_bytes(0).tobytes()}


def test_requests_wait_only_while_sglang_loads(
    sglang: Any, engine: SglangEngine, directory: Path, versions: list[FullUpdate], make_records: MakeRecords
) -> None:
    """A-CACHE-2: paused first, the cache is dropped with the load, and only then do requests go on."""
    engine.stage(versions[0])
    assert sglang.asked == []
    engine.commit()
    assert sglang.asked == [PAUSE, load_order(directory, "0.0"), LABEL, RESUME]
    sglang.asked.clear()
    engine.stage(make_records(versions[0], versions[1]))
    assert sglang.asked == [LABEL]
    engine.commit()
    assert sglang.asked == [LABEL, PAUSE, load_order(directory, "0.1"), LABEL, RESUME]
    assert (sglang.weights, sglang.is_paused) == (weight(versions[1]), False)
    assert set(sglang.keys) == {"Bearer secret"}
    assert (directory / "current" / "config.json").is_file()


def test_nothing_staged_pauses_nobody(sglang: Any, engine: SglangEngine) -> None:
    with pytest.raises(LocalProtocolError, match="commit follows stage"):
        engine.commit()
    assert sglang.asked == []


def test_without_a_key_none_is_sent(sglang: Any, directory: Path, tmp_path: Path, versions: list[FullUpdate]) -> None:
    with closing(SglangEngine(sglang.url, directory, companions=tmp_path)) as engine:
        apply_update(engine, versions[0])
    assert set(sglang.keys) == {None}


def test_a_server_that_does_not_pause_keeps_the_old_version(
    sglang: Any, engine: SglangEngine, versions: list[FullUpdate], make_records: MakeRecords
) -> None:
    apply_update(engine, versions[0])
    sglang.faults["/pause_generation"] = 503, b"busy"
    sglang.is_paused = True  # it did, and the answer got lost
    with pytest.raises(UnavailableError, match="answers /pause_generation with 503: busy"):
        apply_update(engine, make_records(versions[0], versions[1]))
    assert (engine.version, sglang.weights, sglang.is_paused) == (Version(0, 0), weight(versions[0]), False)
    sglang.faults.clear()
    apply_update(engine, make_records(versions[0], versions[1]))
    assert (engine.version, sglang.weights) == (Version(0, 1), weight(versions[1]))


def test_a_first_load_that_cannot_pause_does_not_let_unknown_weights_go_on(
    sglang: Any, engine: SglangEngine, versions: list[FullUpdate]
) -> None:
    """What a failed load left behind, maybe by an earlier process, is not served because the next try fails sooner."""
    sglang.is_paused = True
    sglang.faults["/pause_generation"] = 503, b"busy"
    with pytest.raises(UnavailableError, match="with 503"):
        apply_update(engine, versions[0])
    assert (engine.version, sglang.is_paused) == (None, True)
    assert sglang.asked == [PAUSE]


def test_a_disk_that_refuses_keeps_the_old_version(
    sglang: Any,
    engine: SglangEngine,
    versions: list[FullUpdate],
    make_records: MakeRecords,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apply_update(engine, versions[0])

    def refuse(path: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    engine.stage(make_records(versions[0], versions[1]))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        with pytest.raises(StorageError, match="No space left"):
            engine.commit()
    engine.rollback()
    assert (engine.version, sglang.weights, sglang.is_paused) == (Version(0, 0), weight(versions[0]), False)


@pytest.mark.parametrize(
    ("route", "fault", "reason"),
    [
        ("/update_weights_from_disk", (400, b'{"success": false, "message": "bad shape"}'), "with 400: .*bad shape"),
        ("/update_weights_from_disk", (200, b'{"success": false, "message": "bad shape"}'), "not load .*: bad shape"),
        ("/update_weights_from_disk", (200, b"[]"), "did not load"),
        ("/update_weights_from_disk", (200, b"<html>"), "something else than JSON"),
        ("/model_info", (500, b""), "answers /model_info with 500"),
        ("/continue_generation", (500, b"no"), "answers /continue_generation with 500: no"),
    ],
)
def test_a_load_that_fails_leaves_the_server_paused_until_a_full_one_succeeds(
    route: str,
    fault: tuple[int, bytes],
    reason: str,
    sglang: Any,
    engine: SglangEngine,
    versions: list[FullUpdate],
    make_records: MakeRecords,
) -> None:
    """SGLang may hold a mix then: nothing is computed with it."""
    apply_update(engine, versions[0])
    engine.stage(make_records(versions[0], versions[1]))
    sglang.faults[route] = fault
    with pytest.raises(UnavailableError, match=reason):
        engine.commit()
    engine.rollback()
    assert (engine.version, sglang.is_paused) == (None, True)
    sglang.faults.clear()
    with pytest.raises(PatchMismatchError, match="an unknown version"):
        engine.stage(make_records(versions[0], versions[1]))
    apply_update(engine, versions[1])
    assert (engine.version, sglang.weights, sglang.is_paused) == (Version(0, 1), weight(versions[1]), False)


def test_a_release_that_sets_no_label_is_named(sglang: Any, engine: SglangEngine, versions: list[FullUpdate]) -> None:
    sglang.loads_in_vain = True
    with pytest.raises(UnavailableError, match=r"given version 0\.0 and says that it holds 'default'"):
        apply_update(engine, versions[0])
    assert (engine.version, sglang.is_paused) == (None, True)


def test_a_restarted_server_is_found_when_the_next_version_comes(
    sglang: Any, engine: SglangEngine, versions: list[FullUpdate], make_records: MakeRecords
) -> None:
    apply_update(engine, versions[0])
    sglang.label = "default"
    with pytest.raises(PatchMismatchError, match=r"says that it holds 'default', not version 0\.0"):
        engine.stage(make_records(versions[0], versions[1]))
    assert engine.version is None
    apply_update(engine, versions[1])
    assert engine.version == Version(0, 1)


def test_a_restarted_server_is_found_by_reading_back(
    sglang: Any, engine: SglangEngine, versions: list[FullUpdate]
) -> None:
    apply_update(engine, versions[0])
    sglang.label = "0.7"
    with pytest.raises(IntegrityError, match="loaded by somebody else"):
        engine.read_back()
    assert engine.version is None


def test_a_server_that_is_away_changes_nothing(
    sglang: Any, engine: SglangEngine, versions: list[FullUpdate], make_records: MakeRecords
) -> None:
    apply_update(engine, versions[0])
    sglang.close()
    with pytest.raises(UnavailableError, match="does not answer /model_info: "):
        engine.stage(make_records(versions[0], versions[1]))
    assert engine.version == Version(0, 0)


def test_a_new_engine_on_an_old_directory_trusts_no_server(
    sglang: Any, engine: SglangEngine, directory: Path, tmp_path: Path, versions: list[FullUpdate]
) -> None:
    apply_update(engine, versions[0])
    engine.close()
    with closing(SglangEngine(sglang.url, directory, companions=tmp_path / "model")) as again:
        assert again.version is None
        apply_update(again, versions[0])
    assert (again.version, sglang.weights) == (Version(0, 0), weight(versions[0]))


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "https://127.0.0.1", "http://", "http://a:b", "http://a/v1"])
def test_a_url_that_is_none_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no URL of SGLang"):
        SglangEngine(url, tmp_path, companions=tmp_path)
