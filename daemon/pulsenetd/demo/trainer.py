"""The training process of the demonstration: GRPO on rollouts that come through pulsenet.

It knows nothing of the network: it attaches to the node beside it, publishes, and takes rollouts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from pulsenet.errors import PulsenetError, UnavailableError
from pulsenet.ids import Version
from pulsenet.local.client import PublishResult
from pulsenet.local.protocol import PublishStatus
from pulsenet.local.rollouts import ReceivedRollouts
from pulsenet.training.publisher import Publisher, attach_publisher
from pulsenetd.demo.attaching import wait_for_node, write_weights
from pulsenetd.demo.grpo import GrpoTrainer, StepReport
from pulsenetd.demo.models import load_masters
from pulsenetd.demo.reports import Finished, Loaded, Published, write_report
from pulsenetd.demo.rollouts import Samples
from pulsenetd.demo.settings import SETTINGS, DemoSettings
from pulsenetd.demo.task import parse_question, score_completion
from pulsenetd.demo.tokenizer import PromptTokenizer

PUBLISH_SECONDS_MAX = 120.0
ROLLOUTS_SECONDS_MAX = 120.0


@dataclass(slots=True)
class Collector:
    """Gathers rollouts for one step: whole groups, fresh enough, with rewards this process checked itself."""

    settings: DemoSettings
    tokenizer: PromptTokenizer
    dropped_count: int = 0
    """Batches that were too old or from another epoch."""
    _batches: list[ReceivedRollouts] = field(default_factory=list)
    _staleness: int = 0

    def add(self, batch: ReceivedRollouts, version: Version) -> None:
        """Keep a batch if its oldest weights are at most ``staleness_max`` versions behind ``version``."""
        staleness = version.number - batch.version_first.number
        if batch.version_first.epoch != version.epoch or not 0 <= staleness <= self.settings.staleness_max:
            self.dropped_count += 1
            return
        self._batches.append(batch)
        self._staleness = max(self._staleness, staleness)

    @property
    def is_enough(self) -> bool:
        """Whether a step can be taken."""
        wanted_count = self.settings.prompts_per_step * self.settings.group_size
        return sum(len(batch.samples) for batch in self._batches) >= wanted_count

    def take(self) -> tuple[Samples, int]:
        """Return the samples kept so far and how many versions the oldest is behind; start anew."""
        listed = [sample for batch in self._batches for sample in batch.samples]
        rewards = []
        for sample in listed:
            question = parse_question(self.tokenizer.decode(tuple(sample.prompt_tokens)))
            completion = self.tokenizer.decode(tuple(sample.completion_tokens))
            # a prompt that asks nothing we know teaches nothing: a constant reward has no advantage
            rewards.append(0.0 if question is None else score_completion(question, completion))
        staleness = self._staleness
        self._batches, self._staleness = [], 0
        samples = Samples(
            prompts=tuple(tuple(sample.prompt_tokens) for sample in listed),
            completions=tuple(tuple(sample.completion_tokens) for sample in listed),
            logprobs=tuple(np.asarray(sample.logprobs, dtype=np.float32) for sample in listed),
            rewards=tuple(rewards),
        )
        return samples, staleness


def main(arguments: Sequence[str] | None = None) -> int:
    """Train until ``--versions`` steps are published, write the final BF16 weights and leave."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=tuple(SETTINGS), required=True)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--versions", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--base", type=Path, default=None, help="write the first weights here, for an engine to start")
    parser.add_argument("--rollouts-seconds", type=float, default=ROLLOUTS_SECONDS_MAX, help="longest wait for samples")
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(parsed.threads)
    torch.manual_seed(parsed.seed)
    settings = SETTINGS[parsed.model]
    started_at = time.monotonic()
    masters, tokenizer = load_masters(parsed.model)
    grpo = GrpoTrainer(masters, learning_rate=settings.learning_rate, pad_token=tokenizer.pad_token)
    if parsed.base is not None:
        grpo.view.save_pretrained(parsed.base, safe_serialization=True)
    write_report(sys.stdout, Loaded(time.monotonic() - started_at))
    wait_for_node(parsed.data_dir)
    with attach_publisher(data_dir=parsed.data_dir) as publisher:
        version = train(
            publisher,
            grpo,
            Collector(settings, tokenizer),
            versions=parsed.versions,
            rollouts_seconds_max=parsed.rollouts_seconds,
        )
    write_weights(grpo.view, parsed.output)
    write_report(sys.stdout, Finished(version.epoch, version.number, ""))
    return 0


def train(
    publisher: Publisher,
    grpo: GrpoTrainer,
    collector: Collector,
    *,
    versions: int,
    rollouts_seconds_max: float = ROLLOUTS_SECONDS_MAX,
) -> Version:
    """Publish the weights as they are, then one version per step; returns the last version.

    Raises:
        UnavailableError: The node did not commit, or no rollouts came.
    """
    version = _publish(publisher, grpo, step_index=0, report=None, staleness=0, wait_seconds=0.0, step_seconds=0.0)
    for step_index in range(1, versions + 1):
        waiting_since = time.monotonic()
        samples, staleness = _collect(publisher, collector, version, rollouts_seconds_max)
        stepping_since = time.monotonic()
        report = grpo.step(samples)
        version = _publish(
            publisher,
            grpo,
            step_index=step_index,
            report=report,
            staleness=staleness,
            wait_seconds=stepping_since - waiting_since,
            step_seconds=time.monotonic() - stepping_since,
        )
    return version


def _collect(publisher: Publisher, collector: Collector, version: Version, seconds_max: float) -> tuple[Samples, int]:
    for batch in publisher.rollouts(timeout_seconds=seconds_max):
        collector.add(batch, version)
        if collector.is_enough:
            return collector.take()
    raise UnavailableError(f"no rollouts of version {version} came within {seconds_max:.0f} s")


def _publish(
    publisher: Publisher,
    grpo: GrpoTrainer,
    *,
    step_index: int,
    report: StepReport | None,
    staleness: int,
    wait_seconds: float,
    step_seconds: float,
) -> Version:
    """Publish the FP32 masters, of which pulsenet takes the BF16 cast, and report what it cost."""
    offered_at = time.monotonic()
    result = publisher.publish(grpo.masters, step=step_index, wait=True, timeout_seconds=PUBLISH_SECONDS_MAX)
    version = _expect_committed(result)
    write_report(
        sys.stdout,
        Published(
            epoch=version.epoch,
            number=version.number,
            is_first=report is None,
            raw_size_bytes=result.raw_size_bytes,
            encoded_size_bytes=result.encoded_size_bytes,
            changed_count=result.changed_count,
            element_count=result.element_count,
            reward=0.0 if report is None else report.reward,
            logprob_gap=0.0 if report is None else report.logprob_gap,
            staleness_max=staleness,
            wait_seconds=wait_seconds,
            step_seconds=step_seconds,
            publish_seconds=time.monotonic() - offered_at,
            offered_at=offered_at,
        ),
    )
    return version


def _expect_committed(result: PublishResult) -> Version:
    if result.status is not PublishStatus.COMMITTED or result.version is None:
        raise UnavailableError(f"the node did not commit the version: {result.status} ({result.reason})")
    return result.version


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PulsenetError as error:
        sys.exit(f"trainer: {error}")
