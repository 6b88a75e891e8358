"""Factored Gossip DiLoCo against DiLoCo: a toy where the theory is exact, and a language model on paired seeds.

Usage: python tests/benchmarks/bench_gossip.py [--toy] [--resume FOLDER] [--json FILE] [--write FILE] [--plot FILE]

The trainers of a run live in one process and mix with the maths of ``pulsenet.outer.mixing``, the same that daemons
and training processes run (``gossip_rounds.py``). Nothing here measures a network: docs/planning.md says what links
can carry.

1. The toy (``gossip_toy.py``): a slope without curvature, plain SGD, 8 trainers. Distance between trainers at the end
   of the inner steps, over that of DiLoCo, whose trainers start every round together. Theory:
   ``1 + a^2 rho2 / (1 - rho1)`` without outer momentum. With momentum it says nothing; what is measured is printed.
2. The language model (``gossip_swarm.py``): a Llama of 75 000 parameters on the dialects of bench_outer.py, from
   almost its random weights, constant inner learning rate after a warm-up, outer learning rate 0.7 and momentum 0.9.
   Learning rate and sizes were chosen on seed 1000 by DiLoCo's loss and by what there was time for. Start, batches and
   matchings of a seed are the same for all variants. Primary figure: held-out loss of what would be published (the
   consensus; with ``local_m1_m2`` everyone's own, mean) minus DiLoCo's, paired by seed, with Student's 95 % interval.
   An order is claimed only where the interval excludes 0. The run fails only if a variant that theory puts closer
   together (``gossip_report.ORDER``) is significantly worse than the one behind it by more than 0.02 nats.
   M = 4 trainers on all seeds, M = 8 on one.
3. Gated mixing, in another regime: fine-tuning in steps so small that the gate passes few entries, as reinforcement
   learning takes them, from a model trained before. Bytes, disagreement and loss beside the same variants without gate.

Disagreement is measured after the inner steps, where it is largest. The bound beside it is the theory's factor times
what DiLoCo's trainers are apart, which measures ``2 eta^2 sigma^2 H`` of whatever optimiser and curvature there are. It
is a bound for outer momentum 0; with 0.9 it may be exceeded, and is. The probe has bins of 8 of the 28 tokens and one
for the rest, since the vocabulary is too small for 255.

With ``--resume FOLDER`` each part of each seed is kept when it is done, and a run that was stopped goes on there. What
is reported is what the folder holds: ``--report-only`` runs nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from bench_outer import write_whole
from gossip_report import (
    draw_gossip_plot,
    find_inversions,
    format_difference,
    format_tables,
    format_toy,
    label,
    summarize_gossip,
)
from gossip_swarm import GossipFigures, GossipSwarm, SwarmPlan
from gossip_toy import ToyPlan, ToyRow, run_toys
from outer_tasks import DialectTask
from reporting import Figure, add_summary_option, replace_block, write_summary

from pulsenet.outer.mixing.settings import MixingSettings, MixingVariant

BEGIN, END = "<!-- gossip: written by tests/benchmarks/bench_gossip.py -->", "<!-- gossip: end -->"

MOMENTUM_NAMES: Final = (MixingVariant.GLOBAL_M1_LOCAL_M2, MixingVariant.LOCAL_M1_M2)
"""Variants that are run with their momentum mixed as well."""
GATED_NAMES: Final = (MixingVariant.DILOCO, MixingVariant.GLOBAL_M1_LOCAL_M2, MixingVariant.LOCAL_M1_M2)
"""Variants that are run with and without the gate."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the language-model benchmark."""

    name: str
    seeds: int
    plan: SwarmPlan
    runs: dict[str, MixingSettings]
    learning_rate: float
    pretrain_steps: int


def list_parts(options: argparse.Namespace) -> list[Part]:
    """Return the parts in the order in which they are run."""

    def plan(members: int, rounds: int) -> SwarmPlan:
        interval = max(1, rounds // 4)
        return SwarmPlan(members, options.inner_steps, rounds, options.batch_size, options.warmup_steps, interval, 8)

    def settings(variant: MixingVariant, **changes: Any) -> MixingSettings:
        return MixingSettings(variant=variant, inner_steps=options.inner_steps, **changes)

    plain = {variant.value: settings(variant) for variant in MixingVariant}
    momentum = {f"{variant.value}+momentum": settings(variant, mixes_momentum=True) for variant in MOMENTUM_NAMES}
    gated = {variant.value: settings(variant) for variant in GATED_NAMES} | {
        f"{variant.value}+gate": settings(variant, mixing_gate=True) for variant in GATED_NAMES
    }
    rate, fine_rate = options.learning_rate, options.fine_learning_rate
    small, large = plan(options.members, options.rounds), plan(options.large_members, options.rounds)
    fine = plan(options.members, options.fine_rounds)
    return [
        Part("main", options.seeds, small, plain | momentum, rate, options.pretrain_steps),
        Part("gated", options.gated_seeds, fine, gated, fine_rate, options.fine_pretrain_steps),
        Part("large", options.large_seeds, large, plain, rate, options.pretrain_steps),
    ]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options; the defaults are the run that is reported."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--toy", action="store_true", help="the toy alone")
    parser.add_argument("--parts", nargs="*", default=["main", "gated", "large"], help="of the language model")
    parser.add_argument("--toy-rounds", type=int, default=400)
    parser.add_argument("--toy-elements", type=int, default=2_000)
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=6, help="of the main part")
    parser.add_argument("--large-members", type=int, default=8)
    parser.add_argument("--large-seeds", type=int, default=1)
    parser.add_argument("--gated-seeds", type=int, default=3)
    parser.add_argument("--inner-steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=48)
    parser.add_argument("--fine-rounds", type=int, default=160, help="of the gated part")
    parser.add_argument("--batch-size", type=int, default=2, help="rows an inner step of each trainer")
    parser.add_argument("--warmup-steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--fine-learning-rate", type=float, default=8e-7)
    parser.add_argument("--pretrain-steps", type=int, default=20)
    parser.add_argument("--fine-pretrain-steps", type=int, default=300)
    parser.add_argument("--held-out-count", type=int, default=128)
    parser.add_argument("--resume", type=Path, default=None, help="folder of finished parts, which are not run again")
    parser.add_argument("--report-only", action="store_true", help="run nothing")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--write", type=Path, default=None, help="Markdown file whose marked part becomes the tables")
    parser.add_argument("--plot", type=Path, default=None, help="SVG file")
    add_summary_option(parser)
    options = parser.parse_args(arguments)
    if options.write is not None and BEGIN not in options.write.read_text():
        parser.error(f"--write: {options.write} has no line {BEGIN}")
    return options


def run_seed(part: Part, seed: int, options: argparse.Namespace, folder: Path) -> list[GossipFigures] | None:
    """Return the figures of one seed of a part, as kept in ``folder`` or new; ``None`` if it is not to be run.

    Raises:
        ValueError: what is kept is of another plan.
    """
    kept = folder / f"{part.name}-{seed}.json"
    described = describe(part, options)
    if kept.exists():
        found = json.loads(kept.read_text())
        if found["plan"] != described:
            raise ValueError(f"{kept} is of another plan: {found['plan']}, not {described}")
        return [GossipFigures(**figures) for figures in found["figures"]]
    if options.report_only:
        return None
    task = DialectTask(
        learning_rate=part.learning_rate,
        pretrain_steps=part.pretrain_steps,
        held_out_count=options.held_out_count,
    )
    figures = GossipSwarm(task, task.make_start(seed), part.runs, seed, part.plan).train()
    write_whole(kept, json.dumps({"plan": described, "figures": [asdict(one) for one in figures]}).encode())
    losses = ", ".join(f"{one.name} {one.losses[-1]:.4f}" for one in figures)
    print(f"{part.name}, seed {seed}: {losses}", file=sys.stderr, flush=True)
    return figures


def describe(part: Part, options: argparse.Namespace) -> dict[str, Any]:
    """Return what a part's figures depend on, beside the seed, as JSON holds it."""
    described = {
        "plan": asdict(part.plan),
        "runs": {name: dict(settings.to_constants()) for name, settings in part.runs.items()},
        "learning_rate": part.learning_rate,
        "pretrain_steps": part.pretrain_steps,
        "held_out_count": options.held_out_count,
    }
    found: dict[str, Any] = json.loads(json.dumps(described))
    return found


def run_parts(options: argparse.Namespace, folder: Path) -> dict[str, tuple[Part, list[list[GossipFigures]]]]:
    """Return each part with its figures by seed, those that there are."""
    found = {}
    for part in list_parts(options):
        if part.name not in options.parts:
            continue
        seeds = [run_seed(part, seed, options, folder) for seed in range(part.seeds)]
        found[part.name] = (part, [figures for figures in seeds if figures is not None])
    return found


def run_toy_part(options: argparse.Namespace, folder: Path) -> list[ToyRow]:
    """Return the toy's rows, as kept in ``folder`` or new."""
    kept = folder / "toy.json"
    plan = ToyPlan(rounds=options.toy_rounds, settle_rounds=options.toy_rounds // 5, elements=options.toy_elements)
    if kept.exists():
        found = json.loads(kept.read_text())
        if found["plan"] == asdict(plan):
            return [ToyRow(**row) for row in found["rows"]]
    rows = run_toys(plan)
    write_whole(kept, json.dumps({"plan": asdict(plan), "rows": [asdict(row) for row in rows]}).encode())
    return rows


def choose_figures(summary: Mapping[str, Any]) -> Iterator[Figure]:
    """Yield a row for each variant of the main part but DiLoCo, with its own momentum."""
    part = summary.get("main", {"runs": {}})
    for name in MixingVariant:
        run = part["runs"].get(name.value)
        if run is not None and name is not MixingVariant.DILOCO:
            yield Figure(
                f"{label(name.value)}, {part['round_count']} rounds of {part['members']} trainers: "
                f"loss {run['loss']:.4f} nats",
                f"DiLoCo's {format_difference(run['differences'][-1])}; squared distance of trainers "
                f"{run['distance_ratio']:.1f} times its",
            )


def main(arguments: list[str] | None = None) -> int:
    """Run all; return 1 if a significant inversion was found."""
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.resume or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        toy = run_toy_part(options, folder)
        tables = format_toy(toy)
        parts: Mapping[str, tuple[Part, list[list[GossipFigures]]]] = {}
        if not options.toy:
            parts = run_parts(options, folder)
    summary = summarize_gossip({name: (part.plan, part.runs, seeds) for name, (part, seeds) in parts.items() if seeds})
    inversions = find_inversions(summary)
    tables += format_tables(summary)
    print(tables)
    write_summary(options.summary, choose_figures(summary))
    for inversion in inversions:
        print(f"FAILS: {inversion}")
    if options.json is not None:
        options.json.write_text(json.dumps({"toy": [asdict(row) for row in toy], "summary": summary}, indent=1))
    if options.write is not None:
        replace_block(options.write, BEGIN, END, tables)
    if options.plot is not None and "main" in summary:
        options.plot.write_text(draw_gossip_plot(summary))
    return 1 if inversions else 0


if __name__ == "__main__":
    sys.exit(main())
