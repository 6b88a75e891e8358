"""What bench_outer.py trains on: a language with two dialects, and sums.

A task gives a start model, batches and a held-out set. Batches are functions of their seed alone, so that every
algorithm sees the same ones.
"""

from __future__ import annotations

import bisect
import random
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from pulsenetd.demo.models import load_masters
from pulsenetd.demo.task import Question, draw_questions
from pulsenetd.demo.tokenizer import CharacterTokenizer

Batch = tuple[torch.Tensor, torch.Tensor]
"""Token ids and labels, (rows, width) int64; what is not scored has the label -100."""

Table = npt.NDArray[np.float64]

BETAS: Final = (0.9, 0.95)
"""Of AdamW, everywhere here."""

LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
SPACE_TOKEN: Final = 1
FIRST_LETTER_TOKEN: Final = 2
"""0 stays free: batches need no padding."""

HELD_OUT_SEED: Final = 1 << 40


class Task(Protocol):
    """One way to put the algorithms to the test."""

    name: str
    learning_rate: float
    """Of the inner optimizer: such that the gate passes 1 to 6 % from round 3 on."""

    @property
    def floor(self) -> float | None:
        """Loss that no model goes below, if known."""
        ...

    def make_start(self, seed: int) -> Any:
        """Return the pretrained model of a seed, FP32."""
        ...

    def draw(self, seed: int, count: int) -> Batch:
        """Return rows to fine-tune on."""
        ...

    def draw_held_out(self) -> Batch:
        """Return the rows whose loss is compared."""
        ...


def compute_loss(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of the labelled tokens, nats."""
    logits = model(ids, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)


def make_llama(*, vocabulary_size: int, seed: int) -> Any:
    """Return a Llama of 75 000 parameters with its random weights."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config).eval()


class Dialect:
    """Word frequencies over one lexicon: the next word depends on the class of the word before.

    Args:
        words: The lexicon, spelled in letters; word i is of class ``i % len(next_word)``.
        next_word: Probability of the next word by the class of the word before, (classes, words) FP64.
    """

    def __init__(self, words: list[str], next_word: Table) -> None:
        self._words = words
        self._class_count = len(next_word)
        self.next_word = next_word
        transitions = next_word.reshape(self._class_count, -1, self._class_count).sum(axis=1)
        # Every row of a high power is the share of each class in a long text.
        self.first_word: Table = np.linalg.matrix_power(transitions, 1 << 10)[0] @ next_word
        self._cumulative = [np.cumsum(row).tolist() for row in (*next_word, self.first_word)]

    def draw_words(self, source: random.Random, letter_count: int) -> list[int]:
        """Return words that together, with a space behind each, have at least ``letter_count`` characters."""
        words: list[int] = []
        written, row = 0, self._class_count
        while written < letter_count:
            # The last cumulative value may lie below 1 by rounding.
            word = min(bisect.bisect(self._cumulative[row], source.random()), len(self._words) - 1)
            words.append(word)
            written += len(self._words[word]) + 1
            row = word % self._class_count
        return words

    def measure_floor(self, rows: list[list[int]], width: int) -> float:
        """Return the loss of whoever knows the dialect exactly, on the first ``width`` characters of each row, nats.

        The first character is given, as to a model.
        """
        spelled = [word + " " for word in self._words]
        matching: dict[str, list[int]] = {}
        for word, spelling in enumerate(spelled):
            for end in range(len(spelling) + 1):
                matching.setdefault(spelling[:end], []).append(word)
        total, count = 0.0, 0
        for row in rows:
            position, odds = 0, self.first_word
            for word in row:
                spelling = spelled[word]
                for end in range(1, len(spelling) + 1):
                    if 0 < position < width:
                        total -= float(
                            np.log(odds[matching[spelling[:end]]].sum() / odds[matching[spelling[: end - 1]]].sum())
                        )
                        count += 1
                    position += 1
                odds = self.next_word[word % self._class_count]
        return total / count


class DialectTask:
    """A model of dialect A learns dialect B: the same words, of which the rewarded ones are more frequent.

    A word's reward is the mean score of its letters, and B's next word follows ``B(word) ~ A(word) exp(reward)``: what
    reinforcement learning with a KL penalty of weight 1 ends at. Spelling is learned before and kept.

    Args:
        learning_rate: Of the inner optimizer, in fine-tuning.
        pretrain_steps: On dialect A.
        held_out_count: Rows.
    """

    name = "dialects"
    width: Final = 64
    """Characters a row."""
    class_count: Final = 12
    words_per_class: Final = 20
    reward_deviation: Final = 1.0

    def __init__(self, *, learning_rate: float, pretrain_steps: int = 1500, held_out_count: int = 512) -> None:
        self.learning_rate = learning_rate
        self._pretrain_steps = pretrain_steps
        self._held_out_count = held_out_count
        generator = np.random.default_rng(11)
        self._words = _invent_words(random.Random(11), self.class_count * self.words_per_class)
        transitions = generator.dirichlet(np.full(self.class_count, 0.5), self.class_count) + 1e-3
        ranks = np.arange(1, self.words_per_class + 1)
        frequencies = np.stack([generator.permutation(1.0 / ranks) for _ in range(self.class_count)], axis=1)
        before = transitions[:, None, :] * frequencies[None, :, :] / frequencies.sum(axis=0)
        before = _normalize(before.reshape(self.class_count, -1))
        scores = dict(zip(LETTERS, generator.normal(size=len(LETTERS)), strict=True))
        rewards = np.array([np.mean([scores[letter] for letter in word]) for word in self._words])
        rewards *= self.reward_deviation / rewards.std()
        self.before = Dialect(self._words, before)
        self.after = Dialect(self._words, _normalize(before * np.exp(rewards)))

    @property
    def floor(self) -> float:
        """See :class:`Task`."""
        source = random.Random(HELD_OUT_SEED)
        rows = [self.after.draw_words(source, self.width) for _ in range(self._held_out_count)]
        return self.after.measure_floor(rows, self.width)

    def make_start(self, seed: int) -> Any:
        """Train on dialect A, the learning rate falling to nothing."""
        model = make_llama(vocabulary_size=FIRST_LETTER_TOKEN + len(LETTERS), seed=seed)
        pretrain(
            model,
            lambda step: self._draw(self.before, -1 - step - (seed << 20), 32),
            steps=self._pretrain_steps,
            rate=3e-3,
        )
        return model

    def draw(self, seed: int, count: int) -> Batch:
        """Return rows of dialect B."""
        return self._draw(self.after, seed, count)

    def draw_held_out(self) -> Batch:
        """Return rows of dialect B that no trainer sees."""
        return self._draw(self.after, HELD_OUT_SEED, self._held_out_count)

    def _draw(self, dialect: Dialect, seed: int, count: int) -> Batch:
        source = random.Random(seed)
        rows = [[self._words[word] for word in dialect.draw_words(source, self.width)] for _ in range(count)]
        texts = [" ".join(words) + " " for words in rows]
        ids = torch.tensor([[_token(letter) for letter in text[: self.width]] for text in texts])
        return ids, ids


class SumsTask:
    """Sums as token rows, the answers' tokens scored.

    Args:
        model: ``micro`` (75 000 parameters), ``tiny`` or ``smollm2``, of the demonstration.
        start: ``annealed`` lowers the learning rate to nothing in pretraining; ``steep`` stops in full course, so that
            the first rounds have much to gain. SmolLM2 is trained already.
        learning_rate: Of the inner optimizer.
    """

    floor = None

    def __init__(
        self, model: str, start: str, *, learning_rate: float, pretrain_steps: int = 1200, held_out_count: int = 256
    ) -> None:
        self.name = f"sums, {model}, {start}"
        self.learning_rate = learning_rate
        self._model = model
        self._start = start
        self._pretrain_steps = pretrain_steps
        self._held_out_count = held_out_count
        self._tokenizer: Any = CharacterTokenizer() if model == "micro" else load_masters(model)[1]

    def make_start(self, seed: int) -> Any:
        """Train on sums; all seeds have the same start."""
        if self._model == "micro":
            model = make_llama(vocabulary_size=CharacterTokenizer.vocabulary_size, seed=5)
        else:
            model, _ = load_masters(self._model)
        if self._model != "smollm2":
            pretrain(
                model,
                lambda step: self.draw(-step - 1, 32),
                steps=self._pretrain_steps,
                rate=1e-3,
                is_annealed=self._start == "annealed",
            )
        return model

    def draw(self, seed: int, count: int) -> Batch:
        """Return sums, padded right."""
        questions = draw_questions(random.Random(seed), count=count, operand_max=49)
        rows = [self._row(question) for question in questions]
        width = max(len(tokens) for tokens, _ in rows)
        ids = torch.full((count, width), self._tokenizer.pad_token)
        labels = torch.full((count, width), -100)
        for index, (tokens, prompt_count) in enumerate(rows):
            ids[index, : len(tokens)] = torch.tensor(tokens)
            labels[index, prompt_count : len(tokens)] = torch.tensor(tokens[prompt_count:])
        return ids, labels

    def draw_held_out(self) -> Batch:
        """Return sums of another stream."""
        return self.draw(HELD_OUT_SEED, self._held_out_count)

    def _row(self, question: Question) -> tuple[list[int], int]:
        prompt = self._tokenizer.encode_prompt(question)
        answer = str(question.answer)
        encode: Any = getattr(self._tokenizer, "encode", None)
        tokens = encode(answer) if encode is not None else self._tokenizer._bpe.encode(answer).ids
        return [*prompt, *tokens, self._tokenizer.end_token], len(prompt)


def pretrain(model: Any, draw: Any, *, steps: int, rate: float, is_annealed: bool = True) -> None:
    """Train ``model`` in place on ``draw(step)``; annealed, the learning rate follows a cosine to nothing."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=BETAS)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        compute_loss(model, *draw(step)).backward()
        optimizer.step()
        if is_annealed:
            schedule.step()
        optimizer.zero_grad()


def _invent_words(source: random.Random, count: int) -> list[str]:
    """Return different words of 2 to 6 letters, none of which tells its class."""
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(source.choices(LETTERS, k=source.randint(2, 6)))] = None
    return list(words)


def _normalize(table: Table) -> Table:
    normalized: Table = table / table.sum(axis=1, keepdims=True)
    return normalized


def _token(letter: str) -> int:
    return SPACE_TOKEN if letter == " " else FIRST_LETTER_TOKEN + LETTERS.index(letter)
