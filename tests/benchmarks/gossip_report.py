"""Figures, verdicts, tables and picture of bench_gossip.py."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from gossip_swarm import GossipFigures, SwarmPlan
from gossip_toy import ToyRow
from outer_plot import COLOURS, LABELS, PANEL_HEIGHT, PANEL_WIDTH, Panel, finite, ticks, widen
from outer_report import interval

from pulsenet.outer.mixing.bound import distance_ratio
from pulsenet.outer.mixing.settings import MixingSettings

BASE: Final = "diloco"

ORDER: Final = (
    ("diloco", "global_m1_local_m2"),
    ("diloco", "local_m1_m2"),
    ("diloco", "global_m1"),
    ("global_m1_local_m2", "global_m1_local_m2_subset"),
    ("global_m1_local_m2_subset", "global_m1"),
    ("global_m1_local_m2", "local_m1_m2"),
)
"""(closer together in theory, farther apart): the first must not be significantly worse."""

INVERSION_NATS_MAX: Final = 0.02

LEGEND_WIDTH: Final = 220
"""Pixels to the right of the panels."""

PartRuns = tuple[SwarmPlan, Mapping[str, MixingSettings], Sequence[Sequence[GossipFigures]]]
"""Plan, settings by name, figures by seed."""


def label(name: str) -> str:
    """Return what people call a run."""
    return f"{LABELS[name.removesuffix('+gate')]}, gated" if name.endswith("+gate") else LABELS[name]


def summarize_gossip(parts: Mapping[str, PartRuns]) -> dict[str, Any]:
    """Return the figures of each part."""
    return {name: _summarize_part(*part) for name, part in parts.items()}


def _summarize_part(
    plan: SwarmPlan, runs: Mapping[str, MixingSettings], seeds: Sequence[Sequence[GossipFigures]]
) -> dict[str, Any]:
    by_name = {name: [figures for seed in seeds for figures in seed if figures.name == name] for name in runs}
    base = by_name[BASE]
    return {
        "members": plan.members,
        "inner_steps": plan.inner_steps,
        "rounds": base[0].rounds,
        "round_count": plan.rounds,
        "batch_size": plan.batch_size,
        "seeds": [figures.seed for figures in base],
        "element_count": base[0].element_count,
        "loss_before": float(np.mean([figures.losses[0] for figures in base])),
        "seconds": sum(figures.seconds for listed in by_name.values() for figures in listed),
        "runs": {name: _summarize_run(plan, runs[name], listed, base) for name, listed in by_name.items()},
    }


def _summarize_run(
    plan: SwarmPlan, settings: MixingSettings, listed: Sequence[GossipFigures], base: Sequence[GossipFigures]
) -> dict[str, Any]:
    differences = [
        interval([mine.losses[look] - theirs.losses[look] for mine, theirs in zip(listed, base, strict=True)])
        for look in range(len(base[0].rounds))
    ]
    # The first half of the rounds is where distances still grow to what mixing holds them at.
    late = slice(plan.rounds // 2, None)
    distance = float(np.mean([figures.distances[late] for figures in listed]))
    base_distance = float(np.mean([figures.distances[late] for figures in base]))
    return {
        "loss": float(np.mean([figures.losses[-1] for figures in listed])),
        "own_loss": float(np.mean([figures.own_losses[-1] for figures in listed])),
        "losses_by_seed": [figures.losses[-1] for figures in listed],
        "differences": differences,
        "distance": distance,
        "distance_ratio": distance / base_distance,
        "bound_ratio": distance_ratio(
            settings.variant,
            plan.members,
            outer_learning_rate=settings.learning_rate,
            subset_ratio=listed[0].subset_share,
        ),
        "distances": np.mean([figures.distances for figures in listed], axis=0).tolist(),
        "js_true": np.mean([figures.js_true for figures in listed], axis=0).tolist(),
        "js_bound": np.mean([figures.js_bound for figures in listed], axis=0).tolist(),
        "payload_size_bytes": _mean_by_job(listed, "payload_size_bytes"),
        "payload_ratio": _mean_by_job(listed, "payload_ratio"),
        "density": _mean_by_job(listed, "density"),
    }


def _mean_by_job(listed: Sequence[GossipFigures], name: str) -> dict[str, float]:
    jobs = getattr(listed[0], name)
    return {job: float(np.mean([getattr(figures, name)[job] for figures in listed])) for job in jobs}


def find_inversions(summary: Mapping[str, Any]) -> list[str]:
    """Return where a variant is significantly worse than one that theory puts behind it, by more than 0.02 nats."""
    found = []
    for part in (summary[name] for name in ("main", "large") if name in summary):
        for closer, farther in ORDER:
            runs = part["runs"]
            pairs = zip(runs[closer]["losses_by_seed"], runs[farther]["losses_by_seed"], strict=True)
            mean, half_width = interval([one - other for one, other in pairs])
            if mean > INVERSION_NATS_MAX and mean - half_width > 0.0:
                found.append(
                    f"M = {part['members']}: {label(closer)} is worse than {label(farther)} by {mean:.4f} "
                    f"± {half_width:.4f} nats"
                )
    return found


def format_toy(rows: Sequence[ToyRow]) -> str:
    """Return the toy as Markdown."""
    names = list(rows[0].ratios)
    lines = [
        "**Toy.** 8 trainers on a slope without curvature, plain SGD. Mean squared distance between trainers after the "
        "inner steps, over DiLoCo's, ± one standard error; in brackets what theory says for outer momentum 0.",
        "",
        "| outer rate | momentum | " + " | ".join(label(name) for name in names) + " |",
        "| --- | --- |" + " --- |" * len(names),
    ]
    for row in rows:
        momentum = f"{row.momentum_factor:g}" + (", mixed" if row.mixes_momentum else "")
        cells = [
            f"{row.ratios[name]:.3f} ± {row.errors[name]:.3f}"
            + (f" ({row.bounds[name]:.3f})" if row.momentum_factor == 0.0 else "")
            for name in names
        ]
        lines.append(f"| {row.learning_rate:g} | {momentum} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def format_tables(summary: Mapping[str, Any]) -> str:
    """Return the parts of the language model as Markdown."""
    texts = [_format_part(summary[name]) for name in ("main", "large") if name in summary]
    if "main" in summary:
        texts.insert(1, _format_orders(summary["main"]))
    if "gated" in summary:
        texts.append(_format_gated(summary["gated"]))
    return "".join(f"\n{text}" for text in texts)


def _describe(part: Mapping[str, Any]) -> str:
    count = len(part["seeds"])
    return (
        f"M = {part['members']}, {part['element_count']} parameters, H {part['inner_steps']}, {part['round_count']} "
        f"rounds, {part['batch_size']} rows a step, {count} {'paired seeds' if count > 1 else 'seed'}, held-out loss "
        f"before {part['loss_before']:.3f} nats"
    )


def format_difference(difference: Sequence[float]) -> str:
    mean, half_width = difference
    return f"{mean:+.4f} ± {half_width:.4f}" if math.isfinite(half_width) else f"{mean:+.4f}"


def _format_part(part: Mapping[str, Any]) -> str:
    lines = [
        f"**Language model.** {_describe(part)}. Loss is of what would be published; distance squared and JS distance "
        "are between trainers after the inner steps, the first mean of the second half of the rounds, the second after "
        "the last round; the bound is theory's factor without outer momentum.",
        "",
        "| mixing | loss | minus DiLoCo, nats | own loss | distance squared | over DiLoCo | bound | JS true "
        "| JS shown |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, run in part["runs"].items():
        difference = "" if name == BASE else format_difference(run["differences"][-1])
        lines.append(
            f"| {label(name)} | {run['loss']:.4f} | {difference} | {run['own_loss']:.4f} | {run['distance']:.3f} "
            f"| {run['distance_ratio']:.2f} | {run['bound_ratio']:.2f} | {run['js_true'][-1]:.4f} "
            f"| {run['js_bound'][-1]:.4f} |"
        )
    return "\n".join(lines) + "\n"


def _format_orders(part: Mapping[str, Any]) -> str:
    """Return which orders the seeds show, and which they do not."""
    shown, open_pairs = [], []
    for closer, farther in ORDER:
        runs = part["runs"]
        pairs = zip(runs[closer]["losses_by_seed"], runs[farther]["losses_by_seed"], strict=True)
        mean, half_width = interval([one - other for one, other in pairs])
        if abs(mean) > half_width:
            better, worse = (closer, farther) if mean < 0 else (farther, closer)
            shown.append(f"{label(better)} below {label(worse)} by {abs(mean):.4f} ± {half_width:.4f}")
        else:
            open_pairs.append(f"{label(closer)} and {label(farther)} ({format_difference((mean, half_width))})")
    text = f"Orders of the loss whose interval excludes 0: {'; '.join(shown) or 'none'}."
    if open_pairs:
        text += f" No order is claimed of {'; '.join(open_pairs)}."
    return text + "\n"


def _format_gated(part: Mapping[str, Any]) -> str:
    lines = [
        f"**Gated mixing.** {_describe(part)}; fine-tuning in small steps. Payload is what a trainer hands over in a "
        "round, encoded; ratios are dense FP32 over it. The gate is compared with the same mixing without it.",
        "",
        "| mixing | gate passes in Mix1, Mix2, % | payload Mix1, kB (ratio) | payload Mix2, kB (ratio) "
        "| loss minus ungated, nats | distance squared over ungated | JS true over ungated |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, run in part["runs"].items():
        base = part["runs"][name.removesuffix("+gate")]
        passed = ", ".join(
            f"{100 * run['density'][job]:.2f}" if job in run["density"] else "-" for job in ("mix1", "mix2")
        )
        payloads = [
            f"{run['payload_size_bytes'][job] / 1e3:.1f} ({run['payload_ratio'][job]:.1f}x)"
            if job in run["payload_size_bytes"]
            else "-"
            for job in ("mix1", "mix2")
        ]
        compared = ["", "", ""]
        if base is not run:
            pairs = zip(run["losses_by_seed"], base["losses_by_seed"], strict=True)
            difference = interval([mine - theirs for mine, theirs in pairs])
            compared = [
                format_difference(difference),
                f"{run['distance'] / base['distance']:.3f}",
                f"{run['js_true'][-1] / base['js_true'][-1]:.3f}",
            ]
        lines.append(f"| {label(name)} | {passed} | " + " | ".join([*payloads, *compared]) + " |")
    return "\n".join(lines) + "\n"


def draw_gossip_plot(summary: Mapping[str, Any]) -> str:
    """Return the picture of the main part."""
    part = summary["main"]
    width = 3 * PANEL_WIDTH + LEGEND_WIDTH
    legend = Panel(width - PANEL_WIDTH, "", "", (0, 1), (0, 1))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{PANEL_HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        *_draw_differences(part),
        *_draw_distances(part),
        *_draw_predictions(part),
        *legend.draw_legend(list(part["runs"])),
        "</svg>",
        "",
    ]
    return "\n".join(parts)


def _draw_differences(part: Mapping[str, Any]) -> list[str]:
    rounds = part["rounds"]
    names = [name for name in part["runs"] if name != BASE]
    rows = {name: part["runs"][name]["differences"] for name in names}
    ends = widen(
        min(0.0, *(mean - finite(half) for row in rows.values() for mean, half in row)),
        max(0.0, *(mean + finite(half) for row in rows.values() for mean, half in row)),
    )
    panel = Panel(0, "Loss minus DiLoCo's, nats, 95 %", "rounds", (0, rounds[-1]), ends)
    parts = panel.draw_frame(ticks(0, rounds[-1]), ticks(*ends), "{:g}".format)
    parts.append(panel.draw_line([(0, 0), (rounds[-1], 0)], "#1f2328"))
    for name, row in rows.items():
        lower = [(x, mean - finite(half)) for x, (mean, half) in zip(rounds, row, strict=True)]
        upper = [(x, mean + finite(half)) for x, (mean, half) in zip(rounds, row, strict=True)]
        parts.append(panel.draw_band(lower, upper, COLOURS[name]))
        parts.append(panel.draw_line([(x, mean) for x, (mean, _) in zip(rounds, row, strict=True)], COLOURS[name]))
    return parts


def _draw_distances(part: Mapping[str, Any]) -> list[str]:
    rows = {name: run["distances"] for name, run in part["runs"].items()}
    count = part["round_count"]
    largest = max(max(row) for row in rows.values())
    panel = Panel(PANEL_WIDTH, "Mean squared distance", "rounds", (0, count), widen(0.0, largest))
    parts = panel.draw_frame(ticks(0, count), ticks(0.0, largest), "{:g}".format)
    for name, row in rows.items():
        parts.append(panel.draw_line(list(enumerate(row, 1)), COLOURS[name]))
    return parts


def _draw_predictions(part: Mapping[str, Any]) -> list[str]:
    rounds = part["rounds"][1:]
    rows = {name: run["js_true"] for name, run in part["runs"].items()}
    largest = max(max(row) for row in rows.values())
    panel = Panel(2 * PANEL_WIDTH, "JS distance", "rounds", (0, rounds[-1]), widen(0.0, largest))
    parts = panel.draw_frame(ticks(0, rounds[-1]), ticks(0.0, largest), "{:g}".format)
    for name, row in rows.items():
        parts.append(panel.draw_line(list(zip(rounds, row, strict=True)), COLOURS[name]))
    return parts
