"""A small training process that mixes with others, started by tests: an ordinary loop and a checkpoint a round.

It prints a line of JSON for each round: what was mixed with how many, and how far apart it was.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path

import torch
from round_trainer import compute_loss, draw_batch, make_model, save, tell

import pulsenet
from pulsenet.training import GossipOptimizer, MixingReport, Probe


def main() -> None:
    """Train until the round that the goal names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--goal", type=Path, required=True, help="file with the round to end at, once it exists")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="least time of an inner step")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    mixer = pulsenet.join_mixing(data_dir=arguments.data_dir)
    assert mixer is not None

    def on_round(report: MixingReport) -> None:
        norm = sum(float(z.square().sum()) for z in sync.state.z)
        tell(**{**asdict(report), "utilization": report.utilization, "z_square": norm})

    # Outputs stand for logits: 16 tokens of 32 words, the same for every trainer.
    probe = Probe(draw_batch(seed=1000, index=0), lambda model, batch: model(batch), bin_token_count=8)
    sync = GossipOptimizer(model, optimizer, mixer=mixer, on_round=on_round, warmup_steps=0, probe=probe)
    if arguments.checkpoint.exists():
        saved = torch.load(arguments.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        sync.load_state_dict(saved["rounds"])
        tell(resumed_at=sync.round_index)
    tell(passed=sync.catch_up(), begins_at=sync.round_index, adoptions=sync.counters.adoptions)
    batch_index = 0
    while not arguments.goal.exists() or sync.round_index < int(arguments.goal.read_text()):
        batch_index += 1
        ends_at = time.monotonic() + arguments.step_seconds
        compute_loss(model, draw_batch(arguments.seed, batch_index)).backward()
        optimizer.step()
        time.sleep(max(0.0, ends_at - time.monotonic()))
        if sync.step() is not None:
            save(arguments.checkpoint, model, optimizer, sync)
        optimizer.zero_grad()
    tell(done=sync.round_index)
    mixer.close()


if __name__ == "__main__":
    main()
