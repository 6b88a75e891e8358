"""How fast one direction of this node's link was while something was on its way: the link carries at least that."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

STRETCH_SIZE_BYTES_MIN: Final = 1 << 20
"""Less tells more of waiting than of the link."""

STRETCH_SECONDS_MAX: Final = 10.0
"""What goes on for longer is measured in pieces, so that a link that got faster shows."""

STRETCHES_REMEMBERED: Final = 64

BITS_A_MEGABIT: Final = 8e-6


class LinkMeter:
    """Measures stretches in which at least one transfer of chunks is under way.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._active_count = 0
        self._began_at = 0.0
        self._size_bytes = 0
        self._stretches: deque[float] = deque(maxlen=STRETCHES_REMEMBERED)

    @property
    def mbps(self) -> float | None:
        """Megabits a second in the fastest of the last stretches; ``None`` before any that tells."""
        return max(self._stretches, default=None)

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Say that a transfer is under way."""
        if not self._active_count:
            self._begin(self._clock())
        self._active_count += 1
        try:
            yield
        finally:
            self._active_count -= 1
            if not self._active_count:
                self._end(self._clock())

    def note(self, size_bytes: int) -> None:
        """Say that so many bytes of it have arrived, or left."""
        self._size_bytes += size_bytes
        now = self._clock()
        if now >= self._began_at + STRETCH_SECONDS_MAX:
            self._end(now)
            self._begin(now)

    def _begin(self, now: float) -> None:
        self._began_at, self._size_bytes = now, 0

    def _end(self, now: float) -> None:
        seconds = now - self._began_at
        if self._size_bytes >= STRETCH_SIZE_BYTES_MIN and seconds > 0.0:
            self._stretches.append(BITS_A_MEGABIT * self._size_bytes / seconds)
