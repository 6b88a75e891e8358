"""The hand-over between a real training process and a real node, cut on either side in its middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from swarm import Node, Swarm, wait_until
from synthetic import MEGABYTE, SyntheticModel, connect

from pulsenet.local.client import PublishResult
from pulsenet.local.handover import WholeParts
from pulsenet.local.parts import SealedPart
from pulsenet.local.shared_memory import write_parts

pytestmark = pytest.mark.e2e

MODEL_SIZE_BYTES = 40 * MEGABYTE
"""Two tensors of half this size: two parts."""

DYING_TRAINER = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from synthetic import SyntheticModel, connect
from pulsenet.local.handover import WholeParts
from pulsenet.local.shared_memory import write_parts
model = SyntheticModel(int(sys.argv[3]), seed=99)
def parts():
    blocks = ((i, 0, model.table.view(model.region, i).view("u1")) for i in range(len(model.table.tensors)))
    for count, part in enumerate(write_parts(model.table, blocks)):
        if count == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        yield part
connect(Path(sys.argv[2])).publish_from(model.table, WholeParts(parts), 1, is_blocking=sys.argv[4] == "blocking")
"""


def publish(
    model: SyntheticModel, data_dir: Path, *, is_blocking: bool, between: Callable[[], None] | None = None
) -> PublishResult:
    """Publish part by part; ``between`` is called once, after the first part."""
    model.step()
    pending = [between] if between is not None else []

    def make_parts() -> Generator[SealedPart]:
        blocks = ((i, 0, model.table.view(model.region, i).view("u1")) for i in range(len(model.table.tensors)))
        with closing(write_parts(model.table, blocks)) as parts:
            for part in parts:
                yield part
                while pending:
                    pending.pop()()

    with connect(data_dir) as client:
        return client.publish_from(
            model.table,
            WholeParts(make_parts),
            model.step_count,
            wait=True,
            is_blocking=is_blocking,
            timeout_seconds=90,
        )


def count_memories(pid: int) -> int:
    """Count the shared memories a process has open; a mapping keeps a descriptor of its own."""
    inodes = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        if path.is_symlink() and "memfd:pulsenet" in os.readlink(path):
            inodes.add(path.stat().st_ino)
    return len(inodes)


@pytest.fixture(scope="module")
def trainer(swarm: Swarm) -> Iterator[Node]:
    node = swarm.add("trainer", "trainer")
    node.start().wait_ready()
    yield node
    node.clean_up()


def test_a_hand_over_cut_on_either_side_leaves_the_committed_version_and_no_memory(trainer: Node) -> None:
    model = SyntheticModel(MODEL_SIZE_BYTES)
    first = publish(model, trainer.data_dir, is_blocking=True)
    assert first.version is not None, first
    assert trainer.read_root(first.version.number) == model.root
    memories = count_memories(trainer.pid)

    for count, mode in enumerate(("blocking", "waiting"), start=1):
        arguments = (str(Path(__file__).parent), str(trainer.data_dir), str(MODEL_SIZE_BYTES), mode)
        died = subprocess.run([sys.executable, "-c", DYING_TRAINER, *arguments], timeout=60, check=False)
        assert died.returncode == -signal.SIGKILL
        wait_until("the publish was given up", lambda n=count: trainer.log.count("failed (cut_short)") == n or None)
        wait_until("its memory is gone", lambda: count_memories(trainer.pid) == memories or None)
        assert trainer.status["applied_version"] == first.version.number

    second = publish(model, trainer.data_dir, is_blocking=True)
    assert second.version is not None, second
    assert second.version.number == first.version.number + 1
    assert second.encoded_size_bytes < second.raw_size_bytes // 10
    assert trainer.read_root(second.version.number) == model.root

    def restart() -> None:
        trainer.kill()
        trainer.start().wait_ready()

    # The node dies in the middle; the training process, which still has the weights, hands them over again.
    third = publish(model, trainer.data_dir, is_blocking=False, between=restart)
    assert third.version is not None, third
    assert third.version.number == second.version.number + 1
    assert third.encoded_size_bytes < third.raw_size_bytes // 10
    assert trainer.read_root(third.version.number) == model.root
