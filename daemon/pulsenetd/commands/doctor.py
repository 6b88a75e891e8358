"""``pulsenet doctor``: what on this machine keeps a node from working well, and what to do about it."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pulsenet.errors import RemoteProtocolError, UsageError
from pulsenet.local.directories import RUN_NAME_DEFAULT, data_home
from pulsenetd.logs import printable

if TYPE_CHECKING:
    from pulsenetd.doctor.findings import Subject

_EPILOG = """\
One line a finding: ok, warn (works, but could work better) or fail (would not work), the cause, and the next step.
Nothing is changed. Exit code 1 if anything fails, else 0.
"""

_EXAMPLES = (
    ("pulsenet doctor", "the machine, and the nodes of the run 'local'"),
    ("pulsenet doctor --data-dir ~/node --listen /ip4/0.0.0.0/tcp/4001", "one node, and its port"),
    ("pulsenet doctor --token pulse1...", "before joining: do its bootstraps answer?"),
)


def add_parser(commands: Any) -> None:
    """Add ``doctor`` to the command line."""
    parser = commands.add_parser(
        "doctor",
        help="look for what keeps a node from working well",
        epilog=_EPILOG,
        examples=_EXAMPLES,
    )
    parser.add_argument(
        "--run", default=RUN_NAME_DEFAULT, metavar="NAME", help="run whose nodes and bootstraps are meant"
    )
    parser.add_argument("--data-dir", default=None, metavar="DIR", help="node directory, if not of that run")
    parser.add_argument("--token", default="", metavar="TOKEN", help="check the bootstraps of this join token")
    parser.add_argument("--bootstrap", action="append", default=[], metavar="ADDR", help="check this bootstrap too")
    parser.add_argument("--listen", default="", metavar="ADDR", help="check that a node can listen there")
    parser.add_argument("--p2pd", default="", metavar="FILE", help="p2pd binary to run instead of hivemind's")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run_command=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    from pulsenetd.doctor import checks

    subject = _make_subject(arguments)
    findings = []
    for name, finding in checks.examine(subject):
        findings.append((name, finding))
        if not arguments.json:
            step = f"; {finding.next_step}" if finding.next_step else ""
            print(f"{finding.grade:<5} {name:<11} {printable(finding.text + step)}", flush=True)
    code = checks.exit_code([finding for _, finding in findings])
    if arguments.json:
        listed = [
            {"check": name, "grade": str(finding.grade), "text": finding.text, "next_step": finding.next_step}
            for name, finding in findings
        ]
        print(json.dumps({"ok": code == 0, "findings": listed}, indent=2))
    return code


def _make_subject(arguments: argparse.Namespace) -> Subject:
    from pulsenet.chain.token import decode_token
    from pulsenetd import runs
    from pulsenetd.doctor.findings import Subject
    from pulsenetd.network import addresses

    home = data_home(os.environ)
    run = runs.run_path(home, arguments.run)
    nodes = (
        [Path(arguments.data_dir)] if arguments.data_dir else sorted(path.parent for path in run.glob("*/identity.key"))
    )
    bootstraps = list(arguments.bootstrap)
    for text in bootstraps:
        addresses.split_address(text)
    if arguments.listen:
        addresses.check_address(arguments.listen)
    if arguments.token:
        try:
            bootstraps += decode_token(arguments.token).bootstraps
        except RemoteProtocolError as error:
            raise UsageError(f"--token: {error}") from error
    elif (run / "run.json").exists():
        bootstraps += runs.read_run_file(run / "run.json").token.bootstraps
    return Subject(
        home=home,
        nodes=tuple(nodes),
        bootstraps=tuple(dict.fromkeys(bootstraps)),
        listen=arguments.listen,
        p2pd=arguments.p2pd,
    )
