"""Sizes on a real training trace: what *plain* must reach on steps 20 to 36 of both views."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import config as numba_config

from pulsenet.codec.changes import apply_changes
from pulsenet.codec.patch import PatchTotals, decode_patch, encode_patch
from pulsenet.tensors.params import ParameterTable, TensorSpec, make_table

TRACE = Path(__file__).parents[4] / "shared" / "trace"

pytestmark = [
    pytest.mark.skipif(not TRACE.is_dir(), reason="the training trace is not beside this checkout"),
    pytest.mark.skipif(bool(numba_config.DISABLE_JIT), reason="loops over millions of elements need numba"),
]


def load_base(layout: list[dict[str, Any]], table: ParameterTable) -> np.ndarray:
    data = (TRACE / "base.safetensors").read_bytes()
    header_size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_size])
    region = np.zeros(table.layout_size_bytes, np.uint8)
    for entry in layout:
        start, end = header[entry["name"]]["data_offsets"]
        tensor = data[8 + header_size + start : 8 + header_size + end]
        table.view(region, table.index_of(entry["name"]))[:] = np.frombuffer(tensor, np.uint16)
    return region


def read_steps(view: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (flat indices in layout order, new bits) of steps 1 to 36; both are stored as byte planes."""
    stored = np.load(TRACE / f"diffs_{view}.npz")
    for step in range(1, 37):
        gaps = np.ascontiguousarray(stored[f"g{step}"].T).view(np.uint32).ravel()
        yield np.cumsum(gaps, dtype=np.int64), np.ascontiguousarray(stored[f"v{step}"].T).view(np.uint16).ravel()


@pytest.mark.parametrize(("view", "bits_max"), [("off", 12.0), ("grid", 12.9)])
def test_plain_reaches_its_size_on_real_steps(view: str, bits_max: float) -> None:
    layout = json.loads((TRACE / "trace.json").read_text())["layout"]
    table = make_table(TensorSpec(entry["name"], "BF16", tuple(entry["shape"])) for entry in layout)
    new = load_base(layout, table)
    encoded_size_bytes, changed_count = 0, 0
    for step, (flat, bits) in enumerate(read_steps(view), 1):
        old = new.copy()
        for entry in layout:
            first, last = np.searchsorted(flat, [entry["offset"], entry["offset"] + entry["numel"]])
            tensor = table.view(new, table.index_of(entry["name"]))
            tensor[flat[first:last] - entry["offset"]] = bits[first:last]
        if step < 20:
            continue
        totals = PatchTotals()
        pieces = list(encode_patch(table, old, new, totals=totals))
        assert totals.changed_count == flat.size
        encoded_size_bytes += totals.encoded_size_bytes
        changed_count += totals.changed_count
        for changes in decode_patch(pieces, table, old):
            apply_changes(table.view(old, changes.tensor_index), changes)
        assert np.array_equal(old, new)
    assert encoded_size_bytes * 8 / changed_count <= bits_max
