"""Runs the benchmarks and rewrites the one table of docs/benchmarks.md that sums them up (``make bench``).

Usage: python tests/benchmarks/run_all.py [--only NAME ...] [--long] [--quick] [--write docs/benchmarks.md]

Each benchmark runs in a process of its own and gives its rows (``--summary``); those with a table of their own rewrite
that too. A benchmark that cannot run here, was not asked for, or is left to ``--long`` keeps the rows it had, with
their date. ``--quick`` shows that the scripts run and measures nothing worth keeping: give it a copy of the document.
Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from reporting import describe_machine, measure_load, replace_block

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = Path(__file__).resolve().parent
BEGIN, END = "<!-- summary: written by tests/benchmarks/run_all.py -->", "<!-- summary: end -->"
HEAD: Final = "| part | measured | to what the same run measured beside it | by | when and where |\n|" + " --- |" * 5
MEMORY_GIB_MIN: Final = 20
VLLM_PYTHON: Final = Path(os.environ.get("VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))


def lacks_nothing() -> str:
    """Return why a benchmark that needs nothing cannot run: never."""
    return ""


def lacks_lab() -> str:
    """Return why there can be no network namespaces here, or the empty string."""
    sys.path.append(str(ROOT / "tests" / "lab"))
    from namespaces import why_not

    return str(why_not())


def lacks_memory() -> str:
    """Return by how much memory is too short for the largest model, or the empty string."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    available_gib = int(found[1]) / (1 << 20) if found else 0.0
    return "" if available_gib >= MEMORY_GIB_MIN else f"{available_gib:.0f} GiB of memory are free"


def lacks_vllm() -> str:
    """Return where an environment with vLLM would be, or the empty string if it is there."""
    return "" if VLLM_PYTHON.exists() else f"there is no {VLLM_PYTHON} (make vllm)"


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One script."""

    part: str
    name: str
    minutes: int
    options: tuple[str, ...] = ()
    quick: tuple[str, ...] | None = None
    """Options with which it takes seconds; ``None`` where there are none."""
    document: str = ""
    """Where its own tables go."""
    needs: str = ""
    lacks: Callable[[], str] = lacks_nothing
    is_long: bool = False

    @property
    def by(self) -> str:
        """The cell that names it, with what it asks of whoever would run it again."""
        asks = [self.needs] if self.needs else []
        asks += [f"{self.minutes / 60:.0f} h"] if self.minutes >= 100 else [f"{self.minutes} min"]
        return f"`{self.name}` ({', '.join(asks)})"


LAB: Final = "root, network namespaces"
DOCUMENT: Final = "docs/benchmarks.md"
SMALL_SWARM: Final = ("--rounds", "4", "--pretrain-steps", "2", "--held-out-count", "8")
BENCHMARKS: Final = (
    Benchmark("codec", "bench_codec", 3, quick=("--sizes-only",), document=DOCUMENT, needs="the recorded run"),
    Benchmark(
        "codec", "bench_views", 10, quick=("--model", "tiny", "--steps", "4", "--burn-in", "2"), document=DOCUMENT
    ),
    Benchmark(
        "publish and apply", "bench_7b", 4, quick=("--gib", "0.03"), needs="24 GiB of memory", lacks=lacks_memory
    ),
    Benchmark(
        "publish and apply",
        "bench_version_time",
        3,
        ("--model-mib", "2048", "--megabits", "50,200,1000"),
        ("--model-mib", "16", "--megabits", "1000"),
    ),
    Benchmark("publish and apply", "bench_device_baseline", 4, quick=("--models", "tiny", "--publishes", "2")),
    Benchmark("goodput under loss", "bench_lossy", 30, document=DOCUMENT, needs=LAB, lacks=lacks_lab),
    Benchmark(
        "fan-out",
        "bench_swarm",
        6,
        ("--seeds", "1", "--full", "10,50"),
        ("--seeds", "1", "--model", "2,5", "--full", "2"),
        document="docs/scale.md",
    ),
    Benchmark(
        "rounds",
        "bench_outer",
        30,
        ("--plot", str(ROOT / "docs" / "outer-convergence.svg")),
        (*SMALL_SWARM, "--trainers", "2", "--seeds", "2", "--processes", "1"),
        document="docs/outer.md",
        is_long=True,
    ),
    Benchmark("rounds", "bench_received", 2, quick=("--elements", "65536", "--shared", "0")),
    Benchmark(
        "mixing",
        "bench_gossip",
        25,
        ("--plot", str(ROOT / "docs" / "gossip.svg")),
        (*SMALL_SWARM, "--parts", "main", "--seeds", "2", "--toy-rounds", "20", "--toy-elements", "50"),
        document="docs/gossip.md",
        is_long=True,
    ),
    Benchmark("mixing", "bench_mix_overlap", 3, needs=LAB, lacks=lacks_lab, is_long=True),
    Benchmark("mixing", "bench_averager", 15, needs=LAB, lacks=lacks_lab, is_long=True),
    Benchmark("mixing", "bench_utilization", 75, needs=LAB, lacks=lacks_lab, is_long=True),
    Benchmark("engine update", "bench_vllm", 5, document=DOCUMENT, needs="vLLM", lacks=lacks_vllm),
    Benchmark("memory", "bench_memory", 3, quick=("--model-mib", "32")),
)


QUOTED: Final = (
    ("bench_codec", 0),
    ("bench_7b", 0),
    ("bench_7b", 1),
    ("bench_lossy", 0),
    ("bench_swarm", 0),
    ("bench_outer", 0),
    ("bench_vllm", 0),
    ("bench_memory", 1),
)
"""Rows of benchmarks that the README repeats."""


def quote(rows: dict[str, list[str]]) -> str:
    """Return the README's table: part, what was measured, and its ratio, of rows that there are."""
    chosen = [rows[name][index] for name, index in QUOTED if len(rows.get(name, ())) > index]
    cells = [row.split(" | ")[:3] for row in chosen]
    return "\n".join(
        ["| part | measured | beside it |", "| --- | --- | --- |", *(f"{' | '.join(one)} |" for one in cells)]
    )


def read_rows(document: Path) -> dict[str, list[str]]:
    """Return the rows a document has, by benchmark."""
    rows: dict[str, list[str]] = {}
    for line in document.read_text().partition(BEGIN)[2].partition(END)[0].splitlines():
        found = re.match(r"\| .* \| `(bench_\w+)`[^|]* \| [^|]* \|$", line)
        if found:
            rows.setdefault(found[1], []).append(line)
    return rows


def run(benchmark: Benchmark, options: tuple[str, ...]) -> tuple[list[str], str]:
    """Run one; return its rows, none if it measured nothing, and what went wrong."""
    python = str(VLLM_PYTHON) if benchmark.lacks is lacks_vllm else sys.executable
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    where = f"{time.strftime('%Y-%m-%d')}, {describe_machine()}, load {measure_load():.1f}"
    with tempfile.TemporaryDirectory() as folder:
        summary = Path(folder) / "summary.json"
        command = [python, str(FOLDER / f"{benchmark.name}.py"), *options, "--summary", str(summary)]
        code = subprocess.run(command, env=environment, check=False).returncode
        figures = json.loads(summary.read_text()) if summary.exists() else []
    rows = [
        f"| {benchmark.part} | {figure['measured']} | {figure['ratio']} | {benchmark.by} | {where} |"
        for figure in figures
    ]
    problem = "measured nothing" if not rows else ""
    return rows, f"ended with status {code}: it failed, or a promise is broken" if code else problem


def main(arguments: list[str] | None = None) -> int:
    """Run what can be run and write the table; return 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[one.name for one in BENCHMARKS], metavar="NAME", default=[])
    parser.add_argument("--long", action="store_true", help="those that train for long, and those of mixing, too")
    parser.add_argument("--quick", action="store_true", help="small settings; the documents of single tables stay")
    parser.add_argument("--write", type=Path, metavar="FILE", default=ROOT / DOCUMENT)
    options = parser.parse_args(arguments)
    rows, problems = read_rows(options.write), []
    for benchmark in BENCHMARKS:
        is_asked = benchmark.name in options.only if options.only else options.long or not benchmark.is_long
        if not is_asked or (options.quick and benchmark.quick is None):
            continue
        reason = "" if options.quick else benchmark.lacks()
        if reason:
            print(f"{benchmark.name} keeps its rows: {reason}", file=sys.stderr)
            continue
        print(f"{benchmark.name}: some {benchmark.minutes} minutes", file=sys.stderr)
        given = benchmark.options
        if options.quick:
            given = benchmark.quick or ()
        elif benchmark.document:
            given += ("--write", str(ROOT / benchmark.document))
        found, problem = run(benchmark, given)
        rows[benchmark.name] = found or rows.get(benchmark.name, [])
        if problem:
            problems.append(f"{benchmark.name} {problem}")
        # After each, so that a run that is stopped keeps what it has.
        table = [row for one in BENCHMARKS for row in rows.get(one.name, [f"| {one.part} | | | {one.by} | not yet |"])]
        replace_block(options.write, BEGIN, END, "\n".join([HEAD, *table]))
        if options.write == ROOT / DOCUMENT:
            replace_block(ROOT / "README.md", BEGIN, END, quote(rows))
    print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
