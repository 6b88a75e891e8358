"""How many bytes a trainer receives in a round, by the number of trainers: by whole contributions and by slice.

Counted, not timed: contributions and slices are encoded as they travel. ``python tests/benchmarks/bench_received.py``
prints the table of docs/outer.md. Weights and pseudo-gradients are drawn: weights as after training, pseudo-gradients
scaled so that a given share passes the gate. Trainers share a part of them (their variance), as on one task. With
``--flush-interval`` blocks pass it whole by turns; then the weights lie in 16 tensors, so that there are turns.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
from reporting import Figure, add_summary_option, write_summary

from pulsenet.codec.slices import SliceHeader
from pulsenet.ids import Digest
from pulsenet.outer.blob import encode_blob
from pulsenet.outer.contribution import Contribution, Entries
from pulsenet.outer.floats import FP32s
from pulsenet.outer.flush import FlushPlan
from pulsenet.outer.gate import gate_entries
from pulsenet.outer.settings import MANTISSA_BITS, Algorithm, OuterSettings
from pulsenet.outer.slices import SlicePart, sum_all_slices
from pulsenet.tensors.params import ParameterTable, TensorSpec

ROOT = Digest(bytes(32))
INNER_STEPS = 8
FLUSHED_TENSOR_COUNT = 16
TRAINER_COUNTS = (2, 3, 4, 6, 8, 12, 16)
SUMMARY_COUNT = 8


@dataclass(frozen=True, slots=True)
class Received:
    """Bytes that one trainer of a round receives."""

    trainer_count: int
    payload: float
    """Of one contribution."""
    whole: float
    """All contributions of the others."""
    sliced: float
    """One slice of the others' contributions, and the others' slices."""
    union_density: float
    """Elements in which somebody has an entry."""
    ring: float
    """A ring all-reduce of FP32 values, once a round."""

    @property
    def ratio_whole(self) -> float:
        return self.ring / self.whole

    @property
    def ratio_sliced(self) -> float:
        return self.ring / self.sliced


def draw(element_count: int, density: float, shared: float, trainer_count: int) -> tuple[FP32s, list[FP32s]]:
    """Return weights, and local weights of each trainer such that about ``density`` of the entries pass the gate."""
    generator = np.random.default_rng(11)
    theta = (generator.standard_normal(element_count) * 0.03).astype(np.float32)
    common = generator.standard_normal(element_count)
    noises = [
        np.sqrt(shared) * common + np.sqrt(1.0 - shared) * generator.standard_normal(element_count)
        for _ in range(trainer_count)
    ]
    low, high = 1e-9, 1e-2
    for _ in range(40):
        scale = np.sqrt(low * high)
        local = theta - (noises[0] * scale).astype(np.float32)
        passed = len(gate_entries(theta, local, np.zeros_like(theta), tensor_index=0)) / element_count
        low, high = (scale, high) if passed < density else (low, scale)
    return theta, [theta - (noise * scale).astype(np.float32) for noise in noises]


def measure(
    element_count: int,
    trainer_count: int,
    *,
    density: float,
    shared: float,
    settings: OuterSettings,
) -> Received:
    """Encode one round and count."""
    tensor_count = FLUSHED_TENSOR_COUNT if settings.flush_interval else 1
    names = (f"w{index:02d}" for index in range(tensor_count))
    table = ParameterTable(tuple(TensorSpec(name, "F32", (element_count // tensor_count,)) for name in names))
    flushes = FlushPlan(table, settings)
    drawn, locals_ = draw(element_count, density, shared, trainer_count)
    theta = np.split(drawn, tensor_count)
    blobs: dict[bytes, bytes] = {}
    union = [np.zeros_like(one, np.bool_) for one in theta]
    for index, local in enumerate(locals_):
        found = []
        for place, (before, now) in enumerate(zip(theta, np.split(local, tensor_count), strict=True)):
            flush = flushes.of(place, 0)
            entries = gate_entries(before, now, np.zeros_like(before), tensor_index=place, flush=flush)
            if settings.is_dense:
                entries = Entries(place, None, before - now)
            union[place][slice(None) if entries.indices is None else entries.indices] = True
            found.append(entries)
        contribution = Contribution(0, ROOT, INNER_STEPS, tuple(found))
        blobs[bytes([index])] = b"".join(encode_blob(contribution, table, theta))
    header = SliceHeader(table.digest, ROOT, 0, 0, trainer_count)
    parts = {key: SlicePart([blob]) for key, blob in blobs.items()}
    slices = [
        sum(map(len, pieces)) for _, pieces in sum_all_slices(parts, table, theta, header=header, settings=settings)
    ]
    payloads, share = sum(map(len, blobs.values())), (trainer_count - 1) / trainer_count
    return Received(
        trainer_count=trainer_count,
        payload=payloads / trainer_count,
        whole=share * payloads,
        sliced=share * (payloads / trainer_count + sum(slices)),
        union_density=float(np.mean(union)),
        ring=2 * share * 4 * element_count,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=1 << 21)
    parser.add_argument("--density", type=float, default=0.04)
    parser.add_argument("--shared", type=float, nargs="*", default=[0.0, 0.5])
    parser.add_argument("--flush-interval", type=int, default=0)
    parser.add_argument("--flush-mantissa-bits", type=int, default=MANTISSA_BITS)
    add_summary_option(parser)
    arguments = parser.parse_args()
    figures = []
    pulseloco = OuterSettings(
        flush_interval=arguments.flush_interval, flush_mantissa_bits=arguments.flush_mantissa_bits
    )
    for shared in arguments.shared:
        print(f"\nPULSELoCo, {arguments.density:.1%} sent, {shared:.0%} of the variance shared; times below a ring:")
        print("| M | payload | union | whole | by slice | by slice, below DDP |\n| --- | --- | --- | --- | --- | --- |")
        for count in TRAINER_COUNTS:
            found = measure(arguments.elements, count, density=arguments.density, shared=shared, settings=pulseloco)
            ratios = f"{found.ratio_whole:.1f} | {found.ratio_sliced:.1f} | {INNER_STEPS * found.ratio_sliced:.0f}"
            payload = 4 * arguments.elements / found.payload
            if count == SUMMARY_COUNT:
                figures.append(
                    Figure(
                        f"PULSELoCo, {count} trainers, {arguments.density:.0%} sent, {shared:.0%} of the variance "
                        f"shared: payload {payload:.0f} times below dense FP32",
                        f"received by slice: {found.ratio_sliced:.1f} times below a ring all-reduce, "
                        f"{INNER_STEPS * found.ratio_sliced:.0f} below DDP",
                    )
                )
            print(f"| {count} | {payload:.0f}x | {found.union_density:.1%} | {ratios} |")
    write_summary(arguments.summary, figures)
    if arguments.flush_interval:
        return
    diloco = OuterSettings(algorithm=Algorithm.DILOCO)
    print("\nDiLoCo; times below a ring of FP32:\n| M | whole | by slice |\n| --- | --- | --- |")
    for count in TRAINER_COUNTS:
        found = measure(arguments.elements, count, density=0.04, shared=0.0, settings=diloco)
        print(f"| {count} | {found.ratio_whole:.2f} | {found.ratio_sliced:.2f} |")


if __name__ == "__main__":
    main()
