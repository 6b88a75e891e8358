"""``pulsenet scrub``: read everything a stopped node keeps, and delete what is damaged."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pulsenet.errors import ConfigError, StorageError
from pulsenet.local.directories import data_home, list_nodes
from pulsenetd.commands.reporting import reporting
from pulsenetd.errors import DirectoryLockedError
from pulsenetd.logs import printable
from pulsenetd.words import say_count

if TYPE_CHECKING:
    from pulsenetd.storage.scrub import Report

_EPILOG = """\
For nodes that are stopped: a running one reads what it holds by itself, all of it within a day, and fetches again what
it finds damaged. What a stopped node lacks after this, it fetches again at its next start, where it needs it.
Exit code 0 if everything was whole, 6 if anything was damaged or could not be read.
"""

_EXAMPLES = (
    ("pulsenet scrub", "all stopped nodes of this machine"),
    ("pulsenet scrub --data-dir ~/node", "the node in this directory"),
)


def add_parser(commands: Any) -> None:
    """Add ``scrub`` to the command line."""
    parser = commands.add_parser(
        "scrub",
        help="find and delete what is damaged on a node's disk",
        epilog=_EPILOG,
        examples=_EXAMPLES,
    )
    parser.add_argument("--run", default=None, metavar="NAME", help="only nodes of this run (default: of all)")
    parser.add_argument("--data-dir", default=None, metavar="DIR", help="only the node in this directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run_command=_scrub)


def find_nodes(run: str | None, data_dir: str | None) -> list[Path]:
    """Return the directories that are meant.

    Raises:
        ConfigError: There is none.
    """
    from pulsenetd.storage.store import DATABASE_NAME

    if data_dir is not None:
        nodes = [Path(data_dir)] if (Path(data_dir) / DATABASE_NAME).exists() else []
    else:
        nodes = list_nodes(data_home(os.environ), run, DATABASE_NAME)
    if not nodes:
        raise ConfigError(
            f"no node keeps anything in {data_dir or ('run ' + run if run else 'any run')} on this machine"
        )
    return nodes


def _scrub(arguments: argparse.Namespace) -> int:
    from pulsenetd.progress import format_count
    from pulsenetd.storage.scrub import scrub
    from pulsenetd.storage.store import Store

    found: dict[str, Any] = {}
    code = 0
    for node in find_nodes(arguments.run, arguments.data_dir):
        try:
            store = Store.open(node)
            try:
                with reporting(f"reading {node}", format_count("chunks"), is_quiet=arguments.json) as on_progress:
                    report = scrub(store, on_progress)
            finally:
                store.close()
        except StorageError as error:
            if arguments.data_dir is not None:
                raise
            # One of several: it keeps nobody from reading the others.
            if isinstance(error, DirectoryLockedError):
                found[str(node)] = {"skipped": str(error)}
                text, stream = f"{node}: left out, it is running and reads its disk by itself", sys.stdout
            else:
                code, found[str(node)] = 6, {"failed": str(error)}
                text, stream = f"pulsenet: {printable(str(error))}", sys.stderr
            if not arguments.json:
                print(text, file=stream)
            continue
        code = code if report.is_whole else 6
        found[str(node)] = {
            **asdict(report),
            "lacks": [{**asdict(lack), "blob_id": lack.blob_id.hex()} for lack in report.lacks],
        }
        if not arguments.json:
            _print(node, report)
    if arguments.json:
        print(json.dumps({"whole": code == 0, "nodes": found}, indent=2))
    return code


def _print(node: Path, report: Report) -> None:
    print(
        f"{node}: {say_count(report.chunk_count, 'chunk')} ({report.chunk_size_bytes} bytes), "
        f"{say_count(report.record_count, 'record')} read; {say_count(report.damaged_count, 'chunk')} and "
        f"{say_count(report.bad_record_count, 'record')} were damaged and are deleted"
    )
    for lack in report.lacks:
        lacked = f"{say_count(lack.chunk_count, 'chunk')} ({lack.size_bytes} bytes)"
        print(f"  {lack.name or lack.blob_id.hex()[:16]} lacks {lacked}")
    if report.lacks:
        print("  start the node: it fetches again what it needs of that")
