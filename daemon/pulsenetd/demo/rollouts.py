"""Rollouts: groups of sampled completions with their log-probabilities and rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pulsenetd.demo.models import copy_module, has_fast_bf16
from pulsenetd.demo.task import Question, score_completion
from pulsenetd.demo.tokenizer import PromptTokenizer

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


@dataclass(frozen=True, slots=True)
class Samples:
    """Completions of prompts; samples of one prompt stand together. All fields have one entry per sample."""

    prompts: tuple[tuple[int, ...], ...]
    completions: tuple[tuple[int, ...], ...]
    """Each ends with the end token unless it was cut at the limit."""
    logprobs: tuple[np.ndarray, ...]
    """FP32, natural logarithm, one per completion token, under the weights that sampled it."""
    rewards: tuple[float, ...]


class Sampler:
    """Samples completions from BF16 weights that somebody else keeps current.

    Where the CPU has no BF16 arithmetic it computes on an FP32 copy of the same values, refreshed by
    :meth:`refresh`.

    Args:
        model: The BF16 module; read, never written.
        seed: Fixes every draw.
    """

    def __init__(self, model: LlamaForCausalLM, tokenizer: PromptTokenizer, *, seed: int) -> None:
        self._source = model
        self._tokenizer = tokenizer
        self._generator = torch.Generator().manual_seed(seed)
        self._copy: LlamaForCausalLM | None = None

    def refresh(self) -> None:
        """Take notice that the module's weights have changed."""
        if has_fast_bf16():
            return
        if self._copy is None:
            self._copy = copy_module(self._source, torch.float32)
            return
        with torch.no_grad():
            for mine, theirs in zip(self._copy.parameters(), self._source.parameters(), strict=True):
                mine.copy_(theirs)

    @torch.inference_mode()
    def sample(self, questions: Sequence[Question], *, group_size: int, completion_tokens_max: int) -> Samples:
        """Return ``group_size`` completions of every question, sampled at temperature 1 and scored."""
        prompts = [self._tokenizer.encode_prompt(question) for question in questions]
        tokens, logprobs = self._generate(prompts, group_size, completion_tokens_max)
        completions: list[tuple[int, ...]] = []
        rewards: list[float] = []
        for row, sampled in enumerate(tokens.tolist()):
            length = _completion_length(sampled, self._tokenizer.end_token)
            completions.append(tuple(sampled[:length]))
            rewards.append(score_completion(questions[row // group_size], self._tokenizer.decode(sampled[:length])))
        return Samples(
            prompts=tuple(tuple(prompt) for prompt in prompts for _ in range(group_size)),
            completions=tuple(completions),
            logprobs=tuple(
                np.array(row[: len(completion)], dtype=np.float32)
                for row, completion in zip(logprobs.tolist(), completions, strict=True)
            ),
            rewards=tuple(rewards),
        )

    def _generate(
        self, prompts: Sequence[Sequence[int]], group_size: int, token_count_max: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (tokens, logprobs), both of shape (prompts x group_size, up to ``token_count_max``)."""
        from transformers.cache_utils import DynamicCache

        model = self._source if self._copy is None else self._copy
        padded, mask = pad_left(prompts, self._tokenizer.pad_token)
        cache = DynamicCache(config=model.config)
        # each prompt is read once; its keys and values are then shared out to the whole group
        logits = model(padded, mask, positions_of(mask), cache, use_cache=True, logits_to_keep=1).logits
        cache.batch_repeat_interleave(group_size)
        logits = logits[:, -1].repeat_interleave(group_size, dim=0)
        mask = mask.repeat_interleave(group_size, dim=0)
        ended = torch.zeros(mask.shape[0], dtype=torch.bool)
        tokens: list[torch.Tensor] = []
        logprobs: list[torch.Tensor] = []
        while True:
            distribution = torch.log_softmax(logits.float(), dim=-1)
            token = torch.multinomial(distribution.exp(), 1, generator=self._generator)
            tokens.append(token)
            logprobs.append(distribution.gather(1, token))
            ended |= token[:, 0] == self._tokenizer.end_token
            if len(tokens) == token_count_max or bool(ended.all()):
                return torch.cat(tokens, dim=1), torch.cat(logprobs, dim=1)
            mask = torch.cat([mask, torch.ones_like(token)], dim=1)
            logits = model(token, mask, positions_of(mask)[:, -1:], cache, use_cache=True, logits_to_keep=1).logits
            logits = logits[:, -1]


def pad_left(rows: Sequence[Sequence[int]], pad_token: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (tokens, mask) of shape (rows, longest row), int64; the mask is 0 on the padding."""
    width = max(len(row) for row in rows)
    tokens = torch.tensor([[pad_token] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return tokens, mask


def positions_of(mask: torch.Tensor) -> torch.Tensor:
    """Return each token's position counted from its row's first real token; padding gets 0."""
    return (mask.cumsum(dim=1) - 1).clamp_(min=0)


def _completion_length(tokens: Sequence[int], end_token: int) -> int:
    """Return how many tokens stand up to and with the first end token."""
    return tokens.index(end_token) + 1 if end_token in tokens else len(tokens)
