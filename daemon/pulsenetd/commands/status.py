"""``pulsenet status``: what the nodes of this machine are doing."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any, Final

from pulsenet.errors import UnavailableError
from pulsenet.local.directories import data_home, list_nodes
from pulsenetd.logs import printable
from pulsenetd.node_file import NODE_FILE, read_metrics_url
from pulsenetd.words import say_cause, say_version

ANSWER_SECONDS_MAX: Final = 5.0
ANSWER_SIZE_BYTES_MAX: Final = 4 << 20
SHORTFALLS: Final = {
    "thin-upload": "  readers upload too little, the publisher helps out",
    "no-readers": "  other readers cannot be reached, the publisher serves this node alone",
}
"""Words for the reasons for which the publisher helps out."""

_EXAMPLES = (
    ("pulsenet status", "a line for every node of this machine"),
    ("pulsenet status --watch", "again and again, with rates and what is fetched"),
    ("pulsenet status --data-dir ~/node --json", "everything one node says of itself"),
)


def add_parser(commands: Any) -> None:
    """Add ``status`` to the command line."""
    parser = commands.add_parser("status", help="show the running nodes of this machine", examples=_EXAMPLES)
    parser.add_argument("--run", default=None, metavar="NAME", help="only this run (default: all)")
    parser.add_argument("--data-dir", default=None, metavar="DIR", help="only the node in this directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object; with --watch one a line")
    parser.add_argument("--watch", action="store_true", help="go on until Ctrl-C; lines of changes if no terminal")
    parser.set_defaults(run_command=_status)


def read_status(node: Path) -> dict[str, Any]:
    """Ask the node that lives in a directory for its status.

    Raises:
        UnavailableError: No node runs there, or it does not answer.
    """
    try:
        address = read_metrics_url(node)
    except (OSError, ValueError) as error:
        raise UnavailableError(f"no node runs in {node}; start it with 'pulsenet join --data-dir {node}'") from error
    if not isinstance(address, str) or not address.startswith("http://"):
        raise UnavailableError(f"{node / NODE_FILE} names no http address; restart the node")
    # Nodes of this machine are never asked through a proxy of the environment.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(address + "/status", timeout=ANSWER_SECONDS_MAX) as answer:
            status = json.loads(answer.read(ANSWER_SIZE_BYTES_MAX))
        if not isinstance(status, dict):
            raise ValueError("what answers is no node")
    except (OSError, ValueError, http.client.HTTPException) as error:
        text = (
            f"the node in {node} does not answer at {address} ({say_cause(error)}); look at its log, or start it again"
        )
        raise UnavailableError(text) from error
    return status


def _look(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the status of every node asked for, and why others have none."""
    nodes: list[dict[str, Any]] = []
    problems: list[str] = []
    for directory in node_directories(arguments):
        try:
            nodes.append({"data_dir": str(directory), **read_status(directory)})
        except UnavailableError as error:
            problems.append(str(error))
    return nodes, problems


def _status(arguments: argparse.Namespace) -> int:
    if arguments.watch:
        # Imported late: one look needs no table.
        from pulsenetd.commands.status_watch import watch

        watch(lambda: _look(arguments), as_json=arguments.json)
    nodes, problems = _look(arguments)
    if arguments.data_dir and not nodes:
        raise UnavailableError(problems[0])
    for problem in problems:
        print(f"pulsenet: {printable(problem)}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(nodes[0] if arguments.data_dir else {"nodes": nodes}, indent=2))
        return 0
    if not nodes:
        print("no node is running; start one with 'pulsenet join --role trainer'")
        print("one of another user, in the directory DIR, is shown by 'pulsenet status --data-dir DIR'")
    width = max((len(_name(node)) for node in nodes), default=0)
    for node in nodes:
        print(_line(node, width))
    return 0


def node_directories(arguments: argparse.Namespace) -> list[Path]:
    """Return the directories that ``--run`` and ``--data-dir`` name, of nodes that run or ran: without them, all."""
    if arguments.data_dir:
        return [Path(arguments.data_dir)]
    return list_nodes(data_home(os.environ), arguments.run, NODE_FILE)


def _name(node: dict[str, Any]) -> str:
    role, name = str(node.get("role", "?")), Path(str(node.get("data_dir", ""))).name
    # The second inferencer of a run lives in inferencer-2; a directory somebody chose may be called anything.
    return f"{node.get('run', '?')}/{name if name.startswith(role) else role}"


def _line(node: dict[str, Any], width: int) -> str:
    version = say_version(node) or "-"
    lag = node.get("version_lag")
    return (
        f"{_name(node):<{width}}  version {version:<8} "
        f"lag {lag if lag is not None else '?':<4} peers {node.get('peers', 0):<4} {node.get('state', '')}"
        f"{_round(node)}{_disagreement(node)}{_shortfall(node)}"
    )


def _shortfall(node: dict[str, Any]) -> str:
    """Return why the publisher serves what other readers should, if it does."""
    return SHORTFALLS.get(str(node.get("fetch_shortfall")), "")


def _disagreement(node: dict[str, Any]) -> str:
    """Return how far apart trainers that mix are: what they predict, then their weights, bound and measured."""
    if "mixing_variant" not in node:
        return ""
    words = [] if node.get("consensus", True) else ["no consensus"]
    if node.get("disagreement") is not None:
        words.append(f"disagreement {node['disagreement']:.3f}")
    if node.get("disagreement_l2_end") is not None:
        bound = node.get("disagreement_l2_bound")
        words.append(f"weights {node['disagreement_l2_end']:.3g} apart")
        words += [] if bound is None else [f"bound {bound:.3g}"]
    return "  " + ", ".join(words) if words else ""


def _round(node: dict[str, Any]) -> str:
    """Return where the node is in the rounds; nothing in a run without them."""
    phase = node.get("rounds_phase")
    if phase is None:
        return ""
    reason = f" ({node['rounds_reason']})" if node.get("rounds_reason") else ""
    return f"  round {node.get('round_index', '?')} {phase}{reason}, {node.get('round_contributors', 0)} counted"
