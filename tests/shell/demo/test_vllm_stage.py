"""vLLM in the demonstration: found or missed before anything starts, summed up at the end, never left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pulsenet.errors import UsageError
from pulsenetd import cli
from pulsenetd.commands import demo as command
from pulsenetd.demo import orchestrator, vllm_stage
from pulsenetd.demo.comparison import Comparison, compute_root
from pulsenetd.demo.processes import Children
from pulsenetd.demo.progress import Progress, VersionRow
from pulsenetd.demo.reports import Compared, Finished, Published
from pulsenetd.demo.settings import SETTINGS
from pulsenetd.demo.vllm_stage import VllmEngines, end_engines, prepare_vllm
from pulsenetd.engines.vllm_process import PROCESS_NAME, ServerArguments, remember

PUBLISHED = Published(0, 2, False, 2000, 30, 10, 1000, 0.25, 0.0, 0, 0.0, 0.0, 0.5, 20.0)


def write_python(path: Path, text: str) -> str:
    """Write a program that stands for an interpreter."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_vllm_is_found_and_every_inferencer_has_a_port_of_its_own(tmp_path: Path) -> None:
    python = write_python(tmp_path / "python", "echo a warning; echo 0.32.0")
    engines = prepare_vllm(python, ["inferencer-1", "inferencer-2"])
    assert (engines.python, engines.version) == (python, "0.32.0")
    assert len({engines.url(name) for name in ("inferencer-1", "inferencer-2")}) == 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("echo 'ModuleNotFoundError: No module named vllm' >&2; exit 1", r"No module named vllm\): make one with"),
        ("exit 1", r"no message\): make one with"),
        (None, "cannot be started"),
        ("exec sleep 30", "did not load vLLM within"),
    ],
)
def test_no_vllm_is_one_error_with_the_next_step(
    text: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_stage, "FIND_SECONDS_MAX", 1.0 if text and "sleep" in text else 60.0)
    python = str(tmp_path / "none") if text is None else write_python(tmp_path / "python", text)
    with pytest.raises(UsageError, match=reason):
        orchestrator.run_demo("tiny", 1, 1, tmp_path / "work", json_output=True, vllm_python=python)
    assert not (tmp_path / "work").exists()


def test_the_interpreter_comes_from_the_flag_or_as_for_join_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(orchestrator, "run_demo", lambda *_, vllm_python, **__: given.append(vllm_python) or 0)
    monkeypatch.setenv("PULSENET_ENGINE_PYTHON", "/environment/python")
    for arguments in ([], ["--engine", "vllm"], ["--engine", "vllm", "--engine-python", "/flag/python"]):
        parsed = cli.build_parser().parse_args(["demo", *arguments])
        assert command._demo(parsed) == 0
    monkeypatch.delenv("PULSENET_ENGINE_PYTHON")
    assert command._demo(cli.build_parser().parse_args(["demo", "--engine", "vllm"])) == 0
    assert given == [None, "/environment/python", "/flag/python", ""]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--engine-python", "/python"], "goes with --engine vllm"),
        (["--engine", "vllm", "--trainers", "3"], "--engine vllm is for one trainer"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(arguments: list[str], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        command._demo(cli.build_parser().parse_args(["demo", *arguments]))


def test_pauses_are_summed_up_over_all_engines() -> None:
    engines = VllmEngines("python", "0.32.0", {})
    assert engines.summarise([])["pause_ms_median"] is None
    rows = [
        VersionRow(PUBLISHED, {}, {"a": {"stage": 1.0, "pause": 0.02}, "b": {"pause": 0.04}}),
        VersionRow(PUBLISHED, {}, {"a": {"pause": 0.03}, "b": {"stage": 1.0}}),
    ]
    assert engines.summarise(rows) == {
        "name": "vLLM 0.32.0",
        "pauses": 3,
        "pause_ms_median": 30.0,
        "pause_ms_max": 40.0,
    }


def test_identical_means_that_the_memory_equals_the_trainers_file_under_the_published_root(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    (tmp_path / "weights").mkdir()
    save_file({"a": torch.ones(3, dtype=torch.bfloat16)}, tmp_path / "weights" / "trainer.safetensors")
    names = ("inferencer-1", "inferencer-2")
    engines = VllmEngines("python", "0.32.0", {})
    watches: Any = dict.fromkeys(names)
    swarm = orchestrator._Swarm(SETTINGS["tiny"], 1, tmp_path, Children(tmp_path), Progress(names), watches, engines)
    root = compute_root(tmp_path / "weights" / "trainer.safetensors")
    for name in names:
        orchestrator._take_in(swarm, name, Compared(True, ""))
        orchestrator._take_in(swarm, name, Finished(0, 2, root))
    found, _ = orchestrator._compare(swarm)
    assert found == dict.fromkeys(names, Comparison(root, True, ""))
    orchestrator._take_in(swarm, names[0], Compared(False, "rank 0: other bits"))
    orchestrator._take_in(swarm, names[1], Finished(0, 2, "ab" * 32))
    found, _ = orchestrator._compare(swarm)
    assert found[names[0]] == Comparison(root, False, "rank 0: other bits")
    assert not found[names[1]].is_identical


def test_an_engine_that_outlived_its_node_is_ended(tmp_path: Path) -> None:
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    remember(tmp_path / PROCESS_NAME, left.pid, 8123, ServerArguments(["--model", "/base"]))
    end_engines([tmp_path, tmp_path / "none"])
    assert left.wait(10) != 0
