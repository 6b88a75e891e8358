"""Figures, verdicts, table and picture of bench_outer.py."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from outer_swarm import CONTROLS, FP32_SIZE_BYTES, Plan, RunFigures

T_95: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093),
)
"""Two-sided 95 % points of Student's t, from 1 degree of freedom."""

SEEDS_MAX: Final = len(T_95) + 1
TRAINER_COUNTS: Final = (2, 4, 8, 16)

FALL_RATIO_MIN: Final = 0.05
"""Of the loss: what fine-tuning must gain to be progress."""
TAIL_RATIO_MAX: Final = 0.003
"""Of the loss: what DiLoCo may still gain in the last quarter of the rounds and be flat."""
INTERVAL_WIDTH_RATIO_MAX: Final = 0.01
DIFFERENCE_RATIO_MAX: Final = 0.01
INCLUDES_ZERO: Final = "95 % interval of the loss difference to DiLoCo includes 0"
DENSITY_MIN, DENSITY_MAX = 0.01, 0.06
PAYLOAD_RATIO_MIN: Final = 17.0

Runs = Mapping[str, Sequence[RunFigures]]
"""By algorithm, seeds in the same order."""


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return mean and half width of the 95 % interval of paired differences, of at most ``SEEDS_MAX`` seeds."""
    count = len(differences)
    if count < 2:
        return float(np.mean(differences)), math.inf
    return float(np.mean(differences)), T_95[count - 2] * float(np.std(differences, ddof=1)) / math.sqrt(count)


def mean_losses(runs: Sequence[RunFigures]) -> list[float]:
    """Return the loss at each look, mean over seeds."""
    means: list[float] = np.mean([run.losses for run in runs], axis=0).tolist()
    return means


def count_rounds_behind(pulse: Sequence[RunFigures], diloco: Sequence[RunFigures], look: int) -> float:
    """Return how many rounds earlier DiLoCo had PULSELoCo's loss; negative where PULSELoCo is ahead of its last loss.

    Mean losses, made monotone, with straight lines between the looks.
    """
    rounds, losses = diloco[0].rounds, np.minimum.accumulate(mean_losses(diloco))
    loss = mean_losses(pulse)[look]
    # Loss falls while np.interp wants rising abscissas.
    return rounds[look] - float(np.interp(-loss, -losses, rounds))


def summarize(runs: Runs, plan: Plan, *, floor: float | None) -> dict[str, Any]:
    """Return the figures that are promised, and what belongs beside them."""
    pulse, diloco = runs["pulseloco"], runs["diloco"]
    rounds, loss = pulse[0].rounds, float(np.mean([run.loss for run in diloco]))
    curve = mean_losses(diloco)
    differences = [
        interval([a.losses[look] - b.losses[look] for a, b in zip(pulse, diloco, strict=True)])
        for look in range(len(rounds))
    ]
    quarters = [int(np.argmin([abs(done - plan.rounds * part / 4) for done in rounds])) for part in (1, 2, 3, 4)]
    late = [density for run in pulse for density in run.gated_densities[2:]]
    difference, half_width = differences[-1]
    payload = float(np.mean([run.payload_size_bytes for run in pulse]))
    densities = np.mean([run.densities for run in pulse], axis=0)
    element_count = pulse[0].element_count
    return {
        "element_count": element_count,
        "loss_floor": floor,
        "loss_before": curve[0],
        "loss": {name: mean_losses(listed)[-1] for name, listed in runs.items()},
        "fall_ratio": (curve[0] - loss) / curve[0],
        "tail_ratio": (curve[quarters[2]] - loss) / loss,
        "difference": [difference, half_width],
        "difference_ratio": [difference / loss, half_width / loss],
        "difference_of_fall": [difference / (curve[0] - loss), half_width / (curve[0] - loss)],
        "differences_by_seed": [a.loss - b.loss for a, b in zip(pulse, diloco, strict=True)],
        "quarters": [_describe_look(runs, look, differences[look]) for look in quarters],
        "rounds": rounds,
        "losses": {name: mean_losses(listed) for name, listed in runs.items()},
        "losses_half_width": {
            name: [interval([run.losses[look] for run in listed])[1] for look in range(len(rounds))]
            for name, listed in runs.items()
        },
        "differences": differences,
        "density_by_round": densities.tolist(),
        "density_from_round_3": [min(late), max(late)] if late else [],
        "residual_norm_by_round": np.mean([run.residual_norms for run in pulse], axis=0).tolist(),
        "payload_ratio": element_count * FP32_SIZE_BYTES / payload,
        "payload_ratio_min": min(ratio for run in pulse for ratio in run.payload_ratios),
        "bits_per_entry": 8 * payload / (float(densities.mean()) * element_count),
        "payload_ratios": {
            name: element_count * FP32_SIZE_BYTES / float(np.mean([run.payload_size_bytes for run in listed]))
            for name, listed in runs.items()
        },
        "loss_applied": float(np.mean([run.loss_applied for run in pulse])),
        "sizes": [
            {
                "low": low,
                **{
                    name: float(np.mean([getattr(row, name) for run in pulse for row in run.sizes if row.low == low]))
                    for name in ("share", "density", "never_sent")
                },
            }
            for low in sorted({row.low for run in pulse for row in run.sizes})
        ],
        "received": [_count_received(count, payload, element_count, plan.inner_steps) for count in TRAINER_COUNTS],
        "seconds": sum(run.seconds for listed in runs.values() for run in listed),
    }


def _describe_look(runs: Runs, look: int, difference: tuple[float, float]) -> dict[str, Any]:
    pulse, diloco = runs["pulseloco"], runs["diloco"]
    done = pulse[0].rounds[look]
    loss = mean_losses(diloco)[look]
    index = max(0, done - 1)
    return {
        "rounds": done,
        "losses": {name: mean_losses(listed)[look] for name, listed in runs.items()},
        "difference_ratio": [difference[0] / loss, difference[1] / loss],
        "rounds_behind": count_rounds_behind(pulse, diloco, look),
        "density": float(np.mean([run.gated_densities[index] for run in pulse])),
        "residual_norm": float(np.mean([run.residual_norms[index] for run in pulse])),
    }


def _count_received(trainers: int, payload: float, element_count: int, inner_steps: int) -> dict[str, float]:
    """Return what one of ``trainers`` takes in a round, bytes: everyone's payload, or ring all-reduces of FP32."""
    ring = 2 * (trainers - 1) / trainers * element_count * FP32_SIZE_BYTES
    pulse = (trainers - 1) * payload
    return {
        "trainers": trainers,
        "pulseloco": pulse,
        "diloco": ring,
        "ddp": ring * inner_steps,
        "against_diloco": ring / pulse,
        "against_ddp": ring * inner_steps / pulse,
    }


def verdicts(summary: Mapping[str, Any]) -> dict[str, bool]:
    """Return what the project promises of these figures, and whether the run could show it at all."""
    difference, half_width = summary["difference_ratio"]
    densities = summary["density_from_round_3"]
    return {
        f"training lowers the held-out loss by more than {FALL_RATIO_MIN:.0%}": summary["fall_ratio"] > FALL_RATIO_MIN,
        f"DiLoCo is flat: below {TAIL_RATIO_MAX:.1%} of the loss in the last quarter": abs(summary["tail_ratio"])
        < TAIL_RATIO_MAX,
        "density 1 to 6 % from round 3 on": bool(densities)
        and densities[0] >= DENSITY_MIN
        and densities[1] <= DENSITY_MAX,
        INCLUDES_ZERO: abs(difference) <= half_width,
        "all of the interval within 1 % of the loss": abs(difference) + half_width < DIFFERENCE_RATIO_MAX,
        "interval narrower than 1 % of the loss": 2 * half_width < INTERVAL_WIDTH_RATIO_MAX,
        "payload more than 17x below dense FP32": summary["payload_ratio"] > PAYLOAD_RATIO_MIN,
    }


def format_table(summary: Mapping[str, Any], heading: str) -> str:
    """Return the summary as Markdown."""
    difference, half_width = summary["difference_ratio"]
    of_fall, of_fall_width = summary["difference_of_fall"]
    names = list(summary["loss"])
    floor = summary["loss_floor"]
    payloads = ", ".join(f"{name} {summary['payload_ratios'][name]:.1f}x" for name in names if name in CONTROLS)
    ends = "" if floor is None else f", floor {floor:.4f}"
    low, high = summary["density_from_round_3"] or (math.nan, math.nan)
    lines = [
        heading,
        f"Held-out loss before {summary['loss_before']:.4f} nats{ends}; DiLoCo lowers it by "
        f"{100 * summary['fall_ratio']:.1f} %, by {100 * summary['tail_ratio']:.2f} % in the last quarter.",
        "",
        "| rounds | " + " | ".join(names) + " | PULSELoCo minus DiLoCo, % of the loss | rounds behind | gate passes, % "
        "| residual norm |",
        "| --- |" + " --- |" * (len(names) + 4),
    ]
    for row in summary["quarters"]:
        losses = " | ".join(f"{row['losses'][name]:.5f}" for name in names)
        mean, width = row["difference_ratio"]
        lines.append(
            f"| {row['rounds']} | {losses} | {100 * mean:+.4f} ± {100 * width:.4f} | {row['rounds_behind']:.1f} "
            f"| {100 * row['density']:.2f} | {row['residual_norm']:.3g} |"
        )
    seeds = ", ".join(f"{1e4 * value:+.2f}" for value in summary["differences_by_seed"])
    lines += [
        "",
        f"At the end: {100 * difference:+.4f} % ± {100 * half_width:.4f} % of the loss, {100 * of_fall:+.3f} % ± "
        f"{100 * of_fall_width:.3f} % of its fall (seed by seed, 1e-4 nats: {seeds}). The gate passes "
        f"{100 * low:.2f} to {100 * high:.2f} % from round 3 on. Payload "
        f"{summary['payload_ratio']:.1f}x below dense FP32 (worst round "
        f"{summary['payload_ratio_min']:.1f}x), {summary['bits_per_entry']:.1f} bits an entry. Were every residual "
        f"sent at once and its momentum run out, PULSELoCo would have {summary['loss_applied']:.5f}."
        + (f" Payload of the controls: {payloads}." if payloads else ""),
        "",
        "| weights from | share, % | sent a round, % | never sent, % |",
        "| --- | --- | --- | --- |",
        *(
            f"| {row['low']:g} | {100 * row['share']:.1f} | {100 * row['density']:.2f} "
            f"| {100 * row['never_sent']:.1f} |"
            for row in summary["sizes"]
        ),
        "",
        "| trainers | received a trainer and round, kB: PULSELoCo | ring all-reduce (DiLoCo) | DDP | x below DiLoCo "
        "| x below DDP |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row['trainers']} | {row['pulseloco'] / 1e3:.1f} | {row['diloco'] / 1e3:.0f} | {row['ddp'] / 1e3:.0f} "
        f"| {row['against_diloco']:.1f} | {row['against_ddp']:.0f} |"
        for row in summary["received"]
    ]
    return "\n".join(lines) + "\n"
