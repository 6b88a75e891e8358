"""The demonstration as people run it: the installed command, real processes, real streams, a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e


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


def test_trainers_that_train_together_outlive_a_kill_of_one(tmp_path: Path) -> None:
    workdir = tmp_path / "work"
    command = [sys.executable, "-m", "pulsenetd.cli", "demo", "--trainers", "3", "--model", "tiny", "--json"]
    finished = subprocess.run(
        [*command, "--rounds", "10", "--workdir", str(workdir)],
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    summary = json.loads(finished.stdout)
    # three state roots, three files of weights and the inferencer's are the same
    assert summary["identical"] is True
    assert summary["resumed"]["from"] == 2
    assert summary["resumed"]["at"] >= 4
    rounds = summary["rounds"]
    assert [row["round"] for row in rounds] == list(range(10))
    assert len(rounds[0]["contributors"]) == 3
    assert rounds[3]["contributors"] == ["trainer-1", "trainer-2"]
    assert all(0.005 < row["density"] < 0.12 for row in rounds)
    assert all(row["residual_norm"] > 0 for row in rounds)
    for row in rounds:
        assert row["received_bytes"] < row["diloco_received_bytes"] < row["ddp_received_bytes"]
    assert summary["payload_ratio"] > 17
    assert rounds[-1]["loss"] < rounds[0]["loss"]
    assert _processes_of(workdir) == []


@pytest.mark.nightly
def test_trainers_that_mix_outlive_a_kill_of_one(tmp_path: Path) -> None:
    workdir = tmp_path / "work"
    command = [sys.executable, "-m", "pulsenetd.cli", "demo", "--trainers", "3", "--algorithm", "gossip", "--json"]
    finished = subprocess.run(
        [*command, "--model", "tiny", "--rounds", "8", "--workdir", str(workdir)],
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    summary = json.loads(finished.stdout)
    assert summary["mixes_again"] is True
    assert summary["resumed"]["at"] >= summary["resumed"]["from"] >= 1
    rounds = summary["rounds"]
    assert [row["round"] for row in rounds] == list(range(len(rounds)))
    assert rounds[1]["trainers"] == ["trainer-1", "trainer-2", "trainer-3"]
    # How far the victim came before the kill depends on how fast its rounds were.
    assert ["trainer-1", "trainer-2"] in [row["trainers"] for row in rounds], "the others went on"
    # weights of their own, and close: BF16 alone keeps three digits
    assert 0.0 < summary["apart"] < 0.01
    assert rounds[-1]["loss"] < rounds[0]["loss"]
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
