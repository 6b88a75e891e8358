"""The warm-up runs the real codec."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from numba import config as numba_config
from numba.core.registry import CPUDispatcher

from pulsenet.codec.patch import decode_patch, encode_patch
from pulsenet.tensors.params import TensorSpec, make_table
from pulsenetd.warm_up import ELEMENTS, warm_up


def test_every_kind_of_tensor_is_encoded_and_decoded() -> None:
    assert warm_up() == 3 * len(range(7, ELEMENTS, 97))


def count_signatures() -> dict[str, int]:
    return {
        f"{name}.{attribute}": len(loop.signatures)
        for name, module in list(sys.modules.items())
        if name.startswith("pulsenet.codec")
        for attribute, loop in vars(module).items()
        if isinstance(loop, CPUDispatcher)
    }


@pytest.mark.skipif(bool(numba_config.DISABLE_JIT), reason="nothing is compiled")
def test_the_first_patch_between_a_baseline_and_a_snapshot_finds_every_loop_ready() -> None:
    warm_up()
    ready = count_signatures()
    table = make_table([TensorSpec("w", "BF16", (50_000,))])
    baseline = np.zeros(table.layout_size_bytes, np.uint8)
    snapshot = baseline.copy()
    table.view(snapshot, 0)[::90] += 1
    snapshot.setflags(write=False)
    blob = list(encode_patch(table, baseline, snapshot))
    assert sum(len(changes) for changes in decode_patch(blob, table, baseline)) == len(range(0, 50_000, 90))
    assert count_signatures() == ready
