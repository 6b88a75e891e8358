"""What a check says, and what it is told about the machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final


class Grade(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    """The node works, but worse than it could, or something could not be told."""
    FAIL = "fail"
    """The node will not start, not be safe, or reach nobody."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    grade: Grade
    text: str
    """What was found: the cause, with its figures."""
    next_step: str = ""
    """What to do about it; empty if there is nothing to do."""
    repair: Callable[[], str] | None = None
    """Puts it right and returns what was done; ``None`` where only a person can decide. It loses nothing that a node
    could not fetch again, and refuses while a node runs there.

    Raises:
        OSError: The system refused.
        PulsenetError: It could not; the message says why.
    """


def ok(text: str) -> Finding:
    """Return a finding that asks for nothing."""
    return Finding(Grade.OK, text)


def warn(text: str, next_step: str, repair: Callable[[], str] | None = None) -> Finding:
    """Return a finding the operator should know of."""
    return Finding(Grade.WARN, text, next_step, repair)


def fail(text: str, next_step: str, repair: Callable[[], str] | None = None) -> Finding:
    """Return a finding that keeps a node from working."""
    return Finding(Grade.FAIL, text, next_step, repair)


def split_step(error: Exception) -> tuple[str, str]:
    """Return what an error says, and the next step that it ends with; empty if it names none.

    The step is ours and the last part: a path, or what another program said, may hold "; " before it.
    """
    cause, _, step = str(error).rpartition("; ")
    return (cause, step) if cause else (step, "")


@dataclass(frozen=True, slots=True)
class Subject:
    """The machine, and the run and nodes on it that are meant."""

    home: Path
    """Where runs live on this machine."""
    nodes: tuple[Path, ...] = ()
    """Directories of nodes, running or not."""
    bootstraps: tuple[str, ...] = ()
    """Addresses a node would join by, each with ``/p2p/<peer>``."""
    run_trouble: Finding | None = None
    """What is wrong with the run, or the token, that was asked for."""
    listen: str = ""
    """Where a node is to listen; empty for any free port."""
    p2pd: str = ""
    """p2pd to run instead of hivemind's."""
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0
    """Where ``/metrics`` is to be; 0 for any free port."""
    engine: str = "files"
    """Engine beside an inferencer, as ``--engine`` names it."""
    engine_url: str = ""
    engine_python: str = ""
    """Interpreter that has vLLM; empty for this one."""
    reads_all: bool = False
    """Whether every chunk is to be read and hashed."""
    on_progress: Callable[[int, int], None] = lambda done, total: None
    """Told how many bytes of how many were read."""
    proc: Path = Path("/proc")
    """What the kernel tells."""
    cgroup: Path = Path("/sys/fs/cgroup")


Look = Callable[[Subject], Sequence[Finding]]
"""A check: what it found, at least one line. It changes nothing on the machine."""


@dataclass(frozen=True, slots=True)
class Check:
    """A named check."""

    name: str
    look: Look


SECONDS_MAX: Final = 5.0
"""For anything a check waits for."""
