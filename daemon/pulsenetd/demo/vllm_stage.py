"""What the demonstration needs to run its rollouts on vLLM: an interpreter, ports, and what became of the engines."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pulsenet.errors import UsageError
from pulsenetd.demo.progress import VersionRow
from pulsenetd.demo.reports import Compared
from pulsenetd.engines.vllm_process import PROCESS_NAME, end_left, pick_port

FIND_SECONDS_MAX: Final = 120.0
"""Importing vLLM for the first time compiles its files."""

_FIND: Final = "import pulsenet.serving.vllm.plugin, vllm; print(vllm.__version__)"
_NEXT_STEP: Final = (
    "make one with '.ci/vllm' in a checkout or as docs/vllm.md says, and give its interpreter with --engine-python or "
    "PULSENET_ENGINE_PYTHON"
)


@dataclass(slots=True)
class VllmEngines:
    """The vLLMs of one demonstration."""

    python: str
    """Interpreter that has vLLM and pulsenet."""
    version: str
    ports: dict[str, int]
    """By inferencer."""
    compared: dict[str, Compared] = field(default_factory=dict)
    """By inferencer: what comparing its memory with the trainer's file gave."""

    def url(self, name: str) -> str:
        """Return where an inferencer's vLLM listens."""
        return f"http://127.0.0.1:{self.ports[name]}"

    def summarise(self, rows: Iterable[VersionRow]) -> dict[str, Any]:
        """Return what is told about the engines at the end: their release, and how long updates held requests up."""
        pauses = [
            seconds["pause"] for row in rows for seconds in row.stage_seconds.values() if seconds.get("pause", 0.0) > 0
        ]
        return {
            "name": f"vLLM {self.version}",
            "pauses": len(pauses),
            "pause_ms_median": round(1000 * statistics.median(pauses), 1) if pauses else None,
            "pause_ms_max": round(1000 * max(pauses), 1) if pauses else None,
        }


def end_engines(data_directories: Iterable[Path]) -> None:
    """End every vLLM whose node ended without it; such a node was killed, or left in a hurry."""
    for directory in data_directories:
        end_left(directory / PROCESS_NAME)


def prepare_vllm(python: str, names: Sequence[str]) -> VllmEngines:
    """Find vLLM, and a port for the one of each inferencer.

    Args:
        python: Interpreter; empty means the one that runs this.
        names: Of the inferencers.

    Raises:
        UsageError: No vLLM, or none with pulsenet beside it; the message says what to do.
    """
    python = python or sys.executable
    try:
        found = subprocess.run(
            [python, "-c", _FIND], capture_output=True, text=True, timeout=FIND_SECONDS_MAX, check=False
        )
    except OSError as error:
        raise UsageError(f"--engine vllm: {python} cannot be started ({error.strerror}): {_NEXT_STEP}") from error
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"--engine vllm: {python} did not load vLLM within {FIND_SECONDS_MAX:.0f} s") from error
    if found.returncode != 0:
        last = (found.stderr.strip().splitlines() or ["no message"])[-1]
        raise UsageError(f"--engine vllm: {python} has no vLLM with pulsenet beside it ({last}): {_NEXT_STEP}")
    version = found.stdout.strip().splitlines()[-1]
    ports: dict[str, int] = {}
    for name in names:
        while (port := pick_port()) in ports.values():
            pass
        ports[name] = port
    return VllmEngines(python, version, ports)
