"""What a link carries of its nominal speed under loss and delay, from goodputs measured once (docs/planning.md).

Measured on a 100 Mbit/s link between two nodes, four streams on one connection. Between the measured points values
are interpolated; what lies beyond them is said below and is a guess.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Congestion(StrEnum):
    """TCP's congestion control at the senders."""

    CUBIC = "cubic"
    """What most machines run."""
    BBR = "bbr"


LOSS_RATIO_MAX: Final = 0.10
"""Nothing was measured beyond."""

FAR_SECONDS: Final = 0.1
"""Round trip of the second row of measurements; longer ones are taken to carry as much as this one."""

CONNECTIONS_MAX: Final = 4
"""Connections whose goodputs were seen to add up."""

Points = tuple[tuple[float, float], ...]

BBR_NEAR: Final[Points] = ((0.0, 1.0), (0.05, 0.69), (0.10, 0.25))
"""Share of the link by loss at a short round trip. Without loss it is taken to be whole."""
BBR_FAR: Final[Points] = ((0.0, 0.83), (0.01, 0.75), (0.05, 0.58), (0.10, 0.58 * 0.25 / 0.69))
"""The same at 100 ms. The last point is not measured: it falls as at a short round trip."""

CUBIC_NEAR: Final[Points] = ((0.0, 100.0), (0.05, 22.0), (0.10, 1.7))
"""Mbit/s of one connection by loss: the loss, not the link, sets it."""
CUBIC_FAR: Final[Points] = ((0.0, 86.0), (0.01, 1.2), (0.05, 0.4), (0.10, 0.4 * 1.7 / 22.0))
"""The same at 100 ms; the last point as above."""

CUBIC_FAR_SHARE: Final = 0.86
"""Of a link without loss, at 100 ms."""


@dataclass(frozen=True, slots=True)
class Link:
    """A trainer's own link. Every other trainer is taken to have the same one.

    Speeds are above 0 and finite, the loss is from 0 to :data:`LOSS_RATIO_MAX`.
    """

    down_mbps: float
    """Megabits (10^6 bits) a second."""
    up_mbps: float
    loss_ratio: float = 0.0
    """Of packets."""
    rtt_seconds: float = 0.0
    """Round trip to another trainer."""
    congestion: Congestion = Congestion.CUBIC

    def __post_init__(self) -> None:
        assert 0.0 < self.down_mbps < math.inf
        assert 0.0 < self.up_mbps < math.inf
        assert 0.0 <= self.loss_ratio <= LOSS_RATIO_MAX
        assert 0.0 <= self.rtt_seconds < math.inf

    def with_down(self, down_mbps: float) -> Link:
        """Return a link of another speed that has the same proportions."""
        return Link(
            down_mbps,
            self.up_mbps * (down_mbps / self.down_mbps),
            self.loss_ratio,
            self.rtt_seconds,
            self.congestion,
        )

    def transfer_seconds(
        self, *, received_bytes: float, sent_bytes: float, connection_count: int, round_trips: int
    ) -> float:
        """Return how long an exchange takes; both directions run at once. Nothing to move takes no time.

        Args:
            connection_count: Peers that it goes to and comes from at once.
            round_trips: Of questions that wait for each other, apart from the bytes.
        """
        if not received_bytes and not sent_bytes:
            return 0.0
        down = self.goodput_mbps(self.down_mbps, connection_count)
        up = self.goodput_mbps(self.up_mbps, connection_count)
        return max(received_bytes / down, sent_bytes / up) * 8e-6 + round_trips * self.rtt_seconds

    def goodput_mbps(self, nominal_mbps: float, connection_count: int) -> float:
        """Return what gets through of a nominal speed."""
        assert connection_count >= 1
        far = min(self.rtt_seconds / FAR_SECONDS, 1.0)
        if self.congestion is Congestion.BBR:
            near_share, far_share = _interpolate(BBR_NEAR, self.loss_ratio), _interpolate(BBR_FAR, self.loss_ratio)
            return nominal_mbps * (near_share + far * (far_share - near_share))
        whole = nominal_mbps * (1.0 + far * (CUBIC_FAR_SHARE - 1.0))
        if not self.loss_ratio:
            return whole
        near_log = _interpolate(_logarithms(CUBIC_NEAR), self.loss_ratio)
        far_log = _interpolate(_logarithms(CUBIC_FAR), self.loss_ratio)
        one = math.exp(near_log + far * (far_log - near_log))
        return min(whole, one * min(connection_count, CONNECTIONS_MAX))


def _logarithms(points: Points) -> Points:
    return tuple((at, math.log(value)) for at, value in points)


def _interpolate(points: Points, at: float) -> float:
    """Return the value at a place within the points, ascending by place, along straight lines."""
    after = next(index for index, (place, _) in enumerate(points) if place >= at)
    if after == 0:
        return points[0][1]
    (left, left_value), (right, right_value) = points[after - 1], points[after]
    return left_value + (right_value - left_value) * (at - left) / (right - left)
