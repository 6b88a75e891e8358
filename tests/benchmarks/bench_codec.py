"""The codec's promises, measured: sizes on recorded training steps, speeds as ratios within one run.

Usage: python tests/benchmarks/bench_codec.py [--trace DIR] [--sizes-only] [--json] [--write docs/benchmarks.md]

Prints each promise with its figure and whether it is kept; exits 1 if one is broken. The trace is expected in
shared/trace beside the checkout; without it there is nothing to measure against and the run is skipped (exit 0).
One-core figures are processor time of the whole process, and threads of libraries are off; those of all cores are
wall time. Where other processes take the cores meanwhile, those lines are not measured. Speeds are of full blocks, as
models worth sharing have them; the recorded model's own small tensors are timed beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from reporting import Figure, add_summary_option, describe_machine, measure_load, replace_block, write_summary

from pulsenet.codec.patch import CODEC_CHOICES
from pulsenet.tensors.params import ParameterTable, TensorSpec, make_table
from pulsenetd.bench.entropy import position_bits
from pulsenetd.bench.measure import measure_pairs
from pulsenetd.bench.pairs import Pair
from pulsenetd.bench.trace import VIEWS, Trace

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT.parent / "shared" / "trace"
STEPS = (20, 36)

TIGHT_BITS_MAX = {"off": 8.0, "grid": 7.0}
PLAIN_BITS_MAX = {"off": 12.0, "grid": 12.9}
TIGHT_OVER_BOUND_MAX = {"off": 1.08, "grid": 1.15}
PUBLISHED_OVER_TIGHT_MIN = 2.6

SCATTERED_ELEMENTS = 8_000_000
SCATTERED_RATIOS_MIN = {0.001: 500.0, 0.005: 135.0, 0.0077: 95.0, 0.01: 75.0, 0.05: 17.0}
"""What *plain* must save (case A-PRF-1), by density."""
SCATTERED_OVER_BOUND_MAX = 1.06

SPEED_COPIES = 8
"""How often one step of the trace is repeated to be measured: 142 MB a version, beyond the caches."""

THREADS_OFF = dict.fromkeys(("NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Libraries read these when they start, so the script starts itself again with them."""

LOAD_MAX = 0.5
"""Busy cores before the measurement, above which other processes take part of what all cores could do."""

BEGIN, END = "<!-- codec: written by tests/benchmarks/bench_codec.py -->", "<!-- codec: end -->"


@dataclass(frozen=True, slots=True)
class Line:
    """One promise."""

    name: str
    figure: float | None
    """``None`` if there is nothing to measure: a codec not built, or too few cores."""
    limit: float
    at_least: bool
    """Whether the limit is a minimum; else a maximum."""

    @property
    def passed(self) -> bool | None:
        if self.figure is None:
            return None
        return self.figure >= self.limit if self.at_least else self.figure <= self.limit


def at_most(name: str, figure: float | None, limit: float) -> Line:
    """Return a promise not to exceed a limit."""
    return Line(name, figure, limit, at_least=False)


def at_least(name: str, figure: float | None, limit: float) -> Line:
    """Return a promise to reach a limit."""
    return Line(name, figure, limit, at_least=True)


def by_name(figures: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the figures of each codec."""
    return {codec["name"]: codec for codec in figures["codecs"]}


def known(*names: str) -> list[str]:
    """Return those names that are public layouts or codecs this build has."""
    return [name for name in names if name in CODEC_CHOICES or name in ("published", "index_value_zstd", "xor_zstd")]


# Sizes


def measure_trace_sizes(directory: Path, names: list[str] | None = None) -> dict[str, dict[str, Any]]:
    """Return the figures of both views of the trace, sizes alone."""
    return {view: measure_pairs(Trace(directory, view).pairs(*STEPS), seconds=0, names=names) for view in VIEWS}


def trace_lines(by_view: dict[str, dict[str, Any]]) -> Iterator[Line]:
    """Yield the promises about recorded steps."""
    for view, figures in by_view.items():
        codecs = by_name(figures)
        plain, published = codecs["plain"]["bits_per_change"], codecs["published"]["bits_per_change"]
        tight = codecs["tight"]["bits_per_change"] if "tight" in codecs else None
        bound = figures["entropy_bits"]["exponent"]
        yield at_most(f"{view}: tight, bits a change", tight, TIGHT_BITS_MAX[view])
        yield at_most(f"{view}: plain, bits a change", plain, PLAIN_BITS_MAX[view])
        over = None if tight is None else tight / bound
        yield at_most(f"{view}: tight over the exponent bound", over, TIGHT_OVER_BOUND_MAX[view])
        ratio = None if tight is None else published / tight
        yield at_least(f"{view}: published over tight", ratio, PUBLISHED_OVER_TIGHT_MIN)


def make_scattered_pair(density: float) -> Pair:
    """Return 8 M normal weights of which a share chosen at random went one step up or down."""
    generator = np.random.default_rng(round(density * 1e6))
    table = make_table([TensorSpec("weight", "BF16", (SCATTERED_ELEMENTS,))])
    old = np.zeros(table.layout_size_bytes, np.uint8)
    view = table.view(old, 0)
    weights = generator.standard_normal(SCATTERED_ELEMENTS, dtype=np.float32) * np.float32(0.02)
    # Truncated, and away from zero: there a step of the bits is a step of the ordered integer.
    view[:] = np.maximum(weights.view(np.uint32) >> 16, 2)
    new = old.copy()
    changed = generator.choice(SCATTERED_ELEMENTS, round(density * SCATTERED_ELEMENTS), replace=False, shuffle=False)
    table.view(new, 0)[changed] += generator.integers(0, 2, changed.size).astype(np.uint16) * 2 - 1
    return Pair(table, old, new)


def scattered_lines() -> Iterator[Line]:
    """Yield the promises about changes anywhere (case A-PRF-1)."""
    for density, ratio_min in SCATTERED_RATIOS_MIN.items():
        figures = measure_pairs([make_scattered_pair(density)], seconds=0, names=known("plain", "tight"))
        codecs = by_name(figures)
        yield at_least(f"scattered {density:.2%}: plain, ratio", codecs["plain"]["ratio"], ratio_min)
        bound = position_bits(figures["elements"], figures["changes"]) / figures["changes"] + 1
        over = codecs["tight"]["bits_per_change"] / bound if "tight" in codecs else None
        yield at_most(f"scattered {density:.2%}: tight over H(p)/p + 1", over, SCATTERED_OVER_BOUND_MAX)


def make_adversarial_pairs() -> Iterator[tuple[str, Pair]]:
    """Yield inputs chosen to make patches grow."""
    generator = np.random.default_rng(3)
    wide = make_table([TensorSpec("weight", "BF16", (1_500_000,)), TensorSpec("bias", "BF16", (513,))])
    for name, share in (("all random", 1.0), ("half random", 0.5), ("a third random", 1 / 3), ("13 % random", 0.13)):
        yield name, _scramble(wide, generator, share)
    dtypes = ("BF16", "F16", "F32", "F64", "I64", "I32", "I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2")
    small = [TensorSpec(f"{dtype}.{size:03d}", dtype, (size,)) for dtype in dtypes for size in range(1, 40)]
    yield "small tensors of all dtypes", _scramble(make_table(small), generator, 1.0)
    large = make_table([TensorSpec(dtype, dtype, (300_000,)) for dtype in dtypes])
    yield "all dtypes, random", _scramble(large, generator, 1.0)
    yield "all dtypes, half random", _scramble(large, generator, 0.5)
    pair = _scramble(wide, generator, 0.0)
    for tensor_index in range(2):
        old, new = pair.tensor_views(tensor_index)
        new[:] = old ^ np.uint16(0x8000)
    yield "all signs", pair


def _scramble(table: ParameterTable, generator: np.random.Generator, share: float) -> Pair:
    """Return random bits of which a share of the elements became other random bits."""
    old = np.zeros(table.layout_size_bytes, np.uint8)
    new = old.copy()
    pair = Pair(table, old, new)
    for tensor_index, spec in enumerate(table.tensors):
        before, after = pair.tensor_views(tensor_index)
        before[:] = np.frombuffer(generator.bytes(spec.size_bytes), spec.bits_dtype)
        other = np.frombuffer(generator.bytes(spec.size_bytes), spec.bits_dtype)
        after[:] = np.where(generator.random(spec.element_count) < share, other, before)
    return pair


def bound_lines() -> Iterator[Line]:
    """Yield the promise about growth: the worst input of each codec, as a share of the bound."""
    worst = dict.fromkeys(CODEC_CHOICES, 0.0)
    for _, pair in make_adversarial_pairs():
        bound = 1.01 * pair.table.size_bytes + 64 * len(pair.table.tensors) + 1024
        for name, codec in by_name(measure_pairs([pair], seconds=0, names=list(CODEC_CHOICES))).items():
            worst[name] = max(worst[name], codec["bytes"] / bound)
    for name, share in worst.items():
        yield at_most(f"adversarial: {name}, share of 1.01 x dense + 64 B a tensor + 1 KiB", share, 1.0)


# Speeds


def repeat_pair(pair: Pair, count: int) -> Pair:
    """Return a model that holds a pair's tensors several times."""
    table = make_table(
        TensorSpec(f"{copy:02d}.{spec.name}", spec.dtype, spec.shape)
        for copy in range(count)
        for spec in pair.table.tensors
    )
    regions = []
    for source in (pair.old, pair.new):
        region = np.zeros(table.layout_size_bytes, np.uint8)
        for tensor_index in range(len(table.tensors)):
            table.view(region, tensor_index)[:] = pair.table.view(source, tensor_index % len(pair.table.tensors))
        regions.append(region)
    return Pair(table, *regions)


def join_tensors(pair: Pair) -> Pair:
    """Return a model whose one tensor is a pair's BF16 tensors laid end to end, so that its blocks are full."""
    views = [pair.tensor_views(tensor_index) for tensor_index in range(len(pair.table.tensors))]
    table = make_table([TensorSpec("joined", "BF16", (pair.table.element_count,))])
    joined = (np.concatenate(version) for version in zip(*views, strict=True))
    regions = [np.zeros(table.layout_size_bytes, np.uint8) for _ in range(2)]
    for region, bits in zip(regions, joined, strict=True):
        table.view(region, 0)[:] = bits
    return Pair(table, *regions)


def measure_speeds(directory: Path, seconds: float) -> dict[str, Any]:
    """Return the figures of one repeated step of the trace, with speeds: of full blocks."""
    (pair,) = islice(Trace(directory, "off").pairs(30, 30), 1)
    return measure_pairs([repeat_pair(join_tensors(pair), SPEED_COPIES)], seconds=seconds)


def measure_small_speeds(directory: Path, seconds: float) -> dict[str, Any]:
    """Return the figures of *tight* on the same step in the recorded model's own tensors, 0.4 M weights on average."""
    (pair,) = islice(Trace(directory, "off").pairs(30, 30), 1)
    return measure_pairs([repeat_pair(pair, SPEED_COPIES)], seconds=seconds, names=known("plain", "tight"))


def drop_busy_figures(figures: dict[str, Any]) -> None:
    """Forget the figures of all cores: others were at work on them."""
    for codec in figures["codecs"]:
        codec["encode_all_cores_mb_s"] = codec["decode_all_cores_mb_s"] = None
    for name in figures["memory"]:
        if name.endswith("_all_cores"):
            figures["memory"][name] = None


def speed_lines(figures: dict[str, Any]) -> Iterator[Line]:
    """Yield the promises about speed: ratios within one run."""
    codecs, memory = by_name(figures), figures["memory"]
    plain, tight = codecs["plain"], codecs.get("tight")

    def of_tight(kind: str, base: float, suffix: str = "") -> float | None:
        rate = None if tight is None else tight[f"{kind}{suffix}_mb_s"]
        return None if rate is None else rate / base

    read, copy = memory["read_mb_s"], memory["copy_mb_s"]
    yield at_least("one core: compare + compact over bare read", memory["compare_mb_s"] / read, 0.6)
    yield at_least("one core: plain encode over memory copy", plain["encode_mb_s"] / copy, 0.2)
    yield at_least("one core: plain decode over memory copy", plain["decode_mb_s"] / copy, 0.3)
    yield at_least("one core: tight encode over bare read", of_tight("encode", read), 0.10)
    yield at_least("one core: tight decode over bare read", of_tight("decode", read), 0.07)
    cores = figures["cores"]
    for kind in ("encode", "decode"):
        one = None if tight is None or cores < 2 else tight[f"{kind}_mb_s"]
        gain = None if one is None else of_tight(kind, one, "_all_cores")
        yield at_least(f"{cores} cores: tight {kind} over one core", gain, 1.6)
    is_measured = cores > 1 and memory["read_mb_s_all_cores"] is not None
    both = memory["compare_mb_s_all_cores"] / memory["read_mb_s_all_cores"] if is_measured else None
    yield at_least(f"{cores} cores: compare over their read bandwidth", both, 0.9)


# Reports


def verdict(line: Line) -> str:
    """Return how a promise fares, in a word."""
    return {True: "kept", False: "BROKEN", None: "not measured"}[line.passed]


def format_line(line: Line) -> str:
    """Return one promise for people."""
    figure = "-" if line.figure is None else f"{line.figure:.3f}"
    sign = ">=" if line.at_least else "<="
    return f"{verdict(line):<12}  {figure:>9} {sign} {line.limit:<6g}  {line.name}"


def format_rate(rate: float | None) -> str:
    """Return MB/s for people."""
    return "-" if rate is None else f"{rate:,.0f}"


def format_markdown(report: dict[str, Any], lines: list[Line]) -> str:
    """Return the tables of docs/benchmarks.md."""
    sizes, speeds = report["trace"], report["speeds"]
    rows = [
        f"Measured {report['date']} on {report['machine']}; {report['load']:.1f} cores busy before.",
        "",
        "| encoding | off: ratio | bits / change | grid: ratio | bits / change | encode | decode | encode, all cores "
        "| decode, all cores |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    grid, fast = by_name(sizes["grid"]), by_name(speeds)
    for name, codec in by_name(sizes["off"]).items():
        cells = [f"{value:.1f}" for value in (codec["ratio"], codec["bits_per_change"])]
        cells += [f"{value:.1f}" for value in (grid[name]["ratio"], grid[name]["bits_per_change"])]
        cells += [
            format_rate(fast[name][key])
            for key in ("encode_mb_s", "decode_mb_s", "encode_all_cores_mb_s", "decode_all_cores_mb_s")
        ]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    for bound in ("density", "exponent"):
        off, on = (sizes[view]["entropy_bits"][bound] for view in ("off", "grid"))
        rows.append(f"| bound: {bound} | | {off:.1f} | | {on:.1f} | | | | |")
    memory = speeds["memory"]
    rows += [
        "",
        "Same run, MB/s on one core (all): "
        + ", ".join(
            f"{text} {format_rate(memory[f'{key}_mb_s'])} ({format_rate(memory[f'{key}_mb_s_all_cores'])})"
            for key, text in (("copy", "memory copy"), ("read", "bare read"), ("compare", "compare and compact"))
        )
        + ".",
        "",
        "The same step in the recorded model's own small tensors, where each block costs more beside its bytes: "
        + "; ".join(
            f"{line.name} {line.figure:.2f}" for line in speed_lines(report["small_speeds"]) if line.figure is not None
        )
        + ".",
        "",
        "| promise | limit | measured | |",
        "| --- | --- | --- | --- |",
    ]
    for line in lines:
        figure = "" if line.figure is None else f"{line.figure:.2f}"
        rows.append(f"| {line.name} | {'≥' if line.at_least else '≤'} {line.limit:g} | {figure} | {verdict(line)} |")
    return "\n".join(rows)


def choose_figures(report: dict[str, Any]) -> Iterator[Figure]:
    """Yield the rows of *tight*, which nodes use where they may, beside public layouts."""
    for view, weights in (
        ("off", "FP32 masters anywhere in their cells"),
        ("grid", "masters that began on BF16 values"),
    ):
        codecs = by_name(report["trace"][view])
        tight = codecs["tight"]
        below = {name: codecs[name]["bytes"] / tight["bytes"] for name in ("published", "index_value_zstd", "xor_zstd")}
        yield Figure(
            f"recorded GRPO steps, {weights}: {tight['bits_per_change']:.1f} bits a change, "
            f"{tight['ratio']:.0f} times below dense",
            f"{below['published']:.1f} times below gaps and values, {below['index_value_zstd']:.1f} below 32-bit "
            f"indices and values, {below['xor_zstd']:.1f} below XOR, all with zstandard",
        )
    if "speeds" in report:
        codecs, memory = by_name(report["speeds"]), report["speeds"]["memory"]
        rates = [codecs["tight"][f"{kind}_mb_s"] for kind in ("encode", "decode")]
        yield Figure(
            f"one core encodes {rates[0]:,.0f} and decodes {rates[1]:,.0f} MB/s of dense weights",
            "{:.2f} and {:.2f} of a bare read".format(*(rate / memory["read_mb_s"] for rate in rates)),
        )


def main() -> int:
    """Print every promise and its figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE, help="directory of the recorded run")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each speed")
    parser.add_argument("--sizes-only", action="store_true")
    parser.add_argument("--busy", action="store_true", help="measure all cores though others are at work on them")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the tables into this document")
    add_summary_option(parser)
    arguments = parser.parse_args()
    if arguments.write and arguments.sizes_only:
        parser.error("--write needs speeds too")
    if not (arguments.trace / "trace.json").is_file():
        print(f"skipped: no trace in {arguments.trace}; name its directory with --trace", file=sys.stderr)
        return 0
    if not THREADS_OFF.items() <= os.environ.items():
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **THREADS_OFF})  # noqa: S606
    report: dict[str, Any] = {
        "machine": f"{describe_machine()}, Python {platform.python_version()}, numpy {np.__version__}",
        "load": measure_load(),
        "date": time.strftime("%Y-%m-%d"),
        "trace": measure_trace_sizes(arguments.trace),
    }
    lines = [*trace_lines(report["trace"]), *scattered_lines(), *bound_lines()]
    if not arguments.sizes_only:
        report["speeds"] = measure_speeds(arguments.trace, arguments.seconds)
        report["small_speeds"] = measure_small_speeds(arguments.trace, arguments.seconds)
        if report["load"] > LOAD_MAX and not arguments.busy:
            drop_busy_figures(report["speeds"])
            drop_busy_figures(report["small_speeds"])
        lines += speed_lines(report["speeds"])
    report["lines"] = [{**asdict(line), "passed": line.passed} for line in lines]
    if arguments.write:
        replace_block(arguments.write, BEGIN, END, format_markdown(report, lines))
    write_summary(arguments.summary, choose_figures(report))
    print(json.dumps(report) if arguments.json else "\n".join(map(format_line, lines)))
    return 1 if any(line.passed is False for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
