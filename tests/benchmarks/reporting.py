"""What the benchmarks have in common: rows for the table of ``run_all.py``, and tables between marks of a document."""

from __future__ import annotations

import argparse
import json
import os
import platform
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
