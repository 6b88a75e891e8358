"""``pulsenet sim`` prints what a story came to, and its exit code says whether all was well."""

from __future__ import annotations

import json
import re

import pytest

from pulsenet.node.fetch import Fetcher
from pulsenetd.cli import main
from pulsenetd.commands import sim

SMALL = ("--nodes", "4", "--steps", "2")


def test_a_good_run_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--seed", "3", *SMALL]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("seed 3: all well\n")
    assert "the publisher uploaded each blob" in printed
    assert "again:" not in printed


def test_json_has_what_scripts_ask_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--seed", "3", "--faults", "drop,crash", "--runs", "2", "--json", *SMALL]) == 0
    runs = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [run["seed"] for run in runs] == [3, 4]
    assert runs[0]["violations"] == []
    assert runs[0]["converged"] is True
    assert len(runs[0]["trace_hash"]) == 64
    assert runs[0]["publisher_payloads"] > 0
    assert runs[0]["faults"] == ["crash", "drop"]
    assert runs[0]["command"] == "pulsenet sim --seed 3 --nodes 4 --faults drop,crash --steps 2"


def test_a_failure_exits_1_and_names_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Fetcher, "_begin", lambda *_: 1 / 0)
    assert main(["sim", "--seed", "3", *SMALL]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("seed 3: FAILED\n")
    assert "violation: ZeroDivisionError" in printed
    assert "again: pulsenet sim --seed 3 --nodes 4 --faults all --steps 2" in printed


def test_a_long_story_is_told_while_it_is_played(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sim", "--seed", "3", "--json", *SMALL]) == 0
    quick = capsys.readouterr()
    assert quick.err == ""
    monkeypatch.setattr(sim, "TELL_SECONDS", 0.0)
    assert main(["sim", "--seed", "3", "--json", *SMALL]) == 0
    told = capsys.readouterr()
    assert told.out == quick.out
    assert re.fullmatch(r"seed 3: \d of up to 3 versions, 1 events, \d virtual seconds", told.err.splitlines()[0])
    assert len(told.err.splitlines()) == json.loads(told.out)["event_count"]


def test_a_drawn_seed_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--faults", "none", "--nodes", "2", "--steps", "0"]) == 0
    assert capsys.readouterr().out.startswith("seed ")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--faults", "fire"], "no fault is called 'fire'"),
        (["--nodes", "1"], "--nodes: 1"),
        (["--runs", "0"], "--runs: 0"),
        (["--seed", "-1"], "--seed: -1"),
    ],
)
def test_wrong_arguments_exit_2(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", *words]) == 2
    assert named in capsys.readouterr().err
