import numpy as np
import pytest

from pulsenet.tensors import jit


def total(values: np.ndarray) -> int:
    result = 0
    for i in range(values.size):
        result += int(values[i])
    return result


def test_compiled_loop_gives_what_the_plain_loop_gives() -> None:
    values = np.arange(10, dtype=np.uint16)
    assert jit.compile_loop(total)(values) == total(values) == 45


def test_loop_compiles_where_no_cache_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_with_numba = jit.numba.njit

    def njit_without_cache(**options: bool) -> object:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return compile_with_numba(**options)

    monkeypatch.setattr(jit.numba, "njit", njit_without_cache)
    assert jit.compile_loop(total)(np.arange(4, dtype=np.uint16)) == 6
