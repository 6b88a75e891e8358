"""Sizes on a real training trace: what each codec must reach on steps 20 to 36 of both views."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import config as numba_config

from pulsenet.codec.changes import apply_changes
from pulsenet.codec.patch import PatchTotals, decode_patch, encode_patch
from pulsenet.tensors.floats import from_ordered, to_ordered
from pulsenet.tensors.params import ParameterTable, TensorSpec, make_table

TRACE = Path(__file__).parents[4] / "shared" / "trace"

pytestmark = pytest.mark.skipif(bool(numba_config.DISABLE_JIT), reason="loops over millions of elements need numba")
needs_trace = pytest.mark.skipif(not TRACE.is_dir(), reason="the training trace is not beside this checkout")


def load_base(layout: list[dict[str, Any]], table: ParameterTable) -> np.ndarray:
    data = (TRACE / "base.safetensors").read_bytes()
    header_size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_size])
    region = np.zeros(table.layout_size_bytes, np.uint8)
    for entry in layout:
        start, end = header[entry["name"]]["data_offsets"]
        tensor = data[8 + header_size + start : 8 + header_size + end]
        table.view(region, table.index_of(entry["name"]))[:] = np.frombuffer(tensor, np.uint16)
    return region


def read_steps(view: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (flat indices in layout order, new bits) of steps 1 to 36; both are stored as byte planes."""
    stored = np.load(TRACE / f"diffs_{view}.npz")
    for step in range(1, 37):
        gaps = np.ascontiguousarray(stored[f"g{step}"].T).view(np.uint32).ravel()
        yield np.cumsum(gaps, dtype=np.int64), np.ascontiguousarray(stored[f"v{step}"].T).view(np.uint16).ravel()


def h(counts: np.ndarray) -> float:
    """Return the bits it takes to tell which of several kinds each of ``counts`` things is."""
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / counts.sum())).sum())


def exponent_bound_bits(old: np.ndarray, new: np.ndarray) -> float:
    """Return H(position | exponent) + H(step | exponent) of one step, in bits."""
    exponents, changed = (old >> 7) & 0xFF, old != new
    steps = to_ordered(new[changed]) - to_ordered(old[changed])
    members, hits = np.bincount(exponents, minlength=256), np.bincount(exponents[changed], minlength=256)
    positions = sum(h(np.array([hit, all_ - hit])) for hit, all_ in zip(hits, members, strict=True))
    sizes = sum(
        h(np.unique(steps[exponents[changed] == exponent], return_counts=True)[1]) for exponent in np.flatnonzero(hits)
    )
    return positions + sizes


def walk(view: str) -> Iterator[tuple[ParameterTable, np.ndarray, np.ndarray]]:
    """Yield (table, old region, new region) of steps 20 to 36."""
    layout = json.loads((TRACE / "trace.json").read_text())["layout"]
    table = make_table(TensorSpec(entry["name"], "BF16", tuple(entry["shape"])) for entry in layout)
    new = load_base(layout, table)
    for step, (flat, bits) in enumerate(read_steps(view), 1):
        old = new.copy()
        for entry in layout:
            first, last = np.searchsorted(flat, [entry["offset"], entry["offset"] + entry["numel"]])
            tensor = table.view(new, table.index_of(entry["name"]))
            tensor[flat[first:last] - entry["offset"]] = bits[first:last]
        if step >= 20:
            yield table, old, new


@needs_trace
@pytest.mark.parametrize(
    ("view", "plain_bits_max", "tight_bits_max", "over_bound_max"),
    [("off", 12.0, 8.0, 1.08), ("grid", 12.9, 7.0, 1.15)],
)
def test_codecs_reach_their_sizes_on_real_steps(
    view: str, plain_bits_max: float, tight_bits_max: float, over_bound_max: float
) -> None:
    size_bits = dict.fromkeys(("plain", "tight"), 0)
    bound_bits, changed_count = 0.0, 0
    for table, old, new in walk(view):
        for codec in size_bits:
            totals, found = PatchTotals(), old.copy()
            pieces = list(encode_patch(table, old, new, codec=codec, totals=totals))
            size_bits[codec] += totals.encoded_size_bytes * 8
            for changes in decode_patch(pieces, table, found):
                apply_changes(table.view(found, changes.tensor_index), changes)
            assert np.array_equal(found, new)
        changed_count += totals.changed_count
        bound_bits += exponent_bound_bits(old.view(np.uint16), new.view(np.uint16))
    assert size_bits["plain"] / changed_count <= plain_bits_max
    assert size_bits["tight"] / changed_count <= tight_bits_max
    assert size_bits["tight"] <= bound_bits * over_bound_max


@pytest.mark.parametrize(("percent", "plain_ratio_min"), [(0.1, 500), (0.5, 135), (0.77, 95), (1, 75), (5, 17)])
def test_scattered_steps_of_one_cost_little_more_than_their_entropy(percent: float, plain_ratio_min: float) -> None:
    """A-PRF-1."""
    generator = np.random.default_rng(6)
    count = 8_000_000
    table = make_table([TensorSpec("w", "BF16", (count,))])
    old = np.zeros(table.layout_size_bytes, np.uint8)
    bits = (generator.standard_normal(count, np.float32) * np.float32(0.02)).view(np.uint32) >> np.uint32(16)
    table.view(old, 0)[:] = bits.astype(np.uint16)
    density = percent / 100
    hit = generator.random(count) < density
    ups = generator.random(count) < 0.5
    new = old.copy()
    ordered = to_ordered(table.view(old, 0))
    moved = from_ordered(np.where(ups, ordered + np.uint16(1), ordered - np.uint16(1)))
    table.view(new, 0)[hit] = moved[hit]
    sizes = {}
    for codec in ("plain", "tight"):
        totals = PatchTotals()
        list(encode_patch(table, old, new, codec=codec, totals=totals))
        sizes[codec] = totals.encoded_size_bytes
    entropy_bits = -np.log2(density) - (1 - density) / density * np.log2(1 - density) + 1
    assert table.size_bytes / sizes["plain"] >= plain_ratio_min
    assert sizes["tight"] * 8 / totals.changed_count <= entropy_bits * 1.06
