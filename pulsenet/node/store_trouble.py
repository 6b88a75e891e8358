"""What a machine does when the disk refuses to keep something: count it, say it now and then, store it again."""

from __future__ import annotations

from pulsenet.node.effects import Count, Effect, Log

STORE_RETRY_SECONDS = 5.0
"""Pause before what was refused is stored again; space comes back within a minute or not at all."""

TELL_SECONDS = 60.0
"""Least time between two log lines about it."""


class StoreTrouble:
    """Remembers that state is not on disk. A chunk that was refused is the fetcher's, and comes again by itself."""

    def __init__(self) -> None:
        self._retry_at: float | None = None
        self._tell_at = float("-inf")

    def note(self, reason: str, now: float, *, is_state: bool) -> list[Effect]:
        """Take in a refusal; ``is_state`` if records or state were refused and have to be stored again."""
        if is_state and self._retry_at is None:
            self._retry_at = now + STORE_RETRY_SECONDS
        effects: list[Effect] = [Count("rejected", reason)]
        if now >= self._tell_at:
            self._tell_at = now + TELL_SECONDS
            text = f"the disk refuses what has to be stored ({reason}): free some space; it is tried again by itself"
            effects.append(Log("warning", text))
        return effects

    def take_due(self, now: float) -> bool:
        """Say, once, that state has to be stored again now."""
        if self._retry_at is None or now < self._retry_at:
            return False
        self._retry_at = None
        return True

    def next_wake(self, now: float) -> float | None:
        """Return when :meth:`take_due` will say so."""
        return self._retry_at if self._retry_at is not None and self._retry_at > now else None
