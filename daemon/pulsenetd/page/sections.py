"""The parts of the page, each made of what ``/status`` says."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final
from xml.etree.ElementTree import Element

from pulsenetd.page.charts import Chart, Line, draw_chart
from pulsenetd.page.markup import tag
from pulsenetd.status.log_tail import FILTER_SIZE_MAX
from pulsenetd.words import say_count, say_rate, say_seconds, say_size, say_version

Status = Mapping[str, Any]

_CODE: Final = re.compile(r"(?<=\s)(?:'(?=[^']+'))?((?<=')[^']+(?=')|--[a-z-]+)'?")

MARKS: Final = {"ok": "✓", "note": "…", "warning": "!", "error": "✕"}
LEVEL_WORDS: Final = {"ok": "OK", "note": "Note", "warning": "Warning", "error": "Error"}

_LEVELS: Final = (
    ("debug", "everything"),
    ("info", "info and above"),
    ("warning", "warnings and errors"),
    ("error", "errors only"),
)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _last(values: Sequence[float]) -> float:
    return values[-1]


def _say_number(value: float) -> str:
    return f"{value:.0f}"


def _say_share(value: float) -> str:
    return f"{100 * value:.0f} %"


CHARTS: Final = (
    Chart(
        "bandwidth",
        "Bandwidth",
        (Line("received_bytes_per_second", "received"), Line("sent_bytes_per_second", "sent")),
        say=say_rate,
        summary=_mean,
        top_min=10_000.0,
        empty="Two looks are needed; the first were not taken yet.",
    ),
    Chart(
        "lag",
        "Lag",
        (Line("version_lag", "versions behind"),),
        say=_say_number,
        summary=max,
        top_min=2.0,
        is_stepped=True,
        empty="Nobody was heard, so nobody knows the lag.",
    ),
    Chart(
        "versions",
        "Versions",
        (Line("applied_version", "in use"), Line("latest_seen_version", "newest heard of")),
        say=_say_number,
        summary=_last,
        top_min=4.0,
        from_zero=False,
        is_stepped=True,
        empty="No version was heard of yet.",
    ),
    Chart(
        "utilisation",
        "Utilisation",
        (Line("utilization_ratio", "measured"), Line("utilization_predicted_ratio", "predicted")),
        say=_say_share,
        summary=_mean,
        top_min=1.0,
        top_max=1.0,
        empty="Only trainers of a run with rounds have it, after two rounds.",
    ),
)

DISAGREEMENT: Final = Chart(
    "disagreement",
    "Disagreement of trainers",
    (Line("disagreement", "Jensen-Shannon distance"),),
    say=lambda value: f"{value:.3f}",
    summary=_last,
    top_min=0.01,
    top_max=1.0,
)
"""Drawn in runs with gossip only."""


def version_words(status: Status) -> str:
    """Return the version in use."""
    return say_version(status) or "none"


def draw_conditions(status: Status) -> list[Element]:
    """Return the node's state in words: the worst first, large."""
    first, *others = status["conditions"]
    return [
        tag("p", _mark(first), tag("strong", first["title"]), class_=f"headline {first['level']}"),
        *_explain(first),
        *([tag("ul", [_condition(one) for one in others], class_="conditions")] if others else []),
    ]


def say_warnings(status: Status) -> str:
    """Return what is read aloud when it changes: what is wrong, and nothing that comes and goes with every version."""
    titles = [one["title"] for one in status["conditions"] if one["level"] in ("error", "warning")]
    return "; ".join(titles) or "No warnings"


def draw_figures(status: Status) -> list[Element]:
    """Return the figures people look for first."""
    lag, age = status.get("version_lag"), status.get("version_age_seconds")
    newest = say_version(status, "latest_seen")
    free = status.get("disk_free_bytes")
    figures = [
        (
            "Version in use",
            version_words(status),
            f"newest heard of {newest}" if newest else "",
        ),
        (
            "Lag",
            "unknown" if lag is None else f"{lag}",
            "nobody says what is newest" if lag is None else "versions behind",
        ),
        ("Confirmed", "unknown" if age is None else f"{say_seconds(age)} ago", "as the newest, by its publisher"),
        (
            "Peers",
            str(status.get("peers") or 0),
            f"connected, {say_count(status.get('peers_neighbour') or 0, 'neighbour')}",
        ),
        ("Receiving", say_rate(status.get("received_bytes_per_second")) or "unknown", _total(status, "received")),
        ("Sending", say_rate(status.get("sent_bytes_per_second")) or "unknown", _total(status, "sent")),
        (
            "Stored",
            say_size(status.get("store_bytes") or 0),
            "" if free is None else f"{say_size(free)} of the disk free",
        ),
        (
            "Up",
            say_seconds(status.get("uptime_seconds") or 0.0),
            f"{status.get('p2pd_restarts') or 0} restarts of p2pd",
        ),
    ]
    if status.get("role") == "trainer":
        density = status.get("patch_density_ratio")
        size = status.get("patch_size_bytes")
        figures[2] = (
            "Last patch",
            "none" if size is None else say_size(size),
            "" if density is None else f"{100 * density:.2f} % of the weights changed",
        )
    return [tag("div", tag("dt", name), tag("dd", tag("b", value), tag("span", note))) for name, value, note in figures]


def draw_transfers(status: Status) -> list[Element]:
    """Return what is being fetched, with how much is left."""
    transfers = status["transfers"]
    if not transfers:
        return [tag("p", "Nothing is being fetched.", class_="empty")]
    rows = []
    for one in transfers:
        share = one["held_bytes"] / one["wanted_bytes"]
        left = "stands still" if one["eta_seconds"] is None else f"{say_seconds(one['eta_seconds'])} left"
        sources = (
            "" if not one["source_count"] else f", from {one['source_count']} peer{'s' * (one['source_count'] > 1)}"
        )
        reason = f" ({one['reason']})" if one["reason"] else ""
        name = one["name"][:1].upper() + one["name"][1:]
        bar = tag("progress", max=100, value=f"{100 * share:.1f}", aria_label=name)
        amount = f"{say_size(one['held_bytes'])} of {say_size(one['wanted_bytes'])}{sources}"
        rows.append(
            tag(
                "li",
                tag("b", name),
                tag("span", f"{100 * share:.0f} %, {left}{reason}", class_="eta"),
                bar,
                tag("span", amount, class_="quiet"),
            )
        )
    return [tag("ul", rows, class_="transfers")]


def draw_rounds(status: Status) -> list[Element]:
    """Return where the node is in the rounds, of receipts or of mixing."""
    facts: list[tuple[str, str]] = []
    if status.get("mixing_phase") is not None:
        facts = [
            ("Round", f"{status.get('mixing_round')}, {status['mixing_phase']}"),
            ("Members", str(status.get("mixing_members") or 0)),
            ("Behind", f"{status.get('mixing_rounds_behind') or 0} rounds"),
            ("Means owed", str(status.get("mixing_debts_owed") or 0)),
            ("Other roots", str(status.get("mixing_other_roots") or 0)),
            *_disagreement(status),
        ]
    elif status.get("rounds_phase") is not None:
        reason = f" ({status['rounds_reason']})" if status.get("rounds_reason") else ""
        facts = [
            ("Round", f"{status.get('round_index')}, {status['rounds_phase']}{reason}"),
            ("Contributors", f"{status.get('round_contributors') or 0} in the last"),
            ("Behind", f"{status.get('rounds_behind') or 0} rounds"),
        ]
    if not facts:
        return [tag("p", "This run has no rounds, or none that this node takes part in.", class_="empty")]
    return [tag("dl", [tag("div", tag("dt", name), tag("dd", value)) for name, value in facts], class_="facts")]


def draw_round_rows(status: Status) -> list[Element]:
    """Return a row for each of the last rounds."""
    now_ms = status["now_ms"]
    return [
        tag(
            "tr",
            tag("th", str(one["round"]), scope="row"),
            tag("td", str(one.get("contributors") or 0), class_="number"),
            tag("td", _round_outcome(one)),
            tag("td", "" if one["seconds"] is None else say_seconds(one["seconds"]), class_="number"),
            tag("td", f"{say_seconds((now_ms - one['time_ms']) / 1000)} ago", class_="number"),
        )
        for one in status["rounds_recent"]
    ] or [tag("tr", tag("td", "none was seen since the start", colspan=5))]


def draw_charts(status: Status) -> list[Element]:
    """Return the charts of the last hours."""
    history = status["history"]
    has_mixing = status.get("mixing_phase") is not None or any(
        value is not None for value in history["series"]["disagreement"]
    )
    return [draw_chart(chart, history) for chart in (*CHARTS, *([DISAGREEMENT] if has_mixing else []))]


def draw_log_lines(status: Status) -> list[Element]:
    """Return the log lines that pass the filter, newest first."""
    log = status["log"]
    if log is None:
        return [
            tag(
                "li",
                "The log is shown to programs of this machine only: open the page on it, or through 'ssh -L'.",
                class_="empty",
            )
        ]
    return [
        tag(
            "li",
            tag("time", time.strftime("%H:%M:%S", time.localtime(line["time_ms"] / 1000))),
            tag("span", line["level"], class_="level"),
            tag("span", line["text"], class_="text"),
            class_=line["level"],
        )
        for line in log["lines"]
    ] or [tag("li", "No line passes the filter." if log["kept_count"] else "No line yet.", class_="empty")]


def say_log_count(status: Status) -> str:
    """Return how many lines the filter leaves."""
    log = status["log"]
    if log is None:
        return ""
    shown = len(log["lines"])
    return f"{shown} of {log['found_count']} shown, {log['kept_count']} kept; newest first"


def draw_filter(status: Status) -> Element:
    """Return the form that filters the log."""
    log = status["log"] or {"level": "debug", "text": ""}
    options = [tag("option", words, value=name, selected=name == log["level"]) for name, words in _LEVELS]
    return tag(
        "form",
        tag("label", "Level ", tag("select", options, name="level")),
        tag("label", "Text ", tag("input", type="search", name="text", value=log["text"], maxlength=FILTER_SIZE_MAX)),
        tag("button", "Filter", type="submit"),
        method="get",
        action="/#log",
        role="search",
        aria_label="Filter the log",
    )


def _condition(one: Mapping[str, str]) -> Element:
    return tag(
        "li",
        tag("p", _mark(one), tag("strong", one["title"]), class_=one["level"]),
        _explain(one),
    )


def _explain(one: Mapping[str, str]) -> list[Element]:
    label = tag("span", "Next step", class_="label")
    return [
        tag("p", _mark_code(one["cause"]), class_="cause"),
        tag("p", label, " ", _mark_code(one["next_step"]), class_="next"),
    ]


def _mark_code(text: str) -> list[Element | str]:
    """Return a sentence with its quoted commands and its options as code."""
    parts = _CODE.split(text)
    return [tag("code", part) if index % 2 else part for index, part in enumerate(parts)]


def _mark(one: Mapping[str, str]) -> Element:
    mark = tag("span", MARKS[one["level"]], class_="mark")
    mark.set("aria-hidden", "true")
    return tag("span", mark, tag("span", LEVEL_WORDS[one["level"]], class_="word"), class_="badge")


def _total(status: Status, direction: str) -> str:
    total = sum(size for name, size in (status.get("bytes") or {}).items() if name.startswith(direction))
    return f"{say_size(total)} since the start"


def _disagreement(status: Status) -> list[tuple[str, str]]:
    """Return how far apart trainers that mix are: what they predict, and their weights."""
    facts = []
    if status.get("disagreement") is not None:
        facts.append(("Disagreement", f"{status['disagreement']:.3f}"))
    if status.get("disagreement_l2_end") is not None:
        bound = status.get("disagreement_l2_bound")
        limit = "" if bound is None else f", bound {bound:.3g}"
        facts.append(("Weights apart", f"{status['disagreement_l2_end']:.3g}{limit}"))
    return facts


def _round_outcome(one: Mapping[str, Any]) -> str:
    if one["kind"] != "mixing":
        return "final"
    return f"mix 1 {one.get('mix1') or 'none'}, mix 2 {one.get('mix2') or 'none'}"
