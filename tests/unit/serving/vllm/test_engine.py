"""The node's side of a transaction, against a stand-in for vLLM around real ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_vllm import FakeVllm, make_servant
from safetensors.torch import save_file

from pulsenet.codec.changes import Changes
from pulsenet.errors import (
    IntegrityError,
    LocalProtocolError,
    PatchMismatchError,
    PulsenetError,
    RemoteProtocolError,
    StorageError,
    StructureError,
    UnavailableError,
)
from pulsenet.ids import Digest, Version
from pulsenet.local.shared_memory import create_memory, write_at
from pulsenet.serving.engine import FullUpdate, RecordsUpdate, apply_update
from pulsenet.serving.vllm import compare as compare_module
from pulsenet.serving.vllm import engine as engine_module
from pulsenet.serving.vllm import handover as handover_module
from pulsenet.serving.vllm.compare import compare_engine
from pulsenet.serving.vllm.engine import UpdateTimes, VllmEngine, _make_error
from pulsenet.serving.vllm.exchange import PAUSED_NAME, TABLE_NAME, State
from pulsenet.serving.vllm.handover import lend_memory
from pulsenet.serving.vllm.rank import RankWeights
from pulsenet.serving.vllm.transaction import Fault

Published = Callable[..., dict[str, torch.Tensor]]
MakeRecords = Callable[[FullUpdate, FullUpdate], RecordsUpdate]
RANKS = 2


class Swarm:
    """An engine of two ranks, the node's side of it, and four versions."""

    def __init__(self, path: Path, served_model: Any, states: list[Any], make_full: Any) -> None:
        self.path, self.states = path, states
        self.served_model = served_model
        self.checkpoint = path / "checkpoint"
        self.checkpoint.mkdir()
        save_file({name: tensor.clone() for name, tensor in states[0].items()}, self.checkpoint / "m.safetensors")
        self.descriptors: list[int] = []
        self.versions = [self.lend(make_full(state, Version(0, number))) for number, state in enumerate(states)]
        self.times: list[UpdateTimes] = []
        self.boot_count = 0
        self.vllm = self.start_vllm()
        self.engine = self.start_node()

    def lend(self, update: FullUpdate) -> FullUpdate:
        """Put a version into shared memory."""
        descriptor = create_memory("test", update.region.size)
        write_at(descriptor, update.region, 0)
        self.descriptors.append(descriptor)
        return replace(update, descriptor=descriptor)

    def start_vllm(self) -> FakeVllm:
        """Start an engine from the checkpoint."""
        self.boot_count += 1
        servants = []
        for rank in range(RANKS):
            model = self.served_model(rank, RANKS)
            model.load_weights(self.states[0].items())
            servants.append(make_servant(model, rank, RANKS, self.checkpoint, boot=f"boot{self.boot_count}"))
        self.vllm = FakeVllm(servants)
        return self.vllm

    def start_node(self) -> VllmEngine:
        """Start the node's side."""
        self.engine = VllmEngine(self.vllm, self.path / "node", on_times=self.times.append, sleep=lambda seconds: None)
        return self.engine

    def kill_node(self) -> None:
        """Let the node die: its lock goes, nothing else happens."""
        os.close(self.engine._lock)

    def bits(self) -> list[Any]:
        """Return the bytes of every rank."""
        return [
            {
                name: tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
                for name, tensor in servant._weights._model.state_dict().items()
            }
            for servant in self.vllm.servants
        ]

    def is_version(self, number: int, fresh_bits: Any) -> bool:
        """Say whether every rank holds what a fresh engine would."""
        return self.bits() == [fresh_bits(self.states[number], rank, RANKS) for rank in range(RANKS)]


@pytest.fixture
def swarm(tmp_path: Path, served_model: Any, make_published: Published, make_full: Any) -> Iterator[Swarm]:
    swarm = Swarm(tmp_path, served_model, [make_published(seed) for seed in range(4)], make_full)
    yield swarm
    for descriptor in swarm.descriptors:
        os.close(descriptor)
    for servant in swarm.vllm.servants:
        servant.close()


def test_an_engine_started_from_the_version_is_taken_up_without_a_write(swarm: Swarm, fresh_bits: Any) -> None:
    assert swarm.engine.version is None
    apply_update(swarm.engine, swarm.versions[0])
    assert swarm.engine.version == Version(0, 0)
    assert "pause" not in swarm.vllm.asked
    assert swarm.vllm.weight_label == "0.0"
    assert swarm.times[-1].changed_count == 0
    assert swarm.is_version(0, fresh_bits)


def test_twenty_versions_follow_in_place(swarm: Swarm, make_records: MakeRecords, fresh_bits: Any) -> None:
    """A-APP-2, A-CACHE-2: the reset comes with the pause, before any request goes on."""
    apply_update(swarm.engine, swarm.versions[1])
    assert swarm.is_version(1, fresh_bits)
    held = swarm.versions[1]
    for number in range(20):
        following = replace(swarm.versions[number % 3], version=Version(0, 2 + number))
        del swarm.vllm.asked[:]
        apply_update(swarm.engine, make_records(held, following))
        assert swarm.vllm.asked == ["open", "stage", "pause", "commit", "close", "resume"]
        assert swarm.engine.version == following.version
        assert swarm.vllm.weight_label == str(following.version)
        assert swarm.is_version(number % 3, fresh_bits)
        held = following
    assert not swarm.vllm.is_paused
    assert not (swarm.path / "node" / PAUSED_NAME).exists()
    assert swarm.times[-1].pause_seconds > 0
    swarm.engine.read_back()


def test_staging_leaves_the_engine_serving_and_can_be_given_up(
    swarm: Swarm, make_records: MakeRecords, fresh_bits: Any
) -> None:
    apply_update(swarm.engine, swarm.versions[0])
    del swarm.vllm.asked[:]
    swarm.engine.stage(make_records(swarm.versions[0], swarm.versions[1]))
    assert swarm.engine.version == Version(0, 0)
    assert swarm.is_version(0, fresh_bits)
    swarm.engine.rollback()
    swarm.engine.rollback()
    assert swarm.vllm.asked == ["open", "stage", "rollback", "close_unchanged"]
    with pytest.raises(LocalProtocolError, match="nothing is staged"):
        swarm.engine.commit()
    swarm.engine.stage(make_records(swarm.versions[0], swarm.versions[1]))
    swarm.engine.stage(make_records(swarm.versions[0], swarm.versions[2]))
    swarm.engine.commit()
    assert swarm.is_version(2, fresh_bits)


def test_a_version_without_visible_change_needs_no_pause(swarm: Swarm, fresh_bits: Any) -> None:
    """A-ENC-6."""
    apply_update(swarm.engine, swarm.versions[0])
    first = swarm.versions[0]
    apply_update(swarm.engine, RecordsUpdate(Version(0, 0), Version(0, 1), first.root, first.table, lambda: iter(())))
    assert swarm.engine.version == Version(0, 1)
    assert swarm.vllm.weight_label == "0.1"
    assert "pause" not in swarm.vllm.asked


@pytest.mark.parametrize("order", ["stage", "commit"])
def test_one_rank_that_does_not_answer_sends_all_back(
    order: str, swarm: Swarm, make_records: MakeRecords, fresh_bits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status file is missing."""
    apply_update(swarm.engine, swarm.versions[0])
    monkeypatch.setattr(engine_module, "ANSWER_SECONDS_MAX", 1.0)
    swarm.vllm.silent[order] = 1
    with pytest.raises(UnavailableError, match=f"rank 1 of the engine did not answer '{order}'"):
        apply_update(swarm.engine, make_records(swarm.versions[0], swarm.versions[1]))
    assert swarm.engine.version == Version(0, 0)
    assert swarm.is_version(0, fresh_bits)
    assert not swarm.vllm.is_paused
    assert swarm.vllm.weight_label == "0.0"
    swarm.vllm.silent.clear()
    monkeypatch.undo()
    apply_update(swarm.engine, make_records(swarm.versions[0], swarm.versions[2]))
    assert swarm.is_version(2, fresh_bits)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_that_fails_in_the_commit_sends_all_back_and_the_next_hand_over_composes(
    rank: int, swarm: Swarm, make_records: MakeRecords, fresh_bits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A-APP-1, A-APP-3."""
    apply_update(swarm.engine, swarm.versions[0])
    commit = RankWeights.commit

    def fail_on_one(self: RankWeights) -> None:
        commit(self)
        if self is swarm.vllm.servants[rank]._weights:
            raise RuntimeError("device lost")

    monkeypatch.setattr(RankWeights, "commit", fail_on_one)
    with pytest.raises(UnavailableError, match=f"rank {rank}: device lost"):
        apply_update(swarm.engine, make_records(swarm.versions[0], swarm.versions[1]))
    monkeypatch.undo()
    assert swarm.engine.version == Version(0, 0)
    assert swarm.is_version(0, fresh_bits)
    assert not swarm.vllm.is_paused
    # What leads from the engine's version to the newest, over the version it could not take.
    apply_update(swarm.engine, make_records(swarm.versions[0], swarm.versions[2]))
    assert swarm.is_version(2, fresh_bits)


def test_ranks_that_cannot_go_back_stay_paused_until_a_full_update(
    swarm: Swarm, make_records: MakeRecords, fresh_bits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A-APP-1: never a request answered in between."""
    apply_update(swarm.engine, swarm.versions[0])

    def fail(self: RankWeights) -> None:
        self.state = State.UNKNOWN
        raise RuntimeError("device lost")

    monkeypatch.setattr(RankWeights, "commit", fail)
    with pytest.raises(UnavailableError, match="device lost; the engine's weights are unknown now"):
        apply_update(swarm.engine, make_records(swarm.versions[0], swarm.versions[1]))
    monkeypatch.undo()
    assert swarm.engine.version is None
    assert swarm.vllm.is_paused
    assert swarm.vllm.weight_label == "0.0"
    with pytest.raises(PatchMismatchError, match="an unknown version"):
        apply_update(swarm.engine, make_records(swarm.versions[0], swarm.versions[1]))
    assert swarm.vllm.is_paused
    apply_update(swarm.engine, swarm.versions[1])
    assert swarm.is_version(1, fresh_bits)
    assert not swarm.vllm.is_paused


@pytest.mark.parametrize("name", ["memory", f".partial-{PAUSED_NAME}-{os.getpid()}"], ids=["memory", "paused"])
def test_a_disk_that_refuses_a_file_leaves_the_old_version_serving(
    name: str, swarm: Swarm, make_records: MakeRecords, fresh_bits: Any
) -> None:
    apply_update(swarm.engine, swarm.versions[0])
    in_the_way = swarm.path / "node" / name
    in_the_way.mkdir()
    with pytest.raises(PulsenetError, match="Is a directory"):
        apply_update(swarm.engine, make_records(swarm.versions[0], swarm.versions[1]))
    assert swarm.engine.version == Version(0, 0)
    assert swarm.is_version(0, fresh_bits)
    assert not swarm.vllm.is_paused
    in_the_way.rmdir()
    apply_update(swarm.engine, make_records(swarm.versions[0], swarm.versions[1]))
    assert swarm.is_version(1, fresh_bits)


def test_a_disk_that_refuses_the_table_is_tried_again(swarm: Swarm, fresh_bits: Any) -> None:
    in_the_way = swarm.path / "node" / f".partial-{TABLE_NAME}-{os.getpid()}"
    in_the_way.mkdir()
    with pytest.raises(StorageError, match="table cannot be written: Is a directory"):
        apply_update(swarm.engine, swarm.versions[1])
    in_the_way.rmdir()
    apply_update(swarm.engine, swarm.versions[1])
    assert swarm.is_version(1, fresh_bits)


@pytest.mark.parametrize("call", ["open", "stage", "pause", "commit", "close"])
def test_a_request_that_fails_leaves_the_old_version_serving(
    call: str, swarm: Swarm, make_records: MakeRecords, fresh_bits: Any
) -> None:
    apply_update(swarm.engine, swarm.versions[0])
    swarm.vllm.failing[call] = UnavailableError("timed out")
    with pytest.raises(UnavailableError, match="timed out"):
        apply_update(swarm.engine, make_records(swarm.versions[0], swarm.versions[1]))
    assert swarm.engine.version == Version(0, 0)
    assert swarm.is_version(0, fresh_bits)
    assert not swarm.vllm.is_paused
    swarm.vllm.failing.clear()
    apply_update(swarm.engine, make_records(swarm.versions[0], swarm.versions[1]))
    assert swarm.is_version(1, fresh_bits)


def test_an_engine_that_does_not_resume_is_lost_and_found_again(
    swarm: Swarm, make_records: MakeRecords, fresh_bits: Any
) -> None:
    apply_update(swarm.engine, swarm.versions[0])
    swarm.vllm.failing["resume"] = UnavailableError("timed out")
    with pytest.raises(UnavailableError, match="unknown now"):
        apply_update(swarm.engine, make_records(swarm.versions[0], swarm.versions[1]))
    assert swarm.engine.version is None
    swarm.vllm.failing.clear()
    swarm.engine.probe()
    assert swarm.engine.version == Version(0, 1)
    assert not swarm.vllm.is_paused


def test_an_engine_left_paused_goes_on_when_it_turns_out_to_hold_the_version(
    swarm: Swarm, fresh_bits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write of minutes ends after the node gave it up; nothing is left to write for the next try."""
    apply_update(swarm.engine, swarm.versions[0])
    order = swarm.vllm.order

    def commit_and_hang(raw: Any) -> None:
        if raw["order"] == "commit":
            order(raw)
        if raw["order"] in ("commit", "rollback"):
            raise UnavailableError("timed out")
        if raw["order"] == "stage":
            order(raw)

    monkeypatch.setattr(swarm.vllm, "order", commit_and_hang)
    with pytest.raises(UnavailableError, match="timed out; the engine's weights are unknown now"):
        apply_update(swarm.engine, swarm.versions[1])
    monkeypatch.undo()
    assert swarm.vllm.is_paused
    assert swarm.is_version(1, fresh_bits)
    swarm.engine.probe()
    apply_update(swarm.engine, swarm.versions[1])
    assert swarm.engine.version == Version(0, 1)
    assert not swarm.vllm.is_paused
    assert not (swarm.path / "node" / PAUSED_NAME).exists()
    assert swarm.is_version(1, fresh_bits)


def test_an_engine_that_was_started_again_is_not_ready_until_it_is_attached(
    swarm: Swarm, make_records: MakeRecords, fresh_bits: Any
) -> None:
    apply_update(swarm.engine, swarm.versions[1])
    swarm.engine.probe()
    old = swarm.vllm
    new = swarm.start_vllm()
    swarm.engine._control = new
    with pytest.raises(UnavailableError, match="it was started again"):
        swarm.engine.probe()
    assert swarm.engine.version is None
    swarm.engine.probe()
    assert swarm.engine.version is None
    apply_update(swarm.engine, swarm.versions[2])
    assert swarm.is_version(2, fresh_bits)
    for servant in old.servants:
        servant.close()


def test_workers_that_were_replaced_under_an_update_are_noticed(swarm: Swarm, make_records: MakeRecords) -> None:
    """Worker killed in commit: its successor holds the checkpoint, whatever it answers."""
    apply_update(swarm.engine, swarm.versions[1])
    old = swarm.vllm

    def replace_workers(name: str) -> None:
        if name == "commit":
            swarm.start_vllm()
            old.servants[:] = swarm.vllm.servants

    old.on_call = replace_workers
    with pytest.raises(UnavailableError, match="rank 0 of the engine was started again"):
        apply_update(swarm.engine, make_records(swarm.versions[1], swarm.versions[2]))
    assert swarm.engine.version is None


def test_a_node_that_comes_back_takes_the_engine_up_where_it_is(
    swarm: Swarm, make_records: MakeRecords, fresh_bits: Any
) -> None:
    apply_update(swarm.engine, swarm.versions[1])
    swarm.engine.close()
    engine = swarm.start_node()
    assert engine.version is None
    engine.probe()
    assert engine.version == Version(0, 1)
    apply_update(engine, make_records(swarm.versions[1], swarm.versions[2]))
    assert swarm.is_version(2, fresh_bits)
    assert swarm.vllm.asked.count("attach") == 1


@pytest.mark.parametrize("dies_after", ["open", "stage", "pause", "commit", "close"])
def test_a_node_that_died_in_an_update_leaves_nothing_that_its_successor_cannot_put_right(
    dies_after: str, swarm: Swarm, make_records: MakeRecords, fresh_bits: Any
) -> None:
    """Daemon death while paused, and between start and finish."""
    apply_update(swarm.engine, swarm.versions[0])
    following = {"open": "stage", "stage": "pause", "pause": "commit", "commit": "close", "close": "resume"}

    class Killed(BaseException):
        """The node's process is gone."""

    def die(name: str) -> None:
        if name == following[dies_after]:
            raise Killed

    def bring_forward() -> None:
        swarm.engine.stage(make_records(swarm.versions[0], swarm.versions[1]))
        swarm.engine.commit()

    swarm.vllm.on_call = die
    with pytest.raises(Killed):
        bring_forward()
    swarm.vllm.on_call = lambda name: None
    swarm.kill_node()
    engine = swarm.start_node()
    engine.probe()
    number = 1 if dies_after == "close" else 0
    assert engine.version == Version(0, number)
    assert swarm.is_version(number, fresh_bits)
    assert not swarm.vllm.is_paused
    apply_update(engine, make_records(swarm.versions[number], swarm.versions[2]))
    assert swarm.is_version(2, fresh_bits)


def test_two_nodes_do_not_share_an_engine(swarm: Swarm) -> None:
    clock = iter(range(1000))
    with pytest.raises(StorageError, match="another node uses") as caught:
        VllmEngine(swarm.vllm, swarm.path / "node", monotonic=lambda: next(clock), sleep=lambda seconds: None)
    assert caught.value.reason == "locked"
    swarm.engine.close()
    swarm.start_node().close()


def test_a_directory_that_cannot_be_made_is_said(swarm: Swarm) -> None:
    (swarm.path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be used for the engine"):
        VllmEngine(swarm.vllm, swarm.path / "file" / "node")


def test_an_engine_without_a_place_for_a_tensor_is_refused(
    swarm: Swarm, make_published: Published, make_full: Any
) -> None:
    """A patch of lm_head on a tied model would be lost."""
    state = {**swarm.states[0], "head": make_published(9)["embed"]}
    untied = swarm.lend(make_full(state, Version(0, 1)))
    save_file(state, swarm.checkpoint / "m.safetensors")
    with pytest.raises(StructureError, match=r"no place for tensors of the version: 1 \(head\)"):
        apply_update(swarm.engine, untied)
    assert swarm.engine.version is None
    assert "open" not in swarm.vllm.asked


def test_an_engine_that_cannot_be_patched_is_refused_with_its_reason(swarm: Swarm) -> None:
    swarm.vllm.servants[1]._find_obstacle = lambda: "the engine quantises its weights"
    with pytest.raises(StructureError, match="rank 1: the engine quantises its weights"):
        apply_update(swarm.engine, swarm.versions[0])


def test_a_full_update_must_be_what_its_root_says_before_and_after(
    swarm: Swarm, fresh_bits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(IntegrityError, match="have root"):
        swarm.engine.stage(replace(swarm.versions[1], root=Digest(bytes(32))))
    with pytest.raises(LocalProtocolError, match="needs a descriptor"):
        swarm.engine.stage(replace(swarm.versions[1], descriptor=-1))
    region = swarm.versions[1].region.copy()
    swarm.engine.stage(replace(swarm.versions[1], region=region))
    region[0] ^= 1  # the loan was withdrawn and the mirror moved on
    with pytest.raises(IntegrityError, match="have root"):
        swarm.engine.commit()
    assert swarm.engine.version is None


def test_ranks_that_copied_memory_under_change_do_not_take_it_for_the_version(swarm: Swarm, fresh_bits: Any) -> None:
    """The mirror moved under them, and went back: the next full update is of the same root as what they believe."""
    update = swarm.versions[1]
    region = update.region.copy()
    swarm.engine.stage(replace(update, region=region))
    place = update.table.offsets[update.table.index_of("down")]
    region[place : place + 2] ^= 1
    write_at(update.descriptor, region, 0)
    with pytest.raises(IntegrityError, match="have root"):
        swarm.engine.commit()
    assert not swarm.is_version(1, fresh_bits)
    write_at(update.descriptor, update.region, 0)
    apply_update(swarm.engine, update)
    assert swarm.engine.version == Version(0, 1)
    assert swarm.is_version(1, fresh_bits)


def test_records_are_lent_by_their_descriptor_or_copied_where_that_has_no_name(
    swarm: Swarm, make_records: MakeRecords, fresh_bits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply_update(swarm.engine, swarm.versions[0])
    links: list[bool] = []

    def look(name: str) -> None:
        if name == "stage":
            links.append((swarm.path / "node" / "memory").is_symlink())
            if links[-1] and len(links) > 1:
                (swarm.path / "node" / "memory").unlink()

    swarm.vllm.on_call = look
    apply_update(swarm.engine, make_records(swarm.versions[0], swarm.versions[1]))
    apply_update(swarm.engine, make_records(swarm.versions[1], swarm.versions[2]))
    apply_update(swarm.engine, make_records(swarm.versions[2], swarm.versions[3]))
    assert links == [True, True, False, False]
    assert swarm.is_version(3, fresh_bits)
    assert not (swarm.path / "node" / "memory").exists()


def bad_records(swarm: Swarm, indices: list[int]) -> RecordsUpdate:
    table = swarm.versions[0].table
    bits = np.zeros(len(indices), dtype=np.uint16)
    changes = Changes(table.index_of("q"), np.array(indices, dtype=np.uint32), bits, bits)
    return RecordsUpdate(Version(0, 0), Version(0, 1), Digest(bytes(32)), table, lambda: iter([changes]))


@pytest.mark.parametrize("indices", [[64], [2**32 - 1], [3, 3], [4, 3]])
def test_bad_records_are_refused_by_every_rank_before_any_write(
    indices: list[int], swarm: Swarm, fresh_bits: Any
) -> None:
    """A-APP-5."""
    apply_update(swarm.engine, swarm.versions[0])
    with pytest.raises(PulsenetError, match="rank 0"):
        apply_update(swarm.engine, bad_records(swarm, indices))
    assert swarm.is_version(0, fresh_bits)
    assert "pause" not in swarm.vllm.asked
    assert swarm.engine.version == Version(0, 0)


def test_weights_that_were_changed_under_it_ask_for_a_full_load(
    swarm: Swarm, make_records: MakeRecords, fresh_bits: Any
) -> None:
    """A-APP-4: a deep sleep, or somebody else's update."""
    apply_update(swarm.engine, swarm.versions[0])
    with torch.no_grad():
        swarm.vllm.servants[1]._weights._model.down.zero_()
    with pytest.raises(PatchMismatchError, match=r"rank 1: .* positions of down do not hold the old bits"):
        apply_update(swarm.engine, make_records(swarm.versions[0], swarm.versions[1]))
    assert swarm.engine.version is None
    apply_update(swarm.engine, swarm.versions[1])
    assert swarm.is_version(1, fresh_bits)


def test_reading_back_asks_every_rank(swarm: Swarm, make_records: MakeRecords) -> None:
    with pytest.raises(LocalProtocolError, match="no version is held"):
        swarm.engine.read_back()
    apply_update(swarm.engine, swarm.versions[1])
    swarm.engine.read_back()
    assert swarm.engine.version == Version(0, 1)
    with torch.no_grad():
        swarm.vllm.servants[1]._weights._model.norm.zero_()
    with pytest.raises(IntegrityError, match=r"rank 1: .* load the engine in full"):
        swarm.engine.read_back()
    assert swarm.engine.version is None


@pytest.mark.parametrize("is_lost", [True, False])
def test_an_engine_that_slept_is_compared_as_a_whole_before_it_counts(
    is_lost: bool, swarm: Swarm, make_records: MakeRecords, fresh_bits: Any
) -> None:
    """A-APP-4: a deep sleep drops the weights, a light one keeps them; neither says so."""
    apply_update(swarm.engine, swarm.versions[0])
    apply_update(swarm.engine, make_records(swarm.versions[0], swarm.versions[1]))
    swarm.vllm.is_asleep = True
    for _ in range(2):
        with pytest.raises(UnavailableError, match="sleeps or is paused"):
            swarm.engine.probe()
        assert swarm.engine.version is None
    if is_lost:
        with torch.no_grad():
            swarm.vllm.servants[1]._weights._model.conv[0, 0] += 1
    swarm.vllm.is_asleep = False
    swarm.engine.probe()
    assert swarm.engine.version is None
    with pytest.raises(PatchMismatchError, match="an unknown version"):
        apply_update(swarm.engine, make_records(swarm.versions[1], swarm.versions[2]))
    del swarm.vllm.asked[:]
    apply_update(swarm.engine, swarm.versions[1])
    assert swarm.is_version(1, fresh_bits)
    assert swarm.engine.version == Version(0, 1)
    assert ("pause" in swarm.vllm.asked) is is_lost, "weights that are all there are not written again"
    swarm.engine.probe()
    swarm.engine.read_back()
    assert swarm.engine.version == Version(0, 1)


def test_an_engine_that_cannot_be_told_stays_doubted(swarm: Swarm, fresh_bits: Any) -> None:
    apply_update(swarm.engine, swarm.versions[0])
    swarm.vllm.is_asleep = True
    with pytest.raises(UnavailableError, match="sleeps or is paused"):
        swarm.engine.probe()
    swarm.vllm.is_asleep = False
    swarm.vllm.silent["doubt"] = 1
    with pytest.raises(UnavailableError, match="rank 1 of the engine did not answer 'doubt'"):
        swarm.engine.probe()
    swarm.vllm.silent.clear()
    swarm.engine.probe()
    assert {servant.state for servant in swarm.vllm.servants} == {State.UNKNOWN}
    apply_update(swarm.engine, swarm.versions[0])
    assert swarm.is_version(0, fresh_bits)


def test_an_engine_that_is_found_again_is_read_back_first(swarm: Swarm) -> None:
    """Nobody was there to see it sleep."""
    apply_update(swarm.engine, swarm.versions[1])
    swarm.kill_node()
    with torch.no_grad():
        swarm.vllm.servants[1]._weights._model.norm.zero_()
    swarm.start_node()
    with pytest.raises(IntegrityError, match=r"rank 1: .* load the engine in full"):
        swarm.engine.probe()
    assert swarm.engine.version is None
    swarm.engine.probe()
    assert swarm.engine.version is None


def test_an_engine_that_goes_while_it_compares_is_said_to_be_away(
    swarm: Swarm, make_records: MakeRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "PROBE_SECONDS", 0.0)
    apply_update(swarm.engine, swarm.versions[0])
    swarm.vllm.silent["stage"] = 0

    def go_away(name: str) -> None:
        swarm.vllm.failing["label"] = UnavailableError("connection refused")

    swarm.vllm.on_call = go_away
    with pytest.raises(UnavailableError, match="connection refused"):
        apply_update(swarm.engine, make_records(swarm.versions[0], swarm.versions[1]))


def test_an_update_whose_end_was_done_but_not_answered_is_the_new_version(
    swarm: Swarm, make_records: MakeRecords, fresh_bits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply_update(swarm.engine, swarm.versions[0])
    close = swarm.vllm.close

    def close_and_hang(label: str | None) -> None:
        close(label)
        if label is not None:
            raise UnavailableError("timed out")

    monkeypatch.setattr(swarm.vllm, "close", close_and_hang)
    # vLLM takes no order once the update is closed, so the roll-back is answered by nobody: the next look finds out.
    with pytest.raises(UnavailableError, match="timed out"):
        apply_update(swarm.engine, make_records(swarm.versions[0], swarm.versions[1]))
    monkeypatch.undo()
    assert swarm.vllm.is_paused
    swarm.engine.probe()
    assert swarm.engine.version == Version(0, 1)
    assert swarm.is_version(1, fresh_bits)
    assert not swarm.vllm.is_paused


def test_a_label_that_did_not_move_is_moved_once_all_ranks_say_the_version(
    swarm: Swarm, make_records: MakeRecords, fresh_bits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply_update(swarm.engine, swarm.versions[0])

    def finish_and_hang(label: str | None) -> None:
        for servant in swarm.vllm.servants:
            servant.note_open(False)
        raise UnavailableError("timed out")

    monkeypatch.setattr(swarm.vllm, "close", finish_and_hang)
    # The ranks have let go and say so to the roll-back, which vLLM still takes: it holds the update open.
    apply_update(swarm.engine, make_records(swarm.versions[0], swarm.versions[1]))
    assert swarm.engine.version == Version(0, 1)
    assert swarm.vllm.asked[-3:] == ["rollback", "set_label", "resume"]
    assert swarm.vllm.weight_label == "0.1"
    assert swarm.is_version(1, fresh_bits)


def test_an_update_that_could_not_be_closed_is_closed_before_the_next(
    swarm: Swarm, make_records: MakeRecords, fresh_bits: Any
) -> None:
    apply_update(swarm.engine, swarm.versions[0])
    swarm.engine.stage(make_records(swarm.versions[0], swarm.versions[1]))
    swarm.vllm.failing["close_unchanged"] = UnavailableError("timed out")
    swarm.engine.rollback()
    assert swarm.vllm.is_open
    swarm.vllm.failing.clear()
    apply_update(swarm.engine, make_records(swarm.versions[0], swarm.versions[2]))
    assert swarm.vllm.asked[-7:] == ["close_unchanged", "open", "stage", "pause", "commit", "close", "resume"]
    assert swarm.is_version(2, fresh_bits)


def test_an_engine_whose_ranks_disagree_or_whose_table_is_gone_is_not_taken_up(
    swarm: Swarm, make_records: MakeRecords
) -> None:
    apply_update(swarm.engine, swarm.versions[1])
    swarm.engine.close()
    directory = swarm.path / "node"
    table = (directory / "table").read_bytes()
    answers = {rank: (directory / f"rank-{rank}.json").read_bytes() for rank in range(RANKS)}
    for name, data in (("table", None), ("table", b"damaged"), ("rank-1.json", None), ("rank-0.json", None)):
        place = directory / name
        place.unlink()
        if data is not None:
            place.write_bytes(data)
        engine = swarm.start_node()
        engine.probe()
        assert engine.version is None
        engine.close()
        (directory / "table").write_bytes(table)
        for rank, answer in answers.items():
            (directory / f"rank-{rank}.json").write_bytes(answer)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("structure", StructureError),
        ("base_mismatch", PatchMismatchError),
        ("root_mismatch", IntegrityError),
        ("decode", RemoteProtocolError),
        ("damaged", StorageError),
        ("silent", UnavailableError),
    ],
)
def test_a_faults_code_becomes_its_error(code: str, error: type[PulsenetError]) -> None:
    made = _make_error(Fault(code, "why"))
    assert type(made) is error
    assert "why" in str(made)


def test_memory_shorter_than_announced_is_not_copied(swarm: Swarm) -> None:
    descriptor = create_memory("short", 8)
    update = replace(swarm.versions[0], descriptor=descriptor)
    with (
        pytest.raises(StorageError, match="shorter than announced"),
        lend_memory(update, swarm.path / "node", must_copy=True),
    ):
        pass
    os.close(descriptor)
    assert not (swarm.path / "node" / "memory").exists()


def test_records_that_find_no_memory_leave_no_descriptor(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise StorageError("no memory", "memory")

    update = bad_records(swarm, [1])
    monkeypatch.setattr(handover_module, "write_at", refuse)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(StorageError, match="no memory"), lend_memory(update, swarm.path / "node", must_copy=True):
            pass
    assert len(os.listdir("/proc/self/fd")) <= before


def save_state(swarm: Swarm, number: int) -> Path:
    """Write a version as a model directory."""
    directory = swarm.path / f"version-{number}"
    directory.mkdir()
    save_file({name: tensor.clone() for name, tensor in swarm.states[number].items()}, directory / "m.safetensors")
    return directory


def test_a_whole_engine_is_compared_with_a_model_directory_beside_its_node(
    swarm: Swarm, make_records: MakeRecords, fresh_bits: Any
) -> None:
    apply_update(swarm.engine, swarm.versions[0])
    apply_update(swarm.engine, make_records(swarm.versions[0], swarm.versions[1]))
    place = swarm.path / "node"
    assert compare_engine(swarm.vllm, place, save_state(swarm, 1)) == RANKS
    with pytest.raises(IntegrityError, match=r"rank 0: the engine holds other bits than .*version-2"):
        compare_engine(swarm.vllm, place, save_state(swarm, 2))
    # Another comparison's outcome says nothing about the engine: it serves on, and the node goes on with it.
    assert swarm.is_version(1, fresh_bits)
    apply_update(swarm.engine, make_records(swarm.versions[1], swarm.versions[3]))
    assert compare_engine(swarm.vllm, place, save_state(swarm, 3)) == RANKS
    with torch.no_grad():
        swarm.vllm.servants[1]._weights._model.bias[0] += 1
    with pytest.raises(IntegrityError, match="rank 1"):
        compare_engine(swarm.vllm, place, swarm.path / "version-3")


def test_a_comparison_that_nobody_answers_is_unavailable_and_leaves_the_engine_open_to_updates(
    swarm: Swarm, make_records: MakeRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare_module, "COMPARE_SECONDS_MAX", 0.0)
    apply_update(swarm.engine, swarm.versions[0])
    swarm.vllm.silent["compare"] = 1
    with pytest.raises(UnavailableError, match="of the engine did not answer 'compare'"):
        compare_engine(swarm.vllm, swarm.path / "node", save_state(swarm, 0))
    swarm.vllm.silent.clear()
    monkeypatch.undo()
    with pytest.raises(UnavailableError, match="no safetensors files"):
        compare_engine(swarm.vllm, swarm.path / "node", swarm.path)
    apply_update(swarm.engine, make_records(swarm.versions[0], swarm.versions[1]))
    assert swarm.engine.version == Version(0, 1)
