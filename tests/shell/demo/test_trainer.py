"""The training process: which rollouts it takes, and that it publishes what it trained."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from pulsenet.chain.records import RolloutBatch
from pulsenet.errors import UnavailableError
from pulsenet.ids import PeerId, RunId, Version
from pulsenet.local.client import PublishResult
from pulsenet.local.protocol import PublishStatus
from pulsenet.local.rollouts import ReceivedRollouts, Sample, pack_rollouts, unpack_rollouts
from pulsenetd.demo.grpo import GrpoTrainer
from pulsenetd.demo.models import load_masters
from pulsenetd.demo.settings import SETTINGS
from pulsenetd.demo.task import Question
from pulsenetd.demo.tokenizer import CharacterTokenizer
from pulsenetd.demo.trainer import Collector, train

TOKENIZER = CharacterTokenizer()
SETTING = SETTINGS["tiny"]
WANTED_COUNT = SETTING.prompts_per_step * SETTING.group_size


def make_batch(version: Version, *, count: int = WANTED_COUNT, claimed_reward: float = 0.0) -> ReceivedRollouts:
    """Return a batch for 2 + 3 in which every second answer is right."""
    prompt = TOKENIZER.encode_prompt(Question(2, 3))
    samples = tuple(
        Sample(prompt, TOKENIZER.encode("5" if index % 2 else "8"), (-2.5,), claimed_reward) for index in range(count)
    )
    return receive(version, samples)


def receive(version: Version, samples: Sequence[Sample]) -> ReceivedRollouts:
    """Return the samples as they come in from an inferencer."""
    packed = pack_rollouts(version, version, samples)
    fields = {name: getattr(packed, name) for name in packed.__slots__}
    return unpack_rollouts(PeerId(bytes(32)), RolloutBatch(run_id=RunId(bytes(32)), sequence=1, **fields))


class RecordingPublisher:
    """Stands in for the node: commits what it is given and hands out what it was prepared with."""

    def __init__(self, batches: Sequence[ReceivedRollouts], status: PublishStatus = PublishStatus.COMMITTED) -> None:
        self.batches = list(batches)
        self.status = status
        self.published: list[Any] = []

    def publish(self, model: Any, *, step: int, wait: bool, timeout_seconds: float) -> PublishResult:
        self.published.append((step, [parameter.detach().clone() for parameter in model.parameters()]))
        return PublishResult(self.status, Version(0, step + 1), 1000, 10, 5, 500, "why")

    def rollouts(self, *, timeout_seconds: float) -> Iterator[ReceivedRollouts]:
        while self.batches:
            yield self.batches.pop(0)


def make_grpo() -> GrpoTrainer:
    masters, tokenizer = load_masters("tiny")
    return GrpoTrainer(masters, learning_rate=SETTING.learning_rate, pad_token=tokenizer.pad_token)


def test_old_and_foreign_batches_are_dropped() -> None:
    collector = Collector(SETTING, TOKENIZER)
    for version in (Version(1, 7), Version(1, 11), Version(0, 9), Version(2, 10)):
        collector.add(make_batch(version), Version(1, 10))
    assert collector.dropped_count == 4
    assert not collector.is_enough


def test_batches_are_gathered_until_a_step_is_full_and_their_age_is_told() -> None:
    collector = Collector(SETTING, TOKENIZER)
    collector.add(make_batch(Version(0, 10), count=WANTED_COUNT // 2), Version(0, 10))
    assert not collector.is_enough
    collector.add(make_batch(Version(0, 9), count=WANTED_COUNT // 2), Version(0, 10))
    assert collector.is_enough
    samples, staleness = collector.take()
    assert len(samples.completions) == WANTED_COUNT
    assert staleness == 1
    assert not collector.is_enough


def test_rewards_are_computed_here_whatever_the_inferencer_claimed() -> None:
    collector = Collector(SETTING, TOKENIZER)
    collector.add(make_batch(Version(0, 1), claimed_reward=1.0), Version(0, 1))
    samples, _ = collector.take()
    assert samples.rewards[:2] == (0.1, 1.0)


def test_a_prompt_that_asks_nothing_earns_nothing() -> None:
    collector = Collector(SETTING, TOKENIZER)
    sample = Sample(TOKENIZER.encode("12"), TOKENIZER.encode("5"), (-2.5,), 1.0)
    collector.add(receive(Version(0, 1), [sample]), Version(0, 1))
    assert collector.take()[0].rewards == (0.0,)


def test_training_publishes_the_start_and_then_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    publisher = RecordingPublisher([make_batch(Version(0, 1)), make_batch(Version(0, 1)), make_batch(Version(0, 2))])
    version = train(publisher, make_grpo(), Collector(SETTING, TOKENIZER), versions=2)  # type: ignore[arg-type]
    assert version == Version(0, 3)
    assert [step for step, _ in publisher.published] == [0, 1, 2]
    first, second = publisher.published[0][1], publisher.published[1][1]
    assert any(not before.equal(after) for before, after in zip(first, second, strict=True))
    reports = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(report["number"], report["is_first"]) for report in reports] == [(1, True), (2, False), (3, False)]
    assert [report["staleness_max"] for report in reports] == [0, 0, 1]


def test_a_version_that_is_not_committed_ends_training() -> None:
    publisher = RecordingPublisher([], PublishStatus.NOT_PUBLISHER)
    with pytest.raises(UnavailableError, match="not_publisher"):
        train(publisher, make_grpo(), Collector(SETTING, TOKENIZER), versions=1)  # type: ignore[arg-type]


def test_a_lack_of_rollouts_ends_training() -> None:
    with pytest.raises(UnavailableError, match="no rollouts"):
        train(RecordingPublisher([]), make_grpo(), Collector(SETTING, TOKENIZER), versions=1)  # type: ignore[arg-type]
