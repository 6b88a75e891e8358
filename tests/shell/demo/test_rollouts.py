"""Sampled groups: shapes, endings, seeds, and log-probabilities that the model confirms."""

import numpy as np
import pytest
import torch

from pulsenetd.demo import models, rollouts
from pulsenetd.demo.rollouts import Sampler, Samples, pad_left, positions_of
from pulsenetd.demo.task import Question

QUESTIONS = (Question(3, 4), Question(31, 18), Question(5, 40))


def sample(seed: int) -> Samples:
    model, tokenizer = models.load_masters("tiny")
    sampler = Sampler(models.copy_module(model, torch.bfloat16), tokenizer, seed=seed)
    sampler.refresh()
    return sampler.sample(QUESTIONS, group_size=4, completion_tokens_max=5)


def test_groups_stand_together_and_every_sample_is_scored() -> None:
    samples = sample(1)
    _, tokenizer = models.load_masters("tiny")
    assert len(samples.completions) == len(samples.logprobs) == len(samples.rewards) == 12
    for index, prompt in enumerate(samples.prompts):
        assert list(prompt) == tokenizer.encode_prompt(QUESTIONS[index // 4])
        assert 1 <= len(samples.completions[index]) <= 5
        assert len(samples.logprobs[index]) == len(samples.completions[index])
        assert tokenizer.end_token not in samples.completions[index][:-1]
        assert 0 <= samples.rewards[index] <= 1


def test_a_seed_fixes_the_samples() -> None:
    assert sample(1).completions == sample(1).completions
    assert sample(1).completions != sample(2).completions


@pytest.mark.parametrize("has_bf16", [True, False])
def test_logprobs_are_those_of_a_plain_forward_pass(has_bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # both ways of computing exist on every machine: on the BF16 weights, or on an FP32 copy of them
    monkeypatch.setattr(rollouts, "has_fast_bf16", lambda: has_bf16)
    model, tokenizer = models.load_masters("tiny")
    view = models.copy_module(model, torch.bfloat16)
    sampler = Sampler(view, tokenizer, seed=3)
    sampler.refresh()
    samples = sampler.sample(QUESTIONS, group_size=2, completion_tokens_max=4)
    reference = models.copy_module(view, torch.float32)
    for prompt, completion, logprobs in zip(samples.prompts, samples.completions, samples.logprobs, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits, dim=-1)[range(len(completion)), list(completion)]
        np.testing.assert_allclose(logprobs, expected.numpy(), atol=0.05 if has_bf16 else 1e-4)


def test_an_fp32_copy_follows_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "has_fast_bf16", lambda: False)
    model, tokenizer = models.load_masters("tiny")
    view = models.copy_module(model, torch.bfloat16)
    sampler = Sampler(view, tokenizer, seed=3)
    sampler.refresh()
    with torch.no_grad():
        view.model.norm.weight.zero_()
    sampler.refresh()
    # all logits are now equal, so every token has the same probability
    samples = sampler.sample(QUESTIONS, group_size=2, completion_tokens_max=1)
    np.testing.assert_allclose(np.concatenate(samples.logprobs), -np.log(tokenizer.vocabulary_size), rtol=1e-6)


def test_padding_goes_left_and_counts_no_position() -> None:
    tokens, mask = pad_left([[7], [4, 5, 6]], 0)
    assert tokens.tolist() == [[0, 0, 7], [4, 5, 6]]
    assert mask.tolist() == [[0, 0, 1], [1, 1, 1]]
    assert positions_of(mask).tolist() == [[0, 0, 0], [0, 1, 2]]
