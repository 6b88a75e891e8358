"""How far this machine's clock is off, by what peers say the time is."""

from __future__ import annotations

import math
import statistics
from typing import Final

from pulsenet import limits
from pulsenet.ids import PeerId

SAMPLES_MIN: Final = 3
"""Peers that must agree before the clock is corrected: one lying peer moves nothing."""

SAMPLES_MAX: Final = 64
ROUND_TRIP_SECONDS_MAX: Final = 2.0
"""A slower answer says too little about the time."""


class ClockOffset:
    """The median over peers of how far this clock runs ahead of theirs."""

    def __init__(self) -> None:
        self._samples: dict[PeerId, float] = {}

    def add(self, peer_id: PeerId, *, ahead_seconds: float, round_trip_seconds: float) -> None:
        """Take one measurement; the newest of each peer counts, if it is a number."""
        if round_trip_seconds > ROUND_TRIP_SECONDS_MAX or not math.isfinite(ahead_seconds):
            return
        self._samples.pop(peer_id, None)
        self._samples[peer_id] = ahead_seconds
        if len(self._samples) > SAMPLES_MAX:
            del self._samples[next(iter(self._samples))]

    def clear(self) -> None:
        """Forget all measurements: the clock was set."""
        self._samples.clear()

    @property
    def ahead_seconds(self) -> float | None:
        """Seconds this clock runs ahead of the median peer (negative: behind); ``None`` before a measurement.

        Of fewer than three peers the one that differs least counts: if one agrees, it is the other that is off.
        """
        if len(self._samples) < SAMPLES_MIN:
            return min(self._samples.values(), key=abs, default=None)
        return statistics.median(self._samples.values())

    @property
    def correction_seconds(self) -> float:
        """What to take off this clock for directory times: 0 while it is near enough, or few peers were heard."""
        ahead_seconds = self.ahead_seconds
        if ahead_seconds is None or len(self._samples) < SAMPLES_MIN:
            return 0.0
        return ahead_seconds if abs(ahead_seconds) > limits.CLOCK_OFFSET_SECONDS_MAX else 0.0

    @property
    def warning(self) -> str | None:
        """One line for the operator while the clock is off by more than the limit (A-DHT-2)."""
        ahead_seconds = self.ahead_seconds
        if ahead_seconds is None or abs(ahead_seconds) <= limits.CLOCK_OFFSET_SECONDS_MAX:
            return None
        direction = "ahead of" if ahead_seconds > 0 else "behind"
        consequence = (
            "directory times are corrected by it"
            if len(self._samples) >= SAMPLES_MIN
            else f"the directory may not work until {SAMPLES_MIN} peers confirm it"
        )
        return (
            f"this machine's clock is {abs(ahead_seconds):.1f} s {direction} its peers ({len(self._samples)} asked): "
            f"set it, for example with 'timedatectl set-ntp true'; {consequence}"
        )
