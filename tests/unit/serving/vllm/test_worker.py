"""The class that vLLM makes in each worker, with stand-ins for the two modules of vLLM that it imports."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pulsenet.ids import Version
from pulsenet.serving.vllm.exchange import Order, State, UpdateInfo, read_answer

Published = Callable[..., dict[str, torch.Tensor]]


class WeightTransferEngine:
    """vLLM's base class, as far as the adapter leans on it."""

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model


@pytest.fixture
def worker_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import the worker's module as vLLM's worker would."""
    seen: list[Any] = []

    @contextmanager
    def set_current_vllm_config(config: Any) -> Iterator[None]:
        seen.append(config)
        yield

    names = ("vllm", "vllm.config", "vllm.distributed", "vllm.distributed.weight_transfer")
    for name in (*names, "vllm.distributed.weight_transfer.base"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm.config"].set_current_vllm_config = set_current_vllm_config  # type: ignore[attr-defined]
    base: Any = sys.modules["vllm.distributed.weight_transfer.base"]
    base.WeightTransferEngine = WeightTransferEngine
    monkeypatch.delitem(sys.modules, "pulsenet.serving.vllm.worker", raising=False)
    module: Any = importlib.import_module("pulsenet.serving.vllm.worker")
    module.seen_configs = seen
    yield module
    sys.modules.pop("pulsenet.serving.vllm.worker", None)


@pytest.fixture
def transfer(
    worker_module: Any, served_model: Any, make_published: Published, make_full: Any, tmp_path: Path
) -> Iterator[Any]:
    """Make one worker's engine, and the node's directory beside it."""
    state = make_published(0)
    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    save_file({name: tensor.clone() for name, tensor in state.items()}, checkpoint / "model.safetensors")
    model = served_model()
    model.load_weights(state.items())
    config = SimpleNamespace(
        model_config=SimpleNamespace(model=str(checkpoint), revision=None, quantization=None, use_mla=False),
        parallel_config=SimpleNamespace(rank=0, world_size=1, data_parallel_size=1),
        lora_config=None,
    )
    transfer = worker_module.PulsenetTransferEngine(object(), config, torch.device("cpu"), model)
    transfer.node = tmp_path / "node"
    transfer.node.mkdir(mode=0o700)
    transfer.versions = [make_full(make_published(seed), Version(0, seed)) for seed in range(2)]
    (transfer.node / "table").write_bytes(transfer.versions[0].table.encode())
    yield transfer
    transfer.shutdown()


def order(transfer: Any, kind: Order, **values: Any) -> dict[str, Any]:
    return UpdateInfo(kind, "t", str(transfer.node), **values).to_json()


def test_orders_come_by_vllms_calls_and_answers_go_to_files(transfer: Any, worker_module: Any) -> None:
    info = order(transfer, Order.ATTACH, engine_url="http://127.0.0.1:1")
    transfer.init_transfer_engine(transfer.parse_init_info(info))
    transfer.start_weight_update()
    assert worker_module.seen_configs == [transfer.vllm_config], "the loader runs under vLLM's configuration"
    first = transfer.versions[0]
    (transfer.node / "memory").write_bytes(first.region.tobytes())
    staged = order(transfer, Order.STAGE, version="0.0", root=first.root.hex(), size_bytes=first.region.size)
    transfer.update_weights(staged)
    transfer.receive_weights(order(transfer, Order.COMMIT))
    transfer.finish_weight_update()
    answer = read_answer(transfer.node, 0)
    assert answer is not None
    assert (answer.order, answer.state, answer.held, answer.is_open) == (Order.FINISH, State.READY, "0.0", False)
    watchdog = transfer._watchdog
    transfer.init_transfer_engine(info)
    assert transfer._watchdog is watchdog, "one watchdog, however often a node attaches"


def test_nothing_is_raised_inside_a_collective_call(transfer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for damaged in ({}, {"order": "dance"}, order(transfer, Order.COMMIT) | {"directory": "/nowhere"}):
        transfer.update_weights(damaged)
        transfer.init_transfer_engine(transfer.parse_init_info(damaged))
    transfer.start_weight_update()
    transfer.finish_weight_update()
    transfer.update_weights(order(transfer, Order.COMMIT))
    answer = read_answer(transfer.node, 0)
    assert answer is not None
    assert answer.code == "order"
    assert capsys.readouterr().out.count("cannot be answered") == 6


def test_weights_are_never_sent_by_an_engine(transfer: Any) -> None:
    with pytest.raises(NotImplementedError, match="from the node"):
        transfer.trainer_send_weights()


def test_a_device_is_waited_for_and_a_cpu_is_not(worker_module: Any) -> None:
    assert worker_module._choose_synchronize(torch.device("cuda")) is torch.accelerator.synchronize
    worker_module._choose_synchronize(torch.device("cpu"))()
