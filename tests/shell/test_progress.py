"""Long work says how far it is: a bar on a terminal, a line every few seconds elsewhere, nothing for a program."""

from __future__ import annotations

import io
import logging
import sys
from typing import Any

import pytest
from rich.console import Console

from pulsenetd import logs, progress
from pulsenetd.progress import (
    BarReporter,
    LineReporter,
    Meter,
    Reporter,
    SilentReporter,
    Throttle,
    format_count,
    open_reporter,
)
from pulsenetd.transfer_progress import TransferProgress, describe_fetch
from pulsenetd.words import say_size

MEGABYTE = 1_000_000


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_rate_and_time_left_follow_what_came_of_late() -> None:
    clock = Clock()
    meter = Meter(clock)
    assert meter.per_second is None
    for _ in range(60):
        meter.note(meter.done + MEGABYTE, 200 * MEGABYTE)
        clock.now += 1
    assert meter.describe(say_size) == "30 % of 200 MB, 1.0 MB/s, 2 min 20 s left"
    for _ in range(30):
        meter.note(meter.done + 2 * MEGABYTE, 200 * MEGABYTE)
        clock.now += 1
    assert meter.describe(say_size) == "60 % of 200 MB, 2.0 MB/s, 40 s left"


def test_what_stands_still_is_stalled_and_other_work_starts_anew() -> None:
    clock = Clock()
    meter = Meter(clock)
    for _ in range(40):
        meter.note(10, 100)
        clock.now += 1
    assert meter.describe(format_count("things")) == "10 % of 100 things, 0 things/s, stalled"
    meter.note(0, 50)
    assert meter.describe(format_count("things")) == "0 % of 50 things"
    meter.note(0, 0)
    assert meter.describe(format_count("things")) == "100 % of 0 things"


def test_lines_come_every_few_seconds_and_short_work_says_nothing() -> None:
    clock, said = Clock(), list[str]()
    reporter = LineReporter("hashing", said.append, say_size, clock)
    for done in range(20):
        reporter.update(done * MEGABYTE, 20 * MEGABYTE)
        clock.now += 1
    reporter.update(20 * MEGABYTE, 20 * MEGABYTE)
    reporter.close()
    assert len(said) == 5  # after 2, 7, 12 and 17 s, and the end
    assert said[0] == "hashing: 10 % of 20.0 MB, 1.0 MB/s, 18 s left"
    assert said[-1] == "hashing: 20.0 MB in 20 s"
    short = LineReporter("hashing", said.append, say_size, clock)
    short.update(1, 2)
    short.update(2, 2)
    short.close()
    assert len(said) == 5


def test_work_that_ends_early_says_where() -> None:
    clock, said = Clock(), list[str]()
    reporter = LineReporter("fetching", said.append, say_size, clock)
    clock.now += 30
    reporter.update(0, 2 * MEGABYTE)
    assert said == []  # other work came before it
    clock.now += 3
    reporter.update(MEGABYTE, 2 * MEGABYTE)
    reporter.close()
    assert said[-1] == "fetching: stopped after 1.0 MB in 3 s"


def test_the_end_is_left_to_who_says_what_came_of_it() -> None:
    clock, said = Clock(), list[str]()
    reporter = LineReporter("fetching", said.append, say_size, clock, says_end=False)
    reporter.update(0, 2 * MEGABYTE)
    clock.now += 3
    reporter.update(0, 2 * MEGABYTE)
    reporter.close()
    assert said == ["fetching: 0 % of 2.0 MB"]  # nothing came yet: that is no standstill


def test_a_terminal_gets_a_bar_that_leaves_no_trace() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, color_system=None, legacy_windows=False)
    reporter = BarReporter("hashing [x]", console, say_size)
    reporter.update(MEGABYTE, 2 * MEGABYTE)
    assert "hashing [x]" in stream.getvalue()
    assert "50 % of 2.0 MB" in stream.getvalue()
    reporter.update(2 * MEGABYTE, 2 * MEGABYTE)
    shown = stream.getvalue()
    assert shown.endswith(("\x1b[2K", "\x1b[?25h")) or "\x1b[2K" in shown
    reporter.close()
    assert stream.getvalue() == shown


def test_a_bar_stays_on_one_line_of_a_small_terminal() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, color_system=None, legacy_windows=False)
    reporter = BarReporter("catching up, 1.104570 to 1.104571", console, say_size)
    reporter.update(100 * MEGABYTE, 15_231 * MEGABYTE)
    drawn = stream.getvalue()
    reporter.close()
    assert "1 % of 15.2 GB" in drawn
    assert "\n" not in drawn


def test_drawing_is_bounded_and_the_end_is_always_told() -> None:
    seen: list[int] = []

    class Probe(SilentReporter):
        def update(self, done: int, total: int, label: str | None = None) -> None:
            seen.append(done)

    clock = Clock()
    throttled = Throttle(Probe(), clock)
    for done in range(1001):
        throttled.update(done, 1000)
        clock.now += 0.001
    assert len(seen) <= 12
    assert seen[-1] == 1000
    throttled.close()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def choose(stream: io.StringIO, **options: Any) -> type[Reporter]:
    reporter = open_reporter("x", format_amount=say_size, stream=stream, **options)
    return type(reporter._reporter if isinstance(reporter, Throttle) else reporter)


def test_who_reads_decides_what_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    assert choose(Terminal()) is BarReporter
    assert choose(io.StringIO()) is LineReporter
    assert choose(Terminal(), is_quiet=True) is SilentReporter
    monkeypatch.setenv("TERM", "dumb")
    assert choose(Terminal()) is LineReporter


def test_no_color_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    reporter = open_reporter("hashing", format_amount=say_size, stream=stream)
    reporter.update(1, 2)
    reporter.close()
    assert "hashing" in stream.getvalue()
    assert "\x1b[3" not in stream.getvalue().replace("\x1b[?25", "")  # no colour; the cursor may be moved


# A node's transfers


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"fetch_wanted_bytes": 9, "latest_seen_epoch": 0, "latest_seen_version": 57},
            "first version, 0.57",
        ),
        (
            {"fetch_wanted_bytes": 9, "latest_seen_version": 57, "applied_version": 40},
            "catching up, 0.40 to 0.57",
        ),
        ({"fetch_wanted_bytes": 9, "latest_seen_version": 57, "mirror_version": 41}, "catching up, 0.41 to 0.57"),
        ({"rounds_wanted_size_bytes": 9, "round_index": 12}, "fetching round 12"),
    ],
)
def test_what_is_fetched_is_named(fields: dict[str, Any], text: str) -> None:
    assert describe_fetch(fields) == text


def test_a_transfer_is_shown_while_anything_is_missing() -> None:
    told: list[tuple[str, int, int] | str] = []
    fields: dict[str, Any] = {}

    class Probe(SilentReporter):
        def update(self, done: int, total: int, label: str | None = None) -> None:
            told.append((label or "", done, total))

        def close(self) -> None:
            told.append("closed")

    shown = TransferProgress(lambda: fields, is_quiet=False, open_with=lambda label: Probe())

    def look(**changed: Any) -> None:
        fields.update(changed)
        shown.look()

    look()
    look(fetch_wanted_bytes=10, fetch_held_bytes=4, latest_seen_version=1)
    look(fetch_held_bytes=10)
    look()
    shown.close()
    assert told == [("first version, 0.1", 4, 10), "closed"]


def test_a_node_whose_log_is_for_programs_shows_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    fields = {"fetch_wanted_bytes": 10, "fetch_held_bytes": 4, "latest_seen_version": 1}

    def show(level: str, *, as_json: bool) -> str:
        logs.set_up(level, as_json=as_json)
        shown = TransferProgress(lambda: fields, is_quiet=as_json)
        shown.look()
        shown.close()
        return capsys.readouterr().err

    try:
        assert "first version, 0.1: 40 % of 10 B" in show("info", as_json=False)
        assert show("info", as_json=True) == show("warning", as_json=False) == ""
    finally:
        logs.logger.handlers[:] = []
        logs.logger.setLevel(logging.NOTSET)


def test_log_lines_go_to_what_standard_error_is_at_that_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a bar is drawn, rich puts a stand-in there, which writes lines above the bar."""
    logs.set_up("info", as_json=False)
    try:
        stand_in = io.StringIO()
        monkeypatch.setattr(sys, "stderr", stand_in)
        logs.logger.info("above the bar")
        assert "above the bar" in stand_in.getvalue()
    finally:
        logs.logger.handlers[:] = []
        logs.logger.setLevel(logging.NOTSET)
