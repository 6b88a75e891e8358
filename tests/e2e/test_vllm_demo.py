"""The demonstration with its rollouts on a real vLLM: real nodes, a real engine, a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

VLLM_PYTHON = os.environ.get("VLLM_PYTHON", "")
"""Interpreter of an environment with vLLM and pulsenet; .ci/vllm makes one."""

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not VLLM_PYTHON, reason="VLLM_PYTHON does not name an interpreter that has vLLM"),
]


def test_rollouts_from_vllm_train_the_model_and_its_memory_ends_as_the_trainers(tmp_path: Path) -> None:
    workdir = tmp_path / "work"
    command = [sys.executable, "-m", "pulsenetd.cli", "demo", "--model", "tiny", "--versions", "3", "--json"]
    command += ["--engine", "vllm", "--engine-python", VLLM_PYTHON, "--inferencers", "1", "--workdir", str(workdir)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert finished.returncode == 0, finished.stderr
    summary = json.loads(finished.stdout)
    assert summary["identical"] is True
    assert (summary["versions"], summary["inferencers"]) == (3, 1)
    assert summary["engine"]["name"].startswith("vLLM 0.")
    assert summary["engine"]["pauses"] == 3
    assert 0 < summary["engine"]["pause_ms_median"] <= summary["engine"]["pause_ms_max"]
    # vLLM answered every question of every step
    assert summary["rollout_samples"] >= 3 * 64
    assert summary["ratio"] > 10
    log = (workdir / "logs" / "inferencer-1-node.log").read_text()
    assert [line.split()[-1] for line in log.splitlines() if "vLLM serves version" in line] == [
        *("0.1", "0.2", "0.3", "0.4"),
    ]
    assert [path for path in Path("/proc").glob("[0-9]*/cmdline") if _names(path, str(workdir))] == []


def _names(path: Path, text: str) -> bool:
    """Say whether the command line of a running process names the directory."""
    try:
        return text in path.read_bytes().decode(errors="replace")
    except OSError:
        return False
