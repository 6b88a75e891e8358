"""How much to ask of one provider at a time: what it delivers in a few seconds.

A window that follows the measured pace keeps a fast provider busy over a long round trip and leaves a slow one
little to sit on, so that the end of a blob never waits for a long queue at a thin link.
"""

from __future__ import annotations

import math

from pulsenet import limits

WINDOW_CHUNKS_START = 4
WINDOW_CHUNKS_MAX = limits.CHUNKS_PER_REQUEST_MAX * limits.STREAMS_PER_PEER_MAX
WINDOW_SECONDS = 2.0
"""A window holds what came in so much time: some round trips of a lossy link, where each repeat of a lost packet takes
one more. With one second a link of 10 Mb/s had two chunks under way, on two streams, and stood still between them."""

MEASURE_SECONDS = 0.25
"""Least time over which a pace is measured: two chunks that arrive together say nothing."""

PACE_WEIGHT = 0.25
"""A slower measurement counts so much against what is known; a faster one counts at once."""

PEAK_HALVES_SECONDS = 60.0
"""In so much time a peak is forgotten by half."""


class Window:
    """The pace of one provider, and from it the chunks it may owe. Pure.

    Args:
        chunks_min: However slow it is.
    """

    __slots__ = ("_began_at", "_chunks_min", "_count", "chunks", "chunks_per_second")

    def __init__(self, chunks_min: int = 1) -> None:
        self._chunks_min = chunks_min
        self.chunks = WINDOW_CHUNKS_START
        """Chunks that may be asked of it and not have come."""
        self.chunks_per_second = 0.0
        """Measured pace while something was asked of it; 0 before it was measured."""
        self._began_at: float | None = None
        self._count = 0

    def begin(self, now: float) -> None:
        """Something is asked of a provider that owed nothing."""
        self._began_at, self._count = now, 0

    def note_chunk(self, now: float) -> None:
        """A good chunk came."""
        self._count += 1
        if self._began_at is None or now - self._began_at < MEASURE_SECONDS:
            return
        measured = self._count / (now - self._began_at)
        known = self.chunks_per_second
        self.chunks_per_second = measured if measured > known else known + PACE_WEIGHT * (measured - known)
        self._began_at, self._count = now, 0
        self.chunks = min(max(round(self.chunks_per_second * WINDOW_SECONDS) + 1, self._chunks_min), WINDOW_CHUNKS_MAX)

    def shrink(self) -> None:
        """It failed or stands still: ask half as much."""
        self.chunks = max(self.chunks // 2, self._chunks_min)
        self.chunks_per_second /= 2


class Peak:
    """The fastest pace seen lately: about what a provider can do for one reader when nobody else asks it. Pure."""

    __slots__ = ("_at", "_pace")

    def __init__(self) -> None:
        self._pace = 0.0
        self._at = 0.0

    def note(self, pace: float, now: float) -> None:
        """So fast it was."""
        self._pace, self._at = max(self.per_second(now), pace), now

    def per_second(self, now: float) -> float:
        """Return the peak as far as it counts at ``now``; 0 if none was ever seen."""
        return self._pace * math.exp2(-max(now - self._at, 0.0) / PEAK_HALVES_SECONDS)


class Meter:
    """How much came lately, per second. Pure.

    Args:
        seconds: Over how much time, roughly: what came before is forgotten exponentially.
    """

    __slots__ = ("_amount", "_at", "_seconds")

    def __init__(self, seconds: float = 5.0) -> None:
        self._seconds = seconds
        self._amount = 0.0
        self._at = 0.0

    def note(self, amount: float, now: float) -> None:
        """So much came now."""
        self._decay(now)
        self._amount += amount

    def per_second(self, now: float) -> float:
        """Return the pace at ``now``."""
        self._decay(now)
        return self._amount / self._seconds

    def _decay(self, now: float) -> None:
        if now > self._at:
            self._amount *= math.exp((self._at - now) / self._seconds)
            self._at = now
