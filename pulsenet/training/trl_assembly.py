"""Puts the answers of many inferencers where the prompts of one generation step want them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from pulsenet.local.rollouts import ReceivedRollouts, Sample

Prompt = tuple[int, ...]
"""Token ids of one prompt."""

Drop = Literal["late", "stale", "other_prompt", "surplus", "damaged"]
"""Why a sample, or a whole late batch, was not used."""


class RolloutAssembly:
    """One completion for each place of a list of prompts, taken from batches in whatever order they come.

    Equal prompts are one task: GRPO's groups are prompts that stand several times in the list.

    Args:
        prompts: One for each completion that is wanted.
        completion_tokens_max: Longer completions are damaged.
        vocabulary_size: So are token ids from here on: a training process on a GPU dies of them.
        number_newest: Number of the trainer's version, from which staleness is counted.
        staleness_max: Samples that began with weights further behind are stale; ``None`` keeps all.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        completion_tokens_max: int,
        vocabulary_size: int,
        number_newest: int = 0,
        staleness_max: int | None = None,
    ) -> None:
        self.number_newest = number_newest
        self._completion_tokens_max = completion_tokens_max
        self._vocabulary_size = vocabulary_size
        self._number_min = 0 if staleness_max is None else number_newest - staleness_max
        self._open: dict[Prompt, deque[int]] = {}
        for place, prompt in enumerate(prompts):
            self._open.setdefault(prompt, deque()).append(place)
        self._taken: list[Sample | None] = [None] * len(prompts)
        self._asked: dict[bytes, Prompt] = {}
        self.dropped: Counter[Drop] = Counter()
        """What was not used: batches if ``late``, else samples."""

    @property
    def missing(self) -> dict[Prompt, int]:
        """How many completions each prompt still wants."""
        return {prompt: len(places) for prompt, places in self._open.items()}

    @property
    def missing_count(self) -> int:
        """How many are wanted in all."""
        return sum(len(places) for places in self._open.values())

    @property
    def samples(self) -> tuple[Sample, ...]:
        """A sample for each prompt, in their order; ask when none is missing."""
        assert not self._open
        return tuple(sample for sample in self._taken if sample is not None)

    def note_tasks(self, task_ids: Iterable[bytes], prompts: Iterable[Prompt]) -> None:
        """Remember what was asked for: batches that answer anything else are not used."""
        self._asked.update(zip(task_ids, prompts, strict=True))

    def add(self, batch: ReceivedRollouts) -> Mapping[Prompt, int]:
        """Use what fits, and return what nobody works at any more: prompts whose answer did not fill them.

        A node takes a task off its board with the first batch that names it, whatever we think of its samples.
        """
        answered = {self._asked.pop(task_id) for task_id in batch.task_ids if task_id in self._asked}
        if not answered:
            self.dropped["late"] += 1
            return {}
        if batch.stale_count:
            self.dropped["stale"] += batch.stale_count
        for sample in batch.samples:
            drop = self._place(sample, answered)
            if drop is not None:
                self.dropped[drop] += 1
        missing, in_work = self.missing, set(self._asked.values())
        return {prompt: missing[prompt] for prompt in answered if prompt in missing and prompt not in in_work}

    def _place(self, sample: Sample, answered: set[Prompt]) -> Drop | None:
        """Use a sample; else return why not."""
        prompt = tuple(sample.prompt_tokens)
        assert sample.version_first is not None  # a received sample names its own
        if sample.version_first.number < self._number_min:
            return "stale"
        if prompt not in answered:
            return "other_prompt"
        if not self._is_whole(sample):
            return "damaged"
        places = self._open.get(prompt)
        if places is None:
            return "surplus"
        self._taken[places.popleft()] = sample
        if not places:
            del self._open[prompt]
        return None

    def _is_whole(self, sample: Sample) -> bool:
        """Return whether the loss can be computed from it: its shape and signs were checked by the node."""
        return (
            1 <= len(sample.completion_tokens) <= self._completion_tokens_max
            and max(sample.completion_tokens) < self._vocabulary_size
            # A token of probability zero was never drawn, and its importance weight would be infinite.
            and bool(np.isfinite(np.asarray(sample.logprobs, np.float64)).all())
        )


def to_columns(samples: Sequence[Sample], number_newest: int) -> dict[str, list[Any]]:
    """Return samples as TRL's rollout functions do: token ids and logprobs, and fields for the reward functions.

    ``rollout_reward`` is what the inferencer gave: trust it no further than the keys that may send rollouts.
    ``rollout_staleness`` says how many version numbers the sample's oldest token is behind.
    """
    staleness = []
    for sample in samples:
        assert sample.version_first is not None
        staleness.append(max(0, number_newest - sample.version_first.number))
    return {
        "prompt_ids": [list(sample.prompt_tokens) for sample in samples],
        "completion_ids": [list(sample.completion_tokens) for sample in samples],
        "logprobs": [[float(value) for value in sample.logprobs] for sample in samples],
        "rollout_reward": [sample.reward for sample in samples],
        "rollout_staleness": staleness,
    }
