"""Versions of a test model in shared memory, as the node hands them to an engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from pulsenet.codec.changes import Changes
from pulsenet.ids import Version
from pulsenet.local.shared_memory import Region
from pulsenet.serving.engine import FullUpdate, RecordsUpdate
from pulsenet.tensors.digest import compute_region_root
from pulsenet.tensors.params import ParameterTable
from pulsenet.training.snapshot import take_snapshot


@dataclass(slots=True)
class Published:
    """What a publisher and a node's mirror hold."""

    version: Version
    table: ParameterTable
    region: Region

    @classmethod
    def take(cls, model: Any, version: Version) -> Published:
        """Copy a model's weights into shared memory."""
        snapshot = take_snapshot(model, compute_dtype=None)
        region = Region.create("test-version", snapshot.table.layout_size_bytes)
        for tensor_index, offset_bytes, data in snapshot.blocks():
            start = snapshot.table.offsets[tensor_index] + offset_bytes
            region.bytes[start : start + data.size] = data
        return cls(version, snapshot.table, region)

    @contextmanager
    def as_full(self) -> Iterator[FullUpdate]:
        """Lend everything."""
        descriptor = self.region.reopen_for_reading()
        try:
            root = compute_region_root(self.table, self.region.bytes)
            yield FullUpdate(self.version, root, self.table, self.region.bytes, descriptor)
        finally:
            os.close(descriptor)

    def records_from(self, base: Published) -> RecordsUpdate:
        """Return what leads here from another version."""
        records = []
        for tensor_index, spec in enumerate(self.table.tensors):
            old_bits = self.table.view(base.region.bytes, tensor_index)
            new_bits = self.table.view(self.region.bytes, tensor_index)
            indices = np.flatnonzero(old_bits != new_bits)
            if indices.size:
                records.append(
                    Changes(tensor_index, indices.astype(spec.index_dtype), old_bits[indices], new_bits[indices])
                )
        root = compute_region_root(self.table, self.region.bytes)
        return RecordsUpdate(base.version, self.version, root, self.table, lambda: iter(records))
