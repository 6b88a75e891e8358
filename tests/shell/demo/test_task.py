"""The sums of the demonstration and how answers are judged."""

import random

import pytest

from pulsenetd.demo.task import (
    DIGITS_CREDIT_MAX,
    NUMBER_CREDIT,
    Question,
    draw_questions,
    parse_question,
    score_completion,
)


def test_the_same_seed_draws_the_same_questions() -> None:
    first = draw_questions(random.Random(5), count=20, operand_max=99)
    second = draw_questions(random.Random(5), count=20, operand_max=99)
    assert first == second
    assert first != draw_questions(random.Random(6), count=20, operand_max=99)


def test_operands_stay_within_their_bound() -> None:
    questions = draw_questions(random.Random(1), count=500, operand_max=9)
    operands = {operand for question in questions for operand in (question.left, question.right)}
    assert operands == set(range(1, 10))


@pytest.mark.parametrize("text", ["What is 17 + 25?", "17 + 25=", "user\nWhat is 17 + 25?\nassistant\n17 + 25 ="])
def test_a_prompt_tells_which_sum_it_asks(text: str) -> None:
    assert parse_question(text) == Question(17, 25)


def test_a_text_without_a_sum_asks_nothing() -> None:
    assert parse_question("What is the capital of France?") is None


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (" 42", 1.0),
        (" 42, because 17 + 25 is that", 1.0),
        (" 52", NUMBER_CREDIT + DIGITS_CREDIT_MAX / 2),
        (" 142", NUMBER_CREDIT + DIGITS_CREDIT_MAX * 2 / 3),
        (" 2", NUMBER_CREDIT + DIGITS_CREDIT_MAX / 2),
        (" 99", NUMBER_CREDIT),
        (" forty-two", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_right_first_number_earns_the_whole_reward(completion: str, reward: float) -> None:
    assert score_completion(Question(17, 25), completion) == pytest.approx(reward)
