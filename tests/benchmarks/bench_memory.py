"""Memory of a trainer and an inferencer node: growth over idle against the promise (docs: limits).

Usage: python tests/benchmarks/bench_memory.py [--model-mib 512] [--blocking | --waiting] [--json]

Starts two real nodes on loopback, publishes an anchor and five patches of a synthetic model, and samples each
daemon's private memory and every shared memory that it, or this process as the training loop, has open: parts on
their way count, whoever holds them. p2pd, the page cache and the training loop's own weights are apart.
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

import numpy as np

from pulsenet.local.client import Client
from pulsenet.local.parts import SealedPart
from pulsenet.local.protocol import PublishStatus
from pulsenet.local.shared_memory import write_parts
from pulsenet.tensors.params import ParameterTable, TensorSpec, make_table

MIB = 1 << 20
CHUNK_BUFFERS_MIB = 96
"""What chunks under way, thread stacks and allocator slack may take beside the weights."""

ROLES = ("trainer", "inferencer")
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


def measure(model_mib: int, *, is_blocking: bool) -> dict[str, object]:
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
            for version in range(1, VERSIONS + 1):
                model.step()
                started = time.monotonic()
                result = clients["trainer"].publish_parts(
                    table, model.write_parts, version, wait=True, is_blocking=is_blocking
                )
                publish_seconds.append(time.monotonic() - started)
                assert result.status is PublishStatus.COMMITTED, result
                wait_until(
                    lambda version=version: clients["inferencer"].status().get("mirror_version") == version,
                    120,
                    f"version {version}",
                )
            for sampler in samplers.values():
                sampler.stopped = True
                sampler.join()
        finally:
            for node in nodes.values():
                os.killpg(node.pid, signal.SIGTERM)
            for node in nodes.values():
                node.wait(15)
    promised = {
        "trainer": size_mib + (2 * largest_mib if is_blocking else size_mib) + CHUNK_BUFFERS_MIB,
        "inferencer": size_mib + 2 * largest_mib + CHUNK_BUFFERS_MIB,
    }
    return {
        "model_mib": round(size_mib),
        "largest_tensor_mib": round(largest_mib),
        "mode": "blocking" if is_blocking else "waiting",
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


def main() -> int:
    """Print the figures of both modes; fail if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-mib", type=int, default=512)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--blocking", action="store_true", help="only publish(blocking=True)")
    mode.add_argument("--waiting", action="store_true", help="only publish(wait=True)")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    modes = [True] if arguments.blocking else [False] if arguments.waiting else [False, True]
    results = [measure(arguments.model_mib, is_blocking=is_blocking) for is_blocking in modes]
    if arguments.json:
        print(json.dumps(results))
    for figures in results:
        if not arguments.json:
            print_figures(figures)
    kept = all(figures[role]["kept"] for figures in results for role in ROLES)  # type: ignore[index]
    return 0 if kept else 1


def print_figures(figures: dict[str, object]) -> None:
    """Print one mode's figures for a person."""
    print(
        f"model {figures['model_mib']} MiB, largest tensor {figures['largest_tensor_mib']} MiB, {figures['mode']}: "
        f"anchor in {figures['anchor_seconds']} s, a patch in {figures['patch_seconds']} s"
    )
    for role in ROLES:
        row = figures[role]
        assert isinstance(row, dict)
        print(
            f"  {role:<11} idle {row['idle_mib']} MiB, growth at most {row['growth_peak_mib']} MiB, "
            f"promised {row['promised_mib']} MiB: {'kept' if row['kept'] else 'BROKEN'}"
        )


if __name__ == "__main__":
    sys.exit(main())
