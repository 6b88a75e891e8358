"""The character tokenizer, and SmolLM2's from lists as its file carries them."""

import pytest

from pulsenetd.demo.task import Question, parse_question
from pulsenetd.demo.tokenizer import CHARACTERS, CharacterTokenizer, build_chat_tokenizer

BYTES = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def test_characters_survive_the_round_trip() -> None:
    tokenizer = CharacterTokenizer()
    assert tokenizer.decode(tokenizer.encode(CHARACTERS)) == CHARACTERS
    assert max(tokenizer.encode(CHARACTERS)) == tokenizer.vocabulary_size - 1


def test_padding_and_end_have_no_text() -> None:
    tokenizer = CharacterTokenizer()
    assert tokenizer.decode([tokenizer.pad_token, *tokenizer.encode("12"), tokenizer.end_token]) == "12"


def test_a_character_outside_the_alphabet_is_refused() -> None:
    with pytest.raises(ValueError, match="substring not found"):
        CharacterTokenizer().encode("é")


def test_the_chat_tokenizer_splits_digits_and_keeps_special_tokens_whole() -> None:
    tokens = [*SPECIAL, *BYTES, "us", "use", "user", "Ġ+", "12"]
    merges = ["u s", "us e", "use r", "Ġ +", "1 2"]
    tokenizer = build_chat_tokenizer(tokens, merges, SPECIAL)
    prompt = tokenizer.encode_prompt(Question(12, 34))
    assert prompt[:2] == [tokens.index("<|im_start|>"), tokens.index("user")]
    assert tokens.index("12") not in prompt
    assert tokens.index("Ġ+") in prompt
    assert tokenizer.end_token == tokenizer.pad_token == tokens.index("<|im_end|>")
    text = tokenizer.decode(prompt)
    assert text == "user\nWhat is 12 + 34?\nassistant\n12 + 34 ="
    assert parse_question(text) == Question(12, 34)


def test_answers_follow_their_prompts_and_end() -> None:
    characters = CharacterTokenizer()
    answer = characters.encode_answer(Question(12, 34))
    assert characters.decode(answer) == "46"
    assert answer[-1] == characters.end_token
    chat = build_chat_tokenizer([*SPECIAL, *BYTES], [], SPECIAL)
    answer = chat.encode_answer(Question(12, 34))
    assert chat.decode(answer) == " 46"
    assert answer[-1] == chat.end_token
