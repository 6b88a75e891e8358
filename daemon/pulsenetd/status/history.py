"""The last hours of a node in a ring of samples: no file, no growth."""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Mapping
from typing import Any, Final

SAMPLE_SECONDS: Final = 5.0
"""Between two samples of a running node."""

SAMPLES_MAX: Final = 2_160
"""Three hours; eight bytes a sample and series."""

SERIES: Final = (
    "received_bytes_per_second",
    "sent_bytes_per_second",
    "version_lag",
    "applied_version",
    "latest_seen_version",
    "utilization_ratio",
    "utilization_predicted_ratio",
    "disagreement",
)
"""Fields of ``/status`` of which the last hours are kept."""


class History:
    """A ring of samples. Whoever owns the timer calls :meth:`add`; may be read from any thread.

    Args:
        samples_max: The oldest sample is forgotten beyond so many.
    """

    def __init__(self, samples_max: int = SAMPLES_MAX) -> None:
        assert samples_max > 0
        self._samples_max = samples_max
        self._times_ms = array("q", bytes(8 * samples_max))
        self._values = {name: array("d", bytes(8 * samples_max)) for name in SERIES}
        self._count = 0
        """Samples ever taken."""
        self._mutex = threading.Lock()

    def add(self, time_ms: int, values: Mapping[str, Any]) -> None:
        """Take one sample of every series; what is missing or ``None`` is unknown at that time."""
        with self._mutex:
            place = self._count % self._samples_max
            self._times_ms[place] = time_ms
            for name, column in self._values.items():
                value = values.get(name)
                column[place] = math.nan if value is None else float(value)
            self._count += 1

    def columns(self) -> dict[str, Any]:
        """Return ``times_ms`` and ``series``, oldest sample first; ``None`` where a value was unknown."""
        with self._mutex:
            first = max(0, self._count - self._samples_max)
            places = [number % self._samples_max for number in range(first, self._count)]
            return {
                "sample_seconds": SAMPLE_SECONDS,
                "times_ms": [self._times_ms[place] for place in places],
                "series": {
                    name: [None if math.isnan(column[place]) else column[place] for place in places]
                    for name, column in self._values.items()
                },
            }
