"""Trainers that mix, each behind a link of the lab, with inner steps paced by a timer: utilisation as measured."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import plain_tcp
from lab_swarm import RUN, LabNode
from namespaces import Lab, Link
from swarm import Swarm, make_environment, open_swarm, run_json, wait_until

from pulsenet.outer.plan import Variant, Workload, predict_utilization
from pulsenet.outer.plan_link import Link as PlannedLink

SCRIPT: Final = Path(__file__).with_name("paced_trainer.py")
FIRST_ROUND: Final = 1
"""Rounds before it are not counted: a roster is waited for, and everything is compiled."""
PLAIN_SECONDS: Final = 20.0
"""How long plain TCP is looked at before."""
UPLOAD_RATIO: Final = 0.97
"""What nodes may upload, of what plain TCP carries. The rest is for requests: where a node's own chunks fill its line,
requests wait behind them, and now and then one way of a connection runs out of work (docs/gossip.md)."""
UNSENT_SIZE_BYTES: Final = 16_384
"""Less than a hundredth of what a trainer hands over, as a kernel's megabytes are where gigabytes travel."""
MEMORY: Final = Path("/dev/shm")
"""Where the nodes live: all of them together would wait for one disk, of which a trainer has one for itself."""
WAIT_SECONDS: Final = 2400.0
SHOWN: Final = ("round_index", "mix1_count", "mix2_count", "mix1_reason", "mix2_reason", "blocked_seconds")
"""Of each round, for whoever looks into a measurement."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured."""

    variant: str
    mbps: float
    params: int
    step_seconds: float
    inner_steps: int = 8
    trainers: int = 4
    rounds: int = 3

    def predict(self, bytes_per_param: float = 4.0, up_mbps: float = 0.0, down_mbps: float = 0.0) -> float:
        """Return the utilisation that ``pulsenet plan`` gives for the size of a parameter and the link's speeds."""
        workload = Workload(
            params=self.params,
            peer_count=self.trainers,
            step_seconds=self.step_seconds,
            inner_steps=self.inner_steps,
            bytes_per_param=bytes_per_param,
        )
        link = PlannedLink(down_mbps=down_mbps or self.mbps, up_mbps=up_mbps or self.mbps)
        return predict_utilization(Variant(self.variant), workload, link)


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of it."""

    case: Case
    utilization: float
    predicted: float
    """By the size that vectors had, compressed, by what plain TCP carried, and by ``--upload-limit``."""
    predicted_by_line: float
    """The same without ``--upload-limit``."""
    bytes_per_param: float
    """That size."""
    plain_mbps: float
    """What plain TCP carried, to and from each node, while all sent to all."""
    mixed_ratio: float
    """Share of the jobs whose mean had everybody in it who should be."""
    work_ratio_p95: float
    """95th percentile of a fixed piece of work beside mixing, over that alone."""


def measure(case: Case) -> Measured:
    """Run trainers over links of one speed and return how they spent their time."""
    link = Link(up_mbps=case.mbps, down_mbps=case.mbps, unsent_size_bytes=UNSENT_SIZE_BYTES)
    links = [link for _ in range(case.trainers)]
    with Lab(links) as lab, open_swarm(MEMORY) as swarm:
        plain_mbps = plain_tcp.measure_all(lab, case.trainers, PLAIN_SECONDS)
        up_mbps = UPLOAD_RATIO * plain_mbps
        nodes = start_nodes(lab, swarm, case, f"--upload-limit={int(up_mbps * 1e6 / 8)}")
        logs = [swarm.directory / f"{node.name}.reports" for node in nodes]
        processes = []
        try:
            for seed, (node, log) in enumerate(zip(nodes, logs, strict=True)):
                options = ["--data-dir", node.data_dir, "--params", case.params, "--seed", seed]
                options += ["--step-seconds", case.step_seconds, "--rounds", case.rounds]
                with log.open("wb") as stream:
                    command = [sys.executable, SCRIPT, *options]
                    processes.append(
                        subprocess.Popen(
                            [str(word) for word in command],
                            stdout=stream,
                            stderr=stream,
                            env=make_environment(node.home),
                        )
                    )
            for process, log in zip(processes, logs, strict=True):
                wait_until(f"{log.name} is done", lambda process=process: process.poll() is not None, WAIT_SECONDS)  # type: ignore[misc]
                assert process.returncode == 0, log.read_text()[-3000:]
        finally:
            for process in processes:
                process.kill()
        told = [_read(log) for log in logs]
        for lines in told:
            for line in lines:
                print({name: line[name] for name in SHOWN}, file=sys.stderr)
        return _summarise(case, told, plain_mbps)


def start_nodes(lab: Lab, swarm: Swarm, case: Case, *options: str) -> list[LabNode]:
    """Start a node of a run that mixes at each end."""
    nodes = [LabNode(lab, index, swarm, f"trainer{index}", "trainer", options) for index in range(case.trainers)]
    keys = [run_json("keygen", str(node.data_dir / "identity.key"), home=node.home)["public_key"] for node in nodes]
    listed = [f"--trainer={key}" for key in keys]
    rules = f"--algorithm gossip --variant {case.variant} --inner-steps {case.inner_steps} --probe-interval 0"
    # Rounds are short here: the waits of new runs would be shorter than what trainers are apart by.
    rules += " --mix1-wait-seconds 300 --mix2-wait-seconds 300"
    created = run_json("run", "create", RUN, f"--authority={keys[0]}", *listed, *rules.split(), home=nodes[0].home)
    first, *others = nodes
    first.start().wait_ready()
    for node in others:
        node._options = (*options, f"--token={created['token']}", f"--bootstrap={first.address}")
        node.start()
    for node in others:
        node.wait_ready()
    return nodes


def _read(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]


def _summarise(case: Case, told: Sequence[Sequence[dict[str, Any]]], plain_mbps: float) -> Measured:
    counted = [line for lines in told for line in lines[FIRST_ROUND:-1]]
    inner = sum(line["inner_seconds"] for line in counted)
    total = inner + sum(line["blocked_seconds"] for line in counted)
    jobs = [line[f"{job}_reason"] == "" for line in counted for job in ("mix1", "mix2") if line[f"{job}_count"]]
    alone = sorted(seconds for lines in told for seconds in lines[0]["alone_seconds"])
    beside = sorted(seconds for line in counted for seconds in line["work_seconds"])
    sizes = [size for line in counted for size in line["bytes_per_param"]]
    bytes_per_param = sum(sizes) / len(sizes)
    return Measured(
        case,
        utilization=inner / total,
        predicted=case.predict(bytes_per_param, UPLOAD_RATIO * plain_mbps, plain_mbps),
        predicted_by_line=case.predict(bytes_per_param, plain_mbps, plain_mbps),
        bytes_per_param=bytes_per_param,
        plain_mbps=plain_mbps,
        mixed_ratio=sum(jobs) / len(jobs) if jobs else 1.0,
        work_ratio_p95=_p95(beside) / _p95(alone),
    )


def _p95(ascending: Sequence[float]) -> float:
    return ascending[int(0.95 * (len(ascending) - 1))]
