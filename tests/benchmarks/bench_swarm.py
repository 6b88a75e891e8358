"""How long a version takes to all readers over home lines, and what its publisher uploads, against their number.

Usage: python tests/benchmarks/bench_swarm.py [--model 10,100,1000,10000] [--full 10] [--seeds 3] [--json FILE]
           [--write docs/scale.md]

The reduced model runs for every number of ``--model``, the real machines for those of ``--full``, over the same lines
as the model's first seed. Everything is virtual time, so the load of this machine changes nothing but the waiting.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from reporting import Figure, add_summary_option, replace_block, write_summary

from pulsenet.testing.fakes import Chance
from pulsenet.testing.links import Link, draw_home_link
from pulsenet.testing.spread import PUBLISHER_LINK, Spread, measure_spread
from pulsenet.testing.spread_model import SpreadModel

PAYLOADS = {"patch 100 MB": (100_000_000, 96), "anchor 14 GB": (14_000_000_000, 200)}
"""Size in bytes and pieces: a patch in chunks of 1 MiB, an anchor in coarser pieces of 70 MB."""

PLOT_WIDTH, PLOT_HEIGHT = 640, 300
COLOURS = ("#1f77b4", "#d62728")


def draw_lines(count: int, seed: int) -> list[Link]:
    """Return the home lines of a swarm."""
    chance = Chance(seed * 1_000_003 + count)
    return [draw_home_link(chance) for _ in range(count)]


def run_model(size_bytes: int, piece_count: int, count: int, seed: int) -> Spread:
    """Spread one version by the reduced model."""
    lines = draw_lines(count, seed)
    return SpreadModel(seed, PUBLISHER_LINK, lines, payload_size_bytes=size_bytes, piece_count=piece_count).run()


def run_full(count: int, seed: int) -> Spread:
    """Spread a patch of 100 MB by the real machines, its bytes scaled down by 1,024 and its chunks as many."""
    supply = iter(draw_lines(count, seed))
    return measure_spread(
        seed,
        count,
        payload_size_bytes=100_000_000 // 1024,
        chunk_size_bytes=1024,
        scale=1024.0,
        draw_link=lambda _: next(supply),
    )


def measure(model_counts: Sequence[int], full_counts: Sequence[int], seeds: int) -> dict[str, Any]:
    """Return all figures."""
    rows: list[dict[str, Any]] = []
    for name, (size_bytes, piece_count) in PAYLOADS.items():
        for count in model_counts:
            spreads = [run_model(size_bytes, piece_count, count, seed) for seed in range(seeds)]
            middle = sorted(spreads, key=lambda spread: spread.all_seconds)[seeds // 2]
            ratios = [spread.all_seconds / spread.bound_seconds for spread in spreads]
            rows.append({"payload": name, "ratio": statistics.median(ratios), **asdict(middle)})
            print(name, rows[-1], file=sys.stderr)
    full = []
    for count in full_counts:
        size_bytes, piece_count = PAYLOADS["patch 100 MB"]
        full.append({"full": asdict(run_full(count, 0)), "model": asdict(run_model(size_bytes, piece_count, count, 0))})
        print(full[-1], file=sys.stderr)
    return {"seeds": seeds, "model": rows, "full": full}


def format_tables(figures: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    swarms = "one drawn swarm for each number" if figures["seeds"] == 1 else f"median of {figures['seeds']} swarms"
    lines = [
        f"Reduced model, {swarms}; uploads are the publisher's.",
        "",
        "| payload | readers | half have it, s | all have it, s | lines allow, s | all / lines | uploads, payloads |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in figures["model"]:
        lines.append(
            f"| {row['payload']} | {row['reader_count']:,} | {row['half_seconds']:,.0f} | {row['all_seconds']:,.0f} "
            f"| {row['bound_seconds']:,.0f} | {row['ratio']:.2f} | {row['publisher_payloads']:.1f} |"
        )
    if figures["full"]:
        lines += [
            "",
            "The real machines beside the model: patch of 100 MB, the same lines, one swarm each; received per reader.",
            "",
            "| readers | all have it, s | model, s | lines allow, s | uploads, payloads | model | received, payloads |",
            "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
    for pair in figures["full"]:
        full, model = pair["full"], pair["model"]
        lines.append(
            f"| {full['reader_count']:,} | {full['all_seconds']:,.0f} | {model['all_seconds']:,.0f} "
            f"| {full['bound_seconds']:,.0f} | {full['publisher_payloads']:.2f} | {model['publisher_payloads']:.1f} "
            f"| {full['received_payloads']:.2f} |"
        )
    return "\n".join(lines)


def draw_plot(figures: dict[str, Any]) -> str:
    """Return an SVG: time over what the lines allow against the number of readers, which is logarithmic."""
    rows = figures["model"]
    counts = sorted({row["reader_count"] for row in rows})
    top = max(2.0, 1.1 * max(row["ratio"] for row in rows))

    def place(count: int, ratio: float) -> tuple[float, float]:
        step = counts.index(count) / max(len(counts) - 1, 1)
        return 60 + step * (PLOT_WIDTH - 100), PLOT_HEIGHT - 40 - ratio / top * (PLOT_HEIGHT - 70)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{PLOT_WIDTH}" height="{PLOT_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        '<text x="10" y="16">time until all readers have it / what their lines allow</text>',
    ]
    for mark in range(int(top) + 1):
        _, y = place(counts[0], mark)
        parts.append(f'<line x1="60" y1="{y:.1f}" x2="{PLOT_WIDTH - 40}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="40" y="{y + 4:.1f}">{mark}</text>')
    for count in counts:
        x, _ = place(count, 0)
        parts.append(f'<text x="{x - 14:.1f}" y="{PLOT_HEIGHT - 20}">{count:,}</text>')
    parts.append(f'<text x="{PLOT_WIDTH // 2 - 20}" y="{PLOT_HEIGHT - 4}">readers</text>')
    for colour, name in zip(COLOURS, PAYLOADS, strict=True):
        points = [place(row["reader_count"], row["ratio"]) for row in rows if row["payload"] == name]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        x, y = points[-1]
        parts.append(f'<text x="{x - 90:.1f}" y="{y - 8:.1f}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def write(figures: dict[str, Any], path: Path) -> None:
    """Put the tables between the marks of a document, and the plot beside it."""
    replace_block(path, "<!-- figures -->", "<!-- end of figures -->", format_tables(figures))
    path.with_suffix(".svg").write_text(draw_plot(figures))


def choose_figures(figures: dict[str, Any]) -> Iterator[Figure]:
    """Yield a row for each payload: the largest swarm."""
    largest = {row["payload"]: row for row in sorted(figures["model"], key=lambda row: row["reader_count"])}
    for name, row in largest.items():
        yield Figure(
            f"{name} to {row['reader_count']:,} readers over home lines (simulated): {row['all_seconds']:,.0f} s, the "
            f"publisher sends it {row['publisher_payloads']:.1f} times",
            f"{row['ratio']:.2f} of what the lines allow",
        )


def main() -> int:
    """Measure, print, and write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="10,100,1000,10000")
    parser.add_argument("--full", default="10")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", type=Path)
    add_summary_option(parser)
    arguments = parser.parse_args()
    counts = {name: [int(n) for n in getattr(arguments, name).split(",") if n] for name in ("model", "full")}
    figures = measure(counts["model"], counts["full"], arguments.seeds)
    print(format_tables(figures))
    write_summary(arguments.summary, choose_figures(figures))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))
    if arguments.write:
        write(figures, arguments.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
