"""How fast this machine moves memory: what codec speeds are measured against, in the same run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

import numpy as np

from pulsenet import limits
from pulsenet.codec.changes import Bits
from pulsenet.codec.compare import find_changes
from pulsenet.codec.patch import TASK_SIZE_BYTES, RunBlocks
from pulsenetd.bench.loops import read_both
from pulsenetd.bench.pairs import Bytes, Pair

REPEATS_MIN: Final = 2
REPEATS_MAX: Final = 500
"""Enough that one of them falls into a moment when nothing else runs."""


def count_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


@contextmanager
def one_core() -> Iterator[RunBlocks]:
    """Yield ``map``: everything happens in the calling thread."""
    yield map


@contextmanager
def all_cores() -> Iterator[RunBlocks]:
    """Yield a ``map`` with one thread for each core."""
    with ThreadPoolExecutor(count_cores()) as threads:
        yield threads.map


def measure_seconds(
    work: Callable[[], object],
    *,
    seconds: float,
    prepare: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the least time ``work`` took: repeated for about ``seconds``, at least twice unless one takes as long.

    Args:
        prepare: Called before each repeat, not timed.
        clock: ``time.process_time`` for what one core does: it counts every thread, and no waiting for a core that
            others use.
    """
    least, spent, repeats = float("inf"), 0.0, 0
    while repeats < REPEATS_MAX and (spent < seconds or (repeats < REPEATS_MIN and least < seconds)):
        prepare()
        start = clock()
        work()
        elapsed = clock() - start
        least, spent, repeats = min(least, elapsed), spent + elapsed, repeats + 1
    return least


def copy_memory(pair: Pair, out: Bytes, run_blocks: RunBlocks) -> None:
    """Copy the old version, in parts."""

    def copy(part: slice) -> None:
        np.copyto(out[part], pair.old[part])

    list(run_blocks(copy, _parts(pair.old.size)))


def read_pair(pair: Pair, run_blocks: RunBlocks) -> None:
    """Read both versions and do nothing with them."""

    def read(part: slice) -> None:
        old, new = pair.old[part], pair.new[part]
        whole = old.size // 8 * 8
        read_both(old[:whole].view(np.uint64), new[:whole].view(np.uint64))

    list(run_blocks(read, _parts(pair.old.size)))


def cut_blocks(pair: Pair) -> list[list[tuple[Bits, Bits]]]:
    """Return the blocks of both versions, in tasks as encoders make them."""
    tasks: list[list[tuple[Bits, Bits]]] = [[]]
    size_bytes = 0
    for tensor_index in range(len(pair.table.tensors)):
        old, new = pair.tensor_views(tensor_index)
        for start in range(0, old.size, limits.BLOCK_ELEMENTS):
            if size_bytes >= TASK_SIZE_BYTES:
                tasks.append([])
                size_bytes = 0
            block = slice(start, start + limits.BLOCK_ELEMENTS)
            tasks[-1].append((old[block], new[block]))
            size_bytes += old[block].nbytes
    return tasks


def compare_blocks(tasks: list[list[tuple[Bits, Bits]]], run_blocks: RunBlocks) -> None:
    """Find all changes of blocks that :func:`cut_blocks` returned."""

    def find(task: list[tuple[Bits, Bits]]) -> None:
        for old, new in task:
            find_changes(old, new)

    list(run_blocks(find, tasks))


def _parts(size_bytes: int) -> list[slice]:
    starts = range(0, size_bytes, TASK_SIZE_BYTES)
    return [slice(start, min(start + TASK_SIZE_BYTES, size_bytes)) for start in starts]
