"""Goodput of a patch between two real nodes over bad links, beside plain TCP over the same link.

Usage: python tests/benchmarks/bench_lossy.py [--rates 5 20 50] [--losses 5 10] [--round-trips 100 200]
           [--congestion bbr cubic] [--payload-mb 20] [--seconds-max 60] [--write docs/benchmarks.md]

Needs root and network namespaces (tests/lab). A publisher sits on a clean link, its reader behind one that loses
packets on the way to it. For each link, plain TCP moves the payload over a new connection, then the publisher publishes
a patch of that size, also over a new connection; ours counts from the news of the version to the last chunk on the
reader's disk. What is not over after ``--seconds-max`` is cut short: then both figures are what reached the reader's
link meanwhile, headers and all, marked ``*``.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Final

# Tests are no package: the lab, and the harness of the end-to-end tests, are found by their directories.
sys.path.insert(0, str(Path(__file__).parent.parent / "e2e"))
sys.path.insert(0, str(Path(__file__).parent.parent / "lab"))

import plain_tcp
from lab_swarm import LabNode, RandomModel, Transfer, open_lab_swarm
from namespaces import Lab, Link, list_congestion_controls, why_not
from reporting import Figure, add_summary_option, replace_block, write_summary
from synthetic import connect

from pulsenet.local.client import Client

BEGIN: Final = "<!-- lossy: written by tests/benchmarks/bench_lossy.py -->"
END: Final = "<!-- lossy: end -->"
MB: Final = 1_000_000
READER: Final = 1
START_LINK: Final = Link(up_mbps=100, down_mbps=100, delay_ms=1)


@dataclass(frozen=True, slots=True)
class Condition:
    """One link."""

    congestion: str
    rate_mbps: float
    loss: float
    round_trip_ms: float


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured over one link."""

    condition: Condition
    plain_mbps: float
    ours_mbps: float
    sent_ratio: float
    """Chunk bytes the publisher handed to its streams, over the payload; 0 where the transfer was cut short."""
    is_cut_short: bool
    load: float

    @property
    def ratio(self) -> float:
        return self.ours_mbps / self.plain_mbps


class Bench:
    """A pair of nodes whose link changes from measurement to measurement."""

    def __init__(self, lab: Lab, publisher: LabNode, reader: LabNode, model: RandomModel, client: Client) -> None:
        self._lab, self._publisher, self._reader = lab, publisher, reader
        self._model, self._client = model, client

    def warm_up(self) -> None:
        """Bring the reader to the first version over a good link."""
        self._reader.wait_held(self._model.publish_step(self._client), 120)

    def measure(self, condition: Condition, seconds_max: float) -> Row:
        """Move the payload both ways over one link."""
        rate, delay_ms = condition.rate_mbps, condition.round_trip_ms / 2
        self._lab.change(READER, up_mbps=rate, down_mbps=rate, delay_ms=delay_ms, loss_down=condition.loss)
        # What a connection learned of another link would slow it down for long.
        self._reader.reconnect()
        before = self._lab.received_size_bytes(READER)
        plain = plain_tcp.measure(self._lab, 0, READER, self._model.size_bytes, seconds_max)
        assert plain.congestion == condition.congestion
        plain_link_mbps = (self._lab.received_size_bytes(READER) - before) * 8 / MB / plain.seconds
        load = os.getloadavg()[0]
        ours_mbps, sent_ratio, is_over = self._move(seconds_max)
        if not is_over:
            return Row(condition, plain_link_mbps, ours_mbps, 0.0, True, load)
        return Row(condition, plain.mbps, ours_mbps, sent_ratio, plain.size_bytes < self._model.size_bytes, load)

    def _move(self, seconds_max: float) -> tuple[float, float, bool]:
        """Return megabits a second, what was sent over the payload, and whether it came to its end in time."""
        transfer = Transfer(self._publisher, self._reader)
        number = self._model.publish_step(self._client)
        before, started = self._lab.received_size_bytes(READER), time.monotonic()
        try:
            self._reader.wait_held(number, seconds_max)
        except AssertionError:
            mbps = (self._lab.received_size_bytes(READER) - before) * 8 / MB / (time.monotonic() - started)
            self._lab.change(READER, up_mbps=100, down_mbps=100, delay_ms=1, loss_down=0)
            self._reader.wait_held(number, 300)
            return mbps, 0.0, False
        facts = next(one for one in self._reader.status["versions"] if one["version"] == number)
        mbps = facts["encoded_size_bytes"] * 8 / MB / facts["fetch_seconds"]
        return mbps, transfer.sent_size_bytes / self._model.size_bytes, True


def measure_all(conditions: list[Condition], payload_size_bytes: int, seconds_max: float) -> list[Row]:
    """Measure over links of one congestion control, with one pair of nodes."""
    congestion = conditions[0].congestion
    links = [Link(congestion=congestion), dataclasses.replace(START_LINK, congestion=congestion)]
    rows = []
    with Lab(links) as lab, open_lab_swarm(lab) as swarm:
        publisher = swarm.start_publisher().wait_ready()
        reader = swarm.start_reader(READER).wait_ready()
        with connect(publisher.data_dir) as client:
            bench = Bench(lab, publisher, reader, RandomModel(payload_size_bytes), client)
            bench.warm_up()
            for condition in conditions:
                rows.append(bench.measure(condition, seconds_max))
                print(format_row(rows[-1]), flush=True)
    return rows


COLUMNS: Final = (
    *("congestion control", "loss %", "round trip ms", "link Mb/s", "plain TCP Mb/s", "pulsenet Mb/s", "ratio"),
    *("sent / payload", "load"),
)


def format_row(row: Row) -> str:
    """Return a line of the table."""
    condition, mark = row.condition, "*" if row.is_cut_short else ""
    cells = [
        condition.congestion,
        f"{condition.loss * 100:g}",
        f"{condition.round_trip_ms:g}",
        f"{condition.rate_mbps:g}",
    ]
    cells += [f"{row.plain_mbps:.1f}{mark}", f"{row.ours_mbps:.1f}{mark}", f"{row.ratio:.2f}"]
    cells += [f"{row.sent_ratio:.3f}" if row.sent_ratio else "", f"{row.load:.0f}"]
    return f"| {' | '.join(cells)} |"


def format_table(rows: list[Row], payload_mb: float, seconds_max: float) -> str:
    """Return the table with the conditions it was measured under."""
    date, cpus = time.strftime("%Y-%m-%d"), os.cpu_count()
    intro = (
        f"Measured {date}, {cpus} cores, Linux {platform.release().split('-')[0]}, payload {payload_mb:g} MB; "
        f"load average beside each row. Cut short after {seconds_max:g} s: *."
    )
    head = (f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}")
    return "\n".join([intro, "", *head, *map(format_row, rows)])


def choose_figures(rows: list[Row], payload_mb: float) -> Iterator[Figure]:
    """Yield a row for each congestion control."""

    def span(values: list[float], form: str = "g") -> str:
        low, high = (format(value, form) for value in (min(values), max(values)))
        return low if low == high else f"{low} to {high}"

    for congestion in dict.fromkeys(row.condition.congestion for row in rows):
        found = [row for row in rows if row.condition.congestion == congestion]
        links, ratios = [row.condition for row in found], [row.ratio for row in found]
        yield Figure(
            f"a patch of {payload_mb:g} MB, {congestion}, {span([one.rate_mbps for one in links])} Mb/s with "
            f"{span([100 * one.loss for one in links])} % lost and {span([one.round_trip_ms for one in links])} ms: "
            f"{span([row.ours_mbps for row in found], '.1f')} Mb/s",
            f"{span(ratios, '.2f')} of plain TCP, median {statistics.median(ratios):.2f} of {len(found)}",
        )


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[5, 20, 50], help="Mbit/s")
    parser.add_argument("--losses", type=float, nargs="+", default=[5, 10], help="percent, towards the reader")
    parser.add_argument("--round-trips", type=float, nargs="+", default=[100, 200], help="milliseconds")
    parser.add_argument("--congestion", nargs="+", default=["bbr", "cubic"])
    parser.add_argument("--payload-mb", type=float, default=20)
    parser.add_argument("--seconds-max", type=float, default=60)
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table into this document")
    add_summary_option(parser)
    options = parser.parse_args(arguments)
    reason = why_not()
    if reason:
        parser.error(f"no lab: {reason}")
    rows: list[Row] = []
    for congestion in options.congestion:
        if congestion not in list_congestion_controls():
            print(f"this kernel has no {congestion}", file=sys.stderr)
            continue
        links = product(options.losses, options.round_trips, options.rates)
        conditions = [Condition(congestion, rate, loss / 100, trip) for loss, trip, rate in links]
        rows += measure_all(conditions, int(options.payload_mb * MB), options.seconds_max)
    table = format_table(rows, options.payload_mb, options.seconds_max)
    print(table)
    write_summary(options.summary, choose_figures(rows, options.payload_mb))
    if options.write is not None:
        replace_block(options.write, BEGIN, END, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
