"""Runs every contender over the same pairs: verified first, then timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np

from pulsenet.codec.patch import RunBlocks
from pulsenet.errors import IntegrityError, LocalProtocolError
from pulsenetd.bench.contenders import Contender, list_contenders
from pulsenetd.bench.entropy import Bounds, compute_bounds
from pulsenetd.bench.pairs import Bytes, Pair
from pulsenetd.bench.rates import (
    all_cores,
    compare_blocks,
    copy_memory,
    count_cores,
    cut_blocks,
    measure_seconds,
    one_core,
    read_pair,
)

MB: Final = 1_000_000

Way = tuple[Callable[[], AbstractContextManager[RunBlocks]], Callable[[], float]]
CORES: Final[dict[str, Way]] = {"1": (one_core, time.process_time), "all": (all_cores, time.perf_counter)}
"""Ways to run and the clocks they are timed by."""


@dataclass(slots=True)
class _Sums:
    """What one contender took, over all pairs; seconds by kind and cores."""

    encoded_size_bytes: int = 0
    seconds: dict[tuple[str, str], float] = field(default_factory=dict)

    def add(self, kind: str, cores: str, seconds: float) -> None:
        self.seconds[kind, cores] = self.seconds.get((kind, cores), 0.0) + seconds


def measure_pairs(
    pairs: Iterable[Pair],
    *,
    seconds: float = 0.5,
    names: Iterable[str] | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Return the figures of all contenders over these pairs, as ``pulsenet bench codec --json`` prints them.

    Args:
        seconds: How long to repeat each measurement on each pair; the fastest repeat counts. 0 measures sizes
            alone, and speeds are ``None``.
        names: Contenders to measure; all by default.
        on_progress: Told what is being measured.

    Raises:
        IntegrityError: A contender did not give the new version bit for bit. Nothing of it was timed.
        LocalProtocolError: A name is unknown.
    """
    contenders = _choose(names)
    sums = {contender.name: _Sums() for contender in contenders}
    memory = _Sums()
    bounds = Bounds(0, 0.0, 0.0)
    pair_count = element_count = dense_size_bytes = layout_size_bytes = 0
    for pair in pairs:
        pair_count += 1
        element_count += pair.table.element_count
        dense_size_bytes += pair.table.size_bytes
        layout_size_bytes += pair.table.layout_size_bytes
        on_progress("entropy bounds")
        bounds += compute_bounds(pair.table, pair.old, pair.new)
        region = pair.old.copy()
        if seconds > 0:
            on_progress("memory")
            _time_memory(pair, region, memory, seconds)
        for contender in contenders:
            on_progress(contender.name)
            pieces = _verify(contender, pair, region)
            sums[contender.name].encoded_size_bytes += sum(map(len, pieces))
            if seconds > 0:
                _time_contender(contender, pair, pieces, region, sums[contender.name], seconds)
    return {
        "pairs": pair_count,
        "elements": element_count,
        "changes": bounds.changed_count,
        "density_ratio": bounds.changed_count / max(element_count, 1),
        "dense_bytes": dense_size_bytes,
        "entropy_bits": bounds.per_change(),
        "cores": count_cores(),
        "memory": _memory_rates(memory, layout_size_bytes),
        "codecs": [_figures(name, own, dense_size_bytes, bounds.changed_count) for name, own in sums.items()],
    }


def _choose(names: Iterable[str] | None) -> list[Contender]:
    contenders = list_contenders()
    if names is None:
        return contenders
    wanted = set(names)
    if unknown := wanted - {contender.name for contender in contenders}:
        raise LocalProtocolError(f"no codec or layout is called {', '.join(sorted(unknown))}")
    return [contender for contender in contenders if contender.name in wanted]


def _verify(contender: Contender, pair: Pair, region: Bytes) -> list[bytes]:
    """Encode, decode and compare every bit; return what was encoded."""
    pieces = contender.encode(pair, map)
    np.copyto(region, pair.old)
    contender.decode_into(pair, pieces, region, map)
    if not np.array_equal(region, pair.new):
        raise IntegrityError(f"{contender.name} does not give the new version back")
    return pieces


def _time_memory(pair: Pair, region: Bytes, memory: _Sums, seconds: float) -> None:
    tasks = cut_blocks(pair)
    works: dict[str, Callable[[RunBlocks], None]] = {
        "copy": lambda run_blocks: copy_memory(pair, region, run_blocks),
        "read": lambda run_blocks: read_pair(pair, run_blocks),
        "compare": lambda run_blocks: compare_blocks(tasks, run_blocks),
    }
    for cores, (context, clock) in CORES.items():
        with context() as run_blocks:
            for kind, work in works.items():
                work(run_blocks)
                memory.add(kind, cores, measure_seconds(partial(work, run_blocks), seconds=seconds, clock=clock))


def _time_contender(
    contender: Contender, pair: Pair, pieces: list[bytes], region: Bytes, own: _Sums, seconds: float
) -> None:
    for cores, (context, clock) in CORES.items():
        with context() as run_blocks:

            def encode(run_blocks: RunBlocks = run_blocks) -> None:
                contender.encode(pair, run_blocks)

            def decode(run_blocks: RunBlocks = run_blocks) -> None:
                contender.decode_into(pair, pieces, region, run_blocks)

            def restore() -> None:
                np.copyto(region, pair.old)

            own.add("encode", cores, measure_seconds(encode, seconds=seconds, clock=clock))
            own.add("decode", cores, measure_seconds(decode, seconds=seconds, prepare=restore, clock=clock))


def _rate(size_bytes: int, seconds: float | None) -> float | None:
    """Return MB (10^6 bytes) per second; ``None`` if it was not timed."""
    return None if not seconds else size_bytes / MB / seconds


def _memory_rates(memory: _Sums, layout_size_bytes: int) -> dict[str, float | None]:
    rates = {}
    for kind, factor in (("copy", 1), ("read", 2), ("compare", 2)):
        for cores, suffix in (("1", ""), ("all", "_all_cores")):
            rates[f"{kind}_mb_s{suffix}"] = _rate(factor * layout_size_bytes, memory.seconds.get((kind, cores)))
    return rates


def _figures(name: str, own: _Sums, dense_size_bytes: int, changed_count: int) -> dict[str, Any]:
    size_bytes = own.encoded_size_bytes
    return {
        "name": name,
        "bytes": size_bytes,
        "ratio": dense_size_bytes / size_bytes if size_bytes else 0.0,
        "bits_per_change": size_bytes * 8 / changed_count if changed_count else 0.0,
        "encode_mb_s": _rate(dense_size_bytes, own.seconds.get(("encode", "1"))),
        "decode_mb_s": _rate(dense_size_bytes, own.seconds.get(("decode", "1"))),
        "encode_all_cores_mb_s": _rate(dense_size_bytes, own.seconds.get(("encode", "all"))),
        "decode_all_cores_mb_s": _rate(dense_size_bytes, own.seconds.get(("decode", "all"))),
    }
