"""How a training process divides its time: inner steps, and waiting for rounds; and what was to be expected."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from pulsenet.outer.plan import Variant, Workload, predict_utilization
from pulsenet.outer.plan_link import Link
from pulsenet.outer.settings import OuterSettings
from pulsenetd.network.link_meter import BITS_A_MEGABIT, LinkMeter

Meters = Mapping[str, LinkMeter]
"""Of what is ``sent`` and ``received``."""

STRETCHES_REMEMBERED: Final = 16
STRETCHES_MIN: Final = 2
"""One alone may be the first, in which everything is compiled."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Means over the last stretches of inner steps."""

    work_seconds: float
    """Of a stretch: from a state to the contribution made from it."""
    wait_seconds: float
    """From there until the next inner step."""

    @property
    def utilization(self) -> float:
        """Share of the time spent on inner steps."""
        total = self.work_seconds + self.wait_seconds
        return self.work_seconds / total if total > 0.0 else 1.0


class Pace:
    """Measures stretches of work and of waiting, which take turns.

    Args:
        on_measured: Told the means after every stretch, from the :data:`STRETCHES_MIN`-th on.
        monotonic: Monotonic seconds.
    """

    def __init__(
        self, on_measured: Callable[[Measured], object], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_measured = on_measured
        self._monotonic = monotonic
        self._began_at: float | None = None
        self._ended_at: float | None = None
        self._work_seconds = 0.0
        self._stretches: deque[tuple[float, float]] = deque(maxlen=STRETCHES_REMEMBERED)

    def begin(self) -> None:
        """The process has what it needs for inner steps; said twice, it was no work in between, but catching up."""
        now = self._monotonic()
        self._began_at = now
        if self._ended_at is None:
            return
        self._stretches.append((self._work_seconds, now - self._ended_at))
        self._ended_at = None
        count = len(self._stretches)
        if count >= STRETCHES_MIN:
            work, wait = (sum(seconds) / count for seconds in zip(*self._stretches, strict=True))
            self._on_measured(Measured(work, wait))

    def end(self) -> None:
        """The process has done its inner steps and needs others to go on."""
        if self._began_at is None:
            return
        self._ended_at = self._monotonic()
        self._work_seconds, self._began_at = self._ended_at - self._began_at, None

    def forget(self) -> None:
        """The process is gone: what it was at is not counted."""
        self._began_at = self._ended_at = None


def find_link(upload_limit: int, download_limit: int, meters: Meters) -> Link | None:
    """Return this node's link: what its operator caps it to, else what it carried at its fastest lately.

    Args:
        upload_limit: Bytes per second; 0 for no cap.
        download_limit: The same of what is received.
        meters: This node's.

    Returns:
        ``None`` while one direction has neither a cap nor a measurement.
    """
    up = BITS_A_MEGABIT * upload_limit if upload_limit else meters["sent"].mbps
    down = BITS_A_MEGABIT * download_limit if download_limit else meters["received"].mbps
    return None if up is None or down is None else Link(down_mbps=down, up_mbps=up)


def predict(settings: OuterSettings, link: Link, *, params: int, peer_count: int, work_seconds: float) -> float | None:
    """Return the share of time for inner steps that ``pulsenet plan`` gives; ``None`` where nothing was measured.

    Args:
        settings: The run's constants.
        link: This node's.
        params: Parameters that train.
        peer_count: Trainers of a round.
        work_seconds: Of a round's inner steps.
    """
    if params < 1 or work_seconds <= 0.0:
        return None
    workload = Workload(
        params=params,
        peer_count=max(peer_count, 1),
        step_seconds=work_seconds / settings.inner_steps,
        inner_steps=settings.inner_steps,
        flush_interval=settings.flush_interval,
        state_anchor_interval=settings.state_anchor_interval,
    )
    return predict_utilization(Variant(settings.algorithm), workload, link)
