"""The gate on sixteen recorded steps of a real run, where a recording lies beside the checkout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numba import config as numba_config

from pulsenet.outer.gate import find_sent

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
    assert find_sent(recorded["off_theta"], recorded["off_delta"]).all()
    (layout,) = [one for one in json.loads((TRACE / "trace.json").read_text())["layout"] if one["name"] == DENSE]
    positions = recorded["off_idx"].astype(np.int64) - layout["offset"]
    inside = positions[(positions >= 0) & (positions < layout["numel"])]
    sent = find_sent(recorded[f"dense_theta/{DENSE}"], recorded[f"dense_delta/{DENSE}"])
    assert np.array_equal(np.flatnonzero(sent), inside)
