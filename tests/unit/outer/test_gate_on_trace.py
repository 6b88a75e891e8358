"""The gate on sixteen recorded steps of a real run, where a recording lies beside the checkout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numba import config as numba_config

from pulsenet.outer.gate import gate_entries

TRACE = Path(__file__).parents[4] / "shared" / "trace"
WINDOW = TRACE / "loco_window_20_16.safetensors"
DENSE = "model.layers.20.self_attn.o_proj.weight"

pytestmark = [
    pytest.mark.skipif(not WINDOW.is_file(), reason="no recorded run beside the checkout"),
    pytest.mark.skipif(bool(numba_config.DISABLE_JIT), reason="loops over a million elements need numba"),
]


def test_the_gate_passes_exactly_what_was_recorded() -> None:
    """6 % of all weights at H = 16; one tensor was kept whole, so that what is held back is checked too."""
    safetensors = pytest.importorskip("safetensors.numpy")
    recorded = safetensors.load_file(WINDOW)
    theta = recorded["off_theta"]
    assert len(gate_entries(theta, theta, recorded["off_delta"], tensor_index=0)) == theta.size
    (layout,) = [one for one in json.loads((TRACE / "trace.json").read_text())["layout"] if one["name"] == DENSE]
    positions = recorded["off_idx"].astype(np.int64) - layout["offset"]
    inside = positions[(positions >= 0) & (positions < layout["numel"])]
    theta = recorded[f"dense_theta/{DENSE}"].reshape(-1)
    sent = gate_entries(theta, theta, recorded[f"dense_delta/{DENSE}"].reshape(-1), tensor_index=0)
    assert sent.indices is not None
    assert np.array_equal(sent.indices, inside)
