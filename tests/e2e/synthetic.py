"""A small model without torch, and a training loop's end of the hand-off."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from pulsenet.local.client import Client, PublishResult
from pulsenet.local.shared_memory import write_snapshot
from pulsenet.tensors.digest import compute_region_root
from pulsenet.tensors.params import ParameterTable, TensorSpec, make_table

MEGABYTE = 1 << 20


def make_small_table(size_bytes: int) -> ParameterTable:
    """Return a table with the shapes that break naive code: mixed types, no dimension, no element."""
    columns = 1024
    rows = max(1, size_bytes // (2 * 2 * columns))
    return make_table(
        [
            TensorSpec("embedding.weight", "BF16", (rows, columns)),
            TensorSpec("layer.weight", "BF16", (columns, rows)),
            TensorSpec("norm.weight", "F32", (columns,)),
            TensorSpec("position.offset", "I64", ()),
            TensorSpec("unused.weight", "BF16", (0, 7)),
        ]
    )


class SyntheticModel:
    """Bits that change like weights under a small learning rate. ``root`` is what every follower must end at."""

    def __init__(self, size_bytes: int, seed: int = 7) -> None:
        self.table = make_small_table(size_bytes)
        self._random = np.random.default_rng(seed)
        self.region: Any = self._random.integers(0, 256, self.table.layout_size_bytes, dtype=np.uint8)
        self.step_count = 0

    def step(self) -> None:
        """Move about 1 % of the values, most of them by one unit in the last place."""
        self.step_count += 1
        for index in range(2):
            bits = self.table.view(self.region, index)
            moved = self._random.integers(0, bits.size, max(1, bits.size // 100))
            bits[moved] += self._random.choice(np.array([1, 65_535], np.uint16), moved.size)
        bits = self.table.view(self.region, 0)
        bits[:3] = (0x7FC1 + self.step_count, 0x8000 if self.step_count % 2 else 0x0000, self.step_count)
        self.table.view(self.region, 3)[...] = self.step_count

    @property
    def root(self) -> str:
        """The root of the present bits."""
        return compute_region_root(self.table, self.region).hex()

    def publish(self, client: Client, *, wait: bool = True) -> PublishResult:
        """Hand the present bits to a trainer's daemon."""
        blocks = (
            (index, 0, self.table.view(self.region, index).view(np.uint8)) for index in range(len(self.table.tensors))
        )
        descriptor = write_snapshot(self.table, blocks)
        try:
            return client.publish(self.table, descriptor, self.step_count, wait, timeout_seconds=60)
        finally:
            os.close(descriptor)

    def publish_step(self, client: Client) -> int:
        """Make a step, publish it, wait for the commit; return the number of the version."""
        self.step()
        result = self.publish(client)
        assert result.status == "committed", result
        assert result.version is not None
        return result.version.number


def connect(data_dir: Path) -> Client:
    """Attach to a node's daemon."""
    return Client.connect(data_dir, timeout_seconds=10)
