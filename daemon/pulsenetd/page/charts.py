"""The last hours as lines: SVG that stretches, labels that do not, and the same as a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final
from xml.etree.ElementTree import Element

from pulsenetd.page.markup import tag
from pulsenetd.words import say_seconds

POINTS_MAX: Final = 240
TABLE_ROWS_MAX: Final = 12
WIDTH, HEIGHT = 1_000, 100
GAP_SAMPLES: Final = 4
"""Where so many samples are missing, the node or its machine slept: no line is drawn."""

Values = Sequence[float | None]
Summary = Callable[[Sequence[float]], float]
"""Makes one value of those that share a place."""


@dataclass(frozen=True, slots=True)
class Line:
    """One series of a chart."""

    field: str
    label: str


@dataclass(frozen=True, slots=True)
class Chart:
    """What is drawn, and how its values are said."""

    name: str
    title: str
    lines: tuple[Line, ...]
    say: Callable[[float], str]
    summary: Summary
    top_min: float
    """The scale reaches so far at least."""
    top_max: float = math.inf
    from_zero: bool = True
    is_stepped: bool = False
    empty: str = "Nothing is known yet."


def draw_chart(chart: Chart, history: Mapping[str, Any]) -> Element:
    """Return a figure with legend, plot and table.

    Args:
        chart: What to draw.
        history: ``history`` of ``/status``.
    """
    times, columns = _thin(chart, history)
    known = [value for column in columns for value in column if value is not None]
    series = [history["series"][line.field] for line in chart.lines]
    legend = tag("ul", [_legend(chart, index, values) for index, values in enumerate(series)], class_="legend")
    heading = tag("h3", chart.title, id=f"chart-{chart.name}")
    span = say_seconds((times[-1] - times[0]) / 1000) if times else ""
    if known:
        low, high = _scale(chart, known)
        plot = [
            _plot(chart, times, columns, low, high, float(history["sample_seconds"])),
            tag("span", chart.say(high), class_="top"),
            tag("span", chart.say(low), class_="bottom"),
            tag("span", f"{span} ago", class_="start"),
            tag("span", "now", class_="end"),
        ]
    else:
        plot = [tag("p", chart.empty, class_="empty")]
    return tag(
        "figure",
        tag("figcaption", heading, tag("div", legend, data_live=True, id=f"legend-{chart.name}")),
        tag("div", plot, class_="plot", data_live=True, id=f"plot-{chart.name}"),
        _table(chart, times, columns),
        class_="chart",
        aria_labelledby=f"chart-{chart.name}",
    )


def _thin(chart: Chart, history: Mapping[str, Any]) -> tuple[list[int], list[list[float | None]]]:
    """Return at most :data:`POINTS_MAX` times and values; several samples become one."""
    times: list[int] = list(history["times_ms"])
    stride = max(1, math.ceil(len(times) / POINTS_MAX))
    starts = range(0, len(times), stride)
    columns = []
    for line in chart.lines:
        values: Values = history["series"][line.field]
        groups = ([value for value in values[start : start + stride] if value is not None] for start in starts)
        columns.append([chart.summary(group) if group else None for group in groups])
    return [times[min(start + stride, len(times)) - 1] for start in starts], columns


def _scale(chart: Chart, known: Sequence[float]) -> tuple[float, float]:
    low, high = (0.0 if chart.from_zero else min(known)), max(known)
    if not chart.from_zero and high - low < chart.top_min:
        low = max(0.0, (low + high - chart.top_min) / 2)
        high = low + chart.top_min
    if chart.from_zero:
        high = min(max(_round_up(high), chart.top_min), chart.top_max)
    return low, max(high, low + 1e-9)


def _round_up(value: float) -> float:
    """Return the next of 1, 2, 5, 10, 20, ..."""
    if value <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if value <= step * power * (1 + 1e-9))


def _legend(chart: Chart, index: int, values: Values) -> Element:
    key = tag("svg", tag("line", x1=0, y1=5, x2=22, y2=5, class_=f"line line-{index}"), width=22, height=10)
    key.set("aria-hidden", "true")
    return tag("li", key, f" {chart.lines[index].label} ", tag("b", _say(chart, values[-1] if values else None)))


def _plot(
    chart: Chart, times: Sequence[int], columns: Sequence[Values], low: float, high: float, sample_seconds: float
) -> Element:
    first, width_ms = times[0], max(times[-1] - times[0], 1)
    steps_ms = [later - earlier for earlier, later in pairwise(times)]
    usual_ms = max(sorted(steps_ms)[len(steps_ms) // 2] if steps_ms else 0, sample_seconds * 1000)
    # Between the sides whatever the clock did meanwhile.
    xs = [WIDTH * min(max((time - first) / width_ms, 0.0), 1.0) if len(times) > 1 else WIDTH for time in times]
    gaps = {index + 1 for index, step in enumerate(steps_ms) if step > GAP_SAMPLES * usual_ms}
    paths = []
    for index, column in enumerate(columns):
        runs = _runs(xs, [_place(value, low, high) for value in column], gaps)
        if index == 0 and chart.from_zero:
            area = " ".join(
                f"{_path(run, chart.is_stepped)} L{run[-1][0]:.0f},{HEIGHT} L{run[0][0]:.0f},{HEIGHT} Z" for run in runs
            )
            paths.append(tag("path", d=area, class_="area"))
        paths.append(tag("path", d=" ".join(_path(run, chart.is_stepped) for run in runs), class_=f"line line-{index}"))
    grid = [tag("line", x1=0, x2=WIDTH, y1=y, y2=y, class_="grid") for y in (0, HEIGHT / 2, HEIGHT)]
    svg = tag("svg", grid, paths, viewBox=f"0 0 {WIDTH} {HEIGHT}", preserveAspectRatio="none", role="img")
    svg.set("aria-label", _describe(chart, times, columns))
    return svg


def _describe(chart: Chart, times: Sequence[int], columns: Sequence[Values]) -> str:
    parts = []
    for line, column in zip(chart.lines, columns, strict=True):
        known = [value for value in column if value is not None]
        if known:
            parts.append(
                f"{line.label} {chart.say(known[-1])}, between {chart.say(min(known))} and {chart.say(max(known))}"
            )
    return f"{chart.title} over {say_seconds((times[-1] - times[0]) / 1000)}: {'; '.join(parts)}"


def _place(value: float | None, low: float, high: float) -> float | None:
    return None if value is None else HEIGHT * (1 - (min(max(value, low), high) - low) / (high - low))


def _runs(xs: Sequence[float], ys: Values, gaps: set[int]) -> list[list[tuple[float, float]]]:
    """Return the points in stretches without a gap."""
    runs: list[list[tuple[float, float]]] = []
    is_open = False
    for index, (x, y) in enumerate(zip(xs, ys, strict=True)):
        if y is None:
            is_open = False
            continue
        if not is_open or index in gaps:
            runs.append([])
        runs[-1].append((x, y))
        is_open = True
    return runs


def _path(run: Sequence[tuple[float, float]], is_stepped: bool) -> str:
    (x, y), *others = run
    words = [f"M{x:.0f},{y:.1f}"]
    # A lone point is a line of no length: its round cap is seen.
    words += [f"H{x:.0f}"] if not others else []
    words += [f"H{x:.0f} V{y:.1f}" if is_stepped else f"L{x:.0f},{y:.1f}" for x, y in others]
    return " ".join(words)


def _table(chart: Chart, times: Sequence[int], columns: Sequence[Values]) -> Element:
    stride = max(1, math.ceil(len(times) / TABLE_ROWS_MAX))
    rows = [
        tag(
            "tr",
            tag(
                "th",
                "now" if index == len(times) - 1 else f"{say_seconds((times[-1] - times[index]) / 1000)} ago",
                scope="row",
            ),
            [tag("td", _say(chart, column[index])) for column in columns],
        )
        for index in range(len(times) - 1, -1, -stride)
    ]
    head = tag("tr", tag("th", "when", scope="col"), [tag("th", line.label, scope="col") for line in chart.lines])
    body = tag("tbody", rows, data_live=True, id=f"rows-{chart.name}")
    return tag("details", tag("summary", f"{chart.title} as a table"), tag("table", tag("thead", head), body))


def _say(chart: Chart, value: float | None) -> str:
    return "unknown" if value is None else chart.say(value)
