"""Virtual time: what will happen, each thing at its moment, and at equal moments in the order it was asked for."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], bool | None]
"""Something that happens; ``False`` says that it turned out to be nothing, and does not count as an event."""


class VirtualClock:
    """Time that passes only when something happens."""

    def __init__(self) -> None:
        self.now = 0.0
        """Virtual monotonic time in seconds; never falls."""
        self._queue: list[tuple[float, int, Action]] = []
        self._order = 0

    def __len__(self) -> int:
        return len(self._queue)

    def at(self, moment: float, action: Action) -> None:
        """Let ``action`` happen at ``moment``, or now if that is past."""
        self._order += 1
        heapq.heappush(self._queue, (moment, self._order, action))

    def after(self, delay_seconds: float, action: Action) -> None:
        """Let ``action`` happen after a delay."""
        self.at(self.now + delay_seconds, action)

    def step(self, end: float) -> bool:
        """Let the next thing happen, if it does so by ``end``; say whether one did."""
        while self._queue and self._queue[0][0] <= end:
            moment, _, action = heapq.heappop(self._queue)
            self.now = max(self.now, moment)
            if action() is not False:
                return True
        return False
