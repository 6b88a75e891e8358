from collections.abc import Callable

import numpy as np
import pytest

from pulsenet.ids import Digest
from pulsenet.outer.checks import Expected
from pulsenet.outer.contribution import Contribution, Entries
from pulsenet.tensors.params import ParameterTable, TensorSpec

ROOT = Digest(bytes(range(32)))


@pytest.fixture
def table() -> ParameterTable:
    return ParameterTable((TensorSpec("a", "F32", (2, 3)), TensorSpec("b", "F32", ())))


@pytest.fixture
def make_contribution() -> Callable[..., Contribution]:
    """Two entries of tensor ``a``, one of ``b``, unless told otherwise."""

    def make(**changes: object) -> Contribution:
        first = Entries(0, np.array([1, 4], np.uint32), np.array([3.0, 0.0], np.float32))
        second = Entries(1, np.array([0], np.uint32), np.array([-4.0], np.float32))
        given = {"round_index": 5, "state_root": ROOT, "inner_step_count": 8, "entries": (first, second)} | changes
        return Contribution(**given)  # type: ignore[arg-type]

    return make


@pytest.fixture
def expected(table: ParameterTable) -> Expected:
    return Expected(table=table, round_index=5, state_root=ROOT, is_dense=False, norm_max=5.0)
