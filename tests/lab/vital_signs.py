"""What a process holds while it works: memory, descriptors, threads; sampled, and judged for growth."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Final

WARM_UP_SHARE: Final = 1 / 3
"""Of a life, in which caches fill and code is compiled; what is held then says nothing of later."""


@dataclass(frozen=True, slots=True)
class Signs:
    """One look at a process."""

    at_seconds: float
    memory_size_bytes: int
    """Resident memory that is the process's own: pages of files are the kernel's to take back."""
    descriptor_count: int
    thread_count: int


def read_signs(pid: int, at_seconds: float) -> Signs | None:
    """Return what a process holds, or ``None`` if it is gone."""
    with suppress(OSError, AttributeError):
        status = Path(f"/proc/{pid}/status").read_text()
        memory = re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
        threads = re.search(r"^Threads:\s+(\d+)", status, re.MULTILINE)
        descriptors = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
        return Signs(at_seconds, int(memory[1]) << 10, descriptors, int(threads[1]))  # type: ignore[index]
    return None


@dataclass(slots=True)
class Record:
    """All looks at one life of one process."""

    name: str
    signs: list[Signs] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """How long it was watched."""
        return self.signs[-1].at_seconds - self.signs[0].at_seconds if self.signs else 0.0

    def growth(self, what: str) -> float:
        """Return the mean of the last third less that of the third before, so that one spike is no trend."""
        later = self.signs[int(len(self.signs) * WARM_UP_SHARE) :]
        half = len(later) // 2
        return fmean(getattr(one, what) for one in later[half:]) - fmean(getattr(one, what) for one in later[:half])

    def slope_per_hour(self, what: str) -> float:
        """Return the least-squares slope after the warm-up."""
        later = self.signs[int(len(self.signs) * WARM_UP_SHARE) :]
        return slope([one.at_seconds for one in later], [float(getattr(one, what)) for one in later]) * 3600

    def last(self, what: str) -> float:
        """Return the mean of the last few looks."""
        return fmean(getattr(one, what) for one in self.signs[-5:])


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Return the slope of the least-squares line."""
    middle, mean = fmean(times), fmean(values)
    spread = sum((time - middle) ** 2 for time in times)
    return sum((time - middle) * (value - mean) for time, value in zip(times, values, strict=True)) / spread
