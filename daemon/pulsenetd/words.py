"""Quantities and versions as people read them: at most three figures and a unit."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

ETA_SECONDS_MAX: Final = 86_400.0
"""What would take longer has stopped."""
MOMENT_MS_MAX: Final = 253_402_300_799_000
"""The last second of the year 9999: a calendar has no later one."""


def say_version(status: Mapping[str, Any], which: str = "applied") -> str:
    """Return a version of a node's status as people read it, ``epoch.number``; empty if there is none.

    Args:
        status: Fields of ``/status``.
        which: ``applied``, or ``latest_seen``.
    """
    number = status.get(f"{which}_version")
    return "" if number is None else f"{status.get(f'{which}_epoch') or 0}.{number}"


def say_size(size_bytes: float) -> str:
    """Return bytes with a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 999.5:  # what would be rounded to 1000 goes to the next unit
            return f"{size_bytes:.0f} {unit}" if unit == "B" or size_bytes >= 99.95 else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"


def say_rate(bytes_per_second: float | None) -> str:
    """Return bytes per second with a decimal unit; empty if nobody knows."""
    return "" if bytes_per_second is None else f"{say_size(bytes_per_second)}/s"


def say_seconds(seconds: float) -> str:
    """Return a length of time in its two largest units."""
    total = max(0, round(seconds))
    if total < 60:
        return f"{total} s"
    if total < 3_600:
        return f"{total // 60} min {total % 60} s" if total < 600 and total % 60 else f"{total // 60} min"
    if total < 86_400:
        return f"{total // 3_600} h {total % 3_600 // 60} min"
    return f"{total // 86_400} d {total % 86_400 // 3_600} h"


def say_moment(unix_ms: int) -> str:
    """Return a moment to the minute, in the time that is the same everywhere."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(min(unix_ms, MOMENT_MS_MAX) / 1_000))


def say_count(count: int, noun: str) -> str:
    """Return how many there are of a thing whose plural ends in s."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def say_cause(error: Exception) -> str:
    """Return why a call failed, as the system says it and without its number; urllib wraps that once more."""
    cause = getattr(error, "reason", error) if isinstance(error, OSError) else error
    return str(getattr(cause, "strerror", None) or cause)
