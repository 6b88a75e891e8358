"""What vLLM calls when it starts, with stand-ins for the modules it touches."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from pulsenet.serving.vllm import plugin


class Factory:
    """vLLM's registry, which refuses a name twice."""

    def __init__(self) -> None:
        self._registry: dict[str, tuple[str, str]] = {}

    def register_engine(self, name: str, module: str, kind: str) -> None:
        if name in self._registry:
            raise ValueError(f"{name} is already registered")
        self._registry[name] = module, kind


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return a stand-in for vLLM: its registry, its layers, and the configuration of the engine being loaded."""
    packed: list[Any] = []

    def pack(layer: Any, remove_weight: bool) -> None:
        packed.append((layer, remove_weight))

    factory = Factory()
    state = SimpleNamespace(factory=factory, packed=packed, config=None)
    layers = SimpleNamespace(dispatch_cpu_unquantized_gemm=pack)
    state.layers = layers
    modules = {
        "vllm.distributed.weight_transfer.factory": SimpleNamespace(WeightTransferEngineFactory=factory),
        "vllm.model_executor.layers.utils": layers,
        "vllm.config": SimpleNamespace(get_current_vllm_config_or_none=lambda: state.config),
        "torch": torch,
    }
    monkeypatch.setattr(plugin.importlib, "import_module", modules.__getitem__)
    return state


def test_registering_twice_is_registering_once(vllm: SimpleNamespace) -> None:
    """vLLM may load plugins several times in one process."""
    plugin.register()
    once = vllm.layers.dispatch_cpu_unquantized_gemm
    plugin.register()
    assert vllm.factory._registry == {"pulsenet": ("pulsenet.serving.vllm.worker", "PulsenetTransferEngine")}
    assert vllm.layers.dispatch_cpu_unquantized_gemm is once


@pytest.mark.parametrize("module", [None, SimpleNamespace()])
def test_a_vllm_without_the_interface_starts_all_the_same(
    module: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def import_module(name: str) -> Any:
        if module is None:
            raise ImportError(f"No module named {name!r}")
        return module

    monkeypatch.setattr(plugin.importlib, "import_module", import_module)
    plugin.register()
    assert "releases from 0.29 to 0.32" in caplog.text


@pytest.mark.parametrize(
    ("config", "is_plain"),
    [
        (None, False),
        (SimpleNamespace(weight_transfer_config=None), False),
        (SimpleNamespace(weight_transfer_config=SimpleNamespace(backend="nccl")), False),
        (SimpleNamespace(weight_transfer_config=SimpleNamespace(backend="pulsenet")), True),
    ],
)
def test_linear_weights_stay_plain_only_where_the_adapter_is_selected(
    config: Any, is_plain: bool, vllm: SimpleNamespace
) -> None:
    plugin.register()
    vllm.config = config
    layer = SimpleNamespace(weight=torch.zeros(2, 2))
    vllm.layers.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    assert (getattr(layer, "cpu_linear", None) is torch.nn.functional.linear) == is_plain
    assert vllm.packed == ([] if is_plain else [(layer, True)])


def test_weights_of_other_shapes_are_left_to_vllm(vllm: SimpleNamespace) -> None:
    plugin.register()
    vllm.config = SimpleNamespace(weight_transfer_config=SimpleNamespace(backend="pulsenet"))
    layer = SimpleNamespace(weight=torch.zeros(2, 1, 4))
    vllm.layers.dispatch_cpu_unquantized_gemm(layer, True)
    assert vllm.packed == [(layer, True)]


def test_a_release_without_packing_needs_nothing() -> None:
    layers = SimpleNamespace()
    plugin.keep_linear_weights_plain(layers, lambda: True)
    assert vars(layers) == {}


class Handle:
    """Answers any name, as numba's handle of LLVM does."""

    __slots__ = ()

    def __getattr__(self, name: str) -> str:
        return f"function {name}"


def test_a_handle_that_answers_any_name_has_no_dictionary_any_more() -> None:
    handle = Handle()
    assert hasattr(handle, "__dict__")
    ffi = ModuleType("llvmlite.binding.ffi")
    ffi.lib = handle  # type: ignore[attr-defined]
    for _ in range(2):
        plugin.hide_dictionary_of_llvm({"llvmlite.binding.ffi": ffi})
    assert not hasattr(handle, "__dict__")
    assert handle.LLVMPY_Anything == "function LLVMPY_Anything"
    plugin.hide_dictionary_of_llvm({})


def test_vllms_processes_load_no_compiler_for_it() -> None:
    """Every process of every vLLM on a machine with pulsenet loads the plugin, used or not."""
    code = "import sys, pulsenet.serving.vllm.plugin; sys.exit('numba' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
