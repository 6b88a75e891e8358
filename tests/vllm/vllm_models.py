"""Tiny models with random weights, as checkpoints that vLLM loads, and versions that follow from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 256


def make_llama(*, layers: int = 2, hidden: int = 128, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return a tiny untied Llama with grouped key-value heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).to(dtype)


def make_qwen2(*, layers: int = 2, hidden: int = 128, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return a tiny Qwen2: tied head, biases on queries, keys and values."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).to(dtype)


def make_model(family: str, seed: int = 1, **settings: Any) -> Any:
    """Return a model whose outputs depend visibly on its weights."""
    torch.manual_seed(seed)
    model = {"llama": make_llama, "qwen2": make_qwen2}[family](**settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(1.0 if "norm" in name else 3.0)
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model


def save_checkpoint(model: Any, directory: Path) -> Path:
    """Write a model directory that vLLM starts from, and return it."""
    model.save_pretrained(directory, safe_serialization=True)
    return directory


def change_weights(model: Any, seed: int, *, density: float = 0.02) -> None:
    """Move to the next version: some weights of every tensor take other bits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.view(-1)
            count = max(1, int(density * flat.numel()))
            positions = torch.randperm(flat.numel(), generator=generator)[:count]
            noise = 1 + 0.3 * torch.randn(count, generator=generator)
            flat[positions] = (flat[positions].float() * noise + 0.01).to(flat.dtype)
