"""The layouts of public systems give every bit back and have the sizes their description says."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pulsenet.tensors.params import ParameterTable, TensorSpec
from pulsenetd.bench.layouts import PUBLIC_LAYOUTS, Layout
from pulsenetd.bench.pairs import Pair

BY_NAME = {layout.name: layout for layout in PUBLIC_LAYOUTS}


def test_the_three_public_layouts_are_there() -> None:
    assert list(BY_NAME) == ["published", "index_value_zstd", "xor_zstd"]


@pytest.mark.parametrize("layout", PUBLIC_LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_every_bit_of_every_dtype_comes_back(
    layout: Layout, share: float, mixed_table: ParameterTable, make_pair: Callable[[ParameterTable, float], Pair]
) -> None:
    pair = make_pair(mixed_table, share)
    for tensor_index, spec in enumerate(mixed_table.tensors):
        old, new = pair.tensor_views(tensor_index)
        view = old.copy()
        layout.decode_into(spec, layout.encode(spec, old, new), view)
        assert np.array_equal(view, new), spec


@pytest.mark.parametrize(("gap", "width"), [(255, 1), (256, 2), (65_535, 2), (65_536, 4)])
def test_published_gaps_are_as_narrow_as_the_largest_allows(gap: int, width: int) -> None:
    spec = TensorSpec("w", "BF16", (70_000,))
    old = np.zeros(70_000, np.uint16)
    new = old.copy()
    new[[0, gap + 1]] = 7
    body = BY_NAME["published"].encode(spec, old, new)
    # Count, width, then for each of the planes its size and two bytes.
    assert len(body) == 2 + (width + 2) * 3
    assert body[1] == width
    view = old.copy()
    BY_NAME["published"].decode_into(spec, body, view)
    assert np.array_equal(view, new)


def test_index_and_value_take_six_bytes_before_compression() -> None:
    spec = TensorSpec("w", "BF16", (100,))
    old = np.zeros(100, np.uint16)
    new = old.copy()
    new[[3, 50, 99]] = [1, 2, 3]
    assert len(BY_NAME["index_value_zstd"].encode(spec, old, new)) == 2 + 3 * 6
