"""GRPOTrainer on samples of older weights: its loss is weighed by the truncated ratio, token by token."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trl_models import END, compute_logprobs, make_model, make_tokenizer

from pulsenet.chain.records import RolloutBatch
from pulsenet.errors import ConfigError
from pulsenet.ids import PeerId, RunId, Version
from pulsenet.local.rollouts import ReceivedRollouts, Sample, pack_rollouts, unpack_rollouts
from pulsenet.local.tasks import Task
from pulsenet.outer.settings import OuterSettings
from pulsenet.training.local_exchange import LocalExchange
from pulsenet.training.trl import TrlRollouts, encode_prompt, use_rollout_logprobs

TRAINER = PeerId(bytes(32))
GROUP = 4
NEWEST = 5

pytestmark = pytest.mark.filterwarnings("ignore")


class Inferencer:
    """A publisher whose tasks are answered with fixed completions, scored by the weights it is given."""

    def __init__(self, model: Any, number: int = NEWEST) -> None:
        self._model = model
        self._number = number
        self._draw = np.random.default_rng(3)
        self._tasks: list[tuple[bytes, Mapping[str, Any]]] = []

    def status(self) -> dict[str, Any]:
        return {"applied_version": NEWEST}

    def send_tasks(self, tasks: Sequence[Mapping[str, Any]], **_: Any) -> tuple[bytes, ...]:
        ids = tuple(self._draw.bytes(16) for _ in tasks)
        self._tasks += zip(ids, tasks, strict=True)
        return ids

    def rollouts(self, **_: Any) -> Iterator[ReceivedRollouts]:
        version = Version(0, self._number)
        for task_id, task in self._tasks:
            samples = []
            for length in self._draw.integers(1, 5, task["sample_count"]):
                completion = [*self._draw.integers(2, 15, length).tolist(), END]
                logprobs = compute_logprobs(self._model, task["prompt_tokens"], completion)
                samples.append(Sample(task["prompt_tokens"], completion, logprobs, 0.0))
            packed = pack_rollouts(version, version, samples, tasks=[Task(TRAINER, task_id, {}, 1.0)])
            fields = {name: getattr(packed, name) for name in packed.__slots__}
            yield unpack_rollouts(TRAINER, RolloutBatch(run_id=RunId(bytes(32)), sequence=1, **fields))
        self._tasks = []


def make_older(model: Any) -> Any:
    """The weights of some versions before."""
    older = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in older.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return older


def reward_length(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


class Run:
    """One optimizer step, and what its loss was computed from."""

    def __init__(
        self, folder: Path, inferencer: Inferencer, model: Any, *, callbacks: Sequence[Any] = (), **hook: Any
    ) -> None:
        import datasets
        from trl import GRPOConfig, GRPOTrainer

        self.staleness: list[int] = []

        def reward(completion_ids: Any, rollout_staleness: Any, **_: Any) -> list[float]:
            self.staleness = list(rollout_staleness)
            return reward_length(completion_ids)

        arguments = GRPOConfig(
            output_dir=str(folder),
            max_steps=1,
            num_generations=GROUP,
            per_device_train_batch_size=2 * GROUP,
            max_completion_length=6,
            optim="sgd",
            learning_rate=0.1,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
        )
        self.trainer: Any = GRPOTrainer(
            copy.deepcopy(model),
            reward,
            arguments,
            datasets.Dataset.from_dict({"prompt": ["1+2=", "3+4="]}),
            processing_class=make_tokenizer(),
            rollout_func=TrlRollouts(inferencer),  # type: ignore[arg-type]
            callbacks=list(callbacks),
        )
        if hook:
            use_rollout_logprobs(self.trainer, **hook)
        compute_loss = self.trainer.compute_loss

        def record(model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
            self.inputs, self.loss = inputs, compute_loss(model, inputs, *arguments, **options)
            return self.loss

        self.trainer.compute_loss = record
        self.trainer.train()

    @property
    def logged(self) -> Mapping[str, float]:
        return dict(self.trainer.state.log_history[0])

    def expect_ratios(self, model: Any, older: Any) -> torch.Tensor:
        """p / p_older of each completion token, by a plain pass over each sample; 1 on the padding."""
        ratios = torch.ones(self.inputs["completion_ids"].shape)
        rows = zip(self.inputs["prompt_ids"], self.inputs["prompt_mask"], self.inputs["completion_ids"], strict=True)
        for place, (prompt, prompt_mask, completion) in enumerate(rows):
            length = int(self.inputs["completion_mask"][place].sum())
            tokens = prompt[prompt_mask.bool()].tolist(), completion[:length].tolist()
            logprobs, before = compute_logprobs(model, *tokens), compute_logprobs(older, *tokens)
            ratios[place, :length] = torch.tensor(np.exp(np.array(logprobs) - np.array(before)), dtype=torch.float32)
        return ratios

    def expect_loss(self, ratios: torch.Tensor) -> float:
        """The loss where the policy did not move since it was sampled: minus the weighed advantages, by token."""
        mask = self.inputs["completion_mask"]
        return float(-(ratios * self.inputs["advantages"][:, None] * mask).sum() / mask.sum())


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


@pytest.fixture(scope="module")
def older(model: Any) -> Any:
    return make_older(model)


def test_samples_of_the_trainers_own_weights_weigh_one(model: Any, tmp_path: Path) -> None:
    run = Run(tmp_path, Inferencer(model), model, mode="token_truncate", ratio_max=2.0)
    ratios = run.inputs["importance_sampling_ratio"]
    assert torch.allclose(ratios, torch.ones_like(ratios), atol=1e-4)
    assert float(run.loss) == pytest.approx(run.expect_loss(torch.ones(())), abs=1e-4)
    assert run.staleness == [0] * (2 * GROUP)
    assert "vllm" not in sys.modules


def test_a_stale_batch_changes_the_loss_by_the_truncated_ratio(model: Any, older: Any, tmp_path: Path) -> None:
    fresh = Run(tmp_path / "fresh", Inferencer(model), model, mode="token_truncate", ratio_max=1.1)
    stale = Run(tmp_path / "stale", Inferencer(older, NEWEST - 3), model, mode="token_truncate", ratio_max=1.1)
    assert stale.staleness == [3] * (2 * GROUP)
    assert sorted(map(tuple, fresh.inputs["completion_ids"].tolist())) == sorted(
        map(tuple, stale.inputs["completion_ids"].tolist())
    )  # the same samples, but for the logprobs
    exact = stale.expect_ratios(model, older)
    assert (exact > 1.1).any()
    assert (exact < 0.9).any()
    expected = exact.clamp(max=1.1)
    assert torch.allclose(stale.inputs["importance_sampling_ratio"], expected, atol=1e-4)
    assert float(stale.loss) == pytest.approx(stale.expect_loss(expected), abs=1e-4)
    assert abs(float(stale.loss) - float(fresh.loss)) > 1e-3
    assert stale.logged["sampling/importance_sampling_ratio/max"] == pytest.approx(1.1)
    after = zip(fresh.trainer.model.parameters(), stale.trainer.model.parameters(), strict=True)
    assert any(not torch.equal(mine, other) for mine, other in after)


def test_a_sequence_has_one_ratio(model: Any, older: Any, tmp_path: Path) -> None:
    run = Run(tmp_path, Inferencer(older, NEWEST - 3), model, mode="sequence_truncate", ratio_max=1.3)
    expected = run.expect_ratios(model, older).prod(dim=1, keepdim=True).clamp(max=1.3)
    assert torch.allclose(run.inputs["importance_sampling_ratio"], expected, atol=1e-3)
    assert float(run.loss) == pytest.approx(run.expect_loss(expected), abs=1e-3)


def test_without_the_hook_trl_takes_stale_samples_for_fresh_ones(model: Any, older: Any, tmp_path: Path) -> None:
    """Why there is a hook. Should a release of TRL do it by itself, this says so."""
    run = Run(tmp_path, Inferencer(older, NEWEST - 3), model)
    assert "importance_sampling_ratio" not in run.inputs
    assert float(run.loss) == pytest.approx(run.expect_loss(torch.ones(())), abs=1e-4)


def test_rounds_go_on_beside_rollouts(model: Any, tmp_path: Path) -> None:
    """In a run of several trainers the rounds take the place of the publishing callback."""
    from pulsenet.training.callback import OuterCallback

    rounds = OuterCallback(LocalExchange(OuterSettings(inner_steps=1), 1).member(0))
    Run(tmp_path, Inferencer(model), model, callbacks=[rounds], ratio_max=2.0)
    assert rounds.sync is not None
    assert rounds.sync.round_index == 1


def test_prompts_are_encoded_as_trl_does(model: Any, tmp_path: Path) -> None:
    """Plain text and conversations, by the trainer's own template."""
    trainer = Run(tmp_path, Inferencer(model), model).trainer
    trainer.processing_class.chat_template = trainer.chat_template = (
        "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    conversation = [{"role": "user", "content": "1+"}, {"role": "user", "content": "2"}]
    for prompt in ("12+3=", conversation):
        ours, theirs = encode_prompt(prompt, trainer), trainer._tokenize_prompts([prompt])[0][0]
        assert ours == tuple(theirs)
    assert encode_prompt(conversation, trainer) == encode_prompt("1+2=", trainer)


def test_the_hook_is_for_a_trainer_with_rollouts(model: Any, tmp_path: Path) -> None:
    run = Run(tmp_path, Inferencer(model), model, ratio_max=2.0)
    with pytest.raises(ConfigError, match="weight sync of its own"):
        use_rollout_logprobs(run.trainer)
