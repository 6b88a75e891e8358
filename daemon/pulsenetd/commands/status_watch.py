"""``pulsenet status --watch``: every node again and again, as a table that stays in place or as lines of changes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pulsenetd.logs import printable
from pulsenetd.words import say_rate, say_seconds, say_size, say_version

INTERVAL_SECONDS: Final = 2.0

HEADINGS: Final = ("node", "state", "version", "lag", "peers", "received", "sent", "fetching", "round")

Look = Callable[[], tuple[Sequence[dict[str, Any]], Sequence[str]]]
"""Returns the status of every node that answers, and a line for each that does not."""


@dataclass(frozen=True, slots=True)
class Row:
    """One node, as people read it; empty where there is nothing to say."""

    node: str
    state: str
    version: str
    lag: str
    peers: str
    received: str = ""
    sent: str = ""
    fetching: str = ""
    round: str = ""

    @property
    def settled(self) -> Row:
        """The same without what changes all the time."""
        return replace(self, received="", sent="", fetching="")


def make_row(node: dict[str, Any]) -> Row:
    """Return what a node's status says in a few words."""
    lag = node.get("version_lag")
    name = Path(str(node.get("data_dir", ""))).name or str(node.get("role", "?"))
    round_index, phase = node.get("round_index"), node.get("rounds_phase")
    reason = node.get("rounds_reason") or ""
    return Row(
        node=printable(f"{node.get('run', '?')}/{name}"),
        state=printable(str(node.get("state", ""))),
        version=say_version(node) or "-",
        lag="?" if lag is None else str(lag),
        peers=str(node.get("peers", 0)),
        received=say_rate(node.get("received_bytes_per_second")),
        sent=say_rate(node.get("sent_bytes_per_second")),
        fetching=_progress(node),
        round="" if phase is None else printable(f"{round_index} {phase}{f' ({reason})' if reason else ''}"),
    )


def make_table(rows: Sequence[Row], problems: Sequence[str]) -> Table:
    """Return the table for a terminal; what no node answers stands below it."""
    table = Table(box=None, pad_edge=False, caption="\n".join(map(printable, problems)) or None, caption_justify="left")
    for heading in HEADINGS:
        is_number = heading in ("lag", "peers", "received", "sent")
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=True)
    for row in rows:
        # Never markup: run names and reasons may hold brackets.
        table.add_row(*(Text(cell) for cell in astuple(row)))
    return table


def make_line(row: Row) -> str:
    """Return a row as a line of text."""
    cells = [f"{row.node}: {row.state}", f"version {row.version}", f"lag {row.lag}", f"peers {row.peers}"]
    return ", ".join([*cells, *([f"round {row.round}"] if row.round else [])])


def watch(
    look: Look,
    *,
    as_json: bool,
    console: Console | None = None,
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Show the nodes until the caller interrupts.

    Args:
        look: Asks the nodes.
        as_json: Print an object for every look, on a line of its own.
        console: Where to; a terminal gets the table, anything else a line whenever a node changed.
        sleep: Waits so many seconds; may raise to end.
    """
    console = Console(highlight=False, soft_wrap=True) if console is None else console
    if as_json:
        while True:
            nodes, problems = look()
            print(json.dumps({"nodes": nodes, "problems": problems}), file=console.file, flush=True)
            sleep(INTERVAL_SECONDS)
    if not console.is_terminal or console.is_dumb_terminal:
        _print_changes(look, console, sleep)
    with Live(console=console, auto_refresh=False, screen=False) as live:
        while True:
            nodes, problems = look()
            rows = [make_row(node) for node in nodes]
            live.update(make_table(rows, problems or ([] if rows else ["no node is running"])), refresh=True)
            sleep(INTERVAL_SECONDS)


def _print_changes(look: Look, console: Console, sleep: Callable[[float], object]) -> None:
    said: set[str] = set()
    while True:
        nodes, problems = look()
        lines = {make_line(make_row(node).settled) for node in nodes} | {printable(problem) for problem in problems}
        for line in sorted(lines - said) or ([] if said or lines else ["no node is running"]):
            print(f"{time.strftime('%H:%M:%S')} {line}", file=console.file, flush=True)
        said = lines or {""}
        sleep(INTERVAL_SECONDS)


def _progress(node: dict[str, Any]) -> str:
    """Return how much of what is being fetched is here, and when the rest will be."""
    transfers = node.get("transfers")
    if not transfers:
        return ""
    wanted, held = (sum(one[name] for one in transfers) for name in ("wanted_bytes", "held_bytes"))
    share = f"{100 * held / wanted:.0f} % of {say_size(wanted)}"
    seconds = transfers[-1]["eta_seconds"]  # the last waits for those before it
    return share if seconds is None else f"{share}, {say_seconds(seconds)} left"
