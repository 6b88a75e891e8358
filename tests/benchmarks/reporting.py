"""What the benchmarks have in common: rows for the table of ``run_all.py``, and tables between marks of a document."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Figure:
    """One row."""

    measured: str
    ratio: str = ""
    """To what was measured in the same run; machines differ, ratios hardly."""


def add_summary_option(parser: argparse.ArgumentParser) -> None:
    """Let a benchmark be asked for its rows."""
    parser.add_argument("--summary", type=Path, metavar="FILE", help="write the rows for tests/benchmarks/run_all.py")


def write_summary(path: Path | None, figures: Iterable[Figure]) -> None:
    """Write the rows, if they were asked for."""
    if path is not None:
        path.write_text(json.dumps([asdict(figure) for figure in figures]))


def replace_block(document: Path, begin: str, end: str, text: str) -> None:
    """Put text between two marks of a document.

    Raises:
        ValueError: It lacks one.
    """
    before, rest = document.read_text().split(begin, 1)
    document.write_text(f"{before}{begin}\n{text.strip()}\n{end}{rest.split(end, 1)[1]}")


def describe_machine() -> str:
    """Return processor and cores."""
    cpu = platform.processor() or platform.machine()
    for text in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if text.startswith("model name"):
            cpu = text.split(":", 1)[1].strip()
            break
    return f"{cpu}, {len(os.sched_getaffinity(0))} cores"


def measure_load(seconds: float = 2.0, counters: Path = Path("/proc/stat")) -> float:
    """Return how many cores the machine keeps busy, over some seconds from now.

    The load average would count what a benchmark before this one did; it has to do where Linux's counters are not.
    """
    if not counters.exists():
        return os.getloadavg()[0]
    busy, total = _read_ticks(counters)
    time.sleep(seconds)
    busy_later, total_later = _read_ticks(counters)
    # All cores together count as many ticks as there are cores.
    return (busy_later - busy) / max(1, total_later - total) * (os.cpu_count() or 1)


def _read_ticks(counters: Path) -> tuple[int, int]:
    """Return what all cores counted, busy and in all."""
    # user, nice, system, idle, iowait, irq, softirq, steal; guests are in user already
    ticks = [int(word) for word in counters.read_text().split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)
