"""Memory of a trainer and an inferencer node: growth over idle against the promise (docs: limits).

Usage: python tests/benchmarks/bench_memory.py [--model-mib 512] [--blocking | --waiting | --listed] [--json]

Starts two real nodes on loopback, publishes an anchor and five patches of a synthetic model, and samples each
daemon's private memory and every shared memory that it, or this process as the training loop, has open: parts on
their way count, whoever holds them. p2pd, the page cache, the training loop's own weights and its device baseline are
apart. With a device baseline the anchor is whole weights as ever; the figures of *listed* are those of the patches.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reporting import Figure, add_summary_option, write_summary

from pulsenet.local.client import Client, PublishResult
from pulsenet.local.handover import WholeParts
from pulsenet.local.parts import SealedPart
from pulsenet.local.protocol import PublishStatus
from pulsenet.local.shared_memory import write_parts
from pulsenet.tensors.params import ParameterTable, TensorSpec, make_table
from pulsenet.training.publisher import Publisher

MIB = 1 << 20
CHUNK_BUFFERS_MIB = 96
"""What chunks under way, thread stacks and allocator slack may take beside the weights."""

ROLES = ("trainer", "inferencer")
MODES = ("waiting", "blocking", "listed")
DENSITY = 0.01
VERSIONS = 6


def make_model_table(model_mib: int) -> ParameterTable:
    """Return a table of BF16 tensors: one that is a fifth of the model, the rest in equal parts."""
    largest = model_mib * MIB // 5 // 2
    part = (model_mib * MIB // 2 - largest) // 32
    specs = [TensorSpec("embedding", "BF16", (largest,))]
    specs += [TensorSpec(f"layer.{index:02d}", "BF16", (part,)) for index in range(32)]
    return make_table(specs)


class Model:
    """Weights that change a little between versions."""

    def __init__(self, table: ParameterTable) -> None:
        self._table = table
        self._random = np.random.default_rng(7)
        self._bits = [
            self._random.integers(0x3C00, 0x3F00, spec.element_count, dtype=np.uint16) for spec in table.tensors
        ]

    def step(self) -> None:
        """Move one per cent of the values by one unit in the last place."""
        for bits in self._bits:
            bits[self._random.integers(0, bits.size, int(bits.size * DENSITY))] += 1

    def write_parts(self) -> Generator[SealedPart]:
        """Copy the weights out part by part."""
        return write_parts(self._table, ((index, 0, bits.view(np.uint8)) for index, bits in enumerate(self._bits)))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the weights as a training loop has them; they share memory."""
        return {
            spec.name: torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
            for spec, bits in zip(self._table.tensors, self._bits, strict=True)
        }


class Sampler(threading.Thread):
    """Keeps the highest memory of a node: private, and shared by it or by this process if ``with_own``."""

    def __init__(self, pid: int, *, with_own: bool) -> None:
        super().__init__(daemon=True)
        self._status = Path(f"/proc/{pid}/status")
        self._descriptors = [Path(f"/proc/{pid}/fd")] + [Path("/proc/self/fd")] * with_own
        self.idle_mib = self._read()
        self.peak_mib = self.idle_mib
        self.last_mib = self.idle_mib
        self.stopped = False

    def run(self) -> None:
        """Sample until stopped."""
        while not self.stopped:
            self.last_mib = self._read()
            self.peak_mib = max(self.peak_mib, self.last_mib)
            time.sleep(0.02)

    def _read(self) -> float:
        fields = dict(line.split(":", 1) for line in self._status.read_text().splitlines())
        shared: dict[int, int] = {}
        for folder in self._descriptors:
            for path in folder.iterdir():
                # A descriptor may be gone before it is looked at.
                with contextlib.suppress(FileNotFoundError):
                    if "memfd:pulsenet" in os.readlink(path):
                        found = path.stat()
                        shared[found.st_ino] = found.st_blocks * 512
        return int(fields["RssAnon"].split()[0]) / 1024 + sum(shared.values()) / MIB


def wait_until(condition, seconds: float, what: str) -> None:  # type: ignore[no-untyped-def]
    """Wait for a condition, or give up with its name."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            sys.exit(f"gave up waiting for {what}")
        time.sleep(0.1)


def measure(model_mib: int, mode: str) -> dict[str, Any]:
    """Run the two nodes and return the figures, in MiB."""
    table = make_model_table(model_mib)
    model = Model(table)
    largest_mib = max(spec.size_bytes for spec in table.tensors) / MIB
    size_mib = table.layout_size_bytes / MIB
    publish_seconds: list[float] = []
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "XDG_DATA_HOME": home}
        nodes = {}
        for role in ROLES:
            command = [sys.executable, "-m", "pulsenetd.cli", "join", "--role", role, "--engine", "none"]
            nodes[role] = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
        directories = {role: Path(home) / "pulsenet" / "local" / role for role in nodes}
        try:
            for role, directory in directories.items():
                wait_until(lambda directory=directory: (directory / "node.json").exists(), 120, f"the {role}")
            clients = {role: Client.connect(directory) for role, directory in directories.items()}
            wait_until(lambda: clients["inferencer"].status()["peers"] > 0, 60, "the connection")
            time.sleep(2)
            samplers = {role: Sampler(node.pid, with_own=role == "trainer") for role, node in nodes.items()}
            for sampler in samplers.values():
                sampler.start()
            publisher = Publisher(clients["trainer"], device_baseline=True)
            for version in range(1, VERSIONS + 1):
                model.step()
                started = time.monotonic()
                result = publish(mode, model, table, version, publisher, clients["trainer"])
                publish_seconds.append(time.monotonic() - started)
                assert result.status is PublishStatus.COMMITTED, result
                wait_until(
                    lambda version=version: clients["inferencer"].status().get("mirror_version") == version,
                    120,
                    f"version {version}",
                )
                if version == 1 and mode == "listed":
                    for sampler in samplers.values():
                        sampler.peak_mib = sampler.idle_mib
            for sampler in samplers.values():
                sampler.stopped = True
                sampler.join()
        finally:
            for node in nodes.values():
                os.killpg(node.pid, signal.SIGTERM)
            for node in nodes.values():
                node.wait(15)
    promised = {
        "trainer": size_mib + (size_mib if mode == "waiting" else 2 * largest_mib) + CHUNK_BUFFERS_MIB,
        "inferencer": size_mib + 2 * largest_mib + CHUNK_BUFFERS_MIB,
    }
    return {
        "model_mib": round(size_mib),
        "largest_tensor_mib": round(largest_mib),
        "mode": mode,
        "anchor_seconds": round(publish_seconds[0], 2),
        "patch_seconds": round(sorted(publish_seconds[1:])[len(publish_seconds) // 2], 2),
        **{
            role: {
                "idle_mib": round(sampler.idle_mib),
                "growth_peak_mib": round(sampler.peak_mib - sampler.idle_mib),
                "growth_last_mib": round(sampler.last_mib - sampler.idle_mib),
                "promised_mib": round(promised[role]),
                "kept": sampler.peak_mib - sampler.idle_mib <= promised[role],
            }
            for role, sampler in samplers.items()
        },
    }


def publish(
    mode: str, model: Model, table: ParameterTable, version: int, publisher: Publisher, client: Client
) -> PublishResult:
    """Publish the weights in one of the modes."""
    if mode == "listed":
        return publisher.publish(model.state_dict(), step=version, wait=True)
    return client.publish_from(table, WholeParts(model.write_parts), version, wait=True, is_blocking=mode == "blocking")


def choose_figure(figures: dict[str, Any]) -> Figure:
    """Return the row of one mode."""
    grown = [figures[role]["growth_peak_mib"] for role in ROLES]
    shares = [figures[role]["growth_peak_mib"] / figures[role]["promised_mib"] for role in ROLES]
    return Figure(
        f"model of {figures['model_mib']:,} MiB, {figures['mode']}: trainer's node grew by {grown[0]:,} MiB, "
        f"inferencer's by {grown[1]:,}",
        f"{shares[0]:.2f} and {shares[1]:.2f} of what is promised",
    )


def main() -> int:
    """Print the figures of every mode; fail if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-mib", type=int, default=512)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--blocking", dest="modes", action="store_const", const=("blocking",), help="only blocking=True")
    mode.add_argument("--waiting", dest="modes", action="store_const", const=("waiting",), help="only wait=True")
    mode.add_argument("--listed", dest="modes", action="store_const", const=("listed",), help="only what changed")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(modes=MODES)
    add_summary_option(parser)
    arguments = parser.parse_args()
    results = [measure(arguments.model_mib, mode) for mode in arguments.modes]
    write_summary(arguments.summary, map(choose_figure, results))
    if arguments.json:
        print(json.dumps(results))
    for figures in results:
        if not arguments.json:
            print_figures(figures)
    kept = all(figures[role]["kept"] for figures in results for role in ROLES)
    return 0 if kept else 1


def print_figures(figures: dict[str, Any]) -> None:
    """Print one mode's figures for a person."""
    print(
        f"model {figures['model_mib']} MiB, largest tensor {figures['largest_tensor_mib']} MiB, {figures['mode']}: "
        f"anchor in {figures['anchor_seconds']} s, a patch in {figures['patch_seconds']} s"
    )
    for role in ROLES:
        row = figures[role]
        print(
            f"  {role:<11} idle {row['idle_mib']} MiB, growth at most {row['growth_peak_mib']} MiB, "
            f"promised {row['promised_mib']} MiB: {'kept' if row['kept'] else 'BROKEN'}"
        )


if __name__ == "__main__":
    sys.exit(main())
