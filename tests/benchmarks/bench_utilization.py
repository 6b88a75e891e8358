"""Utilisation of trainers that mix, measured in the namespace lab, beside what ``pulsenet plan`` says.

Inner steps are paced by a timer and payloads are small; the published proportion of the time of the inner steps to
that of a pair's exchange is kept (236 s to 240 s at 100 Mbit/s). The plan is told what a parameter takes, compressed,
what plain TCP carries on the same links while all send to all, and the nodes' ``--upload-limit``, a little less. Needs
root and an idle machine, and some ten minutes a variant.

    python tests/benchmarks/bench_utilization.py [--variant NAME ...] [--mbps 4] [--write docs/gossip.md]
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests" / "lab"), str(ROOT / "tests" / "e2e")]

from mixing_lab import Case, Measured, measure  # noqa: E402
from reporting import Figure, add_summary_option, write_summary  # noqa: E402

VARIANTS = ("diloco", "global_m1", "global_m1_local_m2", "global_m1_local_m2_subset", "local_m1_m2")
COMPUTE_OVER_PAIR = 236 / 240
"""C over the time of a pair's exchange, at the slower of the published speeds."""
BEGIN, END = "<!-- utilization -->", "<!-- /utilization -->"


def make_case(variant: str, mbps: float, params: int) -> Case:
    """Return a case with the published proportions."""
    pair_seconds = params * 4 * 8e-6 / mbps
    return Case(variant, mbps, params, step_seconds=COMPUTE_OVER_PAIR * pair_seconds / 8)


def format_table(found: list[Measured]) -> str:
    """Return the table that goes into the documentation."""
    lines = [
        "| variant | in inner steps | planned | points | planned by the line | work beside mixing, 95th percentile |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| `{one.case.variant}` | {one.utilization:.1%} | {one.predicted:.1%} "
        f"| {100 * (one.utilization - one.predicted):+.1f} | {one.predicted_by_line:.1%} "
        f"| {one.work_ratio_p95:.2f} of alone |"
        for one in found
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", action="append", choices=VARIANTS)
    parser.add_argument("--mbps", type=float, default=4.0)
    parser.add_argument("--params", type=int, default=1 << 23)
    parser.add_argument("--write", type=Path, default=None, help="document, whose table is replaced or appended")
    add_summary_option(parser)
    arguments = parser.parse_args()
    found = []
    for variant in arguments.variant or VARIANTS:
        found.append(measure(make_case(variant, arguments.mbps, arguments.params)))
        one = found[-1]
        print(
            f"{variant}: measured {one.utilization:.3f}, planned {one.predicted:.3f} by {one.bytes_per_param:.2f} "
            f"bytes a parameter, {one.predicted_by_line:.3f} by the line; {one.mixed_ratio:.0%} of the mixings whole",
            flush=True,
        )
    write_summary(
        arguments.summary,
        (
            Figure(
                f"{one.case.variant}: {one.utilization:.2f} of the time in inner steps", f"planned: {one.predicted:.2f}"
            )
            for one in found
        ),
    )
    table = format_table(found)
    print(table, f"\nload {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores")
    if arguments.write is not None:
        text = arguments.write.read_text()
        if BEGIN not in text:
            text = f"{text}\n{BEGIN}\n{END}\n"
        start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
        arguments.write.write_text(f"{text[:start]}\n{table}\n{text[end:]}")


if __name__ == "__main__":
    main()
