"""The two tokenizers of the demonstration: SmolLM2's own, and one of single characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from pulsenetd.demo.task import Question

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHARACTERS = "0123456789+= "
"""Alphabet of the tiny model; token ids follow the two special tokens."""

_SPECIAL_TOKEN_COUNT = 2


class PromptTokenizer(Protocol):
    """What generation and training need of a tokenizer."""

    @property
    def pad_token(self) -> int:
        """Fills rows to one length; masked out everywhere."""
        ...

    @property
    def end_token(self) -> int:
        """Ends a completion."""
        ...

    def encode_prompt(self, question: Question) -> list[int]:
        """Return the tokens after which the model is to answer."""
        ...

    def encode_answer(self, question: Question) -> list[int]:
        """Return the tokens of the right answer, its end included, as they follow the prompt."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens`` without special tokens."""
        ...


class CharacterTokenizer:
    """One token per character of :data:`CHARACTERS`; 0 pads, 1 ends."""

    pad_token = 0
    end_token = 1
    vocabulary_size = _SPECIAL_TOKEN_COUNT + len(CHARACTERS)

    def encode_prompt(self, question: Question) -> list[int]:
        """Return the tokens of the bare sum, for a model that knows no language."""
        return self.encode(f"{question.left} + {question.right}=")

    def encode_answer(self, question: Question) -> list[int]:
        """Return the answer's digits and the end."""
        return [*self.encode(str(question.answer)), self.end_token]

    def encode(self, text: str) -> list[int]:
        """Return the tokens of ``text``; ``ValueError`` for a character outside the alphabet."""
        return [CHARACTERS.index(character) + _SPECIAL_TOKEN_COUNT for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the characters of ``tokens``."""
        return "".join(CHARACTERS[token - _SPECIAL_TOKEN_COUNT] for token in tokens if token >= _SPECIAL_TOKEN_COUNT)


class ChatTokenizer:
    """SmolLM2's byte-level BPE behind its chat template, without the system turn (it only costs time).

    Args:
        bpe: The tokenizer built from the model file's metadata.
        end_token: Id of ``<|im_end|>``.
    """

    def __init__(self, bpe: Tokenizer, *, end_token: int) -> None:
        self._bpe = bpe
        self._end_token = end_token

    @property
    def pad_token(self) -> int:
        """Fills rows to one length; masked out everywhere."""
        return self._end_token

    @property
    def end_token(self) -> int:
        """Ends a completion."""
        return self._end_token

    def encode_prompt(self, question: Question) -> list[int]:
        """Return a user turn that asks the question and an assistant's turn opened up to the equals sign.

        The answer follows within a few tokens, so short completions are enough to judge it.
        """
        opening = f"{question.left} + {question.right} ="
        return self.encode(f"<|im_start|>user\n{question.text}<|im_end|>\n<|im_start|>assistant\n{opening}")

    def encode_answer(self, question: Question) -> list[int]:
        """Return a space, the answer's digits and the end of the turn."""
        return [*self.encode(f" {question.answer}"), self.end_token]

    def encode(self, text: str) -> list[int]:
        """Return the tokens of ``text``; special tokens are recognised."""
        tokens: list[int] = self._bpe.encode(text, add_special_tokens=False).ids
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens`` without special tokens."""
        text: str = self._bpe.decode(list(tokens), skip_special_tokens=True)
        return text


def build_chat_tokenizer(tokens: Sequence[str], merges: Sequence[str], special_tokens: Sequence[str]) -> ChatTokenizer:
    """Return SmolLM2's tokenizer from the lists that its GGUF file carries.

    The pre-tokenizer named ``smollm`` splits digits one by one, then works on bytes like GPT-2's.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in (merge.split(" ", 1) for merge in merges)]
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    return ChatTokenizer(bpe, end_token=vocabulary["<|im_end|>"])
