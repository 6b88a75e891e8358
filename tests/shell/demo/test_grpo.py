"""GRPO: advantages, and what one step does to masters and view."""

import numpy as np
import pytest
import torch

from pulsenetd.demo import grpo, models
from pulsenetd.demo.grpo import GrpoTrainer, compute_advantages, pad_right
from pulsenetd.demo.rollouts import Sampler, Samples
from pulsenetd.demo.settings import SETTINGS
from pulsenetd.demo.task import Question


def make_trainer(learning_rate: float = 1e-4) -> GrpoTrainer:
    masters, tokenizer = models.load_masters("tiny")
    return GrpoTrainer(masters, learning_rate=learning_rate, pad_token=tokenizer.pad_token)


def make_samples(trainer: GrpoTrainer, *, seed: int = 1) -> Samples:
    """Return samples of the trainer's own view, every second one of them rewarded."""
    _, tokenizer = models.load_masters("tiny")
    sampler = Sampler(trainer.view, tokenizer, seed=seed)
    sampler.refresh()
    questions = (Question(3, 4), Question(31, 18))
    drawn = sampler.sample(questions, group_size=6, completion_tokens_max=4)
    rewards = tuple(float(index % 2) for index in range(len(drawn.rewards)))
    return Samples(drawn.prompts, drawn.completions, drawn.logprobs, rewards)


def test_advantages_are_relative_to_the_group() -> None:
    prompts = [(1,), (1,), (2,), (2,), (3,)]
    advantages = compute_advantages(prompts, [0.0, 1.0, 0.5, 0.5, 1.0])
    np.testing.assert_allclose(advantages.numpy(), [-1, 1, 0, 0, 0], atol=1e-3)


def test_a_step_raises_the_likelihood_of_what_was_rewarded() -> None:
    trainer = make_trainer()
    samples = make_samples(trainer)
    advantages = compute_advantages(samples.prompts, samples.rewards)
    before, mask = trainer._score(samples)
    trainer.step(samples)
    after, _ = trainer._score(samples)
    gain = (((after - before) * mask).detach().sum(dim=1) * advantages).sum()
    assert float(gain) > 0


@pytest.mark.parametrize("has_bf16", [True, False])
def test_the_view_is_the_bf16_cast_of_the_masters(has_bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo, "has_fast_bf16", lambda: has_bf16)
    trainer = make_trainer()
    old = [parameter.detach().clone() for parameter in trainer.view.parameters()]
    report = trainer.step(make_samples(trainer))
    changed_count = 0
    for before, master, viewed, computed in zip(
        old,
        trainer.masters.parameters(),
        trainer.view.parameters(),
        trainer._compute.parameters(),
        strict=True,
    ):
        assert master.dtype == torch.float32
        assert viewed.dtype == torch.bfloat16
        assert torch.equal(master.to(torch.bfloat16).view(torch.int16), viewed.view(torch.int16))
        assert torch.equal(computed.float(), viewed.float())
        changed_count += int((before.view(torch.int16) != viewed.view(torch.int16)).sum())
    assert report.changed_count == changed_count > 0
    assert report.element_count == sum(parameter.numel() for parameter in old)


def test_a_step_at_the_demonstration_rate_changes_a_few_percent_at_most() -> None:
    trainer = make_trainer(SETTINGS["tiny"].learning_rate)
    reports = [trainer.step(make_samples(trainer, seed=seed)) for seed in range(3)]
    for report in reports:
        assert 0.002 < report.changed_count / report.element_count < 0.04
        assert report.gradient_norm > 0
        # samples of the very weights that are trained: only the arithmetic differs
        assert report.logprob_gap < 0.05


def test_equal_rewards_teach_nothing() -> None:
    trainer = make_trainer()
    drawn = make_samples(trainer)
    report = trainer.step(Samples(drawn.prompts, drawn.completions, drawn.logprobs, (0.5,) * len(drawn.rewards)))
    assert report.gradient_norm == 0
    assert report.changed_count == 0
    assert report.reward == 0.5


def test_rows_are_filled_up_on_the_right() -> None:
    padded = pad_right([torch.tensor([1.0]), torch.tensor([2.0, 3.0])], 3)
    assert padded.tolist() == [[1, 0, 0], [2, 3, 0]]
