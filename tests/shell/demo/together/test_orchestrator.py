"""The command for several trainers: who is killed when, what is printed, and how it fails."""

import dataclasses
import io
import os
import re
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from pulsenet.errors import UsageError
from pulsenetd.commands import demo
from pulsenetd.demo import command_lines
from pulsenetd.demo.comparison import Comparison
from pulsenetd.demo.node_status import NodeWatch
from pulsenetd.demo.processes import Children
from pulsenetd.demo.reports import Finished, Resumed, RoundDone
from pulsenetd.demo.together import orchestrator
from pulsenetd.demo.together.settings import KILL_IN_ROUND, RETURN_IN_ROUND, SETTINGS
from pulsenetd.parsing import Parser

DONE = RoundDone(
    round_index=0,
    next_round_index=1,
    outcome="counted",
    contributor_count=2,
    sent_count=23_654,
    element_count=2_365_440,
    payload_size_bytes=60_000,
    residual_norm=0.25,
    loss=2.5,
    state_root="ab" * 32,
    seconds=0.0,
)


def make_swarm(tmp_path: Path) -> tuple[orchestrator._Swarm, io.StringIO]:
    output = io.StringIO()
    watches = {name: NodeWatch(tmp_path / name) for name in ("trainer-1", "trainer-2")}
    console = Console(file=output, width=200)
    children = Children(tmp_path)
    swarm = orchestrator._Swarm(SETTINGS["tiny"], 8, tmp_path, children, console, watches, time.monotonic())
    return swarm, output


def report_round(swarm: orchestrator._Swarm, index: int, names: tuple[str, ...] = ("trainer-1", "trainer-2")) -> None:
    for name in names:
        done = dataclasses.replace(DONE, round_index=index, next_round_index=index + 1)
        orchestrator._take_in(swarm, name, done)


def test_the_last_trainer_is_killed_once_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm, output = make_swarm(tmp_path)
    done: list[str] = []
    monkeypatch.setattr(swarm.children.__class__, "kill", lambda _, name: done.append(f"kill {name}"))
    monkeypatch.setattr(orchestrator, "_start_node", lambda _, name: done.append(f"node {name}"))
    monkeypatch.setattr(orchestrator, "_start_training", lambda _, name: done.append(f"training {name}"))
    for index in range(RETURN_IN_ROUND + 2):
        names = ("trainer-1",) if KILL_IN_ROUND <= index < RETURN_IN_ROUND else ("trainer-1", "trainer-2")
        report_round(swarm, index, names)
        orchestrator._kill_or_return(swarm)
        if index + 1 == KILL_IN_ROUND:
            assert done == ["kill trainer-2", "kill trainer-2-node"]
        if index + 1 < RETURN_IN_ROUND:
            assert "node trainer-2" not in done
    assert done == ["kill trainer-2", "kill trainer-2-node", "node trainer-2", "training trainer-2"]
    assert f"in round {KILL_IN_ROUND}" in output.getvalue()


def test_rounds_are_printed_once_when_all_reported(tmp_path: Path) -> None:
    swarm, output = make_swarm(tmp_path)
    report_round(swarm, 0, ("trainer-1",))
    orchestrator._print_rounds(swarm)
    assert output.getvalue() == ""
    report_round(swarm, 0, ("trainer-2",))
    orchestrator._print_rounds(swarm)
    report_round(swarm, 1, ("trainer-1",))
    orchestrator._print_rounds(swarm)
    assert len(output.getvalue().splitlines()) == 2
    orchestrator._print_rounds(swarm, is_over=True)
    lines = output.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["round", "0", "1"]
    assert "1.00%" in lines[1]


def test_the_summary_compares_with_dense_exchange(tmp_path: Path) -> None:
    swarm, _ = make_swarm(tmp_path)
    for index in (0, 1):
        report_round(swarm, index)
    orchestrator._take_in(swarm, "trainer-2", Resumed(2, 4))
    swarm.finished = {name: Finished(0, 2, "ab" * 32) for name in swarm.watches}
    summary = orchestrator._summarise(swarm, {"trainer-2": Comparison("cd" * 32, True, "")}, "cd" * 32)
    assert summary["identical"]
    assert summary["payload_ratio"] == pytest.approx(4 * 2_365_440 / 60_000, abs=0.01)
    assert summary["resumed"] == {"from": 2, "at": 4}
    first = summary["rounds"][0]
    assert first["contributors"] == ["trainer-1", "trainer-2"]
    assert first["diloco_received_bytes"] == 4 * 2_365_440
    assert first["ddp_received_bytes"] == 8 * first["diloco_received_bytes"]
    output = io.StringIO()
    swarm.console = Console(file=output, width=200)
    orchestrator._print_summary(swarm, summary, {"trainer-2": Comparison("cd" * 32, False, "norm differs")})
    assert "158 times less" in output.getvalue()
    assert "DIFFERS: norm differs" in output.getvalue()


def test_a_failure_is_explained_and_its_logs_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = (sys.executable, "-c", "import sys; print('no entropy', file=sys.stderr); sys.exit(1)")
    monkeypatch.setattr(command_lines, "PULSENET", failing)
    assert orchestrator.run_together_demo("tiny", 2, 6, tmp_path / "work", json_output=True) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no entropy" in captured.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trainers", "0"], "not from 1 to"),
        (["--trainers", "17"], "not from 1 to"),
        (["--trainers", "3", "--rounds", "3"], "has to be seen coming back"),
        (["--trainers", "3", "--versions", "4"], "versions follow the rounds"),
        (["--rounds", "9"], "give --trainers as well"),
    ],
)
def test_options_that_say_nothing_together_are_refused(options: list[str], message: str) -> None:
    parser = Parser()
    demo.add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["demo", *options])
    with pytest.raises(UsageError, match=message):
        arguments.run_command(arguments)


def test_a_node_that_does_not_start_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import json, sys; sys.argv[1] == 'join' and sys.exit('p2pd cannot run here'); print('{\"peer_id\": \"k\"}')"
    monkeypatch.setattr(command_lines, "PULSENET", (sys.executable, "-c", code))
    idle = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(command_lines, "rounds_process", lambda **_: idle)
    assert orchestrator.run_together_demo("tiny", 2, 6, tmp_path / "work", json_output=True) == 1
    # All three nodes end; the one that is seen first ends the demonstration, and others maybe before they say anything.
    told = capsys.readouterr().err
    (ended,) = re.findall(r"(\S+-node) ended with exit code 1", told)
    assert f"logs/{ended}.log:\n  p2pd cannot run here\n" in told
    assert os.path.exists(tmp_path / "work" / "data")
