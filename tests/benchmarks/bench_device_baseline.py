"""Publishing whole weights against publishing what changed: seconds, bytes that cross, and the node's memory.

Usage: python tests/benchmarks/bench_device_baseline.py [--models tiny,135m,1b] [--publishes 5] [--device cpu] [--json]

A real trainer node beside this process as the training loop, with FP32 masters published as BF16, of which about one
per cent change between publishes. *returns* is how long publish() holds the training loop up, *commits* how long until
the version is committed, both after the first version. Memory is the node's growth over idle, shared memory of both
sides included; the masters and the device baseline, which lie with this process, are apart.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent))
from bench_memory import MIB, Sampler, wait_until
from reporting import Figure, add_summary_option, write_summary

from pulsenet.local.protocol import PublishStatus
from pulsenet.training.publisher import Publisher, attach_publisher

DENSITY = 0.01
"""Share of BF16 values that change between publishes."""

ULP_FP32_BITS = 1 << 16
"""One unit in the last place of a BF16 value, in the bits of the FP32 one above it."""


@dataclass(frozen=True)
class Shape:
    """A decoder of the usual kind; embeddings are tied."""

    vocabulary: int
    width: int
    layers: int
    key_width: int
    inner_width: int


SHAPES = {
    "tiny": Shape(1000, 64, 2, 32, 128),
    "135m": Shape(49_152, 576, 30, 192, 1536),
    "1b": Shape(49_152, 2048, 16, 512, 8192),
}


@dataclass
class Figures:
    """Of one model and one way to publish."""

    model: str
    parameters: int
    is_listed: bool
    first_seconds: float
    returns_seconds: float
    commits_seconds: float
    process_cpu_seconds: float
    """Of this process, in one publish after the first."""
    node_cpu_seconds: float
    """Of the node, likewise."""
    crossed_mib: float
    """Shared memory that one publish after the first needed, together."""
    growth_mib: float
    """Of the node over idle while versions after the first were published, at most."""
    device_baseline_mib: float
    changed_share: float


def make_model(shape: Shape, device: str) -> dict[str, torch.Tensor]:
    """Return FP32 masters with the sizes of a language model."""
    generator = torch.Generator(device=device).manual_seed(7)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=device) * 0.02

    state = {"embed": draw(shape.vocabulary, shape.width), "norm": draw(shape.width)}
    for layer in range(shape.layers):
        sizes = {
            "query": (shape.width, shape.width),
            "key": (shape.key_width, shape.width),
            "value": (shape.key_width, shape.width),
            "output": (shape.width, shape.width),
            "gate": (shape.inner_width, shape.width),
            "up": (shape.inner_width, shape.width),
            "down": (shape.width, shape.inner_width),
            "norm": (shape.width,),
        }
        state |= {f"layers.{layer:02d}.{name}": draw(*size) for name, size in sizes.items()}
    return state


def step(state: dict[str, torch.Tensor]) -> None:
    """Move about one per cent of the values by one unit in the last place of BF16."""
    for tensor in state.values():
        bits = tensor.view(-1).view(torch.int32)
        count = max(1, int(bits.numel() * DENSITY))
        chosen = torch.randint(0, bits.numel(), (count,), device=bits.device)
        bits[chosen] += ULP_FP32_BITS


def watch_crossing(publisher: Publisher) -> list[int]:
    """Return a list that grows by the size of each part that is handed over."""
    client = publisher._client
    assert client is not None
    sizes: list[int] = []
    publish_from = client.publish_from

    def watch(table, source, **options):  # type: ignore[no-untyped-def]
        make_parts = source.make_parts

        class Watched:
            begin = staticmethod(source.begin)

            @staticmethod
            def make_parts(base_number):  # type: ignore[no-untyped-def]
                for part in make_parts(base_number):
                    sizes.append(os.fstat(part.descriptor).st_size)
                    yield part

        return publish_from(table, Watched, **options)

    client.publish_from = watch  # type: ignore[method-assign]
    return sizes


def measure(name: str, *, is_listed: bool, device: str, publish_count: int) -> Figures:
    """Publish one model to a node of its own and return the figures."""
    state = make_model(SHAPES[name], device)
    parameters = sum(tensor.numel() for tensor in state.values())
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "XDG_DATA_HOME": home}
        command = [sys.executable, "-m", "pulsenetd.cli", "join", "--role", "trainer"]
        node = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
        directory = Path(home) / "pulsenet" / "local" / "trainer"
        try:
            wait_until(lambda: (directory / "node.json").exists(), 120, "the trainer")
            with attach_publisher(data_dir=directory, device_baseline=is_listed, timeout_seconds=60) as publisher:
                sampler = Sampler(node.pid, with_own=True)
                started = time.monotonic()
                result = publisher.publish(state, step=0, wait=True)
                first_seconds = time.monotonic() - started
                assert result.status is PublishStatus.COMMITTED, result
                sampler.peak_mib = sampler.idle_mib
                sampler.start()
                crossed = watch_crossing(publisher)
                commits, returns, shares, own_cpu, node_cpu = [], [], [], [], []
                for number in range(1, publish_count + 1):
                    step(state)
                    started, own_started, node_started = time.monotonic(), time.process_time(), read_cpu_seconds(node)
                    result = publisher.publish(state, step=number, wait=True)
                    commits.append(time.monotonic() - started)
                    own_cpu.append(time.process_time() - own_started)
                    node_cpu.append(read_cpu_seconds(node) - node_started)
                    assert result.status is PublishStatus.COMMITTED, result
                    shares.append(result.changed_count / result.element_count)
                crossed_mib = sum(crossed) / publish_count / MIB
                for number in range(publish_count):
                    step(state)
                    started = time.monotonic()
                    assert publisher.publish(state, step=100 + number).status is PublishStatus.QUEUED
                    returns.append(time.monotonic() - started)
                    # The next finds the node idle, as after a training step.
                    wait_until(lambda step_number=100 + number: read_step(publisher) == step_number, 120, "the version")
                sampler.stopped = True
                sampler.join()
                baseline = publisher._keeper._baseline
                return Figures(
                    model=name,
                    parameters=parameters,
                    is_listed=is_listed,
                    first_seconds=first_seconds,
                    returns_seconds=statistics.median(returns),
                    commits_seconds=statistics.median(commits),
                    process_cpu_seconds=statistics.median(own_cpu),
                    node_cpu_seconds=statistics.median(node_cpu),
                    crossed_mib=crossed_mib,
                    growth_mib=sampler.peak_mib - sampler.idle_mib,
                    device_baseline_mib=0.0 if baseline is None else baseline.size_bytes / MIB,
                    changed_share=statistics.mean(shares),
                )
        finally:
            os.killpg(node.pid, signal.SIGTERM)
            node.wait(15)


def read_cpu_seconds(node: subprocess.Popen[bytes]) -> float:
    """Return how much processor time a node has used, p2pd apart."""
    fields = Path(f"/proc/{node.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read_step(publisher: Publisher) -> object:
    """Return the trainer step of the newest committed version."""
    return publisher.status().get("trainer_step")


def choose_figures(rows: list[Figures]) -> Iterator[Figure]:
    """Yield a row for each model: what changed beside all."""
    for whole, listed in zip(rows[::2], rows[1::2], strict=True):
        yield Figure(
            f"{listed.parameters / 1e6:,.0f} M weights, {listed.changed_share:.1%} changed: publish() returns after "
            f"{listed.returns_seconds:.2f} s, {listed.crossed_mib:,.0f} MiB cross",
            f"{listed.returns_seconds / whole.returns_seconds:.2f} and {listed.crossed_mib / whole.crossed_mib:.2f} of "
            "publishing without a device baseline",
        )


def main(arguments: list[str] | None = None) -> int:
    """Print both ways for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="135m,1b", help=f"some of {', '.join(SHAPES)}")
    parser.add_argument("--publishes", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    add_summary_option(parser)
    options = parser.parse_args(arguments)
    rows = [
        measure(name, is_listed=is_listed, device=options.device, publish_count=options.publishes)
        for name in options.models.split(",")
        for is_listed in (False, True)
    ]
    write_summary(options.summary, choose_figures(rows))
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
        return 0
    print("| model | crosses | returns, s | commits, s | CPU s, loop + node | MiB crossing | node's growth, MiB |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(
            f"| {row.model} | {'what changed' if row.is_listed else 'all'} | {row.returns_seconds:.2f} | "
            f"{row.commits_seconds:.2f} | {row.process_cpu_seconds:.2f} + {row.node_cpu_seconds:.2f} | "
            f"{row.crossed_mib:,.0f} | {row.growth_mib:,.0f} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
