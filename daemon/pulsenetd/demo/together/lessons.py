"""What one trainer learns from: sums with their right answers, another shard for each trainer."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

from pulsenetd.demo.task import Question, draw_questions
from pulsenetd.demo.tokenizer import PromptTokenizer

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


def draw_lesson(shard: int, round_index: int, inner_step: int, *, count: int, operand_max: int) -> tuple[Question, ...]:
    """Return the questions of one inner step: a trainer that was killed goes on where its checkpoint stands."""
    draw = random.Random(f"lesson {shard} {round_index} {inner_step}")
    return draw_questions(draw, count=count, operand_max=operand_max)


def compute_loss(model: LlamaForCausalLM, tokenizer: PromptTokenizer, questions: tuple[Question, ...]) -> torch.Tensor:
    """Return the cross-entropy of the right answers in nats a token, a scalar."""
    rows, first_answer = [], []
    for question in questions:
        prompt = tokenizer.encode_prompt(question)
        rows.append(prompt + tokenizer.encode_answer(question))
        first_answer.append(len(prompt))
    width = max(len(row) for row in rows)
    tokens = torch.tensor([row + [tokenizer.pad_token] * (width - len(row)) for row in rows])
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, (row, first) in enumerate(zip(rows, first_answer, strict=True)):
        mask[index, first : len(row)] = True
    # Attention is causal and padding stands to the right, so no answer sees any of it.
    logits = model(tokens, use_cache=False).logits[:, :-1]
    wanted = mask[:, 1:]
    return torch.nn.functional.cross_entropy(logits[wanted].float(), tokens[:, 1:][wanted])
