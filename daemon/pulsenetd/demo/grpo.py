"""GRPO on FP32 masters with a BF16 forward view.

The masters never meet a matrix product: the forward and backward passes run on their BF16 cast, AdamW steps
the masters with those gradients, and the view is cast anew. What inferencers serve is that view, bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from pulsenetd.demo.models import copy_module, has_fast_bf16
from pulsenetd.demo.rollouts import Samples, pad_left, positions_of

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

GRADIENT_NORM_MAX: Final = 1.0
RATIO_CLIP: Final = 0.2
"""Samples of slightly older weights are weighted by their likelihood ratio, clipped to 1 +- this."""
_DEVIATION_MIN: Final = 1e-4


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimiser step did."""

    reward: float
    """Mean over all samples."""
    gradient_norm: float
    """Before clipping."""
    logprob_gap: float
    """Mean absolute difference between the inferencers' and our own log-probabilities before the step."""
    changed_count: int
    """Elements of the BF16 view that changed."""
    element_count: int


class GrpoTrainer:
    """Owns the masters, the optimiser and the BF16 view.

    Args:
        masters: Module with FP32 parameters; this object steps them.
    """

    def __init__(self, masters: LlamaForCausalLM, *, learning_rate: float, pad_token: int) -> None:
        self.masters = masters
        # Both hold BF16 values. Without BF16 arithmetic the values are held, and computed on, in FP32.
        self.view = copy_module(masters, torch.bfloat16)
        self._compute = self.view if has_fast_bf16() else copy_module(self.view, torch.float32)
        self._pad_token = pad_token
        self._optimizer = torch.optim.AdamW(
            masters.parameters(), lr=learning_rate, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, fused=True
        )

    def step(self, samples: Samples) -> StepReport:
        """Take one optimiser step on ``samples`` and bring the view up to date."""
        advantages = compute_advantages(samples.prompts, samples.rewards)
        logprobs, mask = self._score(samples)
        old_logprobs = pad_right([torch.from_numpy(row) for row in samples.logprobs], logprobs.shape[1])
        difference = logprobs - old_logprobs
        ratio = difference.exp()
        clipped = ratio.clamp(1 - RATIO_CLIP, 1 + RATIO_CLIP)
        gain = torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
        loss = -(gain * mask).sum() / mask.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        gap = float((difference.detach().abs() * mask).sum() / mask.sum())
        norm = self._move_gradients()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return StepReport(
            reward=sum(samples.rewards) / len(samples.rewards),
            gradient_norm=norm,
            logprob_gap=gap,
            changed_count=self._cast_view(),
            element_count=sum(parameter.numel() for parameter in self.masters.parameters()),
        )

    def _score(self, samples: Samples) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (logprobs, mask) of the completion tokens, FP32, shape (samples, longest completion)."""
        prompts, prompt_mask = pad_left(samples.prompts, self._pad_token)
        width = max(len(completion) for completion in samples.completions)
        completions = pad_right([torch.tensor(row) for row in samples.completions], width)
        completion_mask = pad_right([torch.ones(len(row), dtype=torch.int64) for row in samples.completions], width)
        tokens = torch.cat([prompts, completions], dim=1)
        mask = torch.cat([prompt_mask, completion_mask], dim=1)
        # prompts end in the same column, so the last ``width + 1`` positions predict all completions
        output = self._compute(
            tokens,
            None if bool(mask.all()) else mask,
            positions_of(mask),
            use_cache=False,
            logits_to_keep=width + 1,
        )
        distribution = torch.log_softmax(output.logits[:, :-1].float(), dim=-1)
        return distribution.gather(2, completions[:, :, None])[:, :, 0], completion_mask.float()

    def _move_gradients(self) -> float:
        """Hand the view's gradients to the masters as FP32, clipped; returns their norm before clipping."""
        for master, computed in zip(self.masters.parameters(), self._compute.parameters(), strict=True):
            assert computed.grad is not None
            master.grad = computed.grad.float()
            computed.grad = None
        return float(torch.nn.utils.clip_grad_norm_(self.masters.parameters(), GRADIENT_NORM_MAX))

    @torch.no_grad()
    def _cast_view(self) -> int:
        """Cast the masters into the view; returns how many of its elements changed, compared as bits."""
        changed_count = 0
        triples = zip(self.masters.parameters(), self.view.parameters(), self._compute.parameters(), strict=True)
        for master, viewed, computed in triples:
            cast = master.to(torch.bfloat16)
            changed_count += int(torch.count_nonzero(cast.view(torch.int16) != viewed.view(torch.int16)))
            viewed.copy_(cast)
            if computed is not viewed:
                computed.copy_(cast)
        return changed_count


def compute_advantages(prompts: Sequence[Sequence[int]], rewards: Sequence[float]) -> torch.Tensor:
    """Return each sample's reward relative to its group, in standard deviations, FP32.

    Samples with equal prompts form a group; a group whose rewards are all equal teaches nothing (zeros).
    """
    advantages = torch.zeros(len(rewards))
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault(tuple(prompt), []).append(index)
    for indices in groups.values():
        values = torch.tensor([rewards[index] for index in indices])
        centred = values - values.mean()
        advantages[indices] = centred / (values.std(correction=0) + _DEVIATION_MIN)
    return advantages


def pad_right(rows: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """Return the rows as one tensor of shape (rows, ``width``), filled up with zeros."""
    padded = torch.zeros(len(rows), width, dtype=rows[0].dtype)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded
