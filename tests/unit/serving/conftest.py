"""Versions of small models, made from dictionaries of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch

from pulsenet.codec.changes import Changes
from pulsenet.ids import Version
from pulsenet.serving.engine import FullUpdate, RecordsUpdate
from pulsenet.tensors.digest import compute_region_root
from pulsenet.training.snapshot import take_snapshot

State = Mapping[str, torch.Tensor]


def make_full(state: State, version: Version) -> FullUpdate:
    """Return a whole version as the daemon hands it over: read-only, in the dense layout."""
    snapshot = take_snapshot(state, compute_dtype=None)
    region = np.zeros(snapshot.table.layout_size_bytes, dtype=np.uint8)
    for tensor_index, offset_bytes, data in snapshot.blocks():
        start = snapshot.table.offsets[tensor_index] + offset_bytes
        region[start : start + data.size] = data
    region.setflags(write=False)
    return FullUpdate(version, compute_region_root(snapshot.table, region), snapshot.table, region)


def make_records(old: FullUpdate, new: FullUpdate) -> RecordsUpdate:
    """Return what leads from one version to the next."""
    records = []
    for tensor_index, spec in enumerate(new.table.tensors):
        old_bits = old.table.view(old.region, tensor_index)
        new_bits = new.table.view(new.region, tensor_index)
        indices = np.flatnonzero(old_bits != new_bits)
        if indices.size:
            records.append(
                Changes(tensor_index, indices.astype(spec.index_dtype), old_bits[indices], new_bits[indices])
            )
    return RecordsUpdate(old.version, new.version, new.root, new.table, lambda: iter(records))


@pytest.fixture(name="make_full")
def make_full_fixture() -> Callable[[State, Version], FullUpdate]:
    return make_full


@pytest.fixture(name="make_records")
def make_records_fixture() -> Callable[[FullUpdate, FullUpdate], RecordsUpdate]:
    return make_records
