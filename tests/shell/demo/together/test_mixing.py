"""The demonstration of trainers that mix: its table, its verdict, and how far apart weights are."""

from __future__ import annotations

import dataclasses
import io
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from pulsenet.errors import UsageError
from pulsenetd.commands import demo
from pulsenetd.demo.node_status import NodeWatch
from pulsenetd.demo.processes import Children
from pulsenetd.demo.reports import Finished, Resumed, RoundMixed, read_report, write_report
from pulsenetd.demo.together import mixing, orchestrator
from pulsenetd.demo.together.settings import KILL_IN_ROUND, RETURN_IN_ROUND, SETTINGS
from pulsenetd.parsing import Parser

MIXED = RoundMixed(
    round_index=0,
    next_round_index=1,
    mix1_count=2,
    mix2_count=2,
    reasons="",
    distance=0.5,
    utilization=0.9,
    loss=2.5,
    seconds=0.0,
)
NAMES = ("trainer-1", "trainer-2")


def make_swarm(tmp_path: Path) -> tuple[orchestrator._Swarm, io.StringIO]:
    output = io.StringIO()
    watches = {name: NodeWatch(tmp_path / name) for name in NAMES}
    console = Console(file=output, width=200)
    swarm = orchestrator._Swarm(
        SETTINGS["tiny"], 8, tmp_path, Children(tmp_path), console, watches, time.monotonic(), "gossip", "local_m1_m2"
    )
    return swarm, output


def report_round(swarm: orchestrator._Swarm, index: int, names: tuple[str, ...] = NAMES, **changes: object) -> None:
    for name in names:
        done = dataclasses.replace(MIXED, round_index=index, next_round_index=index + 1, **changes)  # type: ignore[arg-type]
        orchestrator._take_in(swarm, name, done)


def write_weights(path: Path, value: float) -> None:
    path.parent.mkdir(exist_ok=True)
    save_file({"a": torch.full((4,), value, dtype=torch.bfloat16)}, path)


def finish(swarm: orchestrator._Swarm, values: tuple[float, float] = (1.0, 3.0)) -> None:
    for name, value in zip(NAMES, values, strict=True):
        swarm.finished[name] = Finished(0, 8, "")
        write_weights(swarm.weights(name), value)


def test_a_report_of_a_round_is_read_back() -> None:
    stream = io.StringIO()
    write_report(stream, MIXED)
    assert read_report(stream.getvalue()) == MIXED


def test_rounds_that_mix_are_printed_once_when_all_reported(tmp_path: Path) -> None:
    swarm, output = make_swarm(tmp_path)
    report_round(swarm, 0, NAMES[:1])
    orchestrator._print_rounds(swarm)
    assert output.getvalue() == ""
    report_round(swarm, 0, NAMES[1:], mix1_count=1, distance=None)
    orchestrator._print_rounds(swarm)
    head, line = output.getvalue().splitlines()
    assert head.split() == ["round", "trainers", "mix1", "mix2", "received", "DiLoCo", "used", "distance", "loss"]
    assert line.split()[:4] == ["0", "2", "1.5", "2"]
    assert "90%" in line
    assert "0.5000" in line, "of those that had a mean"


def test_the_verdict_is_that_the_one_cut_off_mixes_again(tmp_path: Path) -> None:
    swarm, _ = make_swarm(tmp_path)
    report_round(swarm, KILL_IN_ROUND, NAMES[:1], mix1_count=1, mix2_count=1, reasons="lost")
    orchestrator._take_in(swarm, NAMES[1], Resumed(KILL_IN_ROUND, RETURN_IN_ROUND))
    report_round(swarm, RETURN_IN_ROUND, NAMES, mix1_count=1, mix2_count=1)
    finish(swarm)
    assert not mixing.summarise(swarm)["mixes_again"]
    assert not mixing.is_over(swarm, 8)
    report_round(swarm, RETURN_IN_ROUND + 1)
    assert mixing.is_over(swarm, 8)
    summary = mixing.summarise(swarm)
    assert summary["mixes_again"]
    assert summary["rounds"][0]["reasons"] == ["lost"]
    assert summary["resumed"] == {"from": KILL_IN_ROUND, "at": RETURN_IN_ROUND}
    text = "\n".join(mixing.describe(summary))
    assert f"mixes again: back with its checkpoint of round {KILL_IN_ROUND}, in round {RETURN_IN_ROUND}\n" in text
    assert "DID NOT MIX AGAIN: not back" in "\n".join(
        mixing.describe({**summary, "mixes_again": False, "resumed": None})
    )
    assert "DID NOT MIX AGAIN" in "\n".join(mixing.describe({**summary, "mixes_again": False}))


def test_without_a_return_nothing_was_shown(tmp_path: Path) -> None:
    swarm, _ = make_swarm(tmp_path)
    report_round(swarm, 0)
    finish(swarm)
    assert not mixing.summarise(swarm)["mixes_again"]
    report_round(swarm, 8 + mixing.ROUNDS_MORE_MAX)
    assert mixing.is_over(swarm, 8), "it is not waited for longer"


def test_how_far_apart_weights_are_is_relative_to_their_mean(tmp_path: Path) -> None:
    paths = {name: tmp_path / "weights" / f"{name}.safetensors" for name in NAMES}
    for name, value in zip(NAMES, (1.0, 3.0), strict=True):
        write_weights(paths[name], value)
    assert mixing.measure_spread(paths) == pytest.approx(0.5)
    write_weights(paths[NAMES[0]], 3.0)
    assert mixing.measure_spread(paths) == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--algorithm", "gossip"], "--algorithm says how several trainers"),
        (["--trainers", "2", "--variant", "diloco"], "--variant goes with --algorithm gossip"),
    ],
)
def test_options_of_several_trainers_are_for_several(options: list[str], message: str) -> None:
    parser = Parser()
    demo.add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["demo", *options])
    with pytest.raises(UsageError, match=message):
        arguments.run_command(arguments)
