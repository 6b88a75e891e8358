"""What vLLM calls in each of its processes, because this package names it under ``vllm.general_plugins``."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Mapping
from typing import Any, Final

BACKEND: Final = "pulsenet"
"""``--weight-transfer-config '{"backend": "pulsenet"}'`` selects the adapter."""

WORKER_MODULE: Final = "pulsenet.serving.vllm.worker"
WORKER_CLASS: Final = "PulsenetTransferEngine"


def register() -> None:
    """Make the adapter known to vLLM, and keep linear weights of its users plain. A second call does nothing.

    A vLLM without the interface starts as if nothing were installed: an error here would end it, used or not.
    """
    try:
        factory = importlib.import_module("vllm.distributed.weight_transfer.factory").WeightTransferEngineFactory
    except (ImportError, AttributeError) as error:
        logging.getLogger("pulsenet").warning(
            "this vLLM takes no weights from pulsenet (%s): releases from 0.29 to 0.32 do", error
        )
        return
    if BACKEND not in factory._registry:
        factory.register_engine(BACKEND, WORKER_MODULE, WORKER_CLASS)
    hide_dictionary_of_llvm(sys.modules)
    keep_linear_weights_plain(importlib.import_module("vllm.model_executor.layers.utils"), _is_selected)


def keep_linear_weights_plain(layers: Any, is_selected: Any) -> None:
    """Let linear layers on a CPU multiply by the weights as they were loaded, where the adapter is selected.

    vLLM packs them for oneDNN and drops the originals, and nothing could be patched in place.

    Args:
        layers: Module ``vllm.model_executor.layers.utils``.
        is_selected: Says whether the engine being loaded uses the adapter.
    """
    packing = getattr(layers, "dispatch_cpu_unquantized_gemm", None)
    if packing is None or getattr(packing, "is_pulsenet", False):
        return

    def choose(layer: Any, remove_weight: bool) -> None:
        if is_selected() and layer.weight.ndim == 2:
            layer.cpu_linear = importlib.import_module("torch").nn.functional.linear
            return
        packing(layer, remove_weight)

    choose.is_pulsenet = True  # type: ignore[attr-defined]
    layers.dispatch_cpu_unquantized_gemm = choose


def hide_dictionary_of_llvm(modules: Mapping[str, Any]) -> None:
    """Let vLLM look through a process that has numba in it already.

    It reads the dictionary of every object of every module; numba's handle of LLVM answers any name, that one too, with
    something that is no dictionary, and the engine does not start.
    """
    kind: Any = type(getattr(modules.get("llvmlite.binding.ffi"), "lib", None))
    answer = getattr(kind, "__getattr__", None)
    if answer is None or getattr(answer, "is_pulsenet", False):
        return

    def answer_names(self: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return answer(self, name)

    answer_names.is_pulsenet = True  # type: ignore[attr-defined]
    kind.__getattr__ = answer_names


def _is_selected() -> bool:
    """Say whether the engine that is being loaded in this process uses the adapter."""
    config = importlib.import_module("vllm.config").get_current_vllm_config_or_none()
    transfer = getattr(config, "weight_transfer_config", None)
    return transfer is not None and transfer.backend == BACKEND
