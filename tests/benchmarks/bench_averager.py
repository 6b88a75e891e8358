"""The global mean of mixing beside hivemind's ``DecentralizedAverager``: same vector, same links, same run.

Usage: python tests/benchmarks/bench_averager.py [--peers 4 8] [--mbps 8] [--params 1048576]

Needs root and network namespaces (tests/lab). Each trainer sits behind a link of its own. A first round is not
counted. A second one is measured with everybody in it; in a third one the last peer is killed, with its node, once a
share (``KILL_SHARE``) of what it is to receive has come. Times are from the moment all may begin to the last one's end;
hivemind's include finding a group, which waits for nothing but peers here. Bytes are those of the links, headers and
all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests" / "lab"), str(ROOT / "tests" / "e2e")]

from mixing_lab import UNSENT_SIZE_BYTES, Case, start_nodes  # noqa: E402
from namespaces import Lab, Link  # noqa: E402
from reporting import Figure, add_summary_option, write_summary  # noqa: E402
from swarm import make_environment, open_swarm  # noqa: E402

PEER: Final = Path(__file__).with_name("averaging_peer.py")
WHOLE_ROUND, KILLED_ROUND, ROUNDS = 1, 2, 3
KILL_SHARE: Final = 0.4
WAIT_SECONDS: Final = 240.0
UNENDED: Final = f"not over after {WAIT_SECONDS:.0f} s"
"""Outcome of a peer that was told nothing; each asked for an answer within half of that."""
POLL_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class Row:
    """One round of one system."""

    system: str
    peers: int
    is_killed: bool
    seconds: float
    """From the moment all may begin to the end of the last who lives."""
    received_mb: float
    """Of one who lives, on average, headers and all."""
    distinct: tuple[int, ...]
    """By tensor: how many different ones those who live hold."""
    outcomes: tuple[str, ...]
    """What each of them was told."""
    counted: tuple[int, ...]
    """Of how many each of them holds the mean, by its own word."""
    mean_share: float | None
    """Share of the elements that are the mean of all within 1e-5; hivemind's, whose values can be seen."""
    own_share: float | None
    """Share of the elements that did not change."""


def make_row(
    system: str, peers: int, *, is_killed: bool, seconds: float, received: Sequence[int], ends: Sequence[dict[str, Any]]
) -> Row:
    """Return what a round came to, from what those who live said of it, if they said anything."""
    by_tensor = zip(*(end["digests"] for end in ends), strict=True)
    told = [[end[name] for end in ends if name in end] for name in ("mean_share", "own_share")]
    shares = [sum(values) / len(values) if values else None for values in told]
    outcomes = {end["outcome"] for end in ends} | ({UNENDED} if len(ends) < len(received) else set())
    return Row(
        system,
        peers,
        is_killed,
        seconds,
        received_mb=sum(received) / len(received) / 1e6,
        distinct=tuple(len(set(digests)) for digests in by_tensor),
        outcomes=tuple(sorted(outcomes)),
        counted=tuple(sorted(end["counted"] for end in ends)),
        mean_share=shares[0],
        own_share=shares[1],
    )


def format_table(rows: Sequence[Row]) -> str:
    """Return the table for the documentation."""
    lines = [
        "| system | M | one is killed | seconds | MB received | equal tensors | outcome | parts counted "
        "| is the mean of all |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        equal = sum(count == 1 for count in row.distinct)
        mean = "-" if row.mean_share is None else f"{row.mean_share:.0%}, untouched {row.own_share:.0%}"
        counted = ", ".join(str(count) for count in row.counted)
        lines.append(
            f"| {row.system} | {row.peers} | {'yes' if row.is_killed else 'no'} | {row.seconds:.1f} "
            f"| {row.received_mb:.1f} | {equal} of {len(row.distinct)} | {', '.join(row.outcomes)} "
            f"| {counted} | {mean} |"
        )
    return "\n".join(lines)


class Peers:
    """The processes of one system."""

    def __init__(self, lab: Lab, directory: Path) -> None:
        self.lab = lab
        self.directory = directory
        self._logs: list[Path] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[object], environment: dict[str, str]) -> None:
        """Start the next peer's process."""
        log = self.directory / f"peer-{len(self._logs)}.out"
        with log.open("wb") as stream, log.with_suffix(".err").open("wb") as errors:
            words = [str(word) for word in command]
            process = subprocess.Popen(words, stdout=stream, stderr=errors, env=environment, start_new_session=True)
        self._logs.append(log)
        self._processes.append(process)

    def read(self, index: int, event: str, round_number: int | None = None) -> dict[str, Any] | None:
        """Return what a peer said, if it did."""
        for line in self._logs[index].read_text().splitlines():
            told = json.loads(line)
            if told["event"] == event and told.get("round") == round_number:
                return dict(told)
        return None

    def wait(self, index: int, event: str) -> dict[str, Any]:
        """Return what a peer says, once it does."""
        told = self.wait_until(index, event, time.monotonic() + WAIT_SECONDS)
        assert told is not None, f"peer {index} never said {event}"
        return told

    def wait_until(
        self, index: int, event: str, give_up_at: float, round_number: int | None = None
    ) -> dict[str, Any] | None:
        """Return what a peer says, if it does until then."""
        while (told := self.read(index, event, round_number)) is None:
            if time.monotonic() >= give_up_at:
                return None
            if self._processes[index].poll() is not None:
                raise AssertionError(self._logs[index].with_suffix(".err").read_text()[-2000:])
            time.sleep(POLL_SECONDS)
        return told

    def kill(self, index: int) -> None:
        """Kill -9 a peer and all that is at its end of the link."""
        _kill(self.lab, index)
        self._processes[index].kill()

    def close(self) -> None:
        """Kill what is left."""
        for process in self._processes:
            process.kill()
            process.wait(10)


def _kill(lab: Lab, index: int) -> None:
    pids = subprocess.run(
        ["ip", "netns", "pids", lab.namespace(index)], capture_output=True, text=True, check=True
    ).stdout.split()
    subprocess.run(["kill", "-9", *pids], check=False)


@contextmanager
def open_hivemind(lab: Lab, case: Case) -> Iterator[Peers]:
    """Start the peers of hivemind, each in its namespace."""
    with tempfile.TemporaryDirectory() as directory:
        peers = Peers(lab, Path(directory))
        try:
            known: list[str] = []
            for index in range(case.trainers):
                options = [*_options(case, index, peers), "--address", lab.address(index), *known]
                command = lab.command(index, sys.executable, str(PEER), "hivemind", *map(str, options))
                peers.start(command, dict(os.environ))
                if not known:
                    known = [word for peer in peers.wait(0, "ready")["address"] for word in ("--peer", peer)]
            yield peers
        finally:
            peers.close()


@contextmanager
def open_pulsenet(lab: Lab, case: Case) -> Iterator[Peers]:
    """Start nodes in the namespaces, and the training processes beside them."""
    with open_swarm() as swarm:
        nodes = start_nodes(lab, swarm, case)
        peers = Peers(lab, swarm.directory)
        try:
            for index, node in enumerate(nodes):
                options = [*_options(case, index, peers), "--data-dir", node.data_dir]
                peers.start([sys.executable, PEER, "pulsenet", *options], make_environment(node.home))
            yield peers
        finally:
            peers.close()


def _options(case: Case, index: int, peers: Peers) -> list[object]:
    counts = ["--count", case.trainers, "--params", case.params, "--rounds", ROUNDS]
    return ["--index", index, *counts, "--directory", peers.directory]


def run_round(peers: Peers, system: str, case: Case, round_number: int) -> Row:
    """Let all begin, kill one if it is that round, and wait for the others."""
    lab, is_killed = peers.lab, round_number == KILLED_ROUND
    before = [lab.received_size_bytes(index) for index in range(case.trainers)]
    (peers.directory / f"go-{round_number}").touch()
    began_at = time.monotonic()
    victim = case.trainers - 1
    if is_killed:
        enough = before[victim] + KILL_SHARE * 2 * (case.trainers - 1) / case.trainers * 4 * case.params
        while lab.received_size_bytes(victim) < enough:
            assert peers.read(victim, "end", round_number) is None, "it was over too soon"
            time.sleep(POLL_SECONDS)
        peers.kill(victim)
    alive = range(case.trainers - 1 if is_killed else case.trainers)
    found = [peers.wait_until(index, "end", began_at + WAIT_SECONDS, round_number) for index in alive]
    ends = [end for end in found if end is not None]
    received = [lab.received_size_bytes(index) - before[index] for index in alive]
    seconds = time.monotonic() - began_at
    return make_row(system, case.trainers, is_killed=is_killed, seconds=seconds, received=received, ends=ends)


def measure(case: Case, open_peers: Callable[[Lab, Case], Any], system: str) -> list[Row]:
    """Return the rounds of one system that count."""
    link = Link(up_mbps=case.mbps, down_mbps=case.mbps, unsent_size_bytes=UNSENT_SIZE_BYTES)
    with Lab([link] * case.trainers) as lab, open_peers(lab, case) as peers:
        for index in range(case.trainers):
            peers.wait(index, "ready")
        return [run_round(peers, system, case, number) for number in range(ROUNDS)][WHOLE_ROUND:]


def choose_figures(rows: Sequence[Row]) -> Iterator[Figure]:
    """Yield a row for each number of trainers of which both systems were measured, with nobody killed."""
    whole = {(row.system, row.peers): row for row in rows if not row.is_killed}
    for (system, peers), ours in whole.items():
        theirs = whole.get(("hivemind", peers))
        if system == "pulsenet" and theirs is not None:
            equal = [sum(count == 1 for count in row.distinct) for row in (ours, theirs)]
            yield Figure(
                f"mean of all of {peers} trainers: {ours.seconds:.1f} s, {equal[0]} of {len(ours.distinct)} tensors "
                "equal",
                f"{ours.seconds / theirs.seconds:.2f} of the time of hivemind's averager, which left {equal[1]} equal",
            )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--mbps", type=float, default=8.0)
    parser.add_argument("--params", type=int, default=1 << 20)
    parser.add_argument("--only", choices=("hivemind", "pulsenet"))
    add_summary_option(parser)
    arguments = parser.parse_args()
    rows = []
    for count in arguments.peers:
        case = Case("diloco", arguments.mbps, arguments.params, step_seconds=1.0, inner_steps=1, trainers=count)
        for system, opened in (("hivemind", open_hivemind), ("pulsenet", open_pulsenet)):
            if arguments.only not in (None, system):
                continue
            rows += measure(case, opened, system)
            print(rows[-2:], flush=True)
    write_summary(arguments.summary, choose_figures(rows))
    print(format_table(rows), f"\nload {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
