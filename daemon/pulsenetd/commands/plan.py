"""``pulsenet plan``: what a round costs on a link, for each algorithm, before anybody trains."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pulsenet.errors import UnavailableError, UsageError

if TYPE_CHECKING:
    from pulsenet.outer.plan import Workload
    from pulsenet.outer.plan_link import Link

_DESCRIPTION = """\
Say for each algorithm what one round moves, how long trainers wait for it, what share of the time goes into inner
steps, at which speed that is 90 %, and whether a joiner catches up with the run. Nothing is measured and nothing is
sent. Variants with a star are of gossip. The formulas and what they rest on: docs/planning.md, in pulsenet's source
archive.
"""

_EXAMPLES = (
    ("pulsenet plan --params 7B --peers 8 --mbps 500 --step-seconds 4", "every algorithm on one link"),
    (
        "pulsenet plan --params 7B --peers 8 --mbps 500 --up-mbps 100 --loss 0.02 --rtt-ms 80 --step-seconds 4",
        "with loss",
    ),
    ("pulsenet plan --params 1.5B --peers 4 --measure --step-seconds 2", "the speed that a running node observed"),
)

_SUFFIXES: Final = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def _number(least: float, most: float, *, hint: str = "") -> Callable[[str], float]:
    """Return a reader of reals."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no number from {least:g} to {most:g}{hint}")
        return value

    return read


def _whole(least: int, most: int) -> Callable[[str], int]:
    """Return a reader of whole numbers."""

    def read(text: str) -> int:
        # More digits than the largest are no number of ours, and would take long to read.
        value = int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None
        if value is None or not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to {most}")
        return value

    return read


def _params(text: str) -> float:
    found = re.fullmatch(r"([0-9.]+(?:e\+?[0-9]+)?)([kmbgt]?)", text.strip().lower())
    try:
        value = float(found[1]) * _SUFFIXES[found[2]] if found else math.nan
    except ValueError:
        value = math.nan
    if not 1 <= value <= 1e15:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of parameters from 1 to 1e15, like 7e9 or 7B")
    return value


_COUNT_MAX: Final = (1 << 31) - 1


def add_parser(commands: Any) -> None:
    """Add ``plan`` to the command line."""
    parser = commands.add_parser(
        "plan",
        help="what a link can carry: bytes, waiting and utilisation of each algorithm",
        description=_DESCRIPTION,
        examples=_EXAMPLES,
    )
    add = parser.add_argument
    add("--params", type=_params, required=True, metavar="N", help="parameters that train, like 7e9 or 7B")
    add("--peers", type=_whole(1, 100_000), required=True, metavar="M", help="trainers")
    add("--step-seconds", type=_number(1e-6, 1e6), required=True, metavar="S", help="of one inner step")
    add("--inner-steps", type=_whole(1, _COUNT_MAX), default=8, metavar="H", help="of a round (8)")
    speed = _number(0.001, 1e9)
    add("--mbps", type=speed, metavar="X", help="download speed of each trainer, Mbit/s")
    add("--up-mbps", type=speed, metavar="X", help="upload speed (the same)")
    add("--measure", action="store_true", help="take the speed that a running node of this machine observed")
    add("--run", metavar="NAME", help="with --measure: a node of this run")
    add("--data-dir", metavar="DIR", help="with --measure: the node in this directory")
    add("--loss", type=_number(0, 0.1, hint=": 0.05 means 5 %"), default=0.0, metavar="X", help="lost packets (0)")
    add("--rtt-ms", type=_number(0, 10_000), default=0.0, metavar="X", help="round trip to other trainers (0)")
    add("--congestion", choices=("cubic", "bbr"), default="cubic", help="control of the senders' TCP (cubic)")
    add("--bytes-per-param", type=_number(0.01, 16), default=4.0, metavar="X", help="of dense values (4)")
    add("--density", type=_number(0, 1), default=0.03, metavar="X", help="pulseloco: what passes the gate (0.03)")
    add("--entry-bits", type=_number(0.1, 128), default=18.0, metavar="X", help="pulseloco: an entry (18)")
    add("--flush-interval", type=_whole(0, _COUNT_MAX), default=8, metavar="N", help="pulseloco: rounds, 0: never (8)")
    add("--subset", type=_number(0, 1), default=0.43, metavar="X", help="share of the parameters in Mix2 (0.43)")
    add("--state-anchor-interval", type=_whole(1, _COUNT_MAX), default=10, metavar="N", help="rounds (10)")
    add("--authorities", action="store_true", help="the trainers are the authorities: each fetches all contributions")
    add("--json", action="store_true", help="print a list of JSON objects")
    add("--plot", metavar="FILE", help="write a picture (.png or .svg) too")
    parser.set_defaults(run_command=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    from pulsenet.outer.plan import make_plans
    from pulsenetd.planning.picture import check_plot_path, write_plot
    from pulsenetd.planning.report import as_json, print_report

    path = None if arguments.plot is None else Path(arguments.plot)
    if path is not None:
        check_plot_path(path)
    workload, link = _make_workload(arguments), _make_link(arguments)
    plans = make_plans(workload, link)
    if path is not None:
        write_plot(plans, workload, link, path)
    if arguments.json:
        print(json.dumps([as_json(plan, workload) for plan in plans], indent=2))
    else:
        print_report(plans, workload, link, sys.stdout)
    return 0


def _make_workload(arguments: argparse.Namespace) -> Workload:
    from pulsenet.outer.plan import Workload

    return Workload(
        params=arguments.params,
        peer_count=arguments.peers,
        step_seconds=arguments.step_seconds,
        inner_steps=arguments.inner_steps,
        bytes_per_param=arguments.bytes_per_param,
        density=arguments.density,
        entry_bits=arguments.entry_bits,
        flush_interval=arguments.flush_interval,
        subset_ratio=arguments.subset,
        state_anchor_interval=arguments.state_anchor_interval,
        are_authorities=arguments.authorities,
    )


def _make_link(arguments: argparse.Namespace) -> Link:
    from pulsenet.outer.plan_link import Congestion, Link

    if arguments.measure:
        if arguments.mbps is not None:
            raise UsageError("plan takes --mbps or --measure, not both")
        if arguments.loss:
            raise UsageError("--loss: what --measure observed holds the loss already; leave it out")
        down_mbps = _observe(arguments)
    elif arguments.run is not None or arguments.data_dir is not None:
        raise UsageError("--run and --data-dir name the node for --measure: add it")
    elif arguments.mbps is None:
        raise UsageError("plan needs a speed: give --mbps, or --measure where a node of this machine runs")
    else:
        down_mbps = arguments.mbps
    return Link(
        down_mbps=down_mbps,
        up_mbps=down_mbps if arguments.up_mbps is None else arguments.up_mbps,
        loss_ratio=arguments.loss,
        rtt_seconds=arguments.rtt_ms / 1000,
        congestion=Congestion(arguments.congestion),
    )


def _observe(arguments: argparse.Namespace) -> float:
    """Return what a node of this machine observed of its link.

    Raises:
        UnavailableError: None runs, or it observed nothing; the message says what to do.
        UsageError: Several run.
    """
    from pulsenetd.commands.status import node_directories, read_status
    from pulsenetd.planning.observed import read_observed_mbps

    running: dict[Path, dict[str, Any]] = {}
    trouble: UnavailableError | None = None
    for directory in node_directories(arguments):
        try:
            running[directory] = read_status(directory)
        except UnavailableError as error:
            trouble = error
    if not running:
        reason = "no node runs on this machine; give --mbps" if trouble is None else f"{trouble}, or give --mbps"
        raise UnavailableError(f"--measure: {reason}")
    if len(running) > 1:
        listed = ", ".join(str(directory) for directory in running)
        raise UsageError(f"--measure: several nodes run ({listed}); choose one with --data-dir")
    (directory, status), *_ = running.items()
    mbps = read_observed_mbps(status, str(directory))
    print(f"pulsenet: the node in {directory} fetched at up to {mbps:.4g} Mbit/s", file=sys.stderr)
    return mbps
