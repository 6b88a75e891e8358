"""Loads the compiled loops before the first patch needs them: about a second that would fall into an update."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

import numpy as np

from pulsenet.codec.patch import decode_patch, encode_patch
from pulsenet.tensors.digest import compute_region_root
from pulsenet.tensors.params import TensorSpec, make_table
from pulsenetd.logs import logger

ELEMENTS = 4_096

CHANGED = np.flatnonzero(np.random.default_rng(1).random(ELEMENTS) < 0.09)
"""Some of the elements, so irregular that *tight* is the shortest encoding of what it can encode."""

SAY_SECONDS: Final = 4.0
"""Loading what was compiled before takes about one; compiling takes half a minute, and minutes on a busy machine."""


def warm_up_aloud(work: Callable[[], object] | None = None, say_seconds: float = SAY_SECONDS) -> None:
    """Warm up, and say so where it is the first time in this environment: a patch that comes meanwhile waits for it.

    Args:
        work: What is done; :func:`warm_up` if not given.
        say_seconds: Work that is done by then is not worth a word.
    """
    begun_at = time.monotonic()
    told = threading.Event()

    def say() -> None:
        told.set()
        logger.info("compiling loops, once in this environment: the first patch waits for it")

    timer = threading.Timer(say_seconds, say)
    timer.daemon = True
    timer.start()
    try:
        (work or warm_up)()
    finally:
        timer.cancel()
    if told.is_set():
        logger.info("loops are compiled, after %.0f s", time.monotonic() - begun_at)


def warm_up() -> int:
    """Encode and decode small patches of every kind of tensor, with every codec; return how many values one changed."""
    table = make_table([TensorSpec(dtype, dtype, (ELEMENTS,)) for dtype in ("BF16", "F32", "U8")])
    old = np.zeros(table.layout_size_bytes, np.uint8)
    new = old.copy()
    for index in range(len(table.tensors)):
        table.view(new, index)[CHANGED] += 1
    changed_count = 0
    # A baseline and a mirror are writable and a snapshot is not: each is another type to the compiler.
    for sealed in ((), (new,), (old, new)):
        for region in sealed:
            region.setflags(write=False)
        compute_region_root(table, new)
        for codec in ("tight", "plain", "absolute", "dense"):
            blob = list(encode_patch(table, old, new, codec=codec))
            changed_count = sum(len(changes) for changes in decode_patch(blob, table, old))
    return changed_count
