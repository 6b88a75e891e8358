"""Patches for SGLang's live weights, on a stand-in of its HTTP surface and of how its workers call a custom loader.

The stand-in keeps the rules of SGLang 0.5.23's sources: a session around the call, tensors that are unpickled with a
list of allowed names, a loader that is called only while nothing is computed. Never run on SGLang itself.
"""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pulsenet.codec.changes import Changes
from pulsenet.errors import IntegrityError, PatchMismatchError, StructureError, UnavailableError
from pulsenet.ids import Version
from pulsenet.local.shared_memory import create_memory, write_at
from pulsenet.serving import sglang_hook, sglang_live
from pulsenet.serving.engine import FullUpdate, RecordsUpdate, apply_update
from pulsenet.serving.sglang_hook import RankHook
from pulsenet.serving.sglang_live import BACKGROUND_NAME, HOOK, SglangControl, SglangPatchEngine, encode_order
from pulsenet.serving.vllm.exchange import PAUSED_NAME, State

MakeFull = Callable[[Mapping[str, torch.Tensor], Version], FullUpdate]
MakeRecords = Callable[[FullUpdate, FullUpdate], RecordsUpdate]
HIDDEN = 8
PAUSE, RESUME = ("/pause_generation", {"mode": "retract"}), ("/continue_generation", {})


class FusedModel(torch.nn.Module):
    """One rank of a layer whose loader fuses and shards, as an engine's does."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.rows = rank, HIDDEN // ranks
        self.qkv = torch.nn.Parameter(torch.zeros(3 * self.rows, HIDDEN, dtype=torch.bfloat16), requires_grad=False)
        self.norm = torch.nn.Parameter(torch.zeros(HIDDEN), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "norm":
                self.norm.data.copy_(tensor)
            else:
                part = tensor[self.rank * self.rows : (self.rank + 1) * self.rows]
                self.qkv.data.narrow(0, "qkv".index(name) * self.rows, self.rows).copy_(part)


def make_state(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(HIDDEN, HIDDEN, generator=generator).to(torch.bfloat16) for name in "qkv"}
    return {**state, "norm": torch.randn(HIDDEN, generator=generator)}


class AllowList(pickle.Unpickler):
    """Reads what SGLang's workers read."""

    def find_class(self, module: str, name: str) -> Any:
        assert (module, name) == ("torch", "ByteTensor")
        return torch.ByteTensor


class LiveSglang:
    """SGLang's routes for updates, in front of workers that are ``models``."""

    def __init__(self, sglang: Any, states: list[Mapping[str, torch.Tensor]], path: Path, ranks: int) -> None:
        self.fake = sglang
        sglang.answer = self.answer
        self.checkpoint = path / "model"
        self.checkpoint.mkdir()
        save_file(dict(states[0]), self.checkpoint / "model.safetensors")
        self.models = [FusedModel(rank, ranks) for rank in range(ranks)]
        for model in self.models:
            model.load_weights(states[0].items())
        self.hooks = [RankHook(lambda rank=rank: (rank, ranks)) for rank in range(ranks)]  # type: ignore[misc]
        self.settings: dict[str, Any] = {"tp_size": ranks, "pp_size": 1, "custom_weight_loader": [HOOK]}
        self.model_path = str(self.checkpoint)
        self.session: str | None = None
        self.is_in_place = False
        self.flush_count = 0
        self.call: Callable[[int, torch.nn.Module, list[Any]], None] = lambda rank, model, tensors: self.hooks[rank](
            model, tensors
        )

    @property
    def routes(self) -> list[str]:
        return [path for path, _ in self.fake.asked]

    def bits(self) -> list[bytes]:
        return [
            b"".join(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in model.parameters())
            for model in self.models
        ]

    def answer(self, path: str, body: Any) -> tuple[int, bytes]:
        match path:
            case "/server_info":
                return 200, json.dumps(self.settings).encode()
            case "/model_info":
                return 200, json.dumps({"weight_version": self.fake.label, "model_path": self.model_path}).encode()
            case "/update_weight_version" if body["abort_all_requests"] is False:
                self.fake.label = body["new_version"]
                return 200, b'{"success": true}'
            case "/pause_generation":
                self.fake.is_paused, self.is_in_place = True, body["mode"] == "in_place"
                return 200, b"{}"
            case "/continue_generation":
                self.fake.is_paused = False
                return 200, b"{}"
            case "/begin_weight_update" if self.session is None and self.fake.is_paused:
                self.session = body["selector"]
                return 200, b'{"success": true}'
            case "/end_weight_update" if self.session is not None:
                self.session = None
                return 200, b'{"success": true}'
            case "/update_weights_from_tensor" if self.session == "target" and body["load_format"] == HOOK:
                return self._load(body)
        return 400, b'{"success": false, "message": "against the rules"}'

    def _load(self, body: Any) -> tuple[int, bytes]:
        if body["flush_cache"] and self.is_in_place:
            return 400, b'{"success": false, "message": "the cache was not flushed"}'
        self.flush_count += body["flush_cache"]
        for rank, model in enumerate(self.models):
            data = base64.b64decode(body["serialized_named_tensors"][rank])
            named = [(name, tensor.to("cpu")) for name, tensor in AllowList(io.BytesIO(data)).load()]
            self.call(rank, model, named)
        return 200, b'{"success": true}'

    def close(self) -> None:
        for hook in self.hooks:
            hook.close()


class Party:
    """An SGLang of some ranks, the node's side of it, and three versions."""

    def __init__(self, sglang: Any, path: Path, make_full: MakeFull, ranks: int) -> None:
        self.states = [make_state(seed) for seed in range(3)]
        self.sglang = LiveSglang(sglang, self.states, path, ranks)
        self.directory = path / "node"
        self.descriptors: list[int] = []
        self.versions = [self._lend(make_full(state, Version(0, number))) for number, state in enumerate(self.states)]
        self.engine = self.start_node()

    def _lend(self, update: FullUpdate) -> FullUpdate:
        descriptor = create_memory("test", update.region.size)
        write_at(descriptor, update.region, 0)
        self.descriptors.append(descriptor)
        return replace(update, descriptor=descriptor)

    def start_node(self) -> SglangPatchEngine:
        self.engine = SglangPatchEngine(self.sglang.fake.url, self.directory)
        return self.engine

    def fresh(self, number: int) -> list[bytes]:
        """Return the bits of workers that loaded a version the ordinary way."""
        models = [FusedModel(model.rank, len(self.sglang.models)) for model in self.sglang.models]
        for model in models:
            model.load_weights(self.states[number].items())
        return [
            b"".join(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in model.parameters())
            for model in models
        ]

    def close(self) -> None:
        self.sglang.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


@pytest.fixture(params=[1, 2])
def party(request: pytest.FixtureRequest, sglang: Any, tmp_path: Path, make_full: MakeFull) -> Iterator[Party]:
    made = Party(sglang, tmp_path, make_full, request.param)
    yield made
    made.close()


def test_patches_go_into_the_live_weights_while_requests_wait_for_the_scatter_only(
    party: Party, make_records: MakeRecords
) -> None:
    sglang, engine, versions = party.sglang, party.engine, party.versions
    addresses = [tensor.data_ptr() for model in sglang.models for tensor in model.parameters()]
    apply_update(engine, versions[0])
    assert (engine.version, sglang.fake.label, sglang.fake.is_paused) == (Version(0, 0), "0.0", False)
    assert sglang.flush_count == 0, "the engine was started from this version: nothing changed"
    for number in (1, 2):
        sglang.fake.asked.clear()
        engine.stage(make_records(versions[number - 1], versions[number]))
        assert not set(sglang.routes) - {"/model_info"}, "staging stops nobody"
        assert sglang.bits() == party.fresh(number - 1)
        engine.commit()
        called = [(path, body) for path, body in sglang.fake.asked if path != "/model_info"]
        assert called[0] == PAUSE
        assert [path for path, _ in called[1:4]] == [
            "/begin_weight_update",
            "/update_weights_from_tensor",
            "/end_weight_update",
        ]
        assert called[2][1]["flush_cache"] is True, "keys and values of the old weights go"
        assert called[4:] == [
            ("/update_weight_version", {"new_version": f"0.{number}", "abort_all_requests": False}),
            RESUME,
        ]
        assert sglang.bits() == party.fresh(number)
        engine.read_back()
    assert (engine.version, sglang.fake.is_paused) == (Version(0, 2), False)
    assert [tensor.data_ptr() for model in sglang.models for tensor in model.parameters()] == addresses


def test_a_full_update_replaces_everything(party: Party) -> None:
    apply_update(party.engine, party.versions[2])
    assert party.sglang.bits() == party.fresh(2)
    assert (party.engine.version, party.sglang.fake.label) == (Version(0, 2), "0.2")


def test_records_that_do_not_fit_are_refused_while_the_engine_serves(party: Party) -> None:
    apply_update(party.engine, party.versions[0])
    following = party.versions[1]
    wrong = Changes(0, np.array([0], np.uint32), np.array([7], np.uint16), np.array([8], np.uint16))
    party.sglang.fake.asked.clear()
    with pytest.raises(PatchMismatchError, match="do not hold the old bits"):
        apply_update(
            party.engine,
            RecordsUpdate(Version(0, 0), following.version, following.root, following.table, lambda: iter([wrong])),
        )
    assert PAUSE[0] not in party.sglang.routes
    assert party.sglang.bits() == party.fresh(0)


def test_a_rank_that_fails_in_the_commit_sends_all_back(
    party: Party, make_records: MakeRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply_update(party.engine, party.versions[0])
    servant = party.sglang.hooks[-1].servant
    assert servant is not None
    with monkeypatch.context() as patch:
        patch.setattr(servant._weights, "commit", lambda: (_ for _ in ()).throw(IntegrityError("a flipped bit")))
        with pytest.raises(IntegrityError, match="a flipped bit"):
            apply_update(party.engine, make_records(party.versions[0], party.versions[1]))
    assert (party.engine.version, party.sglang.fake.label) == (Version(0, 0), "0.0")
    assert (party.sglang.bits(), party.sglang.fake.is_paused) == (party.fresh(0), False)
    apply_update(party.engine, make_records(party.versions[0], party.versions[2]))
    assert party.sglang.bits() == party.fresh(2)


def test_a_cache_that_is_not_dropped_sends_all_back(
    party: Party, make_records: MakeRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A-CACHE-1: SGLang writes first and says only then that the cache was not flushed."""
    apply_update(party.engine, party.versions[0])
    load = party.sglang._load

    def load_and_refuse(body: Any) -> tuple[int, bytes]:
        load(body)
        party.sglang.__dict__.pop("_load")
        return 400, b'{"success": false, "message": "Weights were updated, but the cache was not flushed"}'

    party.sglang.__dict__["_load"] = load_and_refuse
    with pytest.raises(UnavailableError, match="cache was not flushed"):
        apply_update(party.engine, make_records(party.versions[0], party.versions[1]))
    assert (party.engine.version, party.sglang.fake.is_paused) == (Version(0, 0), False)
    assert party.sglang.bits() == party.fresh(0)


def test_a_node_that_dies_while_sglang_is_paused_holds_nobody_up(party: Party, make_records: MakeRecords) -> None:
    """A-APP-1: the workers put the commit back and resume; the next node takes the engine up where it is."""
    apply_update(party.engine, party.versions[0])
    party.engine.stage(make_records(party.versions[0], party.versions[1]))
    ended = threading.Event()

    def die(path: str, body: Any) -> tuple[int, bytes]:
        if path == "/update_weight_version":
            raise SystemExit
        status, reply = LiveSglang.answer(party.sglang, path, body)
        if path == "/end_weight_update":
            ended.set()
        return status, reply

    party.sglang.fake.answer = die
    # The node stops after the write: its commit is never finished, its lock goes.
    control = party.engine._control
    control.close = lambda label: (_ for _ in ()).throw(SystemExit)  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        party.engine.commit()
    assert ended.is_set()
    assert party.sglang.fake.is_paused
    os.close(party.engine._lock)
    party.sglang.fake.answer = party.sglang.answer
    for hook in reversed(party.sglang.hooks):
        assert hook.watchdog is not None
        assert hook.watchdog.is_node_gone()
        hook.watchdog.look()
    party.sglang.hooks[0].watchdog.look()  # type: ignore[union-attr]
    assert not party.sglang.fake.is_paused
    assert not (party.directory / PAUSED_NAME).exists()
    assert party.sglang.bits() == party.fresh(0)
    engine = party.start_node()
    engine.probe()
    assert engine.version == Version(0, 0)
    apply_update(engine, make_records(party.versions[0], party.versions[1]))
    assert party.sglang.bits() == party.fresh(1)


def test_workers_that_were_started_again_are_attached_anew(party: Party, make_records: MakeRecords) -> None:
    apply_update(party.engine, party.versions[1])
    ranks = len(party.sglang.models)
    for hook in party.sglang.hooks:
        hook.close()
    party.sglang.hooks = [RankHook(lambda rank=rank: (rank, ranks)) for rank in range(ranks)]  # type: ignore[misc]
    party.sglang.models = [FusedModel(rank, ranks) for rank in range(ranks)]
    for model in party.sglang.models:
        model.load_weights(party.states[0].items())
    party.sglang.fake.label = "default"
    with pytest.raises(UnavailableError, match="started again"):
        party.engine.probe()
    (party.directory / BACKGROUND_NAME).write_text('{"id": "stale", "what": "close"}')
    apply_update(party.engine, party.versions[2])
    assert party.sglang.bits() == party.fresh(2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"custom_weight_loader": []}, "--custom-weight-loader pulsenet.serving.sglang_hook.load_weights"),
        ({"pp_size": 2}, "2 pipeline stages"),
        ({"dp_size": 2}, "2 replicas"),
        ({"nnodes": 2}, "2 machines"),
        ({"quantization": "fp8"}, "quantises its weights"),
        ({"speculative_algorithm": "EAGLE"}, "draft model"),
        ({"lora_paths": ["a"]}, "LoRA"),
    ],
)
def test_an_sglang_that_cannot_be_patched_is_refused(changes: dict[str, Any], reason: str, party: Party) -> None:
    party.sglang.settings |= changes
    with pytest.raises(StructureError, match=reason):
        party.engine.stage(party.versions[0])
    assert party.sglang.routes == ["/server_info"]


def test_a_model_that_is_not_on_this_machine_is_refused(party: Party) -> None:
    party.sglang.model_path = "org/model"
    with pytest.raises(StructureError, match="from a model directory"):
        party.engine.stage(party.versions[0])


def test_a_rank_that_takes_no_order_is_not_waited_for_for_ever(party: Party) -> None:
    control = SglangControl(party.sglang.fake.url, party.directory, acknowledge_seconds_max=0.0)
    with pytest.raises(UnavailableError, match=r"rank 0 of SGLang .* takes no order"):
        control.open()
    assert not (party.directory / BACKGROUND_NAME).exists()


def test_sglang_that_is_gone_is_seen_while_an_order_waits(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_live, "PROBE_SECONDS", 0.0)
    control = SglangControl(party.sglang.fake.url, party.directory)
    party.sglang.fake.faults["/model_info"] = 500, b"dead"
    with pytest.raises(UnavailableError, match="500: dead"):
        control.open()


def test_an_order_is_the_pickle_that_sglang_reads() -> None:
    order = {"order": "attach", "directory": "/dev/shm/ü", "size_bytes": 1 << 40}
    ((name, tensor),) = AllowList(io.BytesIO(base64.b64decode(encode_order(order)))).load()
    assert name == sglang_live.ORDER_NAME
    assert tensor.dtype == torch.uint8
    assert json.loads(bytes(tensor.tolist())) == order


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [("weight", torch.zeros(3))],
        [(sglang_live.ORDER_NAME, torch.tensor(list(b"no json"), dtype=torch.uint8))],
        [(sglang_live.ORDER_NAME, torch.tensor(list(b"{}"), dtype=torch.uint8))],
    ],
)
def test_a_loader_that_is_given_anything_else_says_so_and_never_raises(
    tensors: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """SGLang does not catch what a loader raises: its worker would end."""
    hook = RankHook(lambda: (0, 1))
    hook(FusedModel(0, 1), tensors)
    assert "something else than an order" in capsys.readouterr().out
    hook.close()


def test_a_draft_model_is_not_patched(party: Party, capsys: pytest.CaptureFixture[str]) -> None:
    apply_update(party.engine, party.versions[0])
    order = json.dumps({"order": "commit"}).encode()
    party.sglang.hooks[0](FusedModel(0, 1), [(sglang_live.ORDER_NAME, torch.tensor(list(order), dtype=torch.uint8))])
    assert "a second model" in capsys.readouterr().out
    assert party.sglang.bits() == party.fresh(0)


def test_an_order_in_the_background_that_is_damaged_is_said_aloud(
    party: Party, capsys: pytest.CaptureFixture[str]
) -> None:
    apply_update(party.engine, party.versions[0])
    hook = party.sglang.hooks[0]
    hook._stop.set()
    hook._thread.join()  # type: ignore[union-attr]
    (party.directory / BACKGROUND_NAME).write_text('{"id": "1", "what": "dance"}')
    hook.look()
    assert "an order of the node is damaged" in capsys.readouterr().out
    hook.look()
    assert capsys.readouterr().out == ""
    assert hook.servant is not None
    assert hook.servant.state is State.READY


def test_sglang_finds_the_loader_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As SGLang's ``dynamic_import`` does: everything before the last dot is the module."""
    module, _, name = HOOK.rpartition(".")
    taken: list[Any] = []
    monkeypatch.setattr(sglang_hook, "_HOOK", lambda *arguments: taken.append(arguments))
    getattr(import_module(module), name)("model", [])
    assert taken == [("model", [])]


def test_a_worker_alone_is_rank_zero() -> None:
    assert sglang_hook.find_place() == (0, 1)
