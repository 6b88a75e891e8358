"""Two watches over time: a round that does not end is said aloud, and a node that stands still ends itself."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Final

from pulsenetd.handlers.reporting import Ledger
from pulsenetd.logs import logger

LOOK_SECONDS: Final = 5.0

STUCK_CODE: Final = 1
"""Exit code of a node that stood still: a runtime failure, after which whoever supervises it starts it again."""

QUIET_PHASES: Final = (None, "idle", "watching")
"""Phases in which no round of this node is due."""


class RoundWatch:
    """Notices that no round ends.

    Args:
        ledger: What the machines reported; told ``round_stuck``.
        round_seconds: How long a round may take.
    """

    def __init__(self, ledger: Ledger, round_seconds: float) -> None:
        self._ledger = ledger
        self._round_seconds = round_seconds
        self._index: object = None
        self._since: float | None = None
        self._is_stuck = False

    def look(self, now: float) -> None:
        """Compare with the last look; ``now`` is monotonic."""
        fields = self._ledger.fields
        index, phase = fields.get("round_index"), fields.get("rounds_phase")
        if index != self._index or phase in QUIET_PHASES or self._since is None:
            self._index, self._since = index, now
        is_stuck = now - self._since > self._round_seconds
        if is_stuck == self._is_stuck:
            return
        self._is_stuck = is_stuck
        self._ledger.note(round_stuck=is_stuck)
        if is_stuck:
            reason = fields.get("rounds_reason") or "no final receipt"
            text = "round %s did not end within %.0f s (%s, %s): look at the coordinator and at slow trainers"
            logger.warning(text, index, self._round_seconds, phase, reason)


class Watchdog:
    """A thread that ends the process when its event loop stands still for too long.

    Args:
        last_turn: Returns when the loop last turned.
        monotonic: Monotonic seconds.
        limit_seconds: How long it may stand still.
        end: Leaves nothing behind and ends the process with a code.
    """

    def __init__(
        self,
        last_turn: Callable[[], float],
        monotonic: Callable[[], float],
        limit_seconds: float,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._last_turn = last_turn
        self._monotonic = monotonic
        self._limit_seconds = limit_seconds
        self._end = end
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """End the watch."""
        self._stopped.set()

    def look(self) -> bool:
        """Say whether the loop still turns; if it does not, end the process."""
        still_seconds = self._monotonic() - self._last_turn()
        if still_seconds <= self._limit_seconds:
            return True
        logger.error("the event loop stood still for %.0f s: the node ends, to be started again", still_seconds)
        self._end(STUCK_CODE)
        return False

    def _run(self) -> None:
        while not self._stopped.wait(min(LOOK_SECONDS, self._limit_seconds / 4)):
            if not self.look():
                return
