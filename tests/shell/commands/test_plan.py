"""``pulsenet plan`` from the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pulsenetd.admin import AdminServer
from pulsenetd.cli import main

MODEL = ("--params", "1.5e9", "--bytes-per-param", "2", "--peers", "8")
STEPS = ("--inner-steps", "100", "--step-seconds", "2.36")
GIVEN = (*MODEL, *STEPS)
FETCHED = {"version": 3, "encoded_size_bytes": 25_000_000, "fetch_seconds": 2.0}


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Returns what starts nodes that answer with the versions given."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    servers = []

    def start_node(name: str, *versions: Any) -> Path:
        status = {"versions": list(versions)}
        server = AdminServer("127.0.0.1", 0, metrics=bytes, live=dict, ready=dict, status=lambda: status)
        servers.append(server)
        directory = tmp_path / "pulsenet" / name
        directory.mkdir(parents=True)
        (directory / "node.json").write_text(json.dumps({"metrics_url": server.url}))
        return directory

    yield start_node
    for server in servers:
        server.close()


def test_json_lists_every_algorithm_with_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *GIVEN, "--mbps", "100", "--json"]) == 0
    plans = {plan["algorithm"]: plan for plan in json.loads(capsys.readouterr().out)}
    assert list(plans) == [
        "ddp",
        "diloco",
        "pulseloco",
        "global_m1",
        "global_m1_local_m2",
        "global_m1_local_m2_subset",
        "local_m1_m2",
    ]
    assert plans["diloco"]["bytes_per_round"] == 5_250_000_000
    assert plans["diloco"]["blocking_seconds"] == pytest.approx(420)
    assert plans["diloco"]["utilization"] == pytest.approx(0.36, abs=0.01)
    assert plans["diloco"]["mbps_for_90_percent"] == pytest.approx(1601.7, abs=0.1)
    assert plans["global_m1"]["utilization"] == pytest.approx(0.56, abs=0.01)
    assert all(type(plan["joiner_can_catch_up"]) is bool for plan in plans.values())


def test_the_table_is_what_people_get(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--params", "1.5B", "--peers", "8", "--mbps", "100", "--step-seconds", "30"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1.5e+09 parameters, 8 trainers, 8 inner steps in 240 s")
    assert "local_m1_m2*" in out


def test_the_document_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[3] / "docs" / "planning.md").read_text()
    command, shown = re.findall(r"^```(?:sh|text)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[:2]
    assert main(command.split()[1:]) == 0
    assert capsys.readouterr().out.startswith(shown)


def test_trainers_may_be_the_authorities(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *GIVEN, "--mbps", "100", "--authorities", "--json"]) == 0
    diloco = json.loads(capsys.readouterr().out)[1]
    assert diloco["bytes_per_round"] == diloco["authority_received_bytes_per_round"] == 21_000_000_000


@pytest.mark.parametrize(("name", "start_bytes"), [("out.png", b"\x89PNG"), ("out.svg", b"<svg")])
def test_a_picture_is_written_beside_the_figures(
    name: str, start_bytes: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *GIVEN, "--mbps", "100", "--plot", str(tmp_path / name), "--json"]) == 0
    assert (tmp_path / name).read_bytes().startswith(start_bytes)
    assert len(json.loads(capsys.readouterr().out)) == 7


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["--params", "0"], "--params: '0'"),
        (["--params", "many"], "like 7e9 or 7B"),
        (["--params", "1.2.3"], "--params"),
        (["--params", "7e99"], "--params"),
        (["--peers", "0"], "--peers: '0' is no whole number from 1"),
        (["--peers", "2.5"], "--peers"),
        (["--mbps", "0"], "--mbps: '0' is no number from 0.001"),
        (["--mbps", "nan"], "--mbps"),
        (["--mbps", "inf"], "--mbps"),
        (["--up-mbps", "-1"], "--up-mbps"),
        (["--loss", "5"], "0.05 means 5 %"),
        (["--rtt-ms", "-1"], "--rtt-ms"),
        (["--inner-steps", "1e3"], "--inner-steps"),
        (["--step-seconds", "0"], "--step-seconds"),
        (["--density", "3"], "--density"),
        (["--bytes-per-param", "0"], "--bytes-per-param"),
        (["--congestion", "reno"], "--congestion"),
        (["--plot", "out.pdf"], "must end in .png or .svg"),
        (["--plot", "absent/out.png"], "make it first"),
        (["--measure"], "not both"),
        (["--data-dir", "x"], "--measure"),
    ],
)
def test_a_bad_flag_is_one_line_that_names_it(
    changed: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *GIVEN, "--mbps", "100", *changed]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (GIVEN, "give --mbps, or --measure"),
        ((*STEPS, "--mbps", "1", "--peers", "2"), "--params"),
        ((*MODEL, "--mbps", "1"), "--step-seconds"),
        ((*GIVEN, "--measure", "--loss", "0.01"), "leave it out"),
    ],
)
def test_what_is_missing_or_too_much_is_one_line(
    given: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *given]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_measure_takes_what_the_running_node_observed(
    start: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    node = start("run/inferencer", FETCHED)
    assert main(["plan", *GIVEN, "--measure", "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == f"pulsenet: the node in {node} fetched at up to 100 Mbit/s\n"
    assert json.loads(printed.out)[1]["blocking_seconds"] == pytest.approx(420)
    # Nothing is seen of the upload: it is taken to be the same unless it is given.
    assert main(["plan", *GIVEN, "--measure", "--up-mbps", "50", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[1]["blocking_seconds"] == pytest.approx(840)


def test_measure_says_what_is_missing_and_what_to_do(
    start: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    measure = ["plan", *GIVEN, "--measure"]
    assert main(measure) == 1
    assert "no node runs on this machine; give --mbps" in capsys.readouterr().err
    node = start("run/trainer")
    assert main(measure) == 1
    error = capsys.readouterr().err
    assert str(node) in error
    assert "give --mbps" in error
    assert error.count("\n") == 1
    other = start("run/inferencer", FETCHED)
    assert main(measure) == 2
    assert "choose one with --data-dir" in capsys.readouterr().err
    assert main([*measure, "--data-dir", str(other)]) == 0


def test_measure_names_a_node_that_does_not_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *GIVEN, "--measure", "--data-dir", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert f"no node runs in {tmp_path}" in error
    assert "or give --mbps" in error
    assert error.count("\n") == 1
