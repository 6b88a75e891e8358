"""A training process that does nothing but fixed pieces of work, and says of each when it was and what the link did.

Prints a line of JSON for each round: of every inner step its seconds, and the bytes that had come to the node by then.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

import pulsenet
from pulsenet.training import GossipOptimizer, MixingReport

WORK_SIDE = 256
"""Of the matrices that are multiplied."""
CALIBRATION_STEPS = 20
"""Done before the first round, to learn how long a step takes."""


def read_received(counters: Path) -> int:
    """Return the bytes that ``eth0`` of a process's network namespace received."""
    for line in counters.read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[0])
    raise ValueError(f"{counters} has no eth0")


def calibrate(work: Callable[[], None]) -> float:
    """Return what one piece of work usually takes: the first ones load libraries, and some are interrupted."""
    times = []
    for _ in range(CALIBRATION_STEPS):
        began_at = time.perf_counter()
        work()
        times.append(time.perf_counter() - began_at)
    return median(times)


def main() -> None:
    """Mix for so many rounds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--node", type=int, required=True, help="process of the node, whose link is looked at")
    parser.add_argument("--params", type=int, required=True)
    parser.add_argument("--products", type=int, required=True, help="matrix products in an inner step")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--idle", action="store_true", help="sleep as long as the work takes instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    counters = Path(f"/proc/{arguments.node}/net/dev")
    generator = torch.Generator().manual_seed(arguments.seed)
    model = torch.nn.Module()
    model.layers = torch.nn.ParameterList([torch.zeros(arguments.params // 8) for _ in range(8)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    matrix = torch.rand(WORK_SIDE, WORK_SIDE) / WORK_SIDE
    steps: list[tuple[float, int]] = []

    def work() -> None:
        nonlocal matrix
        for _ in range(arguments.products):
            matrix = (matrix @ matrix).clamp_(max=1.0)

    step_seconds = calibrate(work)
    mixer = pulsenet.join_mixing(data_dir=arguments.data_dir, publish=False)

    def tell(report: MixingReport) -> None:
        print(json.dumps({"round_index": report.round_index, "mix1": report.mix1_count, "steps": steps}), flush=True)
        steps.clear()

    sync = GossipOptimizer(model, optimizer, mixer=mixer, on_round=tell)
    while sync.counters.rounds < arguments.rounds:
        began_at = time.perf_counter()
        if arguments.idle:
            time.sleep(step_seconds)
        else:
            work()
        steps.append((time.perf_counter() - began_at, read_received(counters)))
        # Only the last step of a round moves the weights: the others are all alike.
        if sync.inner_step == sync.settings.inner_steps - 1:
            optimizer.step()
        sync.step()
    mixer.close()


if __name__ == "__main__":
    main()
