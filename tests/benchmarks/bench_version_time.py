"""Time to a new version with and without streaming, at the publisher and at a follower (docs: limits).

Usage: python tests/benchmarks/bench_version_time.py [--model-mib 512] [--megabits 20,100,500,2000] [--json]

The publisher's figure runs from the first copied byte to the commit. The follower's runs from the first byte of a
patch, which a source sends at a fixed rate, to the mirror holding the version with its root checked; beside it stand
its parts: the transfer, and decoding and applying a patch that is whole. No network and no second process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from reporting import Figure, add_summary_option, write_summary

from pulsenet.chain.records import Kind, Manifest
from pulsenet.chain.signing import seal
from pulsenet.ids import Digest, PeerId, RunId, Version
from pulsenet.local.shared_memory import Region, write_parts
from pulsenet.node.effects import Commit, EncodeSnapshot
from pulsenet.node.events import Committed, HopApplied, PatchEncoded
from pulsenet.tensors.params import ParameterTable, TensorSpec, make_table
from pulsenetd.storage.mirror import Mirror
from pulsenetd.storage.parts import PartQueue
from pulsenetd.storage.publishing import Publisher
from pulsenetd.storage.store import Store

MIB = 1 << 20
DENSITY = 0.006
"""Share of changed values in a steady-state step."""

REPEATS = 3


def make_model_table(model_mib: int) -> ParameterTable:
    """Return BF16 tensors: one that is a fifth of the model, the rest in equal parts."""
    largest = model_mib * MIB // 5 // 2
    part = (model_mib * MIB // 2 - largest) // 64
    specs = [TensorSpec("embedding", "BF16", (largest,))]
    return make_table([*specs, *(TensorSpec(f"layer.{index:02d}", "BF16", (part,)) for index in range(64))])


class Bench:
    """A publisher and a follower on stores in one directory, with the machine's part played here."""

    def __init__(self, directory: Path, table: ParameterTable, run_blocks: Callable[..., object]) -> None:
        self.table = table
        self._random = np.random.default_rng(7)
        self._bits = [
            self._random.integers(0x3C00, 0x3F00, spec.element_count, dtype=np.uint16) for spec in table.tensors
        ]
        self.upstream = Store.open(directory / "publisher")
        self.store = Store.open(directory / "follower")
        self.publisher = Publisher(self.upstream, directory / "publisher" / "spools", run_blocks=run_blocks)  # type: ignore[arg-type]
        self.mirror = Mirror(self.store, directory / "follower" / "spools", run_blocks=run_blocks)  # type: ignore[arg-type]
        self._number = 0

    def step(self) -> None:
        """Move some values by one unit in the last place."""
        for bits in self._bits:
            bits[self._random.integers(0, bits.size, int(bits.size * DENSITY))] += 1

    def publish(self, *, is_streamed: bool) -> tuple[Manifest, float]:
        """Publish the weights; return the manifest and the seconds from the first copied byte to the commit."""
        self._number += 1
        queue = PartQueue(self.table)
        self.publisher.offer(self._number, queue)
        started = time.monotonic()
        copying = threading.Thread(target=self._copy_out, args=(queue,))
        copying.start()
        if not is_streamed:
            copying.join()
        kind = Kind.ANCHOR if self._number == 1 else Kind.PATCH
        base = self.publisher.committed
        encoded = self.publisher.encode_snapshot(EncodeSnapshot(self._number, kind))
        copying.join()
        assert isinstance(encoded, PatchEncoded), encoded
        manifest = Manifest(
            run_id=RunId(bytes(32)),
            revision=0,
            term=0,
            kind=kind,
            base_version=None if base is None else base.version,
            version=Version(0, self._number),
            base_root=None if base is None else base.root,
            root=encoded.root,
            table_digest=Digest(self.table.digest),
            blob_id=encoded.blob_id,
            raw_size_bytes=encoded.raw_size_bytes,
            encoded_size_bytes=encoded.encoded_size_bytes,
            changed_count=encoded.changed_count,
            element_count=encoded.element_count,
            codec_id=encoded.codec_id,
            trainer_step=self._number,
            previous=None,
        )
        record = seal(manifest, lambda _: bytes(64), PeerId(bytes(32)))
        answer = self.publisher.commit(Commit(self._number, manifest.version, manifest.root, (record,), ()))
        assert isinstance(answer, Committed), answer
        return manifest, time.monotonic() - started

    def _copy_out(self, queue: PartQueue) -> None:
        blocks = ((index, 0, bits.view(np.uint8)) for index, bits in enumerate(self._bits))
        with closing(write_parts(self.table, blocks)) as parts:
            for part in parts:
                region = Region.open_snapshot(os.dup(part.descriptor), part.layout.size_bytes)
                queue.put(queue.next_layout(part.layout.count), region)

    def follow(self, manifest: Manifest, *, bytes_per_second: float, is_streamed: bool) -> tuple[float, float]:
        """Receive a version at this rate; return the seconds to holding it, and of the transfer alone."""
        data = self.upstream.chunk_list(manifest.blob_id)
        assert data is not None
        self.store.put_chunk_list(manifest.blob_id, data)
        self.store.put_record(seal(manifest, lambda _: bytes(64), PeerId(bytes(32))))
        started, sent = time.monotonic(), 0
        if is_streamed:
            self.mirror.prepare(manifest)
        for size_bytes, digest in self.store.missing_chunks(manifest.blob_id):
            chunk = self.upstream.chunk(digest)
            assert chunk is not None
            sent += size_bytes
            time.sleep(max(0.0, started + sent / bytes_per_second - time.monotonic()))
            self.store.put_chunks({digest: chunk})
        transferred = time.monotonic() - started
        answer = self.mirror.apply_hop(manifest)
        assert isinstance(answer, HopApplied), answer
        return time.monotonic() - started, transferred

    def close(self) -> None:
        """Let go of memory and files."""
        self.publisher.close()
        self.mirror.close()
        self.upstream.close()
        self.store.close()


def measure(model_mib: int, megabits: list[float]) -> dict[str, Any]:
    """Return the figures."""
    table = make_model_table(model_mib)
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(os.cpu_count()) as threads:
        bench = Bench(Path(directory), table, threads.map)
        anchor, _ = bench.publish(is_streamed=True)
        bench.follow(anchor, bytes_per_second=1e12, is_streamed=False)
        seconds: dict[bool, list[float]] = {False: [], True: []}
        rows: list[dict[str, float]] = []
        patch_size_bytes = 0

        def next_version(*, is_streamed: bool) -> Manifest:
            nonlocal patch_size_bytes
            bench.step()
            manifest, took = bench.publish(is_streamed=is_streamed)
            seconds[is_streamed].append(took)
            patch_size_bytes = manifest.encoded_size_bytes
            return manifest

        # The first patch compiles what was not.
        bench.follow(next_version(is_streamed=True), bytes_per_second=1e12, is_streamed=False)
        seconds = {False: [], True: []}
        for rate in megabits:
            found: dict[str, list[float]] = {"transfer": [], "decode": [], "apply": [], "after": [], "streamed": []}
            for _ in range(REPEATS):
                for is_streamed in (False, True):
                    manifest = next_version(is_streamed=is_streamed)
                    took, transfer = bench.follow(manifest, bytes_per_second=rate * 125_000, is_streamed=is_streamed)
                    found["streamed" if is_streamed else "after"].append(took)
                    times = bench.mirror.last_times
                    assert times is not None
                    if not is_streamed:
                        found["transfer"].append(transfer)
                        found["decode"].append(times.decode_seconds)
                        found["apply"].append(times.apply_seconds + times.verify_seconds)
            rows.append({"megabits": rate, **{f"{name}_seconds": round(min(all_), 3) for name, all_ in found.items()}})
        bench.close()
    return {
        "model_mib": round(table.layout_size_bytes / MIB),
        "patch_size_bytes": patch_size_bytes,
        "publish_after_copy_seconds": round(min(seconds[False]), 3),
        "publish_streamed_seconds": round(min(seconds[True]), 3),
        "follow": rows,
    }


def choose_figures(figures: dict[str, Any]) -> Iterator[Figure]:
    """Yield the rows: what streaming saves at either end."""
    after, streamed = (figures[f"publish_{name}_seconds"] for name in ("after_copy", "streamed"))
    yield Figure(
        f"{figures['model_mib']:,} MiB of BF16: {streamed:.2f} s from the first copied byte to the commit",
        f"{streamed / after:.2f} of encoding after the copy",
    )
    for row in figures["follow"]:
        yield Figure(
            f"the same over {row['megabits']:,g} Mb/s: {row['streamed_seconds']:.2f} s to holding it; transfer "
            f"{row['transfer_seconds']:.2f}, decode {row['decode_seconds']:.2f}, apply {row['apply_seconds']:.2f}",
            f"{row['streamed_seconds'] / row['after_seconds']:.2f} of one after another",
        )


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-mib", type=int, default=512)
    parser.add_argument("--megabits", default="20,100,500,2000", help="rates of the source, megabits per second")
    parser.add_argument("--json", action="store_true")
    add_summary_option(parser)
    arguments = parser.parse_args()
    figures = measure(arguments.model_mib, [float(rate) for rate in arguments.megabits.split(",")])
    write_summary(arguments.summary, choose_figures(figures))
    if arguments.json:
        print(json.dumps(figures))
        return 0
    print(f"model {figures['model_mib']} MiB, a patch of {figures['patch_size_bytes']} bytes; best of {REPEATS}")
    print(
        f"publish: {figures['publish_after_copy_seconds']} s encoding after the copy, "
        f"{figures['publish_streamed_seconds']} s while it goes on"
    )
    print("Mbit/s   transfer   decode    apply   one after another   streamed   (seconds)")
    for row in figures["follow"]:
        print(
            f"{row['megabits']:6.0f} {row['transfer_seconds']:10.3f} {row['decode_seconds']:8.3f} "
            f"{row['apply_seconds']:8.3f} {row['after_seconds']:19.3f} {row['streamed_seconds']:10.3f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
