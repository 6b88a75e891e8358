"""Draws what bench_outer.py found as an SVG picture: loss, difference to DiLoCo, and received bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from xml.sax.saxutils import escape

import numpy as np

PANEL_WIDTH: Final = 330
PANEL_HEIGHT: Final = 240
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 42, 44
COLOURS: Final = {
    "pulseloco": "#0969da",
    "diloco": "#9a6700",
    "ddp": "#57606a",
    "delayed": "#1a7f37",
    "unflushed": "#8250df",
    "global_m1": "#cf222e",
    "global_m1_local_m2": "#0969da",
    "global_m1_local_m2_subset": "#8250df",
    "local_m1_m2": "#1a7f37",
    "global_m1_local_m2+momentum": "#54aeff",
    "local_m1_m2+momentum": "#4ac26b",
}
LABELS: Final = {
    "pulseloco": "PULSELoCo",
    "diloco": "DiLoCo",
    "ddp": "DDP",
    "delayed": "DiLoCo, delayed",
    "unflushed": "PULSELoCo, no flush",
    "global_m1": "GlobalM1",
    "global_m1_local_m2": "GlobalM1LocalM2",
    "global_m1_local_m2_subset": "GlobalM1LocalM2, subset",
    "local_m1_m2": "LocalM1M2",
    "global_m1_local_m2+momentum": "GlobalM1LocalM2, momentum mixed",
    "local_m1_m2+momentum": "LocalM1M2, momentum mixed",
}

Points = Sequence[tuple[float, float]]


@dataclass(slots=True)
class Panel:
    """One plot with its own axes.

    Args:
        left: Of the panel in the picture, pixels.
        title: Above it.
        x_label: Below it.
        x_range: Ends of the horizontal axis.
        y_range: Ends of the vertical axis.
        is_log: Both axes are logarithmic, of base 2 and 10.
    """

    left: int
    title: str
    x_label: str
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    is_log: bool = False

    def place(self, x: float, y: float) -> str:
        """Return a point's place in the picture, as SVG writes it."""
        values, ranges = (x, y), (self.x_range, self.y_range)
        if self.is_log:
            values = (float(np.log(x)), float(np.log(y)))
            ranges = tuple((float(np.log(low)), float(np.log(high))) for low, high in ranges)  # type: ignore[assignment]
        across, up = ((value - low) / (high - low) for value, (low, high) in zip(values, ranges, strict=True))
        width, height = PANEL_WIDTH - LEFT - RIGHT, PANEL_HEIGHT - TOP - BOTTOM
        return f"{self.left + LEFT + across * width:.1f},{PANEL_HEIGHT - BOTTOM - up * height:.1f}"

    def draw_frame(self, x_ticks: Sequence[float], y_ticks: Sequence[float], show: Callable[[float], str]) -> list[str]:
        """Return title, axes and ticks; ``show`` writes the numbers of the vertical axis."""
        parts = [
            f'<text x="{self.left + LEFT}" y="18" font-size="13">{escape(self.title)}</text>',
            f'<text x="{self.left + LEFT}" y="{PANEL_HEIGHT - 8}">{escape(self.x_label)}</text>',
        ]
        for y in y_ticks:
            x_start, height = self.place(self.x_range[0], y).split(",")
            x_end = self.place(self.x_range[1], y).split(",")[0]
            parts.append(f'<line x1="{x_start}" x2="{x_end}" y1="{height}" y2="{height}" stroke="#d0d7de"/>')
            parts.append(
                f'<text x="{float(x_start) - 5:.1f}" y="{float(height) + 4:.1f}" text-anchor="end">{show(y)}</text>'
            )
        for x in x_ticks:
            across, height = self.place(x, self.y_range[0]).split(",")
            parts.append(f'<text x="{across}" y="{float(height) + 15:.1f}" text-anchor="middle">{x:g}</text>')
        return parts

    def draw_line(self, points: Points, colour: str) -> str:
        """Return a line through ``points``."""
        places = " ".join(self.place(*point) for point in points)
        return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.6"/>'

    def draw_band(self, lower: Points, upper: Points, colour: str) -> str:
        """Return the area between two lines."""
        places = " ".join(self.place(*point) for point in [*upper, *reversed(lower)])
        return f'<polygon points="{places}" fill="{colour}" fill-opacity="0.18"/>'

    def draw_legend(self, names: Sequence[str], *, is_low: bool = False) -> list[str]:
        """Return the names in their colours, at the right edge."""
        first = PANEL_HEIGHT - BOTTOM - 14 * len(names) if is_low else TOP + 14
        edge = self.left + PANEL_WIDTH - RIGHT - 4
        return [
            f'<text x="{edge}" y="{first + 14 * row}" text-anchor="end" fill="{COLOURS[name]}">{LABELS[name]}</text>'
            for row, name in enumerate(names)
        ]


def draw_plot(summary: Mapping[str, Any]) -> str:
    """Return the picture."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{3 * PANEL_WIDTH}" height="{PANEL_HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        *_draw_losses(summary),
        *_draw_differences(summary),
        *_draw_received(summary),
        "</svg>",
        "",
    ]
    return "\n".join(parts)


def _draw_losses(summary: Mapping[str, Any]) -> list[str]:
    rounds, losses, widths = summary["rounds"], summary["losses"], summary["losses_half_width"]
    values = [
        loss + sign * finite(width)
        for name, row in losses.items()
        for loss, width in zip(row, widths[name], strict=True)
        for sign in (-1, 1)
    ]
    panel = Panel(0, "Held-out loss, nats", "rounds", (0, rounds[-1]), widen(min(values), max(values)))
    parts = panel.draw_frame(ticks(0, rounds[-1]), ticks(*panel.y_range), "{:g}".format)
    for name, row in losses.items():
        half = [finite(width) for width in widths[name]]
        lower = [(x, y - h) for x, y, h in zip(rounds, row, half, strict=True)]
        upper = [(x, y + h) for x, y, h in zip(rounds, row, half, strict=True)]
        parts.append(panel.draw_band(lower, upper, COLOURS[name]))
        parts.append(panel.draw_line(list(zip(rounds, row, strict=True)), COLOURS[name]))
    return parts + panel.draw_legend(list(losses))


def _draw_differences(summary: Mapping[str, Any]) -> list[str]:
    rounds, base = summary["rounds"], summary["losses"]["diloco"]
    means = [100 * mean / loss for (mean, _), loss in zip(summary["differences"], base, strict=True)]
    half = [100 * finite(width) / loss for (_, width), loss in zip(summary["differences"], base, strict=True)]
    lower = [(x, y - h) for x, y, h in zip(rounds, means, half, strict=True)]
    upper = [(x, y + h) for x, y, h in zip(rounds, means, half, strict=True)]
    ends = widen(min(-0.5, *(y for _, y in lower)), max(0.5, *(y for _, y in upper)))
    title = "PULSELoCo minus DiLoCo, % of the loss, 95 %"
    panel = Panel(PANEL_WIDTH, title, "rounds", (0, rounds[-1]), ends)
    parts = panel.draw_frame(ticks(0, rounds[-1]), ticks(*ends), "{:g}".format)
    parts.append(panel.draw_line([(0, 0), (rounds[-1], 0)], "#1f2328"))
    parts.append(panel.draw_band(lower, upper, COLOURS["pulseloco"]))
    parts.append(panel.draw_line(list(zip(rounds, means, strict=True)), COLOURS["pulseloco"]))
    return parts


def _draw_received(summary: Mapping[str, Any]) -> list[str]:
    rows = summary["received"]
    names = ("ddp", "diloco", "pulseloco")
    values = [row[name] / 1e6 for row in rows for name in names]
    counts = [row["trainers"] for row in rows]
    ends = (10.0 ** np.floor(np.log10(min(values))), 10.0 ** np.ceil(np.log10(max(values))))
    panel = Panel(2 * PANEL_WIDTH, "Received a trainer and round, MB", "trainers", (counts[0], counts[-1]), ends, True)
    powers = range(round(np.log10(ends[0])), round(np.log10(ends[1])) + 1)
    parts = panel.draw_frame(counts, [10.0**power for power in powers], "{:g}".format)
    for name in names:
        parts.append(panel.draw_line([(row["trainers"], row[name] / 1e6) for row in rows], COLOURS[name]))
    return parts + panel.draw_legend(names, is_low=True)


def finite(width: float) -> float:
    """Return no width where one seed gives no interval."""
    return width if np.isfinite(width) else 0.0


def widen(low: float, high: float) -> tuple[float, float]:
    margin = 0.05 * (high - low) or 1.0
    return low - margin, high + margin


def ticks(low: float, high: float) -> list[float]:
    """Return some round numbers from ``low`` to ``high``."""
    step = 10.0 ** np.floor(np.log10(high - low))
    step *= next(part for part in (0.1, 0.2, 0.5, 1.0) if (high - low) / (part * step) <= 6 or part == 1.0)
    first = int(np.ceil(low / step - 1e-9))
    return [round(index * step, 10) for index in range(first, int(np.floor(high / step + 1e-9)) + 1)]
