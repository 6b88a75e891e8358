"""When to bring the engine to the mirror's version: once, however many versions were missed."""

from __future__ import annotations

from collections.abc import Callable

from pulsenet.ids import Version
from pulsenet.node.effects import Count, Effect, Log
from pulsenet.node.events import EngineApplied, EngineFailed

SWAP_SECONDS_MAX = 600.0
"""An engine that does not answer for this long is called failed; an engine that is loading may take minutes."""

FAULTS = frozenset({"base_mismatch", "root_mismatch", "structure", "read_back", "decode"})
"""Codes with which an engine's reason may begin; its other trouble is counted as ``engine``."""


class EngineSwap:
    """The engine's version, apart from the mirror's. Pure.

    A catch-up has a *goal*, the version that was newest when it began: the engine is swapped when the mirror gets
    there, even if newer versions keep coming, so that a slow node still moves.

    Args:
        backoff_seconds: Returns the wait after so many failures in a row.
    """

    def __init__(self, backoff_seconds: Callable[[int], float]) -> None:
        self.version: Version | None = None
        """What the engine serves, if known."""
        self._backoff_seconds = backoff_seconds
        self._goal: Version | None = None
        self._handed: Version | None = None
        self._handed_at = 0.0
        self._retry_at = 0.0
        self._failure_count = 0

    def set_goal(self, newest: Version) -> None:
        """A catch-up to ``newest`` begins, unless one is under way."""
        if self._goal is None:
            self._goal = newest

    def due(self, mirror: Version, *, is_done: bool, now: float) -> Version | None:
        """Return the version to hand over now, if any, and count the swap as begun.

        Args:
            is_done: The mirror holds the newest version.
        """
        if self._handed is not None and now < self._handed_at + SWAP_SECONDS_MAX:
            return None
        if self.version is not None and mirror <= self.version:
            return None
        reached = is_done or (self._goal is not None and mirror >= self._goal)
        if not reached or now < self._retry_at:
            return None
        self._goal = None
        self._handed = mirror
        self._handed_at = now
        return mirror

    def handle(self, event: EngineApplied | EngineFailed, now: float) -> list[Effect]:
        """Take in what the engine said."""
        self._handed = None
        if isinstance(event, EngineApplied):
            self.version = event.version
            self._failure_count = 0
            self._retry_at = 0.0
            return []
        self.version = event.version
        self._failure_count += 1
        self._retry_at = now + self._backoff_seconds(self._failure_count)
        held = "an unknown version" if event.version is None else f"version {event.version}"
        text = f"the engine did not take the update ({event.reason}); it holds {held}, trying again"
        code = event.reason.partition(":")[0]
        return [Count("rejected", code if code in FAULTS else "engine"), Log("warning", text)]

    def next_wake(self, now: float) -> float | None:
        """Return the next time at which a swap may become due."""
        times = [self._retry_at]
        if self._handed is not None:
            times.append(self._handed_at + SWAP_SECONDS_MAX)
        return min((at for at in times if at > now), default=None)
