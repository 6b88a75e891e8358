"""An engine process of the demonstration: samples from the weights it received, and sends rollouts back.

Its model starts as zeros. Everything it ever serves came through the node beside it.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from pulsenet.errors import PulsenetError
from pulsenet.ids import Version
from pulsenet.local.rollouts import Sample
from pulsenet.serving.engine import EngineUpdate
from pulsenet.serving.in_process import InProcessEngine
from pulsenet.serving.subscriber import Subscriber, attach_engine
from pulsenetd.demo.attaching import wait_for_node, write_weights
from pulsenetd.demo.models import load_empty
from pulsenetd.demo.reports import Applied, Finished, Loaded, Sampled, write_report
from pulsenetd.demo.rollouts import Sampler, Samples
from pulsenetd.demo.settings import SETTINGS, DemoSettings
from pulsenetd.demo.task import draw_questions

UPDATE_WAIT_SECONDS: Final = 0.5
"""How long one call waits for an update; between calls the process looks whether the last version is known."""
RETRY_SECONDS: Final = 0.5


class WatchedEngine(InProcessEngine):
    """An engine that also remembers how long its last update took and which root it had."""

    apply_seconds = 0.0
    root = ""

    def stage(self, update: EngineUpdate) -> None:
        """Check an update while the version before it is served."""
        self._begun = time.monotonic(), update.root.hex()
        super().stage(update)

    def commit(self) -> None:
        """Make the staged update the weights."""
        super().commit()
        started_at, self.root = self._begun
        self.apply_seconds = time.monotonic() - started_at


def main(arguments: Sequence[str] | None = None) -> int:
    """Follow the run until the version named in ``--final-file`` is served, write the weights and leave."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=tuple(SETTINGS), required=True)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--prompts", type=int, required=True, help="questions in one batch")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--final-file", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(parsed.threads)
    started_at = time.monotonic()
    model, tokenizer = load_empty(parsed.model)
    engine = WatchedEngine(model)
    sampler = Sampler(model, tokenizer, seed=parsed.seed)
    write_report(sys.stdout, Loaded(time.monotonic() - started_at))
    wait_for_node(parsed.data_dir)
    with attach_engine(engine, data_dir=parsed.data_dir) as subscriber:
        worker = Worker(SETTINGS[parsed.model], subscriber, engine, sampler, random.Random(parsed.seed), parsed.prompts)
        version = worker.follow(parsed.final_file)
    write_weights(model, parsed.output)
    write_report(sys.stdout, Finished(version.epoch, version.number, engine.root))
    return 0


@dataclass(slots=True)
class Worker:
    """Takes turns between applying updates and sampling: one batch per version, more only if nothing newer comes."""

    settings: DemoSettings
    subscriber: Subscriber
    engine: WatchedEngine
    sampler: Sampler
    draw: random.Random
    prompt_count: int
    _sampled: Version | None = None
    """Version of the last batch."""
    _sampled_at: float = 0.0

    def follow(self, final_file: Path) -> Version:
        """Serve until the version that ``final_file`` names is held; return it."""
        while True:
            self._update(UPDATE_WAIT_SECONDS if self._is_idle() else 0.0)
            version = self.engine.version
            # the file appears whole, by a rename, when training is over
            final = final_file.read_text() if final_file.exists() else None
            if version is not None and str(version) == final:
                return version
            if version is not None and final is None and not self._is_idle():
                self._sample(version)

    def _is_idle(self) -> bool:
        """Return whether there is nothing to sample: no weights yet, or a batch of these was sent just now."""
        if self.engine.version is None:
            return True
        is_recent = time.monotonic() - self._sampled_at < self.settings.repeat_seconds
        return self.engine.version == self._sampled and is_recent

    def _update(self, timeout_seconds: float) -> None:
        try:
            version = self.subscriber.step(timeout_seconds)
        except PulsenetError as error:
            # the node may be restarting; the engine keeps serving what it holds
            print(f"update failed, trying again: {error}", file=sys.stderr, flush=True)
            time.sleep(RETRY_SECONDS)
            return
        if version is not None:
            self.sampler.refresh()
            applied = Applied(version.epoch, version.number, self.engine.apply_seconds, time.monotonic())
            write_report(sys.stdout, applied)

    def _sample(self, version: Version) -> None:
        started_at = time.monotonic()
        questions = draw_questions(self.draw, count=self.prompt_count, operand_max=self.settings.operand_max)
        with self.engine.weights() as held:
            assert held == version
            samples = self.sampler.sample(
                questions,
                group_size=self.settings.group_size,
                completion_tokens_max=self.settings.completion_tokens_max,
            )
        self._submit(samples, version, time.monotonic() - started_at)
        self._sampled, self._sampled_at = version, time.monotonic()

    def _submit(self, samples: Samples, version: Version, seconds: float) -> None:
        rows = zip(samples.prompts, samples.completions, samples.logprobs, samples.rewards, strict=True)
        batch = [Sample(prompt, completion, logprobs.tolist(), reward) for prompt, completion, logprobs, reward in rows]
        try:
            taken = self.subscriber.submit_rollouts(batch, version_first=version, version_last=version)
        except PulsenetError as error:
            print(f"rollouts not handed over: {error}", file=sys.stderr, flush=True)
            return
        if not taken.accepted:
            print(f"rollouts refused by the node: {taken.reason}", file=sys.stderr, flush=True)
            return
        reward = sum(samples.rewards) / len(samples.rewards)
        write_report(sys.stdout, Sampled(version.number, len(batch), reward, seconds))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PulsenetError as error:
        sys.exit(f"inferencer: {error}")
