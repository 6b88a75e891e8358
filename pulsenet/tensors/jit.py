"""The one door to numba: hot loops are compiled once, cached on disk, and run without the GIL.

Each compiled loop has a numpy twin that defines its result. With ``NUMBA_DISABLE_JIT=1`` the loops run as plain
Python, so they must not rely on integers that wrap around.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Loop = TypeVar("Loop", bound=Callable[..., Any])


def compile_loop(loop: Loop) -> Loop:
    """Return ``loop`` compiled at its first call for each set of argument types."""
    try:
        return cast(Loop, numba.njit(nogil=True, cache=True)(loop))
    except RuntimeError:
        # Neither the package's folder nor the user's cache can be written: compile anew in each process.
        return cast(Loop, numba.njit(nogil=True)(loop))
