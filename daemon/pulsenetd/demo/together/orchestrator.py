"""``pulsenet demo --trainers N``: trainers that train together, one of which is killed and comes back.

::

    this process ─┬─ a trainer's node ── p2pd      (pulsenet join --role trainer), once per trainer
                  ├─ its training process           (two lines of pulsenet; a checkpoint after each round)
                  └─ an inferencer's node ── p2pd   (pulsenet join --role inferencer), which follows the rounds
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from pulsenetd.demo import command_lines
from pulsenetd.demo.comparison import Comparison, compare_weights, compute_root
from pulsenetd.demo.node_status import NodeWatch
from pulsenetd.demo.processes import Children, DemoError, run_together
from pulsenetd.demo.reports import Finished, Report, Resumed, RoundDone, RoundMixed
from pulsenetd.demo.stage import Stopped, explain, open_workdir, say, stop_on_signals
from pulsenetd.demo.together import mixing, progress
from pulsenetd.demo.together.progress import MixedRow, RoundRow, format_line, ring_size_bytes
from pulsenetd.demo.together.settings import (
    ALGORITHMS,
    INNER_STEPS,
    KILL_IN_ROUND,
    RETURN_IN_ROUND,
    SETTINGS,
    TogetherSettings,
)
from pulsenetd.words import say_size

NODE_START_SECONDS_MAX: Final = 90.0
SILENCE_SECONDS_MAX: Final = 240.0
"""No report from any process for so long means that something hangs."""
FOLLOW_SECONDS_MAX: Final = 60.0
"""Allowance of the inferencer to come to the last version."""
TICK_SECONDS: Final = 0.2
KILL_SHARE: Final = 0.4
"""Share of a round's usual time after which the trainer is killed: amid its inner steps."""

_INFERENCER: Final = "inferencer"


@dataclass(slots=True)
class _Swarm:
    """What one run of the demonstration knows while it lasts."""

    settings: TogetherSettings
    rounds: int
    workdir: Path
    children: Children
    console: Console
    watches: dict[str, NodeWatch]
    """By trainer."""
    started_at: float
    algorithm: str = "pulseloco"
    variant: str | None = None
    """Of gossip."""
    rows: dict[int, RoundRow] = field(default_factory=dict)
    mixed_rows: dict[int, MixedRow] = field(default_factory=dict)
    """Of a run that mixes, in place of rows."""
    printed: set[int] = field(default_factory=set)
    finished: dict[str, Finished] = field(default_factory=dict)
    resumed: Resumed | None = None
    received_before: dict[str, int] = field(default_factory=dict)
    """By trainer, bytes its node had received at its last report."""
    kill_at: float | None = None
    is_victim_away: bool = False
    is_victim_coming: bool = False
    """Started again, and not heard of since."""
    heard_at: float = field(default_factory=time.monotonic)

    @property
    def mixes(self) -> bool:
        """Whether trainers mix instead of closing rounds."""
        return self.algorithm == "gossip"

    @property
    def over(self) -> Path:
        """The file whose coming ends a run that mixes: nobody there waits for the one that was cut off."""
        return self.workdir / "over"

    @property
    def all_rows(self) -> Mapping[int, RoundRow | MixedRow]:
        """Rounds by index, of whichever kind."""
        return self.mixed_rows if self.mixes else self.rows

    @property
    def victim(self) -> str:
        """The trainer that is killed."""
        return list(self.watches)[-1]

    def say(self, text: str) -> None:
        """Print a line with the time."""
        seconds = time.monotonic() - self.started_at
        say(self.console, f"[{seconds:6.1f} s] {text}")

    def node_directory(self, name: str) -> Path:
        """Return a trainer's data directory."""
        return self.watches[name].data_directory

    def weights(self, name: str) -> Path:
        """Return where a trainer writes its last weights."""
        return self.workdir / "weights" / f"{name}.safetensors"


def run_together_demo(
    model: str,
    trainers: int,
    rounds: int,
    workdir: Path | None,
    json_output: bool,
    algorithm: str = "pulseloco",
    variant: str | None = None,
) -> int:
    """Run the demonstration and return its exit code: 0 only if everybody ends with the same bits.

    Trainers that mix end with weights of their own: there it is 0 only if the one that was cut off mixes again.

    Args:
        model: A key of :data:`~pulsenetd.demo.together.settings.SETTINGS`.
        trainers: Trainers, each with a node and a data shard of its own.
        rounds: Rounds to train.
        workdir: Where keys, stores, logs, checkpoints and weights go and stay; ``None`` takes a temporary directory,
            which is removed unless something fails.
        json_output: Print one JSON object on standard output, and progress on standard error.
        algorithm: ``pulseloco`` or ``gossip``.
        variant: Of gossip; ``None`` for the default of new runs.

    Raises:
        UsageError: ``workdir`` holds an earlier run.
        StorageError: There is too little space for it.
    """
    settings = SETTINGS[model]
    console = Console(stderr=json_output)
    started_at = time.monotonic()
    names = tuple(f"trainer-{index}" for index in range(1, trainers + 1))
    with open_workdir(workdir, _needed_size_bytes(settings, trainers)) as directory, stop_on_signals():
        watches = {
            name: NodeWatch(command_lines.node_directory(directory.path, "trainer", index))
            for index, name in enumerate(names, 1)
        }
        try:
            with Children(directory.path / "logs") as children:
                swarm = _Swarm(
                    settings, rounds, directory.path, children, console, watches, started_at, algorithm, variant
                )
                _run_swarm(swarm)
                comparisons, root = ({}, "") if swarm.mixes else _compare(swarm)
        except DemoError as error:
            explain(console, error, directory.path)
            directory.is_kept = True
            return 1
        except Stopped as stopped:
            return 128 + stopped.number
        summary = mixing.summarise(swarm) if swarm.mixes else _summarise(swarm, comparisons, root)
        is_good = bool(summary["mixes_again"] if swarm.mixes else summary["identical"])
        directory.is_kept = directory.is_kept or not is_good
        if json_output:
            print(json.dumps(summary))
        elif swarm.mixes:
            say(console, "", *mixing.describe(summary))
        else:
            _print_summary(swarm, summary, comparisons)
        if directory.is_kept:
            say(console, f"logs and weights are in {directory.path}")
        return 0 if is_good else 1


def _run_swarm(swarm: _Swarm) -> None:
    """Start everything, kill one trainer, bring it back, and wait until all are done."""
    name = ALGORITHMS[swarm.algorithm]
    title = f"pulsenet demo: {swarm.settings.title}, {name}, {len(swarm.watches)} trainers, H = {INNER_STEPS}"
    caption = progress.MIXED_CAPTION if swarm.mixes else progress.CAPTION
    say(swarm.console, f"{title}\n({caption})")
    _create_run(swarm)
    (swarm.workdir / "weights").mkdir()
    (swarm.workdir / "checkpoints").mkdir()
    for name in swarm.watches:
        _start_training(swarm, name)
    for name in swarm.watches:
        _start_node(swarm, name)
    swarm.children.start(
        f"{_INFERENCER}-node",
        command_lines.join_rounds(_INFERENCER, command_lines.node_directory(swarm.workdir, _INFERENCER, 1)),
        command_lines.environment(swarm.workdir, os.environ, threads=1),
    )
    for name, watch in swarm.watches.items():
        _wait_for_node(swarm, name, watch)
    swarm.say("all nodes are up; loading models")
    while set(swarm.finished) != set(swarm.watches):
        _follow(swarm)
        _kill_or_return(swarm)
        if swarm.mixes and not swarm.over.exists() and mixing.is_over(swarm, swarm.rounds):
            swarm.over.touch()
        if time.monotonic() - swarm.heard_at > SILENCE_SECONDS_MAX:
            missing = sorted(set(swarm.watches) - set(swarm.finished))
            log = swarm.children.logs / f"{missing[0]}.log"
            raise DemoError(f"nothing happened for {SILENCE_SECONDS_MAX:.0f} s; not finished: {missing}", log)
    _print_rounds(swarm, is_over=True)


def _create_run(swarm: _Swarm) -> None:
    """Make one key per node and the private run that lists them."""
    swarm.say("creating keys and the run")
    environment = command_lines.environment(swarm.workdir, os.environ, threads=1)
    directories = [watch.data_directory for watch in swarm.watches.values()]
    directories.append(command_lines.node_directory(swarm.workdir, _INFERENCER, 1))
    printed = run_together([command_lines.keygen(path / "identity.key") for path in directories], environment)
    *trainers, inferencer = [str(json.loads(text)["peer_id"]) for text in printed]
    created = command_lines.create_rounds_run(
        trainers=trainers,
        inferencers=[inferencer],
        inner_steps=INNER_STEPS,
        algorithm=swarm.algorithm,
        variant=swarm.variant,
    )
    run_together([created], environment)


def _start_training(swarm: _Swarm, name: str) -> None:
    cores = command_lines.core_count()
    threads = max(1, min(cores, swarm.settings.threads_max) // len(swarm.watches))
    command = command_lines.rounds_process(
        model=swarm.settings.name,
        data_directory=swarm.node_directory(name),
        rounds=swarm.rounds,
        shard=list(swarm.watches).index(name),
        checkpoint=swarm.workdir / "checkpoints" / f"{name}.safetensors",
        output=swarm.weights(name),
        threads=threads,
        algorithm=swarm.algorithm,
        until=swarm.over if swarm.mixes else None,
    )
    environment = command_lines.environment(swarm.workdir, os.environ, threads=threads)
    swarm.children.start(name, command, environment, may_exit=True)


def _start_node(swarm: _Swarm, name: str) -> None:
    environment = command_lines.environment(swarm.workdir, os.environ, threads=1)
    command = command_lines.join_rounds("trainer", swarm.node_directory(name))
    swarm.children.start(f"{name}-node", command, environment)


def _wait_for_node(swarm: _Swarm, name: str, watch: NodeWatch) -> None:
    give_up_at = time.monotonic() + NODE_START_SECONDS_MAX
    while not watch.is_up():
        if time.monotonic() > give_up_at:
            log = swarm.children.logs / f"{name}-node.log"
            raise DemoError(f"the node of {name} did not start within {NODE_START_SECONDS_MAX:.0f} s", log)
        _follow(swarm)


def _follow(swarm: _Swarm) -> None:
    """Wait one tick, take in what the processes report, and notice those that died."""
    time.sleep(TICK_SECONDS)
    while not swarm.children.reports.empty():
        name, report = swarm.children.reports.get()
        swarm.heard_at = time.monotonic()
        _take_in(swarm, name, report)
    swarm.children.check()
    _print_rounds(swarm)


def _take_in(swarm: _Swarm, name: str, report: Report) -> None:
    """Enter one report into what is known."""
    if isinstance(report, RoundDone | RoundMixed):
        row: RoundRow | MixedRow
        if isinstance(report, RoundDone):
            row = swarm.rows.setdefault(report.round_index, RoundRow(report.round_index))
            row.done[name] = report
        else:
            row = swarm.mixed_rows.setdefault(report.round_index, MixedRow(report.round_index))
            row.done[name] = report
        received = swarm.watches[name].read_received_bytes()
        before = swarm.received_before.get(name, 0)
        # A node that was started again counts from 0.
        row.received_size_bytes[name] = received - before if received >= before else received
        swarm.received_before[name] = received
        if name == swarm.victim and report.next_round_index == KILL_IN_ROUND:
            swarm.kill_at = time.monotonic() + KILL_SHARE * report.seconds
    elif isinstance(report, Resumed):
        swarm.resumed = report
        swarm.is_victim_coming = False
        text = f"{name} is back with its checkpoint of round {report.checkpoint_round_index}"
        swarm.say(f"{text} and has caught up to round {report.round_index}")
    elif isinstance(report, Finished):
        swarm.finished[name] = report


def _kill_or_return(swarm: _Swarm) -> None:
    victim = swarm.victim
    if swarm.kill_at is not None and time.monotonic() >= swarm.kill_at:
        swarm.kill_at = None
        swarm.is_victim_away = True
        swarm.children.kill(victim)
        swarm.children.kill(f"{victim}-node")
        swarm.say(f"kill -9 of {victim} and of its node, in round {KILL_IN_ROUND}")
    elif swarm.is_victim_away and max(_next_rounds(swarm)) >= RETURN_IN_ROUND:
        swarm.is_victim_away, swarm.is_victim_coming = False, True
        swarm.say(f"{victim} and its node are started again, in round {RETURN_IN_ROUND} of the others")
        _start_node(swarm, victim)
        _start_training(swarm, victim)


def _is_awaited(swarm: _Swarm, name: str, round_index: int) -> bool:
    """Return whether a trainer may still report a round."""
    if name == swarm.victim and (swarm.is_victim_away or swarm.is_victim_coming):
        return False
    reached = [row.done[name].next_round_index for row in swarm.all_rows.values() if name in row.done]
    return max(reached, default=0) <= round_index


def _next_rounds(swarm: _Swarm) -> list[int]:
    return [done.next_round_index for row in swarm.all_rows.values() for done in row.done.values()]


def _print_rounds(swarm: _Swarm, *, is_over: bool = False) -> None:
    """Print each round in turn, once every trainer has reported it, is past it or is away."""
    for index, row in sorted(swarm.all_rows.items()):
        waits = any(_is_awaited(swarm, name, index) for name in swarm.watches)
        if waits and not is_over:
            return
        if index in swarm.printed:
            continue
        if not swarm.printed:
            columns = progress.MIXED_COLUMNS if swarm.mixes else progress.COLUMNS
            say(swarm.console, format_line(columns))
        swarm.printed.add(index)
        line = format_line(row.cells(swarm.settings.element_count))
        say(swarm.console, line)


def _compare(swarm: _Swarm) -> tuple[dict[str, Comparison], str]:
    """Compare every trainer's and the inferencer's weights with the first trainer's; wait for the inferencer."""
    swarm.say("comparing weights")
    first, *others = swarm.watches
    root = compute_root(swarm.weights(first))
    current = command_lines.node_directory(swarm.workdir, _INFERENCER, 1) / "weights" / "current"
    paths = {name: swarm.weights(name) for name in others} | {_INFERENCER: current}
    give_up_at = time.monotonic() + FOLLOW_SECONDS_MAX
    while True:
        comparisons = compare_weights(swarm.weights(first), paths, root)
        if comparisons[_INFERENCER].is_identical or time.monotonic() > give_up_at:
            break
        time.sleep(TICK_SECONDS)
        swarm.children.check()
    for name in others:
        mine, theirs = swarm.finished[first].root, swarm.finished[name].root
        if mine != theirs:
            text = f"state root {theirs[:16]}, that of {first} is {mine[:16]}"
            comparisons[name] = Comparison(comparisons[name].root, False, text)
    return comparisons, root


def _summarise(swarm: _Swarm, comparisons: Mapping[str, Comparison], root: str) -> dict[str, Any]:
    """Return the summary as plain values."""
    rows = [row for _, row in sorted(swarm.rows.items())]
    payload = sum(row.payload for row in rows) / len(rows)
    dense_size_bytes = progress.FP32_SIZE_BYTES * swarm.settings.element_count
    return {
        "identical": all(comparison.is_identical for comparison in comparisons.values()),
        "model": swarm.settings.name,
        "trainers": len(swarm.watches),
        "inner_steps": INNER_STEPS,
        "root": root,
        "state_root": next(iter(swarm.finished.values())).root,
        "payload_ratio": round(dense_size_bytes / payload, 2) if payload else None,
        "resumed": None
        if swarm.resumed is None
        else {"from": swarm.resumed.checkpoint_round_index, "at": swarm.resumed.round_index},
        "rounds": [
            {
                "round": row.round_index,
                "contributors": list(row.contributors),
                "density": round(row.density, 6),
                "payload_bytes": round(row.payload),
                "received_bytes": round(row.received),
                "diloco_received_bytes": ring_size_bytes(swarm.settings.element_count, len(row.contributors)),
                "ddp_received_bytes": INNER_STEPS
                * ring_size_bytes(swarm.settings.element_count, len(row.contributors)),
                "residual_norm": row.residual_norm,
                "loss": row.loss,
            }
            for row in rows
        ],
        "seconds": round(time.monotonic() - swarm.started_at, 1),
    }


def _print_summary(swarm: _Swarm, summary: Mapping[str, Any], comparisons: Mapping[str, Comparison]) -> None:
    first = next(iter(swarm.watches))
    lines = [f"{first:<12} state root {summary['state_root'][:16]}, weights {summary['root'][:16]}"]
    for name, comparison in comparisons.items():
        verdict = "bit-identical" if comparison.is_identical else f"DIFFERS: {comparison.difference}"
        lines.append(f"{name:<12} weights {comparison.root[:16]}, {verdict}")
    rounds = summary["rounds"]
    payload = sum(row["payload_bytes"] for row in rounds) / len(rounds)
    dense = progress.FP32_SIZE_BYTES * swarm.settings.element_count
    lines += [
        f"{'payload':<12} {say_size(payload)} a contribution instead of {say_size(dense)} dense FP32: "
        f"{summary['payload_ratio']:.0f} times less",
        f"{'loss':<12} {rounds[0]['loss']:.4f} in the first round, {rounds[-1]['loss']:.4f} in the last",
        f"{'time':<12} {summary['seconds']:.0f} s",
    ]
    say(swarm.console, "", *lines)


def _needed_size_bytes(settings: TogetherSettings, trainers: int) -> int:
    """Return the disk a run takes: six FP32 copies in a checkpoint, twice while it is replaced, and stores."""
    return trainers * 16 * progress.FP32_SIZE_BYTES * settings.element_count
