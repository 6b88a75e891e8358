"""The picture of plans."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from pulsenet.errors import StorageError, UsageError
from pulsenet.outer.plan import Variant, Workload, make_plans
from pulsenet.outer.plan_link import Link
from pulsenetd.planning.picture import (
    BOTTOM,
    COLOURS,
    LEFT,
    RIGHT,
    TOP,
    check_plot_path,
    draw_plot,
    write_plot,
)

WORKLOAD = Workload(1.5e9, 8, 2.36, inner_steps=100, bytes_per_param=2.0)


class Sheet:
    """Remembers what was drawn."""

    def __init__(self) -> None:
        self.lines: list[tuple[list[tuple[float, float]], str, bool]] = []
        self.texts: list[str] = []

    def line(self, points: Sequence[tuple[float, float]], colour: str, *, dashed: bool = False, width: int = 1) -> None:
        self.lines.append((list(points), colour, dashed))

    def text(self, x: float, y: float, text: str, colour: str = "#000000") -> None:
        self.texts.append(text)

    def to_bytes(self) -> bytes:
        return b""


@pytest.mark.parametrize("link", [Link(100, 100), Link(0.001, 0.001), Link(1e9, 1e3), Link(100, 10, 0.1, 0.1)])
@pytest.mark.parametrize("peer_count", [1, 8])
def test_each_algorithm_has_a_rising_line_inside_the_axes(link: Link, peer_count: int) -> None:
    workload = Workload(1.5e9, peer_count, 2.36)
    sheet = Sheet()
    draw_plot(sheet, make_plans(workload, link), workload, link)
    for variant in Variant:
        ((points, _, dashed),) = [each for each in sheet.lines if each[1] == COLOURS[variant]]
        assert dashed == (variant not in ("ddp", "diloco", "pulseloco"))
        heights = [-y for _, y in points]
        assert heights == sorted(heights)
        assert all(LEFT - 1 <= x <= RIGHT + 1 and TOP - 1 <= y <= BOTTOM + 1 for x, y in points)
        assert any(str(variant) in text for text in sheet.texts)


def test_the_format_is_that_of_the_name(tmp_path: Path) -> None:
    link = Link(100, 100)
    plans = make_plans(WORKLOAD, link)
    for name, start in (("a.png", b"\x89PNG"), ("a.SVG", b"<svg")):
        check_plot_path(tmp_path / name)
        write_plot(plans, WORKLOAD, link, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)


def test_a_picture_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"must end in \.png or \.svg"):
        check_plot_path(tmp_path / "a.pdf")
    with pytest.raises(UsageError, match="make it first"):
        check_plot_path(tmp_path / "absent" / "a.png")
    (tmp_path / "a.png").mkdir()
    with pytest.raises(StorageError, match="cannot write"):
        write_plot([], WORKLOAD, Link(100, 100), tmp_path / "a.png")
