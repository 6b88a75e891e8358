"""A training process with a device baseline beside a real node: changes cross, whatever the node went through."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from swarm import Node, Swarm

from pulsenet.local.client import PublishResult
from pulsenet.local.protocol import PublishStatus
from pulsenet.tensors.digest import compute_region_root
from pulsenet.training import attach_publisher
from pulsenet.training.publisher import CopyProgress, Publisher
from pulsenet.training.snapshot import take_snapshot

pytestmark = pytest.mark.e2e


class Model(torch.nn.Module):
    """Two layers of FP32 masters, published as BF16: two parts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = torch.nn.Linear(2048, 4096)
        self.second = torch.nn.Linear(4096, 2048)
        self.step_count = 0

    def step(self) -> None:
        """Move every master; about 1 % of the BF16 values follow."""
        self.step_count += 1
        with torch.no_grad():
            for parameter in self.parameters():
                parameter += torch.randn(parameter.shape) * parameter.abs() * 3e-5

    @property
    def root(self) -> str:
        plan = take_snapshot(self)
        region = np.zeros(plan.table.layout_size_bytes, np.uint8)
        for tensor_index, offset_bytes, data in plan.blocks():
            start = plan.table.offsets[tensor_index] + offset_bytes
            region[start : start + data.size] = data
        return compute_region_root(plan.table, region).hex()


def publish(publisher: Publisher, model: Model, trainer: Node) -> PublishResult:
    model.step()
    result = publisher.publish(model, step=model.step_count, wait=True, timeout_seconds=60.0)
    assert result.status is PublishStatus.COMMITTED, result
    assert result.version is not None
    assert trainer.read_root(result.version.number) == model.root
    return result


def own_memories(sizes: list[int]) -> None:
    """Add the sizes of the shared memories that this process has open."""
    for path in Path("/proc/self/fd").iterdir():
        if path.is_symlink() and "memfd:pulsenet" in os.readlink(path):
            sizes.append(path.stat().st_size)


@pytest.fixture(scope="module")
def trainer(swarm: Swarm) -> Iterator[Node]:
    node = swarm.add("trainer", "trainer")
    node.start().wait_ready()
    yield node
    node.clean_up()


def test_changes_cross_and_a_killed_node_gets_whole_weights_once(trainer: Node) -> None:
    model = Model()
    sizes: list[int] = []

    def note(progress: CopyProgress) -> None:
        own_memories(sizes)

    with attach_publisher(data_dir=trainer.data_dir, device_baseline=True, on_progress=note) as publisher:
        publish(publisher, model, trainer)
        assert max(sizes) > 8_000_000
        for _ in range(2):
            sizes.clear()
            patch = publish(publisher, model, trainer)
            assert 0 < patch.changed_count < patch.element_count // 20
            assert max(sizes) < 2_000_000

        trainer.kill()
        trainer.start().wait_ready()
        sizes.clear()
        patch = publish(publisher, model, trainer)
        assert max(sizes) > 8_000_000
        assert patch.encoded_size_bytes < patch.raw_size_bytes // 10
        sizes.clear()
        publish(publisher, model, trainer)
        assert max(sizes) < 2_000_000
