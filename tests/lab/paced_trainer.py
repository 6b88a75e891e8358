"""A training process whose inner steps take as long as it is told, over a model that only has a size.

Its gradients are drawn, and each inner step is of the size of the weights: neither z nor what the steps came to has a
mantissa that would shrink. It prints a line of JSON for each round, with how long a fixed piece of work took in each
inner step and what a parameter of the vectors took that were handed over.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict

import torch

import pulsenet
from pulsenet.training import DaemonMixer, GossipOptimizer, MixingReport
from pulsenet.training.mixing_work import HandedOver

WORK_SIDE = 256
"""Of the matrices that are multiplied in an inner step."""


TENSORS = 64
"""Of the model: enough that owners have alike much in each of their slices, as in every model worth sharing."""


def work() -> float:
    """Compute something, always the same, and return the seconds it took."""
    started_at = time.perf_counter()
    matrix = torch.ones(WORK_SIDE, WORK_SIDE)
    for _ in range(4):
        matrix = (matrix @ matrix).clamp_(max=1.0)
    return time.perf_counter() - started_at


def watch_sizes(mixer: DaemonMixer, tell: Callable[[float], None]) -> None:
    """Have the bytes that a parameter takes told, of every vector that is handed over."""
    work = mixer._work
    assert work is not None
    put = work.put

    def put_and_tell(*arguments: object, **named: object) -> HandedOver:
        handed = put(*arguments, **named)  # type: ignore[arg-type]
        slices = handed.message.slices
        tell(sum(part.encoded_size_bytes for part in slices) / sum(part.element_count for part in slices))
        return handed

    work.put = put_and_tell  # type: ignore[method-assign]


def main() -> None:
    """Mix for so many rounds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--params", type=int, required=True)
    parser.add_argument("--step-seconds", type=float, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    model = torch.nn.Module()
    layers = [torch.randn(arguments.params // TENSORS, generator=generator) for _ in range(TENSORS)]
    model.layers = torch.nn.ParameterList(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    noise = torch.Generator().manual_seed(100 + arguments.seed)
    alone = [work() for _ in range(200)]
    mixer = pulsenet.join_mixing(data_dir=arguments.data_dir, publish=False)
    assert mixer is not None
    taken: list[float] = []
    sizes: list[float] = []

    def tell(report: MixingReport) -> None:
        line = {**asdict(report), "work_seconds": taken, "alone_seconds": alone, "bytes_per_param": sizes}
        print(json.dumps(line), flush=True)
        taken.clear()
        sizes.clear()

    sync = GossipOptimizer(model, optimizer, mixer=mixer, on_round=tell)
    watch_sizes(mixer, sizes.append)
    while sync.counters.rounds < arguments.rounds:
        ends_at = time.monotonic() + arguments.step_seconds
        taken.append(work())
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=noise)
        optimizer.step()
        time.sleep(max(0.0, ends_at - time.monotonic()))
        sync.step()
    mixer.close()


if __name__ == "__main__":
    main()
