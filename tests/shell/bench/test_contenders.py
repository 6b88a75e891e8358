"""Contenders decode from the old version and their pieces alone, on one thread or several."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pulsenet.tensors.params import ParameterTable
from pulsenetd.bench.contenders import Contender, list_contenders
from pulsenetd.bench.pairs import Pair
from pulsenetd.bench.rates import all_cores


@pytest.mark.parametrize("contender", list_contenders(), ids=lambda contender: contender.name)
def test_one_and_several_threads_give_the_same_pieces_and_bits(
    contender: Contender, mixed_table: ParameterTable, make_pair: Callable[[ParameterTable, float], Pair]
) -> None:
    pair = make_pair(mixed_table, 0.05)
    pieces = contender.encode(pair, map)
    region = pair.old.copy()
    blind = Pair(pair.table, np.zeros_like(pair.old), np.zeros_like(pair.new))
    with all_cores() as run_blocks:
        assert contender.encode(pair, run_blocks) == pieces
        contender.decode_into(blind, pieces, region, run_blocks)
    assert np.array_equal(region, pair.new)
