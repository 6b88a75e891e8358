"""One of several training processes: an ordinary loop with one line more, and a checkpoint after each round.

It knows nothing of the other trainers: its ``OuterOptimizer``, or ``GossipOptimizer``, meets them through the node
beside it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from pulsenet.errors import PulsenetError, UnavailableError
from pulsenet.training import (
    DaemonExchange,
    DaemonMixer,
    GossipOptimizer,
    MixingReport,
    OuterOptimizer,
    RoundReport,
    join_mixing,
    join_rounds,
)
from pulsenetd.demo.attaching import wait_for_node, write_weights
from pulsenetd.demo.grpo import GRADIENT_NORM_MAX
from pulsenetd.demo.models import copy_module, load_masters
from pulsenetd.demo.reports import Finished, Loaded, Resumed, RoundDone, RoundMixed, write_report
from pulsenetd.demo.together.checkpoint import load_checkpoint, save_checkpoint
from pulsenetd.demo.together.lessons import compute_loss, draw_lesson
from pulsenetd.demo.together.settings import ALGORITHMS, SETTINGS, TogetherSettings

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

    from pulsenetd.demo.tokenizer import PromptTokenizer

EXCHANGE_TRIES: Final = 10
"""How often an exchange that found no receipt in time is waited for again."""


class Learner:
    """The loop: inner steps on a shard of its own, an exchange after every round.

    Args:
        model: FP32 masters, stepped in place.
        shard: Which sums this trainer learns from; no two trainers see the same.
        checkpoint: Where its state is kept after each round.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        tokenizer: PromptTokenizer,
        settings: TogetherSettings,
        *,
        data_directory: Path,
        shard: int,
        checkpoint: Path,
        algorithm: str = "pulseloco",
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._settings = settings
        self._shard = shard
        self._checkpoint = checkpoint
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self._way: DaemonExchange | DaemonMixer | None
        self.sync: OuterOptimizer | GossipOptimizer
        if algorithm == "gossip":
            self._way = mixer = join_mixing(data_dir=data_directory)
            self.sync = GossipOptimizer(model, self._optimizer, mixer=mixer)
        else:
            self._way = exchange = join_rounds(data_dir=data_directory)
            self.sync = OuterOptimizer(model, self._optimizer, exchange=exchange)

    def run(self, rounds: int, until: Path | None = None) -> None:
        """Train until ``rounds`` rounds are done and the file ``until`` exists, and say what each did."""
        if load_checkpoint(self._checkpoint, self._model, self._optimizer, self.sync):
            held = self.sync.round_index
            self.sync.catch_up()
            write_report(sys.stdout, Resumed(held, self.sync.round_index))
        while self.sync.round_index < rounds or (until is not None and not until.exists()):
            self._run_round()
            save_checkpoint(self._checkpoint, self._model, self._optimizer, self.sync)

    def close(self) -> None:
        """Let go of the node."""
        assert self._way is not None, "one rank a trainer"
        self._way.close()

    def _run_round(self) -> None:
        started_at, begun = time.monotonic(), self.sync.round_index
        losses: list[float] = []
        report = None
        while report is None:
            questions = draw_lesson(
                self._shard,
                begun,
                len(losses),
                count=self._settings.batch_size,
                operand_max=self._settings.operand_max,
            )
            loss = compute_loss(self._model, self._tokenizer, questions)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), GRADIENT_NORM_MAX)
            self._optimizer.step()
            losses.append(float(loss.detach()))
            report = self._exchange_if_due()
            self._optimizer.zero_grad(set_to_none=True)
        write_report(
            sys.stdout, self._describe(report, begun, sum(losses) / len(losses), time.monotonic() - started_at)
        )

    def _describe(
        self, report: RoundReport | MixingReport, begun: int, loss: float, seconds: float
    ) -> RoundDone | RoundMixed:
        if isinstance(report, MixingReport):
            return RoundMixed(
                round_index=report.round_index,
                next_round_index=report.next_round_index,
                mix1_count=report.mix1_count,
                mix2_count=report.mix2_count,
                reasons=" ".join(sorted({report.mix1_reason, report.mix2_reason} - {""})),
                distance=report.distance,
                utilization=report.utilization,
                loss=loss,
                seconds=seconds,
            )
        assert isinstance(self.sync, OuterOptimizer)
        return RoundDone(
            round_index=begun,
            next_round_index=self.sync.round_index,
            outcome=report.outcome,
            contributor_count=report.contributor_count,
            sent_count=report.sent_count,
            element_count=report.element_count,
            payload_size_bytes=report.payload_size_bytes,
            residual_norm=report.residual_norm,
            loss=loss,
            state_root=self.sync.state_root.hex(),
            seconds=seconds,
        )

    def _exchange_if_due(self) -> RoundReport | MixingReport | None:
        for _ in range(EXCHANGE_TRIES - 1):
            try:
                return self.sync.step()
            except UnavailableError as error:
                print(f"the exchange is waited for again: {error}", file=sys.stderr, flush=True)
        return self.sync.step()


def main(arguments: Sequence[str] | None = None) -> int:
    """Train with the others until ``--rounds`` are done, write the final BF16 weights and leave."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=tuple(SETTINGS), required=True)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--shard", type=int, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--until", type=Path, default=None)
    parser.add_argument("--algorithm", choices=tuple(ALGORITHMS), default="pulseloco")
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(parsed.threads)
    settings = SETTINGS[parsed.model]
    started_at = time.monotonic()
    model, tokenizer = load_masters(parsed.model)
    write_report(sys.stdout, Loaded(time.monotonic() - started_at))
    wait_for_node(parsed.data_dir)
    learner = Learner(
        model,
        tokenizer,
        settings,
        data_directory=parsed.data_dir,
        shard=parsed.shard,
        checkpoint=parsed.checkpoint,
        algorithm=parsed.algorithm,
    )
    learner.run(parsed.rounds, parsed.until)
    write_weights(copy_module(model, torch.bfloat16), parsed.output)
    root = learner.sync.state_root.hex() if isinstance(learner.sync, OuterOptimizer) else ""
    write_report(sys.stdout, Finished(0, learner.sync.round_index, root))
    learner.close()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PulsenetError as error:
        sys.exit(f"trainer: {error}")
