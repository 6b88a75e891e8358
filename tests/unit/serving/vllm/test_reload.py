"""An engine that packs its weights is loaded as a whole; what it leaves plain is compared before the label moves."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_vllm import FakeVllm, make_servant
from safetensors.torch import save_file

from pulsenet.errors import (
    IntegrityError,
    LocalProtocolError,
    PatchMismatchError,
    StorageError,
    StructureError,
    UnavailableError,
)
from pulsenet.ids import Version
from pulsenet.serving.engine import FullUpdate, RecordsUpdate, apply_update, read_back_update
from pulsenet.serving.vllm import reload as reload_module
from pulsenet.serving.vllm.engine import UpdateTimes, VllmEngine
from pulsenet.serving.vllm.exchange import PAUSED_NAME
from pulsenet.serving.vllm.reload import REHEARSED_NAME, ReloadEngine

Published = Callable[..., dict[str, torch.Tensor]]
MakeRecords = Callable[[FullUpdate, FullUpdate], RecordsUpdate]
RANKS = 2


class Party:
    """A stand-in for a vLLM of two ranks that packs some weights after it loaded them, and the node's side."""

    def __init__(
        self, path: Path, served_model: Any, states: list[Any], make_full: Any, packed: tuple[str, ...]
    ) -> None:
        class Packing(served_model):  # type: ignore[misc]
            def load_weights(self, weights: Any) -> None:
                super().load_weights(weights)
                for name in packed:
                    memory = getattr(self, name).data.view(-1)
                    memory.copy_(memory.flip(0))

        self.path, self.states, self.model = path, states, Packing
        self.checkpoint = path / "model"
        self.checkpoint.mkdir()
        (self.checkpoint / "config.json").write_text("{}")
        save_file({name: tensor.clone() for name, tensor in states[0].items()}, self.checkpoint / "m.safetensors")
        self.versions: list[FullUpdate] = [make_full(state, Version(0, number)) for number, state in enumerate(states)]
        self.times: list[UpdateTimes] = []
        self.surveys: list[tuple[int, int]] = []
        self.vllm = self.start_vllm()
        self.engine = self.start_node()

    def start_vllm(self) -> FakeVllm:
        servants = []
        for rank in range(RANKS):
            model = self.model(rank, RANKS)
            model.load_weights(self.states[0].items())
            servants.append(make_servant(model, rank, RANKS, self.checkpoint))
        self.vllm = FakeVllm(servants)
        return self.vllm

    def start_node(self) -> ReloadEngine:
        self.engine = ReloadEngine(
            self.vllm,
            self.path / "node",
            self.checkpoint,
            sleep=lambda seconds: None,
            on_times=self.times.append,
            on_survey=lambda *counts: self.surveys.append(counts),
        )
        return self.engine

    def holds(self, number: int) -> bool:
        """Say whether every rank holds what one does that was started from this version."""
        for servant in self.vllm.servants:
            fresh = self.model(servant.rank, RANKS)
            fresh.load_weights(self.states[number].items())
            held = servant._weights._model.state_dict()
            if any(
                not torch.equal(held[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
                for name, tensor in fresh.state_dict().items()
            ):
                return False
        return True

    @property
    def is_marked(self) -> bool:
        return (self.path / "node" / PAUSED_NAME).exists()

    def close(self) -> None:
        self.engine.close()
        for servant in self.vllm.servants:
            servant.close()


@pytest.fixture
def make_party(
    tmp_path: Path, served_model: Any, make_published: Published, make_full: Any
) -> Iterator[Callable[..., Party]]:
    made: list[Party] = []

    def make(*packed: str) -> Party:
        made.append(Party(tmp_path, served_model, [make_published(seed) for seed in range(3)], make_full, packed))
        return made[-1]

    yield make
    for party in made:
        party.close()


@pytest.fixture
def party(make_party: Callable[..., Party]) -> Party:
    return make_party("conv", "down")


def test_an_engine_that_refuses_patches_follows_by_loads(party: Party, make_records: MakeRecords) -> None:
    party.engine.close()
    patched = VllmEngine(party.vllm, party.path / "node")
    with pytest.raises(StructureError, match=r"2 \(conv, down\).*packs or computes them"):
        patched.stage(party.versions[0])
    patched.close()
    engine = party.start_node()
    apply_update(engine, party.versions[1])
    del party.vllm.asked[:]
    for old, new in ((1, 2), (2, 0)):
        engine.stage(make_records(party.versions[old], party.versions[new]))
        assert party.holds(old)
        assert "pause" not in party.vllm.asked
        engine.commit()
        calls = [name for name in party.vllm.asked if name not in ("label", "count_ranks")]
        assert calls == ["pause", "reload", "attach", "set_label", "resume"]
        assert party.holds(new)
        assert (engine.version, party.vllm.weight_label) == (Version(0, new), f"0.{new}")
        read_back_update(engine)
        engine.read_back()
        del party.vllm.asked[:]
    assert not party.is_marked
    assert party.times[-1].pause_seconds > 0
    (survey,) = party.surveys
    elements = sum(spec.element_count for spec in party.versions[0].table.tensors)
    assert survey[1] == elements
    assert survey[0] > 0
    assert (party.path / "node" / "reloaded" / "current" / "config.json").is_file()


def load_badly(party: Party, name: str) -> None:
    """Let the next load leave one memory of the last rank as it was."""

    def spoil(call: str) -> None:
        if call == "attach" and party.vllm.asked[-2:-1] == ["count_ranks"] and "reload" in party.vllm.asked:
            getattr(party.vllm.servants[-1]._weights._model, name).data.zero_()
            party.vllm.on_call = lambda call: None

    del party.vllm.asked[:]
    party.vllm.on_call = spoil


def test_a_load_that_went_wrong_moves_no_label_and_is_served_to_nobody(party: Party, make_records: MakeRecords) -> None:
    """A-APP-3."""
    apply_update(party.engine, party.versions[0])
    load_badly(party, "qkv")
    with pytest.raises(IntegrityError, match=r"rank 1: the engine loaded other bits .*: 3 \(k, q, v\)"):
        apply_update(party.engine, make_records(party.versions[0], party.versions[1]))
    assert (party.engine.version, party.vllm.weight_label) == (None, "0.0")
    assert party.vllm.is_paused
    party.engine.probe()
    with pytest.raises(PatchMismatchError):
        party.engine.stage(make_records(party.versions[1], party.versions[2]))
    apply_update(party.engine, party.versions[2])
    assert party.holds(2)
    assert (party.vllm.is_paused, party.is_marked) == (False, False)


def test_a_node_that_comes_after_a_bad_load_does_not_take_it_for_packed(party: Party) -> None:
    apply_update(party.engine, party.versions[0])
    load_badly(party, "qkv")
    with pytest.raises(IntegrityError):
        apply_update(party.engine, party.versions[1])
    party.engine.close()
    engine = party.start_node()
    load_badly(party, "qkv")
    with pytest.raises(IntegrityError, match="other bits than the files hold"):
        apply_update(engine, party.versions[2])
    apply_update(engine, party.versions[2])
    assert party.holds(2)


def test_a_note_of_the_rehearsal_that_cannot_be_read_is_an_error_of_the_disk(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply_update(party.engine, party.versions[0])
    party.engine.close()
    engine = party.start_node()
    read_bytes = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == REHEARSED_NAME:
            raise OSError(errno.EMFILE, "Too many open files")
        return read_bytes(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse)
        with pytest.raises(StorageError, match="Too many open files"):
            apply_update(engine, party.versions[1])
    apply_update(engine, party.versions[1])
    assert party.holds(1)


def test_an_engine_that_does_not_pause_serves_the_old_version(party: Party, make_records: MakeRecords) -> None:
    apply_update(party.engine, party.versions[0])
    party.vllm.failing["pause"] = UnavailableError("busy")
    with pytest.raises(UnavailableError, match="busy"):
        apply_update(party.engine, make_records(party.versions[0], party.versions[1]))
    assert (party.engine.version, party.is_marked) == (Version(0, 0), False)
    assert party.holds(0)
    party.vllm.failing.clear()
    apply_update(party.engine, make_records(party.versions[0], party.versions[1]))
    assert party.holds(1)


def test_a_mark_that_cannot_be_written_leaves_the_old_version_serving(party: Party, make_records: MakeRecords) -> None:
    apply_update(party.engine, party.versions[0])
    in_the_way = party.path / "node" / f".partial-{PAUSED_NAME}-{os.getpid()}"
    in_the_way.mkdir()
    with pytest.raises(StorageError, match="Is a directory"):
        apply_update(party.engine, make_records(party.versions[0], party.versions[1]))
    assert (party.engine.version, party.vllm.is_paused) == (Version(0, 0), False)
    in_the_way.rmdir()
    apply_update(party.engine, make_records(party.versions[0], party.versions[1]))
    assert party.holds(1)


def test_an_engine_of_which_nothing_can_be_compared_is_refused(make_party: Callable[..., Party]) -> None:
    everything = ("embed", "qkv", "down", "conv", "bias", "norm")
    party = make_party(*everything)
    for servant in party.vllm.servants:
        servant._weights._model.scale += 1
    with pytest.raises(StructureError, match="no load could be checked"):
        party.engine.stage(party.versions[0])


def test_an_engine_that_threw_weights_away_is_refused_before_it_is_touched(party: Party) -> None:
    """vLLM 0.32 with AMX, of latent attention; its own load fails on what is left, and leaves it without any."""
    party.vllm.servants[1]._weights._model.conv.data = torch.empty(0, dtype=torch.bfloat16)
    with pytest.raises(StructureError, match=r"another form.*nor could a load be checked: start vLLM again from"):
        party.engine.stage(party.versions[0])
    assert not {"pause", "reload"} & set(party.vllm.asked)
    assert not party.is_marked


def test_an_engine_that_packs_otherwise_when_it_loads_again_is_refused(party: Party) -> None:
    """Found before any version is loaded: afterwards nobody could compare what is packed."""

    def spoil(call: str) -> None:
        if call == "set_label" or "reload" not in party.vllm.asked:
            return
        party.vllm.servants[0]._weights._model.conv.data[0, 0] += 1

    checksums = party.vllm.checksums

    def spoilt() -> object:
        spoil("checksums")
        return checksums()

    party.vllm.checksums = spoilt  # type: ignore[method-assign]
    with pytest.raises(StructureError, match="comes out with other bits"):
        party.engine.stage(party.versions[0])
    assert party.vllm.is_paused
    assert party.is_marked


def test_an_engine_that_was_started_again_is_loaded_in_full(party: Party, make_records: MakeRecords) -> None:
    apply_update(party.engine, party.versions[1])
    for servant in party.vllm.servants:
        servant.close()
    party.start_vllm()
    party.engine._control = party.vllm
    with pytest.raises(UnavailableError, match="started again"):
        party.engine.probe()
    assert party.engine.version is None
    party.engine.probe()
    apply_update(party.engine, party.versions[1])
    assert party.holds(1)
    assert len(party.surveys) == 2


def test_an_engine_that_slept_is_loaded_in_full(party: Party) -> None:
    apply_update(party.engine, party.versions[1])
    party.vllm.is_asleep = True
    with pytest.raises(UnavailableError, match="sleeps or is paused"):
        party.engine.probe()
    party.vllm.is_asleep = False
    party.engine.probe()
    assert party.engine.version is None


def test_a_rank_that_does_not_answer_is_said(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reload_module, "ANSWER_SECONDS_MAX", 0.0)
    monkeypatch.setattr(reload_module, "PROBE_SECONDS", 0.0)
    party.vllm.silent["survey"] = 1
    with pytest.raises(UnavailableError, match="of the engine did not answer 'survey'"):
        party.engine.stage(party.versions[0])


def test_files_of_another_version_ask_for_a_full_load(party: Party, make_records: MakeRecords) -> None:
    apply_update(party.engine, party.versions[0])
    party.engine._files._version = Version(0, 7)
    with pytest.raises(PatchMismatchError, match="the files are"):
        party.engine.stage(make_records(party.versions[0], party.versions[1]))


def test_without_a_version_there_is_nothing_to_read_back(party: Party) -> None:
    for look in (party.engine.read_back, party.engine.read_back_sample):
        with pytest.raises(LocalProtocolError, match="no version is held"):
            look()
    with pytest.raises(LocalProtocolError, match="commit follows stage"):
        party.engine.commit()


def test_weights_that_changed_since_the_load_are_found(party: Party) -> None:
    apply_update(party.engine, party.versions[1])
    with torch.no_grad():
        party.vllm.servants[0]._weights._model.norm += 1
    with pytest.raises(IntegrityError, match=r"1 \(norm\)"):
        party.engine.read_back()
    assert party.engine.version is None


def test_a_directory_that_cannot_be_used_keeps_no_lock(party: Party, tmp_path: Path) -> None:
    party.engine.close()
    (tmp_path / "node" / "reloaded").rename(tmp_path / "moved")
    (tmp_path / "node" / "reloaded").write_text("in the way")
    with pytest.raises(Exception, match="cannot keep a model"):
        party.start_node()
    (tmp_path / "node" / "reloaded").unlink()
    party.start_node()
