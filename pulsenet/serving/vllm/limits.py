"""Engines that cannot be patched in place, and why; said before anything is drawn or written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pulsenet.errors import StorageError


def find_obstacle(vllm_config: Any, model: torch.nn.Module) -> str:
    """Return why this engine's weights cannot be patched, or an empty text.

    Args:
        vllm_config: vLLM's whole configuration.
        model: One rank's model.
    """
    model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
    if model_config.quantization is not None:
        return f"the engine quantises its weights ({model_config.quantization}): start it without --quantization"
    if getattr(model_config, "use_mla", False):
        return "the model uses multi-head latent attention, of which vLLM keeps derived copies that a patch misses"
    if parallel.data_parallel_size > 1:
        return "the engine runs data-parallel: start one engine per replica, each with its own node"
    if getattr(vllm_config, "lora_config", None) is not None:
        return "the engine serves LoRA adapters, with which patches were never tested: start it without --enable-lora"
    packed = [name for name, module in model.named_modules() if _keeps_packed_copy(module)]
    if packed:
        return (
            f"vLLM computes with packed copies of {len(packed)} layers (first {packed[0]}): start the engine with "
            "pulsenet installed beside it and VLLM_PLUGINS unset or naming pulsenet"
        )
    return ""


def _keeps_packed_copy(module: torch.nn.Module) -> bool:
    """Say whether vLLM's CPU backend multiplies by something else than the module's weight."""
    multiply = getattr(module, "cpu_linear", None)
    return multiply is not None and multiply is not torch.nn.functional.linear


def find_checkpoint(model_config: Any) -> Path:
    """Return the directory of the safetensors files that the engine was started from.

    Raises:
        StorageError: They are not on this machine.
    """
    model = str(model_config.model)
    if Path(model).is_dir():
        return Path(model)
    try:
        from huggingface_hub import snapshot_download

        found = snapshot_download(model, revision=model_config.revision, local_files_only=True)
    except Exception as error:
        raise StorageError(
            f"the checkpoint of {model} is not on this machine ({error}): start the engine from a directory"
        ) from error
    return Path(found)
