"""Which of two waits must be the shorter, so that no outer one kills a recovery that an inner one is making."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields
from typing import Final

from pulsenet.errors import ConfigError
from pulsenet.node.fetch import UNAVAILABLE_SECONDS
from pulsenet.node.transfers import STALL_SECONDS_MIN

ROUND_SECONDS_DEFAULT: Final = 1_200.0
WATCHDOG_SECONDS_DEFAULT: Final = 3_600.0


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Waits in seconds, innermost first; the order of the fields is the rule."""

    chunk_idle_seconds: float = STALL_SECONDS_MIN
    """A chunk request without progress for this long is asked of others."""
    source_switch_seconds: float = UNAVAILABLE_SECONDS
    """A source that fails for this long is given up for others."""
    round_seconds: float = ROUND_SECONDS_DEFAULT
    """A round that does not end by then is reported as stuck."""
    watchdog_seconds: float = WATCHDOG_SECONDS_DEFAULT
    """A process without any progress for this long is restarted."""


def check_timeouts(timeouts: Timeouts) -> None:
    """Refuse waits that are not nested (A-CLI-6).

    Raises:
        ConfigError: with the rule that is broken and both figures.
    """
    names = [field.name for field in fields(timeouts)]
    for inner, outer in itertools.pairwise(names):
        first, second = getattr(timeouts, inner), getattr(timeouts, outer)
        if not 0 < first < second:
            raise ConfigError(f"{inner} ({first:g}) must be above 0 and below {outer} ({second:g})")
