"""A second process finds what the first one compiled."""

from __future__ import annotations

import subprocess
import sys

import pytest
from numba import config as numba_config

from pulsenetd.warm_up import warm_up

SECOND_PROCESS = """
import sys
import numba
from pulsenetd.warm_up import warm_up
assert warm_up() > 0
loops = {
    f"{module.__name__}.{name}": loop.stats
    for module in list(sys.modules.values()) if (module.__name__ or "").startswith("pulsenet.")
    for name, loop in vars(module).items() if isinstance(loop, numba.core.registry.CPUDispatcher)
}
called = [name for name, stats in loops.items() if stats.cache_hits]
print(*called, sep="\\n")
print(*[name for name, stats in loops.items() if stats.cache_misses], sep="\\n", file=sys.stderr)
"""


@pytest.mark.skipif(bool(numba_config.DISABLE_JIT), reason="nothing is compiled")
def test_a_second_process_compiles_nothing() -> None:
    warm_up()
    second = subprocess.run(
        [sys.executable, "-c", SECOND_PROCESS], capture_output=True, text=True, check=True, timeout=120
    )
    assert second.stderr.split() == []
    loaded = second.stdout.split()
    for name in ("codec.compare._list_loop", "codec.tight._encode_loop", "codec.tight._decode_loop"):
        assert f"pulsenet.{name}" in loaded
