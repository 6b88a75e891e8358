"""The 7B script on a model small enough for every run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("bench_7b.py")


@pytest.mark.e2e
def test_a_small_step_is_published_and_applied_in_processes_of_their_own(tmp_path: Path) -> None:
    files, summary = tmp_path / "files", tmp_path / "summary.json"
    files.mkdir()
    command = [sys.executable, str(SCRIPT), "--gib", "0.03", "--directory", str(files), "--json"]
    command += ["--summary", str(summary)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["kept"]
    assert 0.004 < figures["density_ratio"] < 0.008
    assert figures["ratio"] > 150
    assert figures["publish"]["anchor_bytes"] > figures["dense_bytes"]
    assert list(files.iterdir()) == []
    rows = json.loads(summary.read_text())
    assert rows[0]["ratio"] == f"{figures['ratio']:.0f} times below dense"
    assert len(rows) == 3
