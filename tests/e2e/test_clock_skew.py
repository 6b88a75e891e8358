"""Nodes whose clocks are ten minutes off say so with the figure, and work all the same."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import swarm as harness
from swarm import Node, Swarm
from synthetic import MEGABYTE, SyntheticModel, connect

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

SKEW_SECONDS = 600
NAMED_SECONDS_MAX = 15.0

PROGRAM = """#!{python}
import sys, time
right = time.time
time.time = lambda: right() + {skew}
from pulsenetd.cli import main
sys.exit(main())
"""


def start_skewed(node: Node, skew_seconds: int, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a node by another clock."""
    program = directory / f"{node.name}.py"
    program.write_text(PROGRAM.format(python=sys.executable, skew=skew_seconds))
    program.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(harness, "COMMAND", str(program))
        node.start()


@pytest.mark.parametrize(("late", "skew_seconds"), [("inferencer", SKEW_SECONDS), ("trainer", -SKEW_SECONDS)])
def test_a_clock_ten_minutes_off_is_named_within_15_seconds_and_the_node_works(
    swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: str, skew_seconds: int
) -> None:
    """A-DHT-2: once the inferencer's, once the publisher's."""
    home = f"home-{late}"
    trainer = swarm.add(f"trainer-{late}", "trainer", home=home)
    readers = [swarm.add(f"r{number}-{late}", "inferencer", "--engine=none", home=home) for number in range(3)]
    wrong = trainer if late == "trainer" else readers[0]
    model = SyntheticModel(1 * MEGABYTE)
    for node in (trainer, *readers):  # the trainer opens the run
        if node is wrong:
            start_skewed(node, skew_seconds, tmp_path, monkeypatch)
        else:
            node.start()
    for node in (trainer, *readers):
        node.wait_ready(120)
    wrong.wait_status("it has peers", lambda status: status["peers"] >= 3, 120)
    met_at = time.monotonic()
    direction = "ahead of" if skew_seconds > 0 else "behind"
    wrong.wait_log(f"s {direction} its peers", NAMED_SECONDS_MAX)
    print(f"named {time.monotonic() - met_at:.0f} s after it had three peers")
    (line, *_) = [line for line in wrong.log.splitlines() if "its peers" in line]
    assert any(f"{figure}." in line for figure in range(SKEW_SECONDS - 3, SKEW_SECONDS + 4)), line
    assert "timedatectl" in line
    wrong.wait_log("directory times are corrected by it", 60)
    with connect(trainer.data_dir) as client:
        for _ in range(2):
            number = model.publish_step(client)
    for reader in readers:
        reader.wait_status("it follows", lambda status: status["mirror_version"] == number, 90)
        assert reader.read_root(number) == model.root
    for node in (trainer, *readers):
        node.stop()
