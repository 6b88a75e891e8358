"""A tiny Llama and its tokenizer of single characters, as Hugging Face's tools take them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch

CHARACTERS: Final = "0123456789+= "
PAD, END = 0, 1


def make_model(seed: int = 7) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=2 + len(CHARACTERS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        eos_token_id=END,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def make_tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<end>", *CHARACTERS]
    characters = Tokenizer(models.WordLevel({name: place for place, name in enumerate(names)}, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<end>")


def save_checkpoint(folder: Path) -> Path:
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@torch.no_grad()
def compute_logprobs(model: Any, prompt: list[int], completion: list[int]) -> list[float]:
    """Return the log-probability of each token of a completion, at temperature 1."""
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits, -1)[range(len(completion)), completion].tolist()
