"""A watched node is a row of a table in a terminal, and a line when something changed anywhere else."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pulsenetd.commands.status_watch import INTERVAL_SECONDS, make_line, make_row, watch

NODE = {
    "data_dir": "/data/pulsenet/mine/inferencer-2",
    "pid": 7,
    "run": "mine",
    "role": "inferencer",
    "applied_epoch": 1,
    "applied_version": 7,
    "version_lag": 0,
    "peers": 3,
    "state": "current",
    "received_bytes_per_second": 0.0,
}
TRANSFER = {"wanted_bytes": 8_000_000, "held_bytes": 2_000_000, "eta_seconds": 6.0}


class Interrupted(Exception):
    """The test has seen enough."""


class Scene:
    """Looks that a test prepared, and where they are shown."""

    def __init__(self, *looks: tuple[Sequence[dict[str, Any]], Sequence[str]], terminal: bool) -> None:
        self._looks = list(looks)
        self.file = io.StringIO()
        self.console = Console(file=self.file, force_terminal=terminal, width=140, _environ={"TERM": "xterm"})

    def _look(self) -> tuple[Sequence[dict[str, Any]], Sequence[str]]:
        return self._looks.pop(0)

    def _sleep(self, seconds: float) -> None:
        assert seconds == INTERVAL_SECONDS
        if not self._looks:
            raise Interrupted

    def play(self, *, as_json: bool = False) -> str:
        with pytest.raises(Interrupted):
            watch(self._look, as_json=as_json, console=self.console, sleep=self._sleep)
        return self.file.getvalue()


def test_lines_are_printed_when_something_changed() -> None:
    later = {**NODE, "applied_version": 8}
    busier = {**NODE, "received_bytes_per_second": 5_000.0, "transfers": [TRANSFER]}
    printed = Scene(([NODE], []), ([busier], []), ([later], ["gone: no answer"]), terminal=False).play()
    assert [line.split(" ", 1)[1] for line in printed.splitlines()] == [
        "mine/inferencer-2: current, version 1.7, lag 0, peers 3",
        "gone: no answer",
        "mine/inferencer-2: current, version 1.8, lag 0, peers 3",
    ]
    assert "\x1b" not in printed


def test_without_nodes_that_is_said_once() -> None:
    printed = Scene(([], []), ([], []), ([NODE], []), terminal=False).play()
    assert [line.split(" ", 1)[1] for line in printed.splitlines()] == [
        "no node is running",
        "mine/inferencer-2: current, version 1.7, lag 0, peers 3",
    ]


def test_a_terminal_gets_a_table_with_rates_and_the_time_left() -> None:
    fetching = {
        **NODE,
        "state": "fetching",
        "received_bytes_per_second": 1_000_000.0,
        "sent_bytes_per_second": 200.0,
        "transfers": [TRANSFER],
    }
    printed = Scene(([NODE], []), ([fetching], ["x: no answer"]), terminal=True).play()
    assert "\x1b" in printed
    for text in ("mine/inferencer-2", "1.0 MB/s", "200 B/s", "25 % of 8.0 MB, 6 s left", "x: no answer"):
        assert text in printed


def test_every_look_is_an_object_on_a_line_of_its_own() -> None:
    printed = Scene(([NODE], []), ([], ["gone"]), terminal=False).play(as_json=True)
    assert [json.loads(line) for line in printed.splitlines()] == [
        {"nodes": [NODE], "problems": []},
        {"nodes": [], "problems": ["gone"]},
    ]


def test_what_is_not_known_is_not_claimed() -> None:
    row = make_row({"role": "seed"})
    assert make_line(row) == "?/seed: , version -, lag ?, peers 0"
    assert (row.received, row.fetching, row.round) == ("", "", "")


def test_what_has_stopped_has_no_time_left() -> None:
    row = make_row({**NODE, "transfers": [TRANSFER, {**TRANSFER, "eta_seconds": None}]})
    assert row.fetching == "25 % of 16.0 MB"


def test_the_round_and_its_reason_are_shown_and_colour_nothing() -> None:
    row = make_row({**NODE, "round_index": 4, "rounds_phase": "pending", "rounds_reason": "[red]\x1b[31m"})
    assert row.round == "4 pending ([red]\\x1b[31m)"
    assert make_line(row).endswith(", round 4 pending ([red]\\x1b[31m)")


def test_an_interrupt_ends_the_watch_with_its_code(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "pulsenetd.cli", "status", "--watch"],
        env={**os.environ, "XDG_DATA_HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline().endswith("no node is running\n")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
