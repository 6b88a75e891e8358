"""The one timer of a machine; see :class:`pulsenet.node.machine.Machine`."""

from __future__ import annotations

from collections.abc import Iterable

from pulsenet.node.effects import Effect, SetTimer


class Timer:
    """Remembers what was ordered, so that a time is ordered once."""

    def __init__(self) -> None:
        self._at: float | None = None

    def note(self, now: float) -> None:
        """Time has come to ``now``: what was ordered for earlier is over."""
        if self._at is not None and now >= self._at:
            self._at = None

    def wake_at(self, at: float | None) -> list[Effect]:
        """Return the order to wake then and not when it was ordered before; ``None`` leaves that as it is."""
        if at is None or at == self._at:
            return []
        self._at = at
        return [SetTimer(at)]

    def wake_next(self, times: Iterable[float | None], now: float) -> list[Effect]:
        """Return the order to wake at the first of some times that lies ahead."""
        return self.wake_at(min((at for at in times if at is not None and at > now), default=None))

    def wake_by(self, at: float) -> list[Effect]:
        """Return the order to wake then at the latest: what is put off must not put off what is due before."""
        self._at = at if self._at is None else min(self._at, at)
        return [SetTimer(self._at)]
