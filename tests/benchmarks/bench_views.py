"""What versions of other formats would cost: BF16, FP16 and FP8 views of the same FP32 masters, and the masters.

Usage: python tests/benchmarks/bench_views.py [--model smollm2|tiny] [--steps 20] [--burn-in 8] [--json FILE]
           [--write docs/benchmarks.md]

Trains with the demonstration's GRPO in one process, on one thread; completions are sampled from its own weights. After
every step past the burn-in the masters are cast to each view, and the patch from the view one step before is encoded,
decoded and compared bit for bit. Nothing but the last version of each view is kept.

FP8: each tensor has one scale, a power of two, chosen before the first step and frozen: the largest that keeps the
tensor's largest weight finite. Products are rounded to nearest even, and what has outgrown the format becomes its
largest finite value. All tensors are cast alike, norms and embeddings included.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from reporting import Figure, add_summary_option, describe_machine, replace_block, write_summary

from pulsenet import limits
from pulsenet.codec.changes import apply_changes
from pulsenet.codec.patch import PatchTotals, decode_patch, encode_patch, resolve_codec
from pulsenet.errors import IntegrityError
from pulsenet.tensors.bf16 import cast_to_bf16_bits
from pulsenet.tensors.floats import FLOAT_FORMATS
from pulsenet.tensors.params import ParameterTable, TensorSpec, make_table
from pulsenetd.bench.entropy import compute_bounds
from pulsenetd.demo.grpo import GrpoTrainer, StepReport
from pulsenetd.demo.models import load_masters
from pulsenetd.demo.rollouts import Sampler
from pulsenetd.demo.settings import SETTINGS
from pulsenetd.demo.task import draw_questions

Values = npt.NDArray[np.float32]
Bits = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

CODECS = ("tight", "plain")
BF16_SIZE_BYTES = 2
BOUND_SHARE_MAX = 0.25
MB = 1_000_000
BEGIN, END = "<!-- views: written by tests/benchmarks/bench_views.py -->", "<!-- views: end -->"

# Casts


@dataclass(frozen=True, slots=True)
class Fp8Limits:
    """Patterns of an FP8 format that its fields do not tell; magnitudes, without the sign."""

    largest_finite: int
    nan: int


FP8_LIMITS = {"F8_E4M3": Fp8Limits(largest_finite=0x7E, nan=0x7F), "F8_E5M2": Fp8Limits(largest_finite=0x7B, nan=0x7F)}
"""448 and 57,344; E4M3 has no infinity."""
SCALE_EXPONENT_MAX = 126
"""So that a scale and its inverse are normal FP32 values."""


def cast_to_fp8_bits(values: Values, dtype: str, scale_exponent: int = 0) -> npt.NDArray[np.uint8]:
    """Return the FP8 bits of ``values`` x 2^``scale_exponent``: round to nearest even, saturating.

    Infinities and all that rounds beyond the format become its largest finite value; a NaN keeps its sign alone.

    Args:
        dtype: ``F8_E4M3`` (the variant without infinities) or ``F8_E5M2``.
        scale_exponent: At most ``SCALE_EXPONENT_MAX`` either way.
    """
    number_format, fp8 = FLOAT_FORMATS[dtype], FP8_LIMITS[dtype]
    # Exact but for products outside FP32's normal range, which round to zero or saturate here anyhow.
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        bits = (values * np.float32(2.0**scale_exponent)).view(np.uint32)
    magnitudes = bits & np.uint32(0x7FFFFFFF)
    shift = 23 - number_format.mantissa_bits
    odd = (magnitudes >> np.uint32(shift)) & np.uint32(1)
    rounded = (magnitudes + np.uint32((1 << (shift - 1)) - 1) + odd) >> np.uint32(shift)
    # May wrap below the smallest normal value; np.where then takes the other branch.
    normal = rounded - np.uint32((127 - number_format.exponent_bias) << number_format.mantissa_bits)
    # One unit of this FP32 value's last place is the format's smallest step, so the sum rounds to whole steps.
    ruler = np.float32(2.0 ** (24 - number_format.exponent_bias - number_format.mantissa_bits))
    is_below_normal = magnitudes < np.uint32((128 - number_format.exponent_bias) << 23)
    small = np.where(is_below_normal, magnitudes, np.uint32(0)).view(np.float32)
    subnormal = (small + ruler).view(np.uint32) - ruler.view(np.uint32)
    codes = np.where(is_below_normal, subnormal, np.minimum(normal, np.uint32(fp8.largest_finite)))
    codes = np.where(magnitudes > np.uint32(0x7F800000), np.uint32(fp8.nan), codes)
    out: npt.NDArray[np.uint8] = (codes | ((bits >> np.uint32(24)) & np.uint32(0x80))).astype(np.uint8)
    return out


def choose_scale_exponent(values: Values, dtype: str) -> int:
    """Return the exponent of the largest power of two that keeps all of ``values`` finite; 0 for zeros alone.

    Args:
        values: Finite.
        dtype: An FP8 format.
    """
    largest = float(np.abs(values).max(initial=0.0))
    if largest == 0.0:
        return 0
    number_format, code = FLOAT_FORMATS[dtype], FP8_LIMITS[dtype].largest_finite
    field_value, mantissa = divmod(code, 1 << number_format.mantissa_bits)
    finite_max = math.ldexp(
        1 + mantissa / (1 << number_format.mantissa_bits), field_value - number_format.exponent_bias
    )
    (limit_part, limit_exponent), (part, exponent) = math.frexp(finite_max), math.frexp(largest)
    scale_exponent = limit_exponent - exponent - (part > limit_part)
    return max(-SCALE_EXPONENT_MAX, min(SCALE_EXPONENT_MAX, scale_exponent))


def cast_to_fp16_bits(values: Values) -> npt.NDArray[np.uint16]:
    """Return the FP16 bits of ``values``: round to nearest even, infinity beyond 65,504 as IEEE 754 has it."""
    with np.errstate(over="ignore", under="ignore"):
        return values.astype(np.float16).view(np.uint16)


Cast = Callable[[Values, int], Bits]
"""Values and the tensor's scale exponent to bits."""


@dataclass(frozen=True, slots=True)
class View:
    """A format that versions could have."""

    title: str
    dtype: str
    """Of its parameter table."""
    cast: Cast
    is_scaled: bool = False


VIEWS = (
    View("BF16", "BF16", lambda values, _: cast_to_bf16_bits(values)),
    View("FP16", "F16", lambda values, _: cast_to_fp16_bits(values)),
    View("FP8 e4m3", "F8_E4M3", lambda values, k: cast_to_fp8_bits(values, "F8_E4M3", k), is_scaled=True),
    View("FP8 e5m2", "F8_E5M2", lambda values, k: cast_to_fp8_bits(values, "F8_E5M2", k), is_scaled=True),
    View("FP32 master", "F32", lambda values, _: values.view(np.uint32)),
)

# Versions of a view

Masters = dict[str, Values]
"""Flat FP32 values by name, in the trainer's own memory."""


class ViewRecorder:
    """Keeps the last version of one view.

    Args:
        shapes: Of all tensors, by name.
        masters: The weights at the anchor, which fix the scales.
    """

    def __init__(self, view: View, shapes: dict[str, tuple[int, ...]], masters: Masters) -> None:
        self.view = view
        self.table = make_table(TensorSpec(name, view.dtype, shape) for name, shape in shapes.items())
        self._scale_exponents = {
            name: choose_scale_exponent(values, view.dtype) if view.is_scaled else 0 for name, values in masters.items()
        }
        self._held: Bytes | None = None

    def cast(self, masters: Masters) -> Bytes:
        """Return the view of ``masters`` in the table's layout, padding zero."""
        region = np.zeros(self.table.layout_size_bytes, np.uint8)
        for index, spec in enumerate(self.table.tensors):
            out, values = self.table.view(region, index), masters[spec.name]
            for start in range(0, values.size, limits.BLOCK_ELEMENTS):
                block = slice(start, start + limits.BLOCK_ELEMENTS)
                out[block] = self.view.cast(values[block], self._scale_exponents[spec.name])
        return region

    def hold(self, masters: Masters) -> Bytes:
        """Keep the view of ``masters`` as the base of the next patch, and return it."""
        self._held = self.cast(masters)
        return self._held

    def measure(self, masters: Masters) -> PatchFigures:
        """Return what the patch from the held version costs, and hold the new one."""
        old = self._held
        assert old is not None
        return measure_patch(self.table, old, self.hold(masters))


@dataclass(frozen=True, slots=True)
class PatchFigures:
    """One patch of one view."""

    changed_count: int
    size_bytes: dict[str, int]
    """Of the blob, by codec."""
    bound_bits: float | None
    """Entropy of all positions and steps knowing the old exponents; ``None`` if ``BOUND_SHARE_MAX`` or more changed:
    steps are then nearly as many as weights, and counting them tells nothing."""


def measure_patch(table: ParameterTable, old: Bytes, new: Bytes) -> PatchFigures:
    """Encode with every codec, decode and compare.

    Raises:
        IntegrityError: a patch did not give the new version back.
    """
    sizes, changed_counts = {}, set()
    for codec in CODECS:
        totals = PatchTotals()
        decoded = old.copy()
        for changes in decode_patch(encode_patch(table, old, new, codec=codec, totals=totals), table, decoded):
            apply_changes(table.view(decoded, changes.tensor_index), changes)
        if not np.array_equal(decoded, new):
            raise IntegrityError(f"{codec} does not give the new version back")
        sizes[codec] = totals.encoded_size_bytes
        changed_counts.add(totals.changed_count)
    (changed_count,) = changed_counts
    is_sparse = changed_count < BOUND_SHARE_MAX * table.element_count
    bound_bits = compute_bounds(table, old, new).exponent_bits if is_sparse else None
    return PatchFigures(changed_count, sizes, bound_bits)


# Training


@dataclass(slots=True)
class Recording:
    """All measured patches."""

    model: str
    learning_rate: float
    element_count: int
    steps: tuple[int, int]
    """First and last measured step, counted from 1."""
    patches: dict[str, list[PatchFigures]] = field(default_factory=dict)
    """By dtype, one a step."""
    rewards: list[float] = field(default_factory=list)
    """Of the measured steps."""


def train(grpo: GrpoTrainer, sampler: Sampler, model: str, *, steps: int, seed: int) -> Iterator[StepReport]:
    """Sample from the view and step the masters, again and again; yields after every step."""
    settings = SETTINGS[model]
    draw = random.Random(seed)
    for _ in range(steps):
        sampler.refresh()
        questions = draw_questions(draw, count=settings.prompts_per_step, operand_max=settings.operand_max)
        samples = sampler.sample(
            questions, group_size=settings.group_size, completion_tokens_max=settings.completion_tokens_max
        )
        yield grpo.step(samples)


def record(model: str, *, steps: int, burn_in: int, seed: int) -> Recording:
    """Train and measure the patches of the steps after ``burn_in``.

    Raises:
        ConfigError: the model's package is not installed.
    """
    module, tokenizer = load_masters(model)
    rate = SETTINGS[model].learning_rate
    grpo = GrpoTrainer(module, learning_rate=rate, pad_token=tokenizer.pad_token)
    sampler = Sampler(grpo.view, tokenizer, seed=seed)
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    # The optimiser steps in place, so these stay the masters of every step.
    masters: Masters = {name: values.detach().numpy().reshape(-1) for name, values in module.named_parameters()}
    recorders = [ViewRecorder(view, shapes, masters) for view in VIEWS]
    recording = Recording(model, rate, sum(values.size for values in masters.values()), (burn_in + 1, steps))
    if burn_in == 0:
        for recorder in recorders:
            recorder.hold(masters)
    started_at = time.monotonic()
    for step, report in enumerate(train(grpo, sampler, model, steps=steps, seed=seed), 1):
        trained_at = time.monotonic()
        if step == burn_in:
            for recorder in recorders:
                recorder.hold(masters)
        if step > burn_in:
            recording.rewards.append(report.reward)
            for recorder in recorders:
                recording.patches.setdefault(recorder.view.dtype, []).append(recorder.measure(masters))
            if (count := recording.patches["BF16"][-1].changed_count) != report.changed_count:
                raise IntegrityError(f"{count} changes of the BF16 view, but the trainer made {report.changed_count}")
        ended_at = time.monotonic()
        seconds = f"{trained_at - started_at:.1f} s of training, {ended_at - trained_at:.1f} s of measuring"
        print(f"step {step}: reward {report.reward:.3f}, {seconds}", file=sys.stderr)
        started_at = ended_at
    return recording


# Report


def summarize(recording: Recording) -> list[dict[str, Any]]:
    """Return the means over all measured steps, one entry a view."""
    rows = []
    for view in VIEWS:
        patches = recording.patches[view.dtype]
        spec = TensorSpec("all", view.dtype, (recording.element_count,))
        changed_count = sum(patch.changed_count for patch in patches)
        shares = [patch.changed_count / recording.element_count for patch in patches]
        bounds = [patch.bound_bits for patch in patches if patch.bound_bits is not None]
        codecs = {}
        for name in (*CODECS, "auto"):
            codec = resolve_codec(name, is_cpu_scarce=False)
            size_bytes = sum(patch.size_bytes[codec] for patch in patches)
            codecs[name] = {
                "bytes": size_bytes / len(patches),
                "bits_per_change": size_bytes * 8 / changed_count if changed_count else None,
                "ratio": spec.size_bytes * len(patches) / size_bytes,
                "ratio_to_bf16": BF16_SIZE_BYTES * recording.element_count * len(patches) / size_bytes,
            }
        rows.append(
            {
                "view": view.title,
                "dense_bytes": spec.size_bytes,
                "changed_ratio": changed_count / (recording.element_count * len(patches)),
                "changed_ratio_min": min(shares),
                "changed_ratio_max": max(shares),
                "bound_bits_per_change": (
                    sum(bounds) / changed_count if changed_count and len(bounds) == len(patches) else None
                ),
                "codecs": codecs,
            }
        )
    return rows


def format_markdown(recording: Recording, rows: list[dict[str, Any]], *, date: str, machine: str) -> str:
    """Return the table of docs/benchmarks.md."""

    def bits(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    automatic = resolve_codec("auto", is_cpu_scarce=False)
    lines = [
        f"Measured {date} on {machine}; one thread. {SETTINGS[recording.model].title},"
        f" {recording.element_count:,} weights, learning rate {recording.learning_rate:g}; mean of steps"
        f" {recording.steps[0]} to {recording.steps[1]}, mean reward {np.mean(recording.rewards):.2f}.",
        "",
        "| view | dense MB | changed % (least - most) | encoding | bytes | bits / change | bound | ratio to its own "
        "dense | to BF16 dense |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        shares = [100 * row[key] for key in ("changed_ratio", "changed_ratio_min", "changed_ratio_max")]
        cells = [row["view"], f"{row['dense_bytes'] / MB:,.1f}", f"{shares[0]:.3f} ({shares[1]:.3f} - {shares[2]:.3f})"]
        bound = bits(row["bound_bits_per_change"])
        for codec in CODECS:
            figures = row["codecs"][codec]
            cells += [f"{codec}, auto" if codec == automatic else codec, f"{figures['bytes']:,.0f}"]
            cells += [bits(figures["bits_per_change"]), bound]
            cells += [f"{figures['ratio']:,.1f}", f"{figures['ratio_to_bf16']:,.1f}"]
            lines.append(f"| {' | '.join(cells)} |")
            cells, bound = ["", "", ""], ""
    return "\n".join(lines)


def choose_figure(rows: list[dict[str, Any]]) -> Figure:
    """Return the row: what a version in other formats takes."""
    sizes = {row["view"]: row["codecs"]["tight"]["bytes"] for row in rows}
    others = ", ".join(f"{name} {size / sizes['BF16']:.3g}" for name, size in sizes.items() if name != "BF16")
    return Figure(f"a patch of the BF16 view: {sizes['BF16']:,.0f} bytes", f"of it, patches of other views: {others}")


def main(arguments: list[str] | None = None) -> int:
    """Train, measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(SETTINGS), default="smollm2")
    parser.add_argument("--steps", type=int, default=20, help="optimiser steps, burn-in included")
    parser.add_argument("--burn-in", type=int, default=8, help="steps that are not measured: Adam's start")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table into this document")
    add_summary_option(parser)
    options = parser.parse_args(arguments)
    if not 0 <= options.burn_in < options.steps:
        parser.error("--burn-in must leave at least one step")
    torch.set_num_threads(1)
    recording = record(options.model, steps=options.steps, burn_in=options.burn_in, seed=options.seed)
    rows = summarize(recording)
    date = time.strftime("%Y-%m-%d")
    machine = f"{describe_machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    table = format_markdown(recording, rows, date=date, machine=machine)
    print(table)
    write_summary(options.summary, [choose_figure(rows)])
    if options.json is not None:
        report = {"date": date, "machine": machine, "views": rows, "recording": asdict(recording)}
        options.json.write_text(json.dumps(report, indent=1))
    if options.write is not None:
        replace_block(options.write, BEGIN, END, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
