"""Caps on how often something may happen, with room for short bursts, and on bytes per second."""

from __future__ import annotations


class RateCap:
    """Lets through ``burst`` events at once and ``per_second`` in the long run."""

    __slots__ = ("_burst", "_level", "_per_second", "_updated_at")

    def __init__(self, *, per_second: float, burst: int) -> None:
        assert per_second > 0
        assert burst >= 1
        self._per_second = per_second
        self._burst = burst
        self._level = float(burst)
        self._updated_at: float | None = None

    def take(self, now: float) -> bool:
        """Say whether one more may happen at ``now``, and count it if so."""
        self._refill(now)
        if self._level < 1.0:
            return False
        self._level -= 1.0
        return True

    def next_at(self, now: float) -> float:
        """Return the time from which one more may happen; ``now`` if it may already."""
        self._refill(now)
        return now + max(0.0, 1.0 - self._level) / self._per_second

    def _refill(self, now: float) -> None:
        if self._updated_at is not None and now > self._updated_at:
            gained = (now - self._updated_at) * self._per_second
            # Rounding must not leave the level a hair below 1 at the very time ``next_at`` named.
            self._level = min(float(self._burst), round(self._level + gained, 9))
        self._updated_at = now if self._updated_at is None else max(now, self._updated_at)


LATE_SECONDS = 0.1
"""Whoever wakes so much too late makes up for it: on a busy machine the rate would fall below the cap."""


class ByteCap:
    """Keeps an average rate: whoever moved bytes runs up a debt, and nobody moves more until it is paid.

    Args:
        bytes_per_second: The cap; 0 means none.
    """

    __slots__ = ("_bytes_per_second", "_free_at")

    def __init__(self, bytes_per_second: int) -> None:
        assert bytes_per_second >= 0
        self._bytes_per_second = bytes_per_second
        self._free_at = float("-inf")

    def wait_seconds(self, now: float) -> float:
        """Return how long to wait before more may move."""
        return max(self._free_at - now, 0.0) if self._bytes_per_second else 0.0

    def note(self, size_bytes: int, now: float) -> None:
        """So much moved, or is about to."""
        if self._bytes_per_second:
            self._free_at = max(self._free_at, now - LATE_SECONDS) + size_bytes / self._bytes_per_second
