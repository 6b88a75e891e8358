"""Draws plans: utilisation over the speed of the link, one line for each algorithm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pulsenet.errors import StorageError, UsageError
from pulsenet.outer.plan import TARGET_UTILIZATION, WITH_ROUNDS, Plan, Variant, Workload, predict_utilization
from pulsenet.outer.plan_link import Link
from pulsenetd.planning.canvas import Canvas, PngCanvas, SvgCanvas
from pulsenetd.planning.report import describe_link, describe_workload

WIDTH: Final = 960
HEIGHT: Final = 510
LEFT: Final = 70
RIGHT: Final = 640
TOP: Final = 80
BOTTOM: Final = 440

POINTS: Final = 241
DECADES_MAX: Final = 6

GREY: Final = "#8c959f"
PALE: Final = "#d8dee4"
COLOURS: Final = {
    Variant.DDP: "#57606a",
    Variant.DILOCO: "#0969da",
    Variant.PULSELOCO: "#cf222e",
    Variant.GLOBAL_M1: "#1a7f37",
    Variant.GLOBAL_M1_LOCAL_M2: "#9a6700",
    Variant.GLOBAL_M1_LOCAL_M2_SUBSET: "#8250df",
    Variant.LOCAL_M1_M2: "#bf3989",
}

_CANVASES: Final[dict[str, type[SvgCanvas] | type[PngCanvas]]] = {".svg": SvgCanvas, ".png": PngCanvas}


def check_plot_path(path: Path) -> None:
    """Refuse a picture that could not be written.

    Raises:
        UsageError: Neither PNG nor SVG, or in no directory.
    """
    if path.suffix.lower() not in _CANVASES:
        raise UsageError(f"--plot: {path} must end in .png or .svg")
    if not path.parent.is_dir():
        raise UsageError(f"--plot: {path.parent} is no directory: make it first")


def write_plot(plans: Sequence[Plan], workload: Workload, link: Link, path: Path) -> None:
    """Write the picture in the format its name ends in.

    Raises:
        StorageError: It cannot be written.
    """
    canvas = _CANVASES[path.suffix.lower()](WIDTH, HEIGHT)
    draw_plot(canvas, plans, workload, link)
    try:
        path.write_bytes(canvas.to_bytes())
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error


def draw_plot(canvas: Canvas, plans: Sequence[Plan], workload: Workload, link: Link) -> None:
    """Draw axes, lines and what they mean."""
    first, last = _decades(plans, link)

    def x_of(mbps: float) -> float:
        return LEFT + (RIGHT - LEFT) * (math.log10(mbps) - first) / (last - first)

    def y_of(utilization: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * utilization

    canvas.text(8, 22, "Time in inner steps by speed of the link")
    canvas.text(8, 42, describe_workload(workload), GREY)
    canvas.text(8, 60, describe_link(link), GREY)
    for percent in range(0, 101, 20):
        y = y_of(percent / 100)
        canvas.line([(LEFT, y), (RIGHT, y)], PALE)
        canvas.text(LEFT - 52, y + 5, f"{percent} %")
    for decade in range(first, last + 1):
        x = x_of(10.0**decade)
        canvas.line([(x, TOP), (x, BOTTOM)], PALE)
        canvas.text(x - 12, BOTTOM + 20, f"{10.0**decade:g}")
    canvas.text(LEFT, BOTTOM + 42, "Mbit/s down, up in proportion")
    y = y_of(TARGET_UTILIZATION)
    canvas.line([(LEFT, y), (RIGHT, y)], GREY, dashed=True)
    canvas.line([(x_of(link.down_mbps), TOP), (x_of(link.down_mbps), BOTTOM)], GREY, dashed=True)
    for plan in plans:
        speeds = [10 ** (first + (last - first) * index / (POINTS - 1)) for index in range(POINTS)]
        canvas.line(
            [(x_of(mbps), y_of(predict_utilization(plan.variant, workload, link.with_down(mbps)))) for mbps in speeds],
            COLOURS[plan.variant],
            dashed=plan.variant not in WITH_ROUNDS,
            width=2,
        )
    ordered = sorted(plans, key=lambda plan: -plan.utilization)
    for row, plan in enumerate(ordered):
        canvas.text(
            RIGHT + 14, TOP + 14 + 24 * row, f"{100 * plan.utilization:5.1f} % {plan.variant}", COLOURS[plan.variant]
        )
    canvas.text(RIGHT + 14, TOP + 24 + 24 * len(ordered), "on this link (grey)", GREY)
    canvas.text(RIGHT + 14, TOP + 46 + 24 * len(ordered), "dashed: variants of gossip", GREY)


def _decades(plans: Sequence[Plan], link: Link) -> tuple[int, int]:
    """Return the powers of ten between which all that matters lies: the link, and where 90 % are reached."""
    here = math.log10(link.down_mbps)
    wanted = [math.log10(plan.mbps_for_target) for plan in plans if plan.mbps_for_target]
    first = math.floor(max(min([here, *wanted]), here - DECADES_MAX / 2) - 0.5)
    return first, math.ceil(min(max([here, *wanted]), here + DECADES_MAX / 2) + 0.5)
