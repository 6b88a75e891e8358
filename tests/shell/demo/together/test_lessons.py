"""Shards, and the loss of right answers."""

import math

import torch

from pulsenetd.demo.models import load_masters
from pulsenetd.demo.task import Question
from pulsenetd.demo.together.lessons import compute_loss, draw_lesson


def test_a_lesson_is_repeated_and_no_two_trainers_share_one() -> None:
    first = draw_lesson(0, 3, 2, count=8, operand_max=99)
    assert first == draw_lesson(0, 3, 2, count=8, operand_max=99)
    others = [draw_lesson(*place, count=8, operand_max=99) for place in ((1, 3, 2), (0, 4, 2), (0, 3, 1))]
    assert all(first != other for other in others)


def test_the_loss_is_that_of_the_answers_alone() -> None:
    model, tokenizer = load_masters("tiny")
    short, long = Question(1, 2), Question(48, 47)
    together = compute_loss(model, tokenizer, (short, long))
    alone = [compute_loss(model, tokenizer, (question,)) for question in (short, long)]
    counts = [len(tokenizer.encode_answer(question)) for question in (short, long)]
    assert counts == [2, 3]
    expected = sum(count * loss for count, loss in zip(counts, alone, strict=True)) / sum(counts)
    torch.testing.assert_close(together, expected)
    # a model that knows nothing yet is about as good as a guess
    assert abs(float(together.detach()) - math.log(15)) < 1.0
