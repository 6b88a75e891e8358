"""Ways to bring a live vLLM to a new version, in one engine and one run: what each takes and what it leaves behind.

Usage, in an environment with vLLM (.ci/vllm makes one):

    VLLM_ENABLE_V1_MULTIPROCESSING=0 python tests/benchmarks/bench_vllm.py [--layers N] [--write docs/benchmarks.md]

The engine runs in this process, so that its weights can be compared with a fresh load after each way.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from reporting import Figure, add_summary_option, replace_block, write_summary

from pulsenet.codec.changes import Changes, encode_changes
from pulsenet.ids import Version, compute_digest
from pulsenet.serving.vllm.attest import Checkpoint
from pulsenet.serving.vllm.exchange import Order, UpdateInfo
from pulsenet.serving.vllm.rank import RankWeights
from pulsenet.training.snapshot import take_snapshot

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "vllm"))

from vllm_models import make_model, save_checkpoint

DENSITY: Final = 0.01
BEGIN: Final = "<!-- vllm: written by tests/benchmarks/bench_vllm.py -->"
END: Final = "<!-- vllm: end -->"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to update, measured."""

    name: str
    serving_seconds: float
    """While the engine could go on stepping."""
    paused_seconds: float
    """While it could not."""
    is_exact: bool
    """Every parameter has the bits of a fresh load."""


class Engine:
    """A vLLM in this process, and the model's two versions."""

    def __init__(self, layers: int, hidden: int, directory: Path) -> None:
        from vllm import LLM

        self.model = make_model("llama", layers=layers, hidden=hidden)
        self.base = save_checkpoint(self.model, directory / "base")
        self.old = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self._change()
        self.next = save_checkpoint(self.model, directory / "next")
        self.new = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.llm: Any = LLM(
            str(self.base),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=512,
            # On the CPU a share of all memory, of which the rest of the machine wants some too.
            gpu_memory_utilization=0.5,
            enforce_eager=True,
            weight_transfer_config={"backend": "pulsenet"},
        )
        (self.served,) = self.llm.apply_model(lambda model: model)

    def _change(self) -> None:
        """Change one weight in a hundred; a NaN and a negative zero are among the new ones, as bits can be."""
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.model.parameters():
                flat = parameter.view(-1).view(torch.int16)
                count = max(2, int(DENSITY * flat.numel()))
                flat[torch.randint(0, flat.numel(), (count,), generator=generator)] ^= 1
            first = next(iter(self.model.parameters())).view(-1).view(torch.int16)
            first[0], first[1] = 0x7FC1, -0x8000

    def records(self) -> tuple[Any, bytes]:
        """Return the table and what leads from the old version to the new one, in spool form."""
        table = take_snapshot(self.new, compute_dtype=None).table
        pieces = []
        for index, spec in enumerate(table.tensors):
            old, new = (
                state[spec.name].reshape(-1).view(torch.int16).numpy().view("<u2") for state in (self.old, self.new)
            )
            indices = np.flatnonzero(old != new)
            if indices.size:
                changes = Changes(index, indices.astype(spec.index_dtype), old[indices], new[indices])
                pieces.append(encode_changes(changes))
        return table, b"".join(pieces)

    def bits(self) -> dict[str, bytes]:
        """Return every parameter's bytes."""
        return {
            name: parameter.detach().reshape(-1).view(torch.int16).numpy().tobytes()
            for name, parameter in self.served.named_parameters()
        }

    def load(self, directory: Path) -> None:
        """Bring the engine to a version by vLLM's own loader."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(directory)})


def measure_pulsenet(engine: Engine, directory: Path, expected: Mapping[str, bytes], repeats: int) -> list[Way]:
    """Measure attaching and each phase of our own way."""
    table, data = engine.records()
    memory = directory / "memory"
    memory.write_bytes(data)
    weights = RankWeights(engine.served)
    started = time.perf_counter()
    with torch.inference_mode():
        mapped = weights.draw(table)
        drawn = time.perf_counter()
        weights.attach(mapped, lambda table: Checkpoint(engine.base, table))
        attached = time.perf_counter()
    weights.held = Version(0, 1)
    order = UpdateInfo(
        Order.STAGE, "t", "", "0.2", "0.1", size_bytes=len(data), digest=compute_digest(data).hex(), root="00"
    )
    phases: dict[str, list[float]] = {name: [] for name in ("stage", "commit", "roll back", "read back")}
    is_exact = True
    with torch.inference_mode():
        for _ in range(repeats):
            phases["stage"].append(_time(lambda: weights.stage(order, memory)))
            phases["commit"].append(_time(weights.commit))
            is_exact = is_exact and engine.bits() == expected
            phases["roll back"].append(_time(weights.rollback))
            phases["read back"].append(_time(weights.read_back))
    stage, commit = statistics.median(phases["stage"]), statistics.median(phases["commit"])
    return [
        Way("pulsenet: stage, commit with undo log and read-back", stage, commit, is_exact),
        Way("pulsenet: roll back", 0.0, statistics.median(phases["roll back"]), is_exact),
        Way("pulsenet: once, draw the map", 0.0, drawn - started, is_exact),
        Way("pulsenet: once, compare with the checkpoint", attached - drawn, 0.0, is_exact),
    ]


def measure_others(engine: Engine, expected: Mapping[str, bytes], repeats: int) -> list[Way]:
    """Measure vLLM's own ways: all of them write while the engine stands still."""
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        CheckpointWeightPatch,
        load_checkpoint_weight_patches,
    )

    patches = []
    for name, new in engine.new.items():
        differs = new.reshape(-1).view(torch.int16) != engine.old[name].reshape(-1).view(torch.int16)
        # It takes no NaN, which is its mark for what stays.
        changed = (differs & ~new.reshape(-1).isnan()).nonzero()[:, 0]
        patches.append(
            CheckpointWeightPatch(name, tuple(new.shape), new.dtype, new.reshape(-1)[changed], changed.to(torch.int32))
        )

    def load_dense() -> None:
        with torch.inference_mode():
            engine.served.load_weights(iter(engine.new.items()))

    ways = {
        "vLLM: reload_weights from a checkpoint on disk": lambda: engine.load(engine.next),
        "vLLM: load_weights of dense tensors in memory": load_dense,
        "vLLM: sparse loader, NaN for unchanged": lambda: load_checkpoint_weight_patches(engine.served, patches),
    }
    return [_measure_way(name, way, engine, expected, repeats) for name, way in ways.items()]


def _measure_way(
    name: str, way: Callable[[], object], engine: Engine, expected: Mapping[str, bytes], repeats: int
) -> Way:
    seconds, is_exact = [], True
    for _ in range(repeats):
        engine.load(engine.base)
        seconds.append(_time(way))
        is_exact = is_exact and engine.bits() == expected
    return Way(name, 0.0, statistics.median(seconds), is_exact)


def _time(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(layers: int, hidden: int, repeats: int) -> tuple[str, list[Way]]:
    """Run everything and return a heading and the ways."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        engine = Engine(layers, hidden, directory)
        count = sum(tensor.numel() for tensor in engine.new.values())
        ours = measure_pulsenet(engine, directory, {}, 1)  # warms the compiled loops
        engine.load(engine.next)
        expected = engine.bits()
        engine.load(engine.base)
        ours = measure_pulsenet(engine, directory, expected, repeats)
        others = measure_others(engine, expected, repeats)
    return f"{count / 1e6:.0f} M parameters, {100 * DENSITY:g} % changed, median of {repeats}", [*ours, *others]


def format_markdown(heading: str, ways: list[Way]) -> str:
    """Return the table, with each pause beside the shortest."""
    shortest = ways[0].paused_seconds
    lines = [
        f"{heading}, {os.cpu_count()} CPU cores, BF16, one rank:",
        "",
        "| way | while serving, ms | engine paused, ms | pause, ratio | every bit arrives |",
        "| --- | --- | --- | --- | --- |",
    ]
    for way in ways:
        ratio = f"{way.paused_seconds / shortest:.1f}" if way.paused_seconds else "-"
        exact = "yes" if way.is_exact else "no"
        lines.append(
            f"| {way.name} | {1000 * way.serving_seconds:.0f} | {1000 * way.paused_seconds:.0f} | {ratio} | {exact} |"
        )
    return "\n".join(lines)


def choose_figure(heading: str, ways: list[Way]) -> Figure:
    """Return the row: our pause beside those of vLLM's own ways."""
    ours, others = ways[0], [way for way in ways if way.name.startswith("vLLM")]
    return Figure(
        f"{heading}: the engine paused {1000 * ours.paused_seconds:.0f} ms",
        "; ".join(f"{way.paused_seconds / ours.paused_seconds:.1f} times that by {way.name}" for way in others),
    )


def main() -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table into this document")
    add_summary_option(parser)
    arguments = parser.parse_args()
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
        parser.error("set VLLM_ENABLE_V1_MULTIPROCESSING=0: the engine must run in this process")
    heading, ways = measure(arguments.layers, arguments.hidden, arguments.repeats)
    text = format_markdown(heading, ways)
    print(text)
    write_summary(arguments.summary, [choose_figure(heading, ways)])
    if arguments.write:
        replace_block(arguments.write, BEGIN, END, text)


if __name__ == "__main__":
    main()
