"""Memory of a trainer and an inferencer node: growth over idle against the promise (docs: limits).

Usage: python tests/benchmarks/bench_memory.py [--model-mib 512] [--json]

Starts two real nodes on loopback, publishes an anchor and five patches of a synthetic model, and samples
each daemon's private and shared resident memory. p2pd and the page cache are apart.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from pulsenet.local.client import Client
from pulsenet.local.protocol import PublishStatus
from pulsenet.local.shared_memory import SnapshotWriter
from pulsenet.tensors.params import ParameterTable, TensorSpec, make_table

MIB = 1 << 20
CHUNK_BUFFERS_MIB = 96
"""What chunks under way, thread stacks and allocator slack may take beside the weights."""

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

    def write_snapshot(self) -> int:
        """Return the descriptor of a sealed snapshot."""
        writer = SnapshotWriter(self._table)
        for index, bits in enumerate(self._bits):
            writer.write_block(index, 0, bits.view(np.uint8))
        return writer.seal()


class Sampler(threading.Thread):
    """Keeps the highest resident memory of a process."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._path = Path(f"/proc/{pid}/status")
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
        fields = dict(line.split(":", 1) for line in self._path.read_text().splitlines())
        return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) / 1024


def wait_until(condition, seconds: float, what: str) -> None:  # type: ignore[no-untyped-def]
    """Wait for a condition, or give up with its name."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            sys.exit(f"gave up waiting for {what}")
        time.sleep(0.1)


def measure(model_mib: int) -> dict[str, object]:
    """Run the two nodes and return the figures, in MiB."""
    table = make_model_table(model_mib)
    model = Model(table)
    largest_mib = max(spec.size_bytes for spec in table.tensors) / MIB
    size_mib = table.layout_size_bytes / MIB
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "XDG_DATA_HOME": home}
        nodes = {}
        for role in ("trainer", "inferencer"):
            command = [sys.executable, "-m", "pulsenetd.cli", "join", "--role", role, "--engine", "none"]
            nodes[role] = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
        directories = {role: Path(home) / "pulsenet" / "local" / role for role in nodes}
        try:
            for role, directory in directories.items():
                wait_until(lambda directory=directory: (directory / "node.json").exists(), 120, f"the {role}")
            clients = {role: Client.connect(directory) for role, directory in directories.items()}
            wait_until(lambda: clients["inferencer"].status()["peers"] > 0, 60, "the connection")
            time.sleep(2)
            samplers = {role: Sampler(node.pid) for role, node in nodes.items()}
            for sampler in samplers.values():
                sampler.start()
            for version in range(1, VERSIONS + 1):
                model.step()
                result = clients["trainer"].publish(table, model.write_snapshot(), version, wait=True)
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
        "trainer": 2 * size_mib + CHUNK_BUFFERS_MIB,
        "inferencer": size_mib + 2 * largest_mib + CHUNK_BUFFERS_MIB,
    }
    return {
        "model_mib": round(size_mib),
        "largest_tensor_mib": round(largest_mib),
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
    """Print the figures; fail if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-mib", type=int, default=512)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = measure(arguments.model_mib)
    if arguments.json:
        print(json.dumps(figures))
    else:
        print(f"model {figures['model_mib']} MiB, largest tensor {figures['largest_tensor_mib']} MiB")
        for role in ("trainer", "inferencer"):
            row = figures[role]
            assert isinstance(row, dict)
            print(
                f"{role:<11} idle {row['idle_mib']} MiB, growth at most {row['growth_peak_mib']} MiB, "
                f"promised {row['promised_mib']} MiB: {'kept' if row['kept'] else 'BROKEN'}"
            )
    kept = all(figures[role]["kept"] for role in ("trainer", "inferencer"))  # type: ignore[index]
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
