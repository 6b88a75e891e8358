"""Snapshots from and engines on a CUDA device give the bits of the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pulsenet.codec.changes import Changes
from pulsenet.ids import Version
from pulsenet.serving.engine import FullUpdate, RecordsUpdate, apply_update
from pulsenet.serving.in_process import InProcessEngine
from pulsenet.tensors.digest import compute_region_root
from pulsenet.training.snapshot import collect_tensors, take_snapshot

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_every_tensor_leaves_the_device_as_it_leaves_the_cpu() -> None:
    """The cast on special and random bits, and strided tensors (A-DT-3)."""
    random_bits = np.random.default_rng(3).integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    random_bits[:6] = [0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF, 0x00000001, 0x80008000, 0x3F808000]
    on_cpu = {
        "random": torch.from_numpy(random_bits.view(np.float32)).reshape(1024, 1024),
        "transposed": torch.arange(12.0).reshape(3, 4).t(),
        "stepped": torch.arange(9, dtype=torch.bfloat16)[::2],
        "scalar": torch.tensor(1.5),
        "mask": torch.tensor([True, False]),
    }
    on_device = {name: tensor.cuda() for name, tensor in on_cpu.items()}
    on_device["transposed"] = torch.arange(12.0, device="cuda").reshape(3, 4).t()
    on_device["stepped"] = torch.arange(9, dtype=torch.bfloat16, device="cuda")[::2]
    assert dict(collect_tensors(on_device)[1]) == dict(collect_tensors(on_cpu)[1])


def test_an_engine_on_the_device_follows_in_place() -> None:
    """A-APP-2."""
    model = torch.nn.Linear(64, 32, dtype=torch.bfloat16)
    snapshot = take_snapshot(model)
    table = snapshot.table
    region = np.zeros(table.layout_size_bytes, dtype=np.uint8)
    for tensor_index, offset_bytes, data in snapshot.blocks():
        start = table.offsets[tensor_index] + offset_bytes
        region[start : start + data.size] = data
    served = torch.nn.Linear(64, 32, dtype=torch.bfloat16, device="cuda")
    addresses = [parameter.data_ptr() for parameter in served.parameters()]
    engine = InProcessEngine(served)
    apply_update(engine, FullUpdate(Version(0, 1), compute_region_root(table, region), table, region))

    weight_index = table.index_of("weight")
    view = table.view(region, weight_index)
    indices = np.array([0, 7, 2047], dtype=np.uint32)
    changes = Changes(weight_index, indices, view[indices], view[indices] ^ np.uint16(1))
    view[indices] ^= np.uint16(1)
    root = compute_region_root(table, region)
    apply_update(engine, RecordsUpdate(Version(0, 1), Version(0, 2), root, table, lambda: iter([changes])))
    assert engine.version == Version(0, 2)
    assert [parameter.data_ptr() for parameter in served.parameters()] == addresses
    assert served.weight.cpu().view(torch.int16).numpy().tobytes() == view.tobytes()
