"""Orders are answered in files, whatever happens; nothing is raised."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_vllm import make_servant
from safetensors.torch import save_file

from pulsenet.errors import (
    IntegrityError,
    LocalProtocolError,
    PatchMismatchError,
    RemoteProtocolError,
    StorageError,
    StructureError,
)
from pulsenet.ids import Version
from pulsenet.serving.engine import FullUpdate, RecordsUpdate
from pulsenet.serving.vllm.exchange import Answer, Order, Outcome, State, UpdateInfo, read_answer
from pulsenet.serving.vllm.handover import lend_memory
from pulsenet.serving.vllm.rank import RankWeights
from pulsenet.serving.vllm.servant import RankServant, name_fault

Published = Callable[..., dict[str, torch.Tensor]]


class Desk:
    """One rank and what the node needs to give it orders."""

    def __init__(self, path: Path, model: Any, versions: list[FullUpdate], checkpoint: Path, **settings: Any) -> None:
        self.directory = path / "node"
        self.directory.mkdir(mode=0o700)
        (self.directory / "table").write_bytes(versions[0].table.encode())
        self.versions = versions
        self.clock = 100.0
        self.servant: RankServant = make_servant(model, 0, 1, checkpoint, monotonic=lambda: self.clock, **settings)

    def give(self, order: Order, **values: Any) -> Answer | None:
        self.servant.take(UpdateInfo(order, "t", str(self.directory), **values).to_json())
        self.servant.wait()
        return read_answer(self.directory, 0)

    def stage(self, update: RecordsUpdate, **values: Any) -> Answer | None:
        with lend_memory(update, self.directory, must_copy=True) as (size_bytes, digest):
            described = {
                "version": str(update.version),
                "base_version": str(update.base_version),
                "root": update.root.hex(),
                "size_bytes": size_bytes,
                "digest": digest,
            }
            return self.give(Order.STAGE, **(described | values))

    def adopt(self) -> None:
        """Let the rank's checkpoint be version 0.0."""
        self.give(Order.ATTACH)
        (self.directory / "memory").write_bytes(self.versions[0].region.tobytes())
        size_bytes = self.versions[0].region.size
        self.give(Order.STAGE, version="0.0", root=self.versions[0].root.hex(), size_bytes=size_bytes)
        self.servant.note_open(True)
        self.give(Order.COMMIT)
        self.servant.note_open(False)


@pytest.fixture
def states(make_published: Published) -> list[dict[str, torch.Tensor]]:
    return [make_published(seed) for seed in range(3)]


@pytest.fixture
def versions(states: list[Any], make_full: Any) -> list[FullUpdate]:
    return [make_full(state, Version(0, number)) for number, state in enumerate(states)]


@pytest.fixture
def checkpoint(tmp_path: Path, states: list[Any]) -> Path:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    save_file({name: tensor.clone() for name, tensor in states[0].items()}, directory / "model.safetensors")
    return directory


@pytest.fixture
def desk(tmp_path: Path, served_model: Any, versions: list[FullUpdate], states: list[Any], checkpoint: Path) -> Desk:
    model = served_model()
    model.load_weights(states[0].items())
    return Desk(tmp_path, model, versions, checkpoint)


def test_attaching_lists_what_the_rank_holds(desk: Desk, versions: list[FullUpdate]) -> None:
    answer = desk.give(Order.ATTACH, engine_url="http://127.0.0.1:1")
    assert answer is not None
    assert (answer.outcome, answer.state, answer.held) == (Outcome.DONE, State.READY, None)
    assert answer.root == versions[0].root.hex()
    assert {window[0] for window in answer.windows} == set(range(len(versions[0].table.tensors)))
    assert desk.servant.engine_url == "http://127.0.0.1:1"
    desk.servant.close()


def test_an_update_is_answered_at_every_step(desk: Desk, versions: list[FullUpdate], make_records: Any) -> None:
    desk.adopt()
    answer = read_answer(desk.directory, 0)
    assert answer is not None
    assert (answer.order, answer.held, answer.is_open) == (Order.FINISH, "0.0", False)
    desk.servant.note_open(True)
    answer = read_answer(desk.directory, 0)
    assert answer is not None
    assert answer.is_open
    answer = desk.stage(make_records(versions[0], versions[1]))
    assert answer is not None
    assert (answer.outcome, answer.state, answer.held) == (Outcome.DONE, State.STAGED, "0.0")
    assert answer.changed_count == desk.servant.answer.changed_count > 0  # type: ignore[union-attr]
    answer = desk.give(Order.COMMIT)
    assert answer is not None
    assert (answer.outcome, answer.state, answer.held) == (Outcome.DONE, State.COMMITTED, "0.0")
    desk.servant.note_open(False)
    answer = read_answer(desk.directory, 0)
    assert answer is not None
    assert (answer.order, answer.state, answer.held, answer.root) == (
        Order.FINISH,
        State.READY,
        "0.1",
        versions[1].root.hex(),
    )
    answer = desk.give(Order.READ_BACK)
    assert answer is not None
    assert answer.outcome is Outcome.DONE


def test_a_refusal_is_an_answer_with_a_reason(desk: Desk, versions: list[FullUpdate], make_records: Any) -> None:
    desk.adopt()
    answer = desk.stage(make_records(versions[0], versions[1]), digest="00")
    assert answer is not None
    assert (answer.outcome, answer.code, answer.state) == (Outcome.REFUSED, "root_mismatch", State.READY)
    assert "do not have their digest" in answer.reason
    for order in (Order.COMMIT, Order.FINISH):
        answer = desk.give(order)
        assert answer is not None
        assert (answer.outcome, answer.code) == (Outcome.REFUSED, "order")


def test_an_error_after_the_first_write_is_a_failure(
    desk: Desk, versions: list[FullUpdate], make_records: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.adopt()
    desk.stage(make_records(versions[0], versions[1]))
    monkeypatch.setattr(torch.Tensor, "scatter_", lambda *arguments: 1 / 0)
    answer = desk.give(Order.COMMIT)
    assert answer is not None
    assert (answer.outcome, answer.state, answer.code) == (Outcome.FAILED, State.COMMITTED, "engine")
    assert "division by zero" in answer.reason
    monkeypatch.undo()
    answer = desk.give(Order.ROLLBACK)
    assert answer is not None
    assert (answer.outcome, answer.state, answer.held) == (Outcome.DONE, State.READY, "0.0")


def test_an_engine_that_cannot_be_patched_says_why_before_anything_is_drawn(
    tmp_path: Path, served_model: Any, versions: list[FullUpdate], checkpoint: Path
) -> None:
    model = served_model()
    desk = Desk(tmp_path, model, versions, checkpoint, obstacle="the engine quantises its weights")
    answer = desk.give(Order.ATTACH)
    assert answer is not None
    assert (answer.outcome, answer.code, answer.state) == (Outcome.REFUSED, "structure", State.NEW)
    assert answer.reason == "the engine quantises its weights"
    assert model.load_count == 0
    (desk.directory / "table").write_bytes(b"\x00")
    desk.servant._find_obstacle = lambda: ""
    answer = desk.give(Order.ATTACH)
    assert answer is not None
    assert answer.code == "decode"


def test_an_order_that_cannot_be_answered_changes_nothing(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    desk.servant.take({"order": "dance"})
    desk.servant.take(UpdateInfo(Order.COMMIT, "t", str(desk.directory / "none")).to_json())
    desk.directory.chmod(0o777)
    desk.servant.take(UpdateInfo(Order.COMMIT, "t", str(desk.directory)).to_json())
    desk.servant.note_open(True)
    assert desk.servant.answer is None
    assert list(desk.directory.glob("rank-*")) == []
    assert capsys.readouterr().out.count("cannot be answered") == 3


def test_an_answer_that_cannot_be_written_is_said_in_the_engines_log(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    (desk.directory / "rank-0.json").mkdir()
    desk.give(Order.ROLLBACK)
    assert "rank 0" in capsys.readouterr().out


def test_the_engine_steps_on_while_a_rank_compares(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders that only read do not keep the caller."""
    may_go_on = threading.Event()
    attach = RankWeights.attach

    def wait_and_attach(self: RankWeights, *arguments: Any) -> None:
        assert may_go_on.wait(10)
        attach(self, *arguments)

    monkeypatch.setattr(RankWeights, "attach", wait_and_attach)
    desk.servant.take(UpdateInfo(Order.ATTACH, "t", str(desk.directory)).to_json())
    assert read_answer(desk.directory, 0) is None
    may_go_on.set()
    desk.servant.wait()
    assert read_answer(desk.directory, 0) is not None


def test_a_commit_nobody_finishes_is_forgotten_after_a_while(
    desk: Desk, versions: list[FullUpdate], make_records: Any
) -> None:
    desk.adopt()
    desk.stage(make_records(versions[0], versions[1]))
    desk.give(Order.COMMIT)
    desk.clock += 5
    assert not desk.servant.is_commit_forgotten(10)
    desk.clock += 6
    assert desk.servant.is_commit_forgotten(10)
    desk.servant.roll_back_alone()
    (answer,) = desk.servant.others()
    assert answer is not None
    assert (answer.order, answer.transaction, answer.state, answer.held) == (
        Order.WATCHDOG,
        "t",
        State.READY,
        "0.0",
    )
    assert not desk.servant.is_commit_forgotten(10)
    assert replace(answer, seconds=0.0) == replace(desk.servant.answer, seconds=0.0)  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StructureError("x"), "structure"),
        (PatchMismatchError("x"), "base_mismatch"),
        (IntegrityError("x"), "root_mismatch"),
        (RemoteProtocolError("changes-index"), "decode"),
        (StorageError("x", "unreadable"), "unreadable"),
        (LocalProtocolError("x"), "order"),
        (RuntimeError("x"), "engine"),
    ],
)
def test_each_fault_has_a_stable_code(error: Exception, code: str) -> None:
    assert name_fault(error) == code
