"""The gate fails where a step fails, names what it had to skip, and leaves no test out."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GATE = ROOT / ".ci" / "run"


def run_step(code: int) -> tuple[int, str]:
    """Run one step that ends with ``code``, in the gate's own shell and by its own function."""
    head = GATE.read_text().partition('step "install"')[0].replace('cd "$(dirname "$0")/.."', "")
    script = f"{head}\nmay_skip 'one step' sh -c 'exit {code}'\nprintf 'skipped: %s' \"$skipped\""
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, timeout=60)
    return ended.returncode, ended.stdout


@pytest.mark.parametrize(
    ("code", "outcome"), [(0, (0, "skipped: ")), (77, (0, "skipped: one step")), (1, (1, "")), (3, (3, ""))]
)
def test_only_a_step_that_says_why_may_be_skipped(code: int, outcome: tuple[int, str]) -> None:
    assert run_step(code) == outcome


@pytest.mark.parametrize("failing", ["", *re.findall(r"^(?:begin .*)?\bmake ([\w-]+)", GATE.read_text(), re.MULTILINE)])
def test_the_gate_fails_with_any_of_its_steps(failing: str, tmp_path: Path) -> None:
    """Those that run beside the others too."""
    make = f'#!/bin/sh\necho "$1 ran"\n[ "$1" != "{failing}" ]\n'
    for name, text in (("make", make), (".ci/programs", "#!/bin/sh\n"), (".venv/bin/python", "#!/bin/sh\n")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    gate = shutil.copy(GATE, tmp_path / ".ci")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = subprocess.run(["bash", gate], env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == (1 if failing else 0), ended.stderr
    assert f"{failing} ran" in ended.stdout
    assert ("== done" in ended.stdout) == (not failing)


def test_what_is_compiled_is_kept_whatever_the_image_says() -> None:
    command = ["make", "--silent", "--eval", "probe: ; @env", "probe"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    told = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    names = {line.partition("=")[0] for line in told.stdout.splitlines()}
    assert "PATH" in names
    assert "PYTHONDONTWRITEBYTECODE" not in names


def test_every_test_file_is_run_once_by_the_gate() -> None:
    """Those whose coverage is measured are listed; the others are whatever else there is."""
    command = ["make", "--dry-run", "coverage", "simulations"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    # The first runs some of them with the compiler off, and they are run again with it.
    _, *runs = [line.split() for line in listed.stdout.splitlines() if "pytest" in line and "tests/" in line]

    def is_run(path: Path, words: list[str]) -> bool:
        places = [
            str(place.relative_to(ROOT)) for place in (path, *path.parents) if place != ROOT and ROOT in place.parents
        ]
        is_ignored = any(f"--ignore={place}" in words for place in places)
        return not is_ignored and any(place in words for place in places)

    counts = {path: sum(is_run(path, words) for words in runs) for path in (ROOT / "tests").rglob("test_*.py")}
    assert counts
    assert {path for path, count in counts.items() if count != 1} == set()
