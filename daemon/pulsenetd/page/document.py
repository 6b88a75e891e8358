"""The whole page: the skeleton from a file, its parts from the node's status."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from string import Template
from typing import Any, Final
from xml.etree.ElementTree import Element

from pulsenetd.page import sections
from pulsenetd.page.markup import render, tag
from pulsenetd.page.peer_map import draw_map, draw_table_rows, short_name

ASSETS: Final = {
    "/status.css": ("status.css", "text/css; charset=utf-8"),
    "/status.js": ("status.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""Path of each file beside the page: its name in the package, and its type."""


@cache
def read_asset(name: str) -> bytes:
    """Return a file of the page."""
    return files("pulsenetd.page").joinpath("assets", name).read_bytes()


def draw_page(status: Mapping[str, Any]) -> bytes:
    """Return the page as HTML.

    Args:
        status: What ``/status`` answers when asked for ``history`` and ``log``.
    """
    worst = status["conditions"][0]
    text = {
        "title": f"{worst['title']} · {sections.version_words(status)} · {status['run']} {status['role']}",
        "run": str(status["run"]),
        "role": str(status["role"]),
        "peer": short_name(str(status["peer_id"])),
        "peer_id": str(status["peer_id"]),
        "software": str(status["software"]),
        # Where there are rounds, they are worth their room.
        "rounds_open": " open" if status["rounds_recent"] else "",
        "spoken": sections.say_warnings(status),
        "log_count": sections.say_log_count(status),
    }
    parts = {
        "conditions": sections.draw_conditions(status),
        "figures": sections.draw_figures(status),
        "transfers": sections.draw_transfers(status),
        "charts": sections.draw_charts(status),
        "map": draw_map(status["peer_list"]),
        "peer_rows": draw_table_rows(status["peer_list"]),
        "rounds": sections.draw_rounds(status),
        "round_rows": sections.draw_round_rows(status),
        "filter": [sections.draw_filter(status)],
        "log_lines": sections.draw_log_lines(status),
    }
    words = {name: _escape(value) for name, value in text.items()}
    return _skeleton().substitute(words, **{name: render(elements) for name, elements in parts.items()}).encode()


@cache
def _skeleton() -> Template:
    return Template(read_asset("page.html").decode())


def _escape(text: str) -> str:
    """Return text as it stands in HTML, in an attribute too."""
    element: Element = tag("i", text)
    return render([element])[3:-4].replace('"', "&quot;")
