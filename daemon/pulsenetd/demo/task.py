"""The task of the demonstration: small sums, whose answers a parser can check."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

_QUESTION = re.compile(r"(\d{1,6}) \+ (\d{1,6})")
_NUMBER = re.compile(r"\d+")

NUMBER_CREDIT = 0.1
DIGITS_CREDIT_MAX = 0.4
"""Reward of a wrong answer: for being a number, and for digits. Rewards must vary inside a group to teach."""


@dataclass(frozen=True, slots=True)
class Question:
    """One sum to be answered."""

    left: int
    right: int

    @property
    def text(self) -> str:
        """The question as a person would ask it."""
        return f"What is {self.left} + {self.right}?"

    @property
    def answer(self) -> int:
        """The only right answer."""
        return self.left + self.right


def draw_questions(draw: random.Random, *, count: int, operand_max: int) -> tuple[Question, ...]:
    """Return ``count`` questions whose operands lie in 1..``operand_max``."""
    return tuple(Question(draw.randint(1, operand_max), draw.randint(1, operand_max)) for _ in range(count))


def parse_question(text: str) -> Question | None:
    """Return the question that a decoded prompt asks, or ``None`` when it asks none."""
    found = _QUESTION.search(text)
    return None if found is None else Question(int(found[1]), int(found[2]))


def score_completion(question: Question, completion: str) -> float:
    """Return the reward of a completion, 0 to 1, judged by the first number in it.

    1 for the right one; a wrong one earns ``NUMBER_CREDIT`` and up to ``DIGITS_CREDIT_MAX`` for digits that stand
    where they belong; 0 for no number at all.
    """
    found = _NUMBER.search(completion)
    if found is None:
        return 0.0
    given, right = found[0], str(question.answer)
    if given == right:
        return 1.0
    matching_count = sum(mine == other for mine, other in zip(reversed(given), reversed(right), strict=False))
    return NUMBER_CREDIT + DIGITS_CREDIT_MAX * matching_count / max(len(given), len(right))
