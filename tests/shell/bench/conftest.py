"""Small pairs of versions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pulsenet.tensors.params import ParameterTable, TensorSpec, make_table
from pulsenetd.bench.pairs import Pair

DTYPES = ("BF16", "F16", "F32", "F64", "I64", "I32", "U8", "BOOL", "F8_E4M3", "F8_E5M2")


def change_share(table: ParameterTable, share: float) -> Pair:
    """Return random bits of which a share took one step up in bits."""
    generator = np.random.default_rng(5)
    old = np.zeros(table.layout_size_bytes, np.uint8)
    new = old.copy()
    pair = Pair(table, old, new)
    for tensor_index, spec in enumerate(table.tensors):
        before, after = pair.tensor_views(tensor_index)
        before[:] = np.frombuffer(generator.bytes(spec.size_bytes), spec.bits_dtype)
        after[:] = before + (generator.random(spec.element_count) < share).astype(spec.bits_dtype)
    return pair


@pytest.fixture(scope="session")
def mixed_table() -> ParameterTable:
    """Tensors of all widths, a scalar and an empty one."""
    specs = [TensorSpec(dtype, dtype, (61, 33)) for dtype in DTYPES]
    return make_table([*specs, TensorSpec("scalar", "BF16", ()), TensorSpec("void", "F32", (0, 3))])


@pytest.fixture(scope="session")
def make_pair() -> Callable[[ParameterTable, float], Pair]:
    return change_share
