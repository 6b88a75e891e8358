"""The demonstration as people run it: the installed command, real processes, real streams, a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


def test_the_tiny_demo_ends_with_identical_inferencers(tmp_path: Path) -> None:
    workdir = tmp_path / "work"
    command = [sys.executable, "-m", "pulsenetd.cli", "demo", "--model", "tiny", "--versions", "3", "--json"]
    finished = subprocess.run(
        [*command, "--workdir", str(workdir)], capture_output=True, text=True, timeout=200, check=False
    )
    assert finished.returncode == 0, finished.stderr
    summary = json.loads(finished.stdout)
    assert summary["identical"] is True
    assert summary["versions"] == 3
    assert summary["inferencers"] == 2
    assert summary["ratio"] == pytest.approx(summary["dense_bytes"] / summary["patch_bytes"], abs=0.01)
    assert summary["ratio"] > 10
    assert 0.002 < summary["density"] < 0.05
    # every inferencer fetched the first version once, and after it no more than the patches and small records
    for received in summary["received_bytes"].values():
        assert received < 1.1 * (summary["anchor_bytes"] + summary["patch_bytes"])
    weights = [path.read_bytes() for path in sorted((workdir / "weights").iterdir())]
    assert len(weights) == 3
    assert len(set(weights)) == 1
    assert _processes_of(workdir) == []


def _processes_of(workdir: Path) -> list[str]:
    """Return the command lines of running processes that name the directory: none may be left behind."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(workdir) in arguments:
            found.append(arguments)
    return found
