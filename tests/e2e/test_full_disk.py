"""A reader whose disk runs full keeps what it has, and goes on by itself once there is room."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from swarm import Node, Swarm, wait_until
from synthetic import MEGABYTE, SyntheticModel, connect

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

DISK_SIZE_BYTES = 64 * MEGABYTE
MODEL_SIZE_BYTES = 12 * MEGABYTE
LEFT_SIZE_BYTES = 6 * MEGABYTE
"""Room for the node's records, and not for another version."""
RESUME_SECONDS_MAX = 60.0


@contextmanager
def small_disk(directory: Path) -> Iterator[None]:
    """Mount a disk of 64 MiB at a directory, or skip."""
    directory.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_SIZE_BYTES},mode=0700", "tmpfs", str(directory)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def count_refused(node: Node) -> float:
    """Return how often a full disk refused something."""
    _, text = node.get("/metrics")
    return sum(
        float(value) for value in re.findall(r'^pulsenet_\w+_total{.*reason="enospc".*} (\S+)', text, re.MULTILINE)
    )


def fill(path: Path) -> None:
    """Write a file that leaves little."""
    status = os.statvfs(path.parent)
    path.write_bytes(bytes(status.f_bavail * status.f_frsize - LEFT_SIZE_BYTES))


def test_a_full_disk_stops_nothing_and_the_next_version_comes_when_there_is_room(swarm: Swarm) -> None:
    """A-DSK-1: 64 MiB, a version that does not fit."""
    trainer = swarm.add("trainer", "trainer", "--codec=dense")
    reader = swarm.add("first", "inferencer", "--engine=none")
    model = SyntheticModel(MODEL_SIZE_BYTES)
    with small_disk(reader.data_dir):
        trainer.start().wait_ready()
        reader.start().wait_ready()
        with connect(trainer.data_dir) as client:
            first = model.publish_step(client)
            held = reader.wait_status("the first version is held", lambda status: status["mirror_version"] == first)
            filler = reader.data_dir / "filler"
            fill(filler)
            second = model.publish_step(client)
            wait_until("the disk refuses", lambda: count_refused(reader) > 0, 60)
            full = reader.status
            assert (full["pid"], full["mirror_version"]) == (held["pid"], first)
            assert reader.is_running
            filler.unlink()
            reader.wait_status("it goes on", lambda status: status["mirror_version"] == second, RESUME_SECONDS_MAX)
            assert reader.read_root(second) == model.root
        assert "Traceback" not in reader.log
        reader.stop()
