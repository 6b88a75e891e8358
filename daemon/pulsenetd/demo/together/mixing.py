"""What the demonstration of trainers that mix has to show for itself at the end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from pulsenet.tensors.bf16 import bits_to_float32
from pulsenetd.demo.reports import Finished, Resumed
from pulsenetd.demo.together.progress import MixedRow, ring_size_bytes
from pulsenetd.demo.together.settings import INNER_STEPS, TogetherSettings
from pulsenetd.files.safetensors_files import open_model
from pulsenetd.words import say_size


class MixedSwarm(Protocol):
    """What is asked of the demonstration."""

    settings: TogetherSettings
    variant: str | None
    mixed_rows: dict[int, MixedRow]
    """By round."""
    finished: dict[str, Finished]
    """By trainer."""
    resumed: Resumed | None
    """What the one that was cut off said when it came back."""
    started_at: float

    @property
    def victim(self) -> str:
        """The trainer that is cut off."""

    def weights(self, name: str) -> Path:
        """Return where a trainer wrote its last weights."""


ROUNDS_MORE_MAX: Final = 200
"""Rounds beyond those asked for, after which the one that was cut off is not waited for any more."""


def is_over(swarm: MixedSwarm, rounds: int) -> bool:
    """Return whether there is nothing more to see: the one that was cut off mixes again, or never will."""
    return _mixes_again(swarm) or max(swarm.mixed_rows, default=0) >= rounds + ROUNDS_MORE_MAX


def summarise(swarm: MixedSwarm) -> dict[str, Any]:
    """Return the summary as plain values."""
    rows = [row for _, row in sorted(swarm.mixed_rows.items())]
    resumed = swarm.resumed
    apart = measure_spread({name: swarm.weights(name) for name in swarm.finished})
    return {
        "mixes_again": _mixes_again(swarm),
        "model": swarm.settings.name,
        "variant": swarm.variant,
        "trainers": len(swarm.finished),
        "inner_steps": INNER_STEPS,
        "apart": apart,
        "resumed": None if resumed is None else {"from": resumed.checkpoint_round_index, "at": resumed.round_index},
        "rounds": [
            {
                "round": row.round_index,
                "trainers": sorted(row.done),
                "mix1": row.mix1_count,
                "mix2": row.mix2_count,
                "reasons": sorted({done.reasons for done in row.done.values()} - {""}),
                "received_bytes": round(row.received),
                "diloco_received_bytes": ring_size_bytes(swarm.settings.element_count, len(row.done)),
                "utilization": row.utilization,
                "distance": row.distance,
                "loss": row.loss,
            }
            for row in rows
        ],
        "seconds": round(time.monotonic() - swarm.started_at, 1),
    }


def describe(summary: Mapping[str, Any]) -> Iterable[str]:
    """Yield the summary for a person."""
    rounds = summary["rounds"]
    received = sum(row["received_bytes"] for row in rounds) / len(rounds)
    used = sum(row["utilization"] for row in rounds) / len(rounds)
    resumed = summary["resumed"]
    back = f"back with its checkpoint of round {resumed['from']}, in round {resumed['at']}" if resumed else "not back"
    yield f"{'cut off':<12} {'mixes again' if summary['mixes_again'] else 'DID NOT MIX AGAIN'}: {back}"
    yield f"{'apart':<12} {summary['apart']:.2e} of the weights' norm, root mean square over the trainers at the end"
    yield f"{'received':<12} {say_size(received)} a round and trainer"
    yield f"{'used':<12} {used:.0%} of the time in inner steps, on machines that share their cores"
    yield f"{'loss':<12} {rounds[0]['loss']:.4f} in the first round, {rounds[-1]['loss']:.4f} in the last"
    yield f"{'time':<12} {summary['seconds']:.0f} s"


def _mixes_again(swarm: MixedSwarm) -> bool:
    resumed = swarm.resumed
    after = [row for row in swarm.mixed_rows.values() if resumed is not None and row.round_index >= resumed.round_index]
    return any(
        max(done.mix1_count, done.mix2_count) > 1 for row in after if (done := row.done.get(swarm.victim)) is not None
    )


def measure_spread(paths: Mapping[str, Path]) -> float:
    """Return how far BF16 models are from their mean: root mean square over them, relative to the mean's norm."""
    models = [open_model(path) for path in paths.values()]
    apart, size = 0.0, 0.0
    for index in range(len(models[0].table.tensors)):
        bits = [model.tensor_bytes(index).view(np.uint16) for model in models]
        values = np.stack([bits_to_float32(each) for each in bits]).astype(np.float64)
        mean = values.mean(axis=0)
        apart += float(np.square(values - mean).sum()) / len(models)
        size += float(np.square(mean).sum())
    return float(np.sqrt(apart / size)) if size else 0.0
