"""Whatever call that changes the disk fails, and however: the old state or the new one is there after a restart.

``crash_scenarios.py`` lists the calls of a change by carrying it out once, then meets each of them with a kill before,
within and after it, with an I/O error, a disk that is full from there on, and a short write. All of them are tried
every night, some of them at every change.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SEED = 1
SAMPLE_COUNT = 8
SCENARIOS = ("store", "publisher", "mirror", "files", "files-full", "run", "key", "rollouts")
CALLS_MIN = {
    "store": 60,
    "publisher": 50,
    "mirror": 40,
    "files": 15,
    "files-full": 15,
    "run": 8,
    "key": 5,
    "rollouts": 60,
}
"""So that a change which no longer passes through the counted calls shows."""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The counter of calls, compiled."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler: fail points are tried where there is one")
    target = tmp_path_factory.mktemp("fail-points") / "fail_points.so"
    order = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-o", str(target), str(HERE / "fail_points.c"), "-ldl"]
    subprocess.run(order, check=True)
    return target


def try_failures(library: Path, scenario: str, directory: Path, count: int) -> dict[str, Any]:
    """Try ``count`` failures of a scenario, or all for 0, in a process whose calls are counted."""
    done = subprocess.run(
        [
            sys.executable,
            str(HERE / "crash_scenarios.py"),
            str(library),
            scenario,
            str(directory),
            str(SEED),
            str(count),
        ],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["broken"] == [], "\n".join([*found["broken"], done.stderr])
    assert found["calls"] >= CALLS_MIN[scenario]
    return found


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_failure_leaves_the_old_state_or_the_new(library: Path, scenario: str, tmp_path: Path) -> None:
    """A-DSK-1, A-DSK-2, A-PUB-1, A-APP-1, A-PROC-3: some failures, chosen by the seed."""
    found = try_failures(library, scenario, tmp_path, SAMPLE_COUNT)
    assert found["failures"] == SAMPLE_COUNT


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_failure_leaves_the_old_state_or_the_new(library: Path, scenario: str, tmp_path: Path) -> None:
    """A-DSK-2: every call, every way to fail."""
    found = try_failures(library, scenario, tmp_path, 0)
    assert found["failures"] == 6 * found["calls"]
    ends = {end.split(",")[0] for end in found["outcomes"]}
    assert ends == {"done", "killed", "refused"}
    assert {end.split(", ")[1] for end in found["outcomes"]} == {"old", "new"}
