"""The rollout function against a publisher that answers as it is told, without TRL."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from pulsenet.chain.records import RolloutBatch
from pulsenet.errors import ConfigError, UnavailableError
from pulsenet.ids import PeerId, RunId, Version
from pulsenet.local.protocol import TASKS_PER_CALL_MAX
from pulsenet.local.rollouts import ReceivedRollouts, Sample, pack_rollouts, unpack_rollouts
from pulsenet.local.tasks import Task
from pulsenet.training import trl
from pulsenet.training.trl import TrlRollouts, encode_prompt, read_sampling_rules, use_rollout_logprobs

TRAINER = PeerId(bytes(32))
Answer = Callable[[Mapping[str, Any]], Sequence[Sample]]


def answer_well(task: Mapping[str, Any], number: int = 7) -> list[Sample]:
    """Complete a prompt by its first token and a count."""
    prompt = task["prompt_tokens"]
    return [
        Sample(prompt, [prompt[0], place], [-0.5, -0.25], float(place), {}, Version(0, number), Version(0, number))
        for place in range(task["sample_count"])
    ]


@dataclass
class Desk:
    """A publisher whose tasks are answered at once, the newest first."""

    answer: Answer = answer_well
    version: int | None = 7
    sent: list[Mapping[str, Any]] = field(default_factory=list)
    call_sizes: list[int] = field(default_factory=list)
    waiting: list[tuple[bytes, Mapping[str, Any]]] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    """Arguments of each look for rollouts."""
    options: list[dict[str, Any]] = field(default_factory=list)

    def status(self) -> dict[str, Any]:
        return {"applied_version": self.version}

    def send_tasks(self, tasks: Sequence[Mapping[str, Any]], **options: Any) -> tuple[bytes, ...]:
        ids = tuple((len(self.sent) + place).to_bytes(16, "big") for place in range(len(tasks)))
        self.sent += tasks
        self.call_sizes.append(len(tasks))
        self.options.append(options)
        self.waiting += zip(ids, tasks, strict=True)
        return ids

    def rollouts(self, **options: Any) -> Iterator[ReceivedRollouts]:
        self.asked.append(options)
        while self.waiting:
            task_id, task = self.waiting.pop()
            samples = self.answer(task)
            if samples:
                version = samples[0].version_first
                packed = pack_rollouts(version, version, samples, tasks=[Task(TRAINER, task_id, {}, 1.0)])  # type: ignore[arg-type]
                fields = {name: getattr(packed, name) for name in packed.__slots__}
                yield unpack_rollouts(TRAINER, RolloutBatch(run_id=RunId(bytes(32)), sequence=1, **fields))


class Tokenizer:
    """Letters from 1 on; a conversation is its contents and a 0 for the turn of the assistant."""

    eos_token_id = 9

    def __call__(self, text: Sequence[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(letter) - 96 for letter in one] for one in text]}

    def apply_chat_template(
        self, conversations: Sequence[Sequence[Mapping[str, str]]], **options: Any
    ) -> dict[str, list[list[int]]]:
        assert options == {
            "chat_template": "one",
            "add_generation_prompt": True,
            "tokenize": True,
            "return_dict": True,
            "enable_thinking": False,
        }
        texts = ["".join(message["content"] for message in conversation) for conversation in conversations]
        return {"input_ids": [[*ids, 0] for ids in self(texts)["input_ids"]]}


def make_trainer(**changes: Any) -> Any:
    text_config = SimpleNamespace(vocab_size=30)
    fields = {
        "model": SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text_config)),
        "processing_class": Tokenizer(),
        "chat_template": "one",
        "chat_template_kwargs": {"enable_thinking": False},
        "max_completion_length": 4,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "rollout_func": print,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_max": 3.0,
        "tools": [],
        "loss_type": "dapo",
    }
    return SimpleNamespace(**{**fields, **changes})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time that goes on by a second each time somebody looks."""
    seconds = itertools.count(1.0)
    monkeypatch.setattr(trl, "monotonic", lambda: next(seconds))


def test_every_place_gets_a_completion_of_its_prompt() -> None:
    desk = Desk()
    rollouts = TrlRollouts(desk, lease_seconds=50.0)  # type: ignore[arg-type]
    columns = rollouts(["ab", "ab", "c", "c"], make_trainer())
    assert columns["prompt_ids"] == [[1, 2], [1, 2], [3], [3]]
    assert columns["completion_ids"] == [[1, 0], [1, 1], [3, 0], [3, 1]]
    assert columns["logprobs"] == [[-0.5, -0.25]] * 4
    assert columns["rollout_reward"] == [0.0, 1.0, 0.0, 1.0]
    assert [(task["prompt_tokens"], task["sample_count"]) for task in desk.sent] == [([1, 2], 2), ([3], 2)]
    assert desk.options[0] == {"lease_seconds": 50.0, "timeout_seconds": 600.0}
    assert rollouts.report is not None
    assert (rollouts.report.sample_count, rollouts.report.staleness_max, rollouts.report.dropped) == (4, 0, {})


def test_tasks_say_how_to_sample() -> None:
    assert read_sampling_rules(make_trainer()) == {
        "completion_tokens_max": 4,
        "end_tokens": [9],
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "repetition_penalty": 1.0,
    }
    assert read_sampling_rules(make_trainer(eos_token_ids=[8, 9]))["end_tokens"] == [8, 9]


def test_conversations_take_the_trainers_template() -> None:
    assert encode_prompt([{"role": "user", "content": "ab"}], make_trainer()) == (1, 2, 0)


def test_a_prompt_that_is_no_text_is_refused() -> None:
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}]
    with pytest.raises(ConfigError, match="no text"):
        TrlRollouts(Desk())([prompt], make_trainer())  # type: ignore[arg-type]


def test_stale_samples_are_asked_for_again_and_said() -> None:
    numbers = iter([4, 5])
    desk = Desk(answer=lambda task: answer_well(task, next(numbers)))
    rollouts = TrlRollouts(desk, staleness_max=2)  # type: ignore[arg-type]
    columns = rollouts(["a", "a"], make_trainer())
    assert columns["rollout_staleness"] == [2, 2]
    assert [task["sample_count"] for task in desk.sent] == [2, 2]
    assert rollouts.report is not None
    assert (rollouts.report.dropped, rollouts.report.staleness_max) == ({"stale": 2}, 2)


def test_a_node_without_a_version_makes_nothing_stale() -> None:
    columns = TrlRollouts(Desk(version=None), staleness_max=0)(["a"], make_trainer())  # type: ignore[arg-type]
    assert columns["rollout_staleness"] == [0]


@pytest.mark.usefixtures("clock")
def test_what_is_missing_is_asked_for_again_when_nothing_came_for_a_lease() -> None:
    """A restarted node has forgotten its tasks."""
    lost = [True]

    def lose_first(task: Mapping[str, Any]) -> Sequence[Sample]:
        return [] if lost and lost.pop() else answer_well(task)

    desk = Desk(answer=lose_first)
    rollouts = TrlRollouts(desk, lease_seconds=10.0, timeout_seconds=100.0)  # type: ignore[arg-type]
    columns = rollouts(["ab", "c", "c"], make_trainer())
    assert columns["completion_ids"] == [[1, 0], [3, 0], [3, 1]]
    assert [(task["prompt_tokens"], task["sample_count"]) for task in desk.sent] == [([1, 2], 1), ([3], 2), ([3], 2)]
    assert desk.asked[0]["timeout_seconds"] == trl.POLL_SECONDS


@pytest.mark.usefixtures("clock")
def test_silence_ends_in_one_error_that_says_what_is_missing() -> None:
    desk = Desk(answer=lambda task: [] if task["prompt_tokens"] == [3] else answer_well(task))
    rollouts = TrlRollouts(desk, timeout_seconds=20.0)  # type: ignore[arg-type]
    with pytest.raises(UnavailableError, match=r"2 completions of 1 prompts are missing .* 20 s \(not used: none\)"):
        rollouts(["a", "c", "c"], make_trainer())


@pytest.mark.usefixtures("clock")
def test_a_stream_of_useless_batches_ends_too() -> None:
    desk = Desk(answer=lambda task: answer_well(task, 1))
    rollouts = TrlRollouts(desk, staleness_max=0, timeout_seconds=20.0)  # type: ignore[arg-type]
    with pytest.raises(UnavailableError, match=r"not used: \d+ stale"):
        rollouts(["a"], make_trainer())


def test_many_prompts_are_sent_in_calls_that_the_node_takes() -> None:
    desk = Desk(answer=lambda task: answer_well(task)[:1])
    trainer = make_trainer()
    letters = "".join(chr(97 + place) for place in range(26))
    prompts = [one + two + three for one in letters for two in letters for three in letters[:2]]
    assert len(prompts) > TASKS_PER_CALL_MAX
    columns = TrlRollouts(desk)(prompts, trainer)  # type: ignore[arg-type]
    assert columns["prompt_ids"] == [[ord(letter) - 96 for letter in prompt] for prompt in prompts]
    assert desk.call_sizes == [TASKS_PER_CALL_MAX, len(prompts) - TASKS_PER_CALL_MAX]


@pytest.mark.parametrize("options", [{"staleness_max": -1}, {"timeout_seconds": 0.0}, {"lease_seconds": 0.0}])
def test_arguments_out_of_range_are_refused(options: Any) -> None:
    with pytest.raises(ConfigError):
        TrlRollouts(Desk(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap"])
def test_the_hook_turns_the_correction_on_and_the_weight_sync_off(name: str) -> None:
    trainer = make_trainer(**{name: 3.0})
    if name.endswith("cap"):
        del trainer.vllm_importance_sampling_clip_max
    use_rollout_logprobs(trainer, ratio_max=1.5)
    assert getattr(trainer, name) == 1.5
    assert (trainer.use_vllm, trainer.vllm_importance_sampling_mode) == (True, "token_truncate")
    trainer.vllm_generation.sync_weights()
    assert "vllm" not in sys.modules


@pytest.mark.parametrize(
    ("changes", "options", "text"),
    [
        ({"rollout_func": None}, {}, "rollout_func="),
        ({"use_vllm": True}, {}, "without use_vllm"),
        ({"tools": [print]}, {}, "tools"),
        ({}, {"mode": "sequence_mask"}, "token_truncate or"),
        ({}, {"ratio_max": 0.0}, "above 0"),
        ({"loss_type": "vespo"}, {"mode": "sequence_truncate"}, "vespo"),
    ],
)
def test_a_trainer_that_the_hook_does_not_fit_is_refused_untouched(changes: Any, options: Any, text: str) -> None:
    trainer = make_trainer(**changes)
    before = vars(trainer).copy()
    with pytest.raises(ConfigError, match=text):
        use_rollout_logprobs(trainer, **options)
    assert vars(trainer) == before


@pytest.mark.parametrize("name", ["vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max", "rollout_func"])
def test_a_release_without_the_settings_is_named(name: str) -> None:
    trainer = make_trainer()
    delattr(trainer, name)
    with pytest.raises(ConfigError, match=f"has no {name}: docs/trl.md"):
        use_rollout_logprobs(trainer)
