"""The gate fails where a step fails, and names what it had to skip."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

GATE = Path(__file__).resolve().parents[2] / ".ci" / "run"


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
