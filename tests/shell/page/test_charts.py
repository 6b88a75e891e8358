"""Charts: one point a place, gaps where nothing is known, the same as a table."""

from __future__ import annotations

from typing import Any
from xml.etree.ElementTree import Element

import pytest

from pulsenetd.page.charts import POINTS_MAX, TABLE_ROWS_MAX, Chart, Line, draw_chart

CHART = Chart(
    "lag", "Lag", (Line("lag", "behind"), Line("other", "other")), say="{:.0f}".format, summary=max, top_min=2.0
)


def history(
    lag: list[float | None], *, other: list[float | None] | None = None, step_ms: int = 5_000
) -> dict[str, Any]:
    return {
        "sample_seconds": 5.0,
        "times_ms": [step_ms * number for number in range(len(lag))],
        "series": {"lag": lag, "other": other or [None] * len(lag)},
    }


def paths(figure: Element, kind: str) -> list[str]:
    return [str(path.get("d")) for path in figure.iter("path") if path.get("class") == kind]


def texts(figure: Element, name: str) -> list[str]:
    return ["".join(element.itertext()).strip() for element in figure.iter(name)]


def test_a_chart_without_samples_says_so() -> None:
    for lag in ([], [None, None]):
        figure = draw_chart(CHART, history(list(lag)))
        assert not paths(figure, "line line-0")
        assert CHART.empty in texts(figure, "p")
        assert texts(figure, "b") == ["unknown", "unknown"]


def test_values_stand_where_they_belong() -> None:
    figure = draw_chart(CHART, history([0.0, 2.0, 1.0]))
    assert paths(figure, "line line-0") == ["M0,100.0 L500,0.0 L1000,50.0"]
    assert paths(figure, "area") == ["M0,100.0 L500,0.0 L1000,50.0 L1000,100 L0,100 Z"]
    (label,) = [svg.get("aria-label") for svg in figure.iter("svg") if svg.get("role") == "img"]
    assert label == "Lag over 10 s: behind 1, between 0 and 2"
    assert texts(figure, "b") == ["1", "unknown"]


def test_no_line_is_drawn_where_nothing_is_known_or_the_node_slept() -> None:
    figure = draw_chart(CHART, history([1.0, None, 1.0, 2.0]))
    assert paths(figure, "line line-0")[0].count("M") == 2
    slept = history([1.0, 1.0, 1.0, 1.0])
    slept["times_ms"] = [0, 5_000, 600_000, 605_000]
    assert paths(draw_chart(CHART, slept), "line line-0")[0].count("M") == 2


def test_a_clock_that_was_set_back_draws_nothing_beyond_the_sides() -> None:
    stepped = history([1.0, 1.0, 1.0, 1.0])
    stepped["times_ms"] = [0, 5_000, -90_000, 6_000]
    (line,) = paths(draw_chart(CHART, stepped), "line line-0")
    assert line == "M0,50.0 L833,50.0 L0,50.0 M1000,50.0 H1000"


def test_many_samples_become_few_points_and_fewer_rows_without_losing_the_worst() -> None:
    lag: list[float | None] = [0.0] * 2_160
    lag[1_003] = 5.0
    figure = draw_chart(CHART, history(lag))
    (line,) = paths(figure, "line line-0")
    assert line.count("L") < POINTS_MAX
    assert ",0.0" in line  # the one sample of 5 is at the top
    assert len(list(figure.iter("tr"))) <= TABLE_ROWS_MAX + 1


@pytest.mark.parametrize(("top", "label"), [(0.0, "2"), (3.0, "5"), (70.0, "100"), (101.0, "200")])
def test_the_scale_ends_at_a_round_number(top: float, label: str) -> None:
    figure = draw_chart(CHART, history([0.0, top]))
    assert [span.text for span in figure.iter("span") if span.get("class") == "top"] == [label]


def test_a_scale_that_does_not_begin_at_zero_holds_all_values() -> None:
    chart = Chart("v", "V", (Line("lag", "v"),), say="{:.0f}".format, summary=max, top_min=4.0, from_zero=False)
    for values in ([417.0, 417.0], [1.0, 1.0], [10.0, 400.0]):
        figure = draw_chart(chart, history(list(values)))
        top, bottom = (
            float(next(str(span.text) for span in figure.iter("span") if span.get("class") == name))
            for name in ("top", "bottom")
        )
        assert 0 <= bottom <= min(values) <= max(values) <= top
        assert top - bottom >= 4.0
