"""The command: its directory, its summary, and how it fails. The whole of it runs in the e2e tests."""

import dataclasses
import io
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from pulsenet.errors import StorageError, UsageError
from pulsenetd.demo import command_lines, orchestrator
from pulsenetd.demo.comparison import Comparison
from pulsenetd.demo.node_status import NodeWatch
from pulsenetd.demo.processes import Children
from pulsenetd.demo.progress import Progress
from pulsenetd.demo.reports import Applied, Finished, Published
from pulsenetd.demo.settings import SETTINGS
from pulsenetd.demo.stage import open_workdir

FIRST = Published(
    epoch=0,
    number=1,
    is_first=True,
    raw_size_bytes=2000,
    encoded_size_bytes=2100,
    changed_count=1000,
    element_count=1000,
    reward=0.0,
    logprob_gap=0.0,
    staleness_max=0,
    wait_seconds=0.0,
    step_seconds=0.0,
    publish_seconds=0.5,
    offered_at=10.0,
)
SECOND = dataclasses.replace(
    FIRST, number=2, is_first=False, encoded_size_bytes=30, changed_count=10, reward=0.25, offered_at=20.0
)
THIRD = dataclasses.replace(SECOND, number=3, encoded_size_bytes=10, changed_count=30, reward=0.5, offered_at=30.0)


def make_swarm(tmp_path: Path) -> orchestrator._Swarm:
    progress = Progress(("inferencer-1",))
    for published in (FIRST, SECOND, THIRD):
        progress.add_published(published)
    progress.add_applied("inferencer-1", Applied(0, 3, 0.1, 32.0), {})
    watches = {"inferencer-1": NodeWatch(tmp_path)}
    return orchestrator._Swarm(SETTINGS["tiny"], 2, tmp_path, Children(tmp_path), progress, watches)


def test_the_summary_counts_patches_against_dense_transfer(tmp_path: Path) -> None:
    comparisons = {"inferencer-1": Comparison("ab" * 32, True, "")}
    summary = orchestrator._summarise(make_swarm(tmp_path), comparisons, "ab" * 32, {"inferencer-1": 2140}, 12.34)
    assert summary == {
        "identical": True,
        "model": "tiny",
        "versions": 2,
        "inferencers": 1,
        "final_version": "0.3",
        "root": "ab" * 32,
        "dense_bytes": 4000,
        "patch_bytes": 40,
        "ratio": 100.0,
        "anchor_bytes": 2100,
        "received_bytes": {"inferencer-1": 2140},
        "density": 0.02,
        "lag_seconds": 2.0,
        "rollout_samples": 0,
        "reward_start": 0.25,
        "reward_end": 0.5,
        "seconds": 12.3,
    }


def test_who_waits_for_loops_to_be_compiled_is_told_of_it(tmp_path: Path) -> None:
    """Nodes say so in their logs alone, and nothing came for half a minute."""
    watches = {"inferencer-1": NodeWatch(tmp_path)}
    progress = Progress(("inferencer-1",))
    swarm = orchestrator._Swarm(SETTINGS["tiny"], 2, tmp_path, Children(tmp_path), progress, watches)
    orchestrator._take_in(swarm, "trainer", FIRST)
    assert "compile their loops" in swarm.progress.phase
    orchestrator._take_in(swarm, "trainer", SECOND)
    assert swarm.progress.phase == "training: 1 of 2 versions published"


def test_the_summary_names_an_inferencer_that_differs(tmp_path: Path) -> None:
    comparisons = {"inferencer-1": Comparison("cd" * 32, False, "model.norm.weight differs in 2 of 512 bytes")}
    summary = orchestrator._summarise(make_swarm(tmp_path), comparisons, "ab" * 32, {}, 1.0)
    assert summary["identical"] is False
    output = io.StringIO()
    orchestrator._print_summary(Console(file=output), summary, comparisons)
    assert "DIFFERS: model.norm.weight" in output.getvalue()
    assert "100 times less" in output.getvalue()


def test_weights_published_under_another_root_are_not_identical(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    (tmp_path / "weights").mkdir()
    for name in ("trainer", "inferencer-1"):
        save_file({"a": torch.ones(3, dtype=torch.bfloat16)}, tmp_path / "weights" / f"{name}.safetensors")
    swarm = make_swarm(tmp_path)
    swarm.finished["inferencer-1"] = Finished(0, 3, "ab" * 32)
    comparisons, root = orchestrator._compare(swarm)
    assert not comparisons["inferencer-1"].is_identical
    swarm.finished["inferencer-1"] = Finished(0, 3, root)
    comparisons, _ = orchestrator._compare(swarm)
    assert comparisons["inferencer-1"].is_identical


def test_a_directory_of_our_own_is_removed_and_a_given_one_stays(tmp_path: Path) -> None:
    with open_workdir(None, 0) as directory:
        own = directory.path
        assert (own / "logs").is_dir()
    assert not own.exists()
    with open_workdir(tmp_path / "given", 0) as directory:
        assert directory.path == tmp_path / "given"
    assert (tmp_path / "given" / "logs").is_dir()


def test_a_directory_with_an_earlier_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    with pytest.raises(UsageError, match="not an empty directory"):
        orchestrator.run_demo("tiny", 1, 1, tmp_path, json_output=True)


def test_too_little_space_is_said_before_anything_starts(tmp_path: Path) -> None:
    with (
        pytest.raises(StorageError, match="give a directory on a larger disk") as caught,
        open_workdir(tmp_path / "given", 1 << 60),
    ):
        pytest.fail("the block must not run")
    assert caught.value.reason == "enospc"


def test_a_directory_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot use"), open_workdir(tmp_path / "file" / "below", 0):
        pytest.fail("the block must not run")


def test_a_failure_is_explained_and_its_logs_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = (sys.executable, "-c", "import sys; print('no entropy', file=sys.stderr); sys.exit(1)")
    monkeypatch.setattr(command_lines, "PULSENET", failing)
    assert orchestrator.run_demo("tiny", 1, 1, tmp_path / "work", json_output=True) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no entropy" in captured.err
    assert str(tmp_path / "work" / "logs") in captured.err


def test_a_node_that_dies_is_named_with_the_end_of_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
import sys
if sys.argv[1] == "join":
    sys.exit("pulsenet: p2pd cannot run here")
print('{"peer_id": "12D3KooW"}')
"""
    monkeypatch.setattr(command_lines, "PULSENET", (sys.executable, "-c", code))
    assert orchestrator.run_demo("tiny", 1, 1, tmp_path / "work", json_output=True) == 1
    captured = capsys.readouterr()
    # Both nodes die alike; whichever is noticed first is named.
    assert re.search(r"(trainer|inferencer-1)-node ended with exit code 1", captured.err)
    assert "p2pd cannot run here" in captured.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_every_process(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys, time; print('{\"peer_id\": \"12D3KooW\"}', flush=True); time.sleep(60 * (sys.argv[1] == 'join'))"
    )
    monkeypatch.setattr(command_lines, "PULSENET", (sys.executable, "-c", code))
    started: list[Children] = []
    start_nodes = orchestrator._start_nodes

    def start_and_interrupt(swarm: orchestrator._Swarm, screen: orchestrator.Screen) -> None:
        started.append(swarm.children)
        threading.Timer(1.0, os.kill, (os.getpid(), number)).start()
        start_nodes(swarm, screen)

    monkeypatch.setattr(orchestrator, "_start_nodes", start_and_interrupt)
    started_at = time.monotonic()
    if number == signal.SIGINT:
        with pytest.raises(KeyboardInterrupt):
            orchestrator.run_demo("tiny", 1, 2, tmp_path / "work", json_output=True)
    else:
        assert orchestrator.run_demo("tiny", 1, 2, tmp_path / "work", json_output=True) == 128 + number
    assert time.monotonic() - started_at < 20
    assert len(started[0]._children) == 6
    assert all(child.process.poll() is not None for child in started[0]._children)
