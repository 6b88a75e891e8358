"""What Mix1 beside the inner steps costs them (A-GOS-2): the same work, while Mix1 is under way and when it is over.

Usage: python tests/benchmarks/bench_mix_overlap.py [--mbps 10] [--params 2097152] [--rounds 6] [--share-cores | --both]

Two trainers (``global_m1``), each behind its own link in the namespace lab (needs root). A round has far more inner
steps than Mix1 takes, so each has steps of both kinds, one after the other, and whatever else the machine does meets
both. A step counts as beside Mix1 from the round's beginning, hand-over included, until nothing comes over the link any
more. The measured trainer has a core of its own, hand-over included, as it has on a machine with more cores than this
needs; with ``--share-cores`` both trainers and both nodes share all of them, and with ``--both`` both trainers compute.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests" / "lab"), str(ROOT / "tests" / "e2e")]

from mixing_lab import Case, start_nodes  # noqa: E402
from namespaces import Lab, Link  # noqa: E402
from reporting import Figure, add_summary_option, write_summary  # noqa: E402
from swarm import make_environment, open_swarm, wait_until  # noqa: E402

TRAINER: Final = ROOT / "tests" / "lab" / "overlap_trainer.py"
FIRST_ROUND: Final = 1
"""A roster is waited for before it, and everything is compiled."""
QUIET_SHARE: Final = 0.02
"""Of what a round receives: what comes after all but so much is news between nodes, no mixing."""
STEPS_MIN: Final = 500
"""Steps without Mix1 that are enough for a 95th percentile."""
WAIT_SECONDS: Final = 900.0

Step = tuple[float, int]
"""Seconds of an inner step, and the bytes that had come over the link at its end."""


class Cores(Enum):
    """Whose the machine's cores are."""

    OWN = "on a core of their own"
    SHARED = "on cores shared with two nodes"
    BOTH = "of two trainers on cores shared with two nodes"


@dataclass(frozen=True, slots=True)
class Overlap:
    """Times of inner steps, ascending."""

    beside: tuple[float, ...]
    alone: tuple[float, ...]

    def ratio(self, quantile: float) -> float:
        """Return a quantile beside Mix1 over that without."""
        return _quantile(self.beside, quantile) / _quantile(self.alone, quantile)


def split_steps(steps: Sequence[Step]) -> tuple[list[float], list[float]]:
    """Return the times of a round's steps beside Mix1, and of those after it."""
    first, last = steps[0][1], steps[-1][1]
    enough = last - QUIET_SHARE * (last - first)
    count = next(place for place, (_, received) in enumerate(steps) if received >= enough) + 1
    times = [seconds for seconds, _ in steps]
    return times[:count], times[count:]


def summarise(rounds: Sequence[Sequence[Step]]) -> Overlap:
    """Return the steps of all rounds by kind."""
    parts = [split_steps(steps) for steps in rounds]
    return Overlap(
        beside=tuple(sorted(seconds for beside, _ in parts for seconds in beside)),
        alone=tuple(sorted(seconds for _, alone in parts for seconds in alone)),
    )


def format_line(overlap: Overlap, mbps: float) -> str:
    """Return what is printed."""
    return (
        f"Inner steps beside Mix1 over {mbps:g} Mbit/s, over the same steps without: 95th percentile "
        f"{overlap.ratio(0.95):.2f}, median {overlap.ratio(0.5):.2f} "
        f"({len(overlap.beside)} and {len(overlap.alone)} steps)."
    )


def measure(mbps: float, params: int, *, inner_steps: int, products: int, rounds: int, cores: Cores) -> Overlap:
    """Run two trainers and return what the steps took of those that compute."""
    both = cores is Cores.BOTH
    first, *others = sorted(os.sched_getaffinity(0))
    assert others, "one core holds no trainer beside nodes"
    own, rest = ([first], others) if cores is Cores.OWN else ([first, *others], [first, *others])
    # What is started from now on is on these.
    os.sched_setaffinity(0, rest)
    # Two that mixed steps as well would hold one z, of which nothing travels.
    case = Case("global_m1", mbps, params, step_seconds=1.0, inner_steps=inner_steps, trainers=2)
    with Lab([Link(up_mbps=mbps, down_mbps=mbps)] * 2) as lab, open_swarm() as swarm:
        nodes = start_nodes(lab, swarm, case)
        logs = [swarm.directory / f"{node.name}.steps" for node in nodes]
        processes = []
        try:
            for seed, (node, log) in enumerate(zip(nodes, logs, strict=True)):
                options = ["--data-dir", node.data_dir, "--node", node.pid, "--params", params, "--seed", seed]
                options += ["--products", products, "--rounds", rounds]
                options += ["--idle"] if seed and not both else []
                places = ",".join(map(str, rest if seed else own))
                command = ["taskset", "--cpu-list", places, sys.executable, TRAINER, *options]
                with log.open("wb") as stream:
                    environment = make_environment(node.home)
                    words = [str(word) for word in command]
                    processes.append(subprocess.Popen(words, stdout=stream, stderr=stream, env=environment))
            for process, log in zip(processes, logs, strict=True):
                wait_until(f"{log.name} is done", lambda process=process: process.poll() is not None, WAIT_SECONDS)  # type: ignore[misc]
                assert process.returncode == 0, log.read_text()[-3000:]
        finally:
            for process in processes:
                process.kill()
        told = [_read(log) for log in logs]
    counted = [line for lines in told[: 2 if both else 1] for line in lines[FIRST_ROUND:]]
    assert all(line["mix1"] == 2 for line in counted), "a Mix1 did not come"
    overlap = summarise([line["steps"] for line in counted])
    assert len(overlap.alone) >= STEPS_MIN, "Mix1 outlasts the inner steps: ask for more of them, or longer ones"
    return overlap


def _read(log: Path) -> list[dict[str, Any]]:
    """Return what a trainer told, without what libraries had to say."""
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbps", type=float, default=10.0)
    parser.add_argument("--params", type=int, default=1 << 21)
    parser.add_argument("--inner-steps", type=int, default=800)
    parser.add_argument("--products", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=6)
    cores = parser.add_mutually_exclusive_group()
    cores.add_argument("--share-cores", dest="cores", action="store_const", const=Cores.SHARED, default=Cores.OWN)
    cores.add_argument("--both", dest="cores", action="store_const", const=Cores.BOTH, help="both trainers compute")
    add_summary_option(parser)
    arguments = parser.parse_args()
    overlap = measure(
        arguments.mbps,
        arguments.params,
        inner_steps=arguments.inner_steps,
        products=arguments.products,
        rounds=arguments.rounds,
        cores=arguments.cores,
    )
    line = format_line(overlap, arguments.mbps)
    times = f"median {overlap.ratio(0.5):.2f}, 95th percentile {overlap.ratio(0.95):.2f} times as long as without"
    write_summary(
        arguments.summary,
        [Figure(f"inner steps beside Mix1 over {arguments.mbps:g} Mb/s, {arguments.cores.value}", times)],
    )
    print(line, f"\nload {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores")


def _quantile(ascending: Sequence[float], quantile: float) -> float:
    return ascending[int(quantile * (len(ascending) - 1))]


if __name__ == "__main__":
    main()
