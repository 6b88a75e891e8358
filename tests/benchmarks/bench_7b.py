"""One step of a 7B-size model, published and applied: seconds, bytes and memory against the limits.

Usage: python tests/benchmarks/bench_7b.py [--gib 14.2] [--codec auto] [--directory DIR] [--json]

Weights are synthetic, with the share of changes by exponent that recorded runs have, and are made tensor by tensor
while they are published, so one version in memory is all there ever is. Two processes run one after another: one
publishes an anchor and a patch, one applies both to its mirror; publisher and mirror are the daemon's. Disk needed:
a bit more than the model.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from reporting import Figure, add_summary_option, write_summary

from pulsenet import limits
from pulsenet.chain.records import Kind, Manifest
from pulsenet.chain.signing import seal
from pulsenet.codec.patch import CODEC_CHOICES
from pulsenet.ids import Digest, PeerId, RunId, Version
from pulsenet.local.shared_memory import Region, SnapshotWriter
from pulsenet.node.effects import Commit, EncodeSnapshot
from pulsenet.node.events import Committed, HopApplied, PatchEncoded
from pulsenet.tensors.params import ParameterTable, TensorSpec, make_table
from pulsenetd.bench.synthetic import Bits, draw_step
from pulsenetd.storage.mirror import Mirror
from pulsenetd.storage.parts import PartQueue
from pulsenetd.storage.publishing import Publisher
from pulsenetd.storage.store import Store
from pulsenetd.warm_up import warm_up

GIB, MIB = 1 << 30, 1 << 20
FULL_GIB = 14.2
"""Qwen2.5-7B in BF16."""
PAPER_MB = 108
"""Of the PULSE paper, for a patch of a 7B model."""
BUFFERS_MIB = 96
"""What chunks, blocks in work and allocator slack may take beside the weights."""
POOL_BLOCKS = 24
"""How many different blocks the weights are made of: blocks are encoded one by one, so repeats change nothing."""
LAYERS, WIDTH, MLP_WIDTH, KEY_WIDTH, VOCABULARY = 28, 3584, 18_944, 512, 152_064


def make_7b_table(gib: float) -> ParameterTable:
    """Return the tensors of a 7B model, all its sizes but the number of layers shrunk to about ``gib``."""
    scale = math.sqrt(gib / FULL_GIB)

    def shrink(size: int) -> int:
        return max(8, round(size * scale / 8) * 8)

    width, mlp, keys, vocabulary = (shrink(size) for size in (WIDTH, MLP_WIDTH, KEY_WIDTH, VOCABULARY))
    shapes = {
        "embed_tokens.weight": (vocabulary, width),
        "lm_head.weight": (vocabulary, width),
        "norm.weight": (width,),
    }
    for layer in range(LAYERS):
        prefix = f"layers.{layer:02d}"
        for name, rows in (("q", width), ("k", keys), ("v", keys), ("o", width)):
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (rows, width)
        shapes[f"{prefix}.mlp.gate_proj.weight"] = shapes[f"{prefix}.mlp.up_proj.weight"] = (mlp, width)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (width, mlp)
        shapes[f"{prefix}.input_layernorm.weight"] = shapes[f"{prefix}.post_attention_layernorm.weight"] = (width,)
    return make_table(TensorSpec(name, "BF16", shape) for name, shape in shapes.items())


# Publish


class Sampler(threading.Thread):
    """Keeps the highest private and shared resident memory of this process; the page cache is apart."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._idle_bytes = self._read()
        self._peak_bytes = self._idle_bytes
        self._stopped = threading.Event()

    def run(self) -> None:
        """Sample until stopped."""
        while not self._stopped.wait(0.02):
            self._peak_bytes = max(self._peak_bytes, self._read())

    def stop(self) -> float:
        """Return the growth over idle in MiB."""
        self._stopped.set()
        self.join()
        return (max(self._peak_bytes, self._read()) - self._idle_bytes) / MIB

    @staticmethod
    def _read() -> int:
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


class Version7B:
    """One of the two versions, made of blocks of a small pool when they are needed."""

    def __init__(self, pool: list[tuple[Bits, Bits]], which: int) -> None:
        self._blocks = [pair[which] for pair in pool]

    def tensor_blocks(self, tensor_index: int, spec: TensorSpec) -> Iterator[Bits]:
        """Yield one tensor's bits, a block at a time."""
        for start in range(0, spec.element_count, limits.BLOCK_ELEMENTS):
            block = self._blocks[(tensor_index * 7 + start // limits.BLOCK_ELEMENTS) % POOL_BLOCKS]
            yield block[: min(limits.BLOCK_ELEMENTS, spec.element_count - start)]


class Feeder(threading.Thread):
    """Hands a version over as a training process does: a part for each tensor, one ahead of the encoder."""

    def __init__(self, table: ParameterTable, version: Version7B) -> None:
        super().__init__(daemon=True)
        self._table = table
        self._version = version
        self._room = threading.Semaphore(1)
        self.parts = PartQueue(table, on_taken=self._room.release)

    def run(self) -> None:
        """Put in all parts, each when the one before was taken."""
        for index, spec in enumerate(self._table.tensors):
            self._room.acquire()
            layout = self.parts.next_layout(1)
            writer = SnapshotWriter(self._table, layout)
            offset = 0
            for block in self._version.tensor_blocks(index, spec):
                writer.write_block(index, offset, block.view(np.uint8))
                offset += block.nbytes
            self.parts.put(layout, Region.open_snapshot(writer.seal(), layout.size_bytes))


def publish_versions(directory: Path, gib: float, *, codec: str) -> dict[str, Any]:
    """Publish both versions and commit them."""
    table = make_7b_table(gib)
    generator = np.random.default_rng(7)
    pool = [draw_step(generator, limits.BLOCK_ELEMENTS) for _ in range(POOL_BLOCKS)]
    figures: dict[str, Any] = {}
    store = Store.open(directory / "store")
    warm_up()
    sampler = Sampler()
    sampler.start()
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        publisher = Publisher(store, directory / "spools", codec=codec, run_blocks=threads.map)
        try:
            manifest = None
            for number, kind in enumerate((Kind.ANCHOR, Kind.PATCH), 1):
                feeder = Feeder(table, Version7B(pool, number - 1))
                publisher.offer(number, feeder.parts)
                started = time.monotonic()
                feeder.start()
                manifest = _publish(publisher, number, kind, table, manifest)
                figures[f"{kind.value}_seconds"] = time.monotonic() - started
                figures[f"{kind.value}_waited_seconds"] = publisher.waited_seconds
                figures[f"{kind.value}_bytes"] = manifest.encoded_size_bytes
            assert manifest is not None
            figures["changes"] = manifest.changed_count
            figures["codec_id"] = manifest.codec_id
        finally:
            publisher.close()
            store.close()
    return {**figures, "growth_mib": sampler.stop()}


def _publish(
    publisher: Publisher, generation: int, kind: Kind, table: ParameterTable, base: Manifest | None
) -> Manifest:
    event = publisher.encode_snapshot(EncodeSnapshot(generation, kind))
    assert isinstance(event, PatchEncoded), event
    manifest = Manifest(
        run_id=RunId(bytes(32)),
        revision=0,
        term=0,
        kind=kind,
        base_version=None if base is None else base.version,
        version=Version(0, generation),
        base_root=None if base is None else base.root,
        root=event.root,
        table_digest=Digest(table.digest),
        blob_id=event.blob_id,
        raw_size_bytes=event.raw_size_bytes,
        encoded_size_bytes=event.encoded_size_bytes,
        changed_count=event.changed_count,
        element_count=event.element_count,
        codec_id=event.codec_id,
        trainer_step=generation,
        previous=None,
    )
    record = seal(manifest, lambda _: bytes(64), PeerId(bytes(32)))
    answer = publisher.commit(Commit(generation, manifest.version, manifest.root, (record,), ()))
    assert answer == Committed(manifest.version), answer
    return manifest


# Apply


def apply_versions(directory: Path) -> dict[str, Any]:
    """Move a fresh mirror along both versions; the root of each is checked by the mirror."""
    figures: dict[str, Any] = {}
    # Publisher and mirror name their states differently, so the mirror starts empty in the publisher's store.
    store = Store.open(directory / "store")
    warm_up()
    sampler = Sampler()
    sampler.start()
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        mirror = Mirror(store, directory / "spools", run_blocks=threads.map)
        try:
            for _, manifest in sorted(store.manifests(), key=lambda item: item[1].version):
                started = time.monotonic()
                answer = mirror.apply_hop(manifest)
                assert answer == HopApplied(manifest.version, manifest.root), answer
                figures[f"{manifest.kind.value}_seconds"] = time.monotonic() - started
            times = mirror.last_times
            assert times is not None
            figures |= {
                "decode_seconds": times.decode_seconds,
                "apply_seconds": times.apply_seconds,
                "verify_seconds": times.verify_seconds,
            }
        finally:
            mirror.close()
            store.close()
    return {**figures, "growth_mib": sampler.stop()}


# All of it


def run_stage(stage: str, arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Run one stage in a process of its own and return its figures."""
    command = [sys.executable, __file__, "--stage", stage, "--directory", str(directory)]
    command += ["--gib", str(arguments.gib), "--codec", arguments.codec]
    print(f"{stage} ...", file=sys.stderr)
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    figures: dict[str, Any] = json.loads(output)
    return figures


def run_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run both stages and return their figures and limits."""
    table = make_7b_table(arguments.gib)
    size_mib = table.layout_size_bytes / MIB
    largest_mib = max(spec.size_bytes for spec in table.tensors) / MIB
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="pulsenet-7b-") as name:
        directory = Path(name)
        needed = 1.2 * table.layout_size_bytes
        if shutil.disk_usage(directory).free < needed:
            sys.exit(f"{needed / GIB:.1f} GiB of disk are needed in {directory}: name another with --directory")
        publish = run_stage("publish", arguments, directory)
        apply = run_stage("apply", arguments, directory)
    # Of both, as docs/operating.md states for inferencers and for a blocking publish.
    publish["limit_mib"] = apply["limit_mib"] = size_mib + 2 * largest_mib + BUFFERS_MIB
    return {
        "parameters": table.element_count,
        "dense_bytes": table.size_bytes,
        "codec": arguments.codec,
        "publish": publish,
        "apply": apply,
        "ratio": table.size_bytes / publish["patch_bytes"],
        "bits_per_change": publish["patch_bytes"] * 8 / publish["changes"],
        "density_ratio": publish["changes"] / table.element_count,
        "kept": all(part["growth_mib"] <= part["limit_mib"] for part in (publish, apply)),
    }


def format_report(figures: dict[str, Any]) -> str:
    """Return the figures for people."""
    publish, apply = figures["publish"], figures["apply"]
    factor = FULL_GIB * GIB / figures["dense_bytes"]
    total = sum(part[f"{kind}_seconds"] for part in (publish, apply) for kind in ("anchor", "patch"))
    return "\n".join(
        (
            f"model    {figures['parameters'] / 1e9:.2f} G parameters, {figures['dense_bytes'] / 1e6:,.0f} MB; "
            f"{figures['density_ratio']:.3%} changed",
            f"patch    {publish['patch_bytes'] / 1e6:,.1f} MB ({figures['codec']}), {figures['ratio']:.0f}x smaller, "
            f"{figures['bits_per_change']:.2f} bits a change; at {FULL_GIB} GiB "
            f"{publish['patch_bytes'] * factor / 1e6:,.0f} MB, the paper's {PAPER_MB} MB",
            f"publish  anchor {publish['anchor_seconds']:.1f} s, patch {publish['patch_seconds']:.1f} s (of which "
            f"{publish['patch_waited_seconds']:.1f} waiting for the synthetic weights)",
            f"apply    anchor {apply['anchor_seconds']:.1f} s, patch {apply['patch_seconds']:.1f} s (decode "
            f"{apply['decode_seconds']:.1f}, write {apply['apply_seconds']:.1f}, check {apply['verify_seconds']:.1f})",
            f"memory   publisher grew {publish['growth_mib']:,.0f} MiB of {publish['limit_mib']:,.0f}, "
            f"mirror {apply['growth_mib']:,.0f} MiB of {apply['limit_mib']:,.0f}: "
            f"{'kept' if figures['kept'] else 'BROKEN'}",
            f"time     {total:.0f} s; at {FULL_GIB} GiB about {total * factor / 60:.0f} min",
        )
    )


def choose_figures(figures: dict[str, Any]) -> Iterator[Figure]:
    """Yield the rows: size, time by stage, memory."""
    publish, apply = figures["publish"], figures["apply"]
    yield Figure(
        f"{figures['parameters'] / 1e9:.2f} G weights, {figures['density_ratio']:.2%} changed: "
        f"patch of {publish['patch_bytes'] / 1e6:,.1f} MB, {figures['bits_per_change']:.1f} bits a change",
        f"{figures['ratio']:.0f} times below dense",
    )
    yield Figure(
        f"the same: published in {publish['patch_seconds']:.1f} s, {publish['patch_waited_seconds']:.1f} of them "
        f"waiting for weights; applied in {apply['patch_seconds']:.1f} s: decode {apply['decode_seconds']:.1f}, "
        f"write {apply['apply_seconds']:.1f}, check {apply['verify_seconds']:.1f}",
        f"{publish['patch_seconds'] / publish['anchor_seconds']:.2f} and "
        f"{apply['patch_seconds'] / apply['anchor_seconds']:.2f} of a whole version",
    )
    yield Figure(
        f"the same: publisher grew by {publish['growth_mib']:,.0f} MiB, mirror by {apply['growth_mib']:,.0f}",
        f"{publish['growth_mib'] / publish['limit_mib']:.2f} and {apply['growth_mib'] / apply['limit_mib']:.2f} "
        "of what is promised",
    )


def main() -> int:
    """Print the figures; fail if a memory limit was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=FULL_GIB, help="size of the model")
    parser.add_argument("--codec", choices=sorted(CODEC_CHOICES), default="auto")
    parser.add_argument("--directory", type=Path, help="where the files go (default: the system's)")
    parser.add_argument("--json", action="store_true")
    add_summary_option(parser)
    parser.add_argument("--stage", choices=("publish", "apply"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    stages: dict[str, Callable[[], dict[str, Any]]] = {
        "publish": lambda: publish_versions(arguments.directory, arguments.gib, codec=arguments.codec),
        "apply": lambda: apply_versions(arguments.directory),
    }
    if arguments.stage:
        print(json.dumps(stages[arguments.stage]()))
        return 0
    figures = run_all(arguments)
    write_summary(arguments.summary, choose_figures(figures))
    print(json.dumps(figures) if arguments.json else format_report(figures))
    return 0 if figures["kept"] else 1


if __name__ == "__main__":
    sys.exit(main())
