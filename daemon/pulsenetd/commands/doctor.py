"""``pulsenet doctor``: what on this machine keeps a node from working well, and what to do about it."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pulsenet.errors import RemoteProtocolError, UsageError
from pulsenet.local.directories import data_home, list_nodes
from pulsenetd import config
from pulsenetd.commands.reporting import reporting
from pulsenetd.logs import printable
from pulsenetd.words import say_moment

if TYPE_CHECKING:
    from pulsenetd.doctor.findings import Finding, Subject

_EPILOG = """\
One line a finding: ok, warn (works, but could work better) or fail (would not work), the cause, and the next step.
Nothing is changed without --repair, which closes keys and directories to others, deletes what a killed node left
behind and chunks that are damaged, and then looks again. It leaves the stores of running nodes alone. Options that a
node is given belong here too, by --config, PULSENET_* or flags. Exit code 1 if anything fails, else 0.
"""
_EXAMPLES = (
    ("pulsenet doctor", "the machine, and all its nodes"),
    ("pulsenet doctor --data-dir ~/node --listen /ip4/0.0.0.0/tcp/4001", "one node, and its port"),
    ("pulsenet doctor --token pulse1...", "before joining: do its bootstraps answer?"),
    ("pulsenet doctor --data-dir ~/node --read-all --repair", "read all it keeps, delete what is damaged"),
    ("pulsenet doctor --engine vllm --engine-url http://127.0.0.1:8000", "the engine too"),
)


def add_parser(commands: Any) -> None:
    """Add ``doctor`` to the command line."""
    parser = commands.add_parser(
        "doctor",
        help="look for what keeps a node from working well",
        epilog=_EPILOG,
        examples=_EXAMPLES,
    )
    add = parser.add_argument
    add("--config", metavar="FILE", help="TOML file of the node (env PULSENET_CONFIG)")
    add("--run", metavar="NAME", help="run whose nodes and bootstraps are meant (default: all nodes)")
    add("--data-dir", metavar="DIR", help="only the node in this directory, and its run's bootstraps")
    add("--token", metavar="TOKEN", help="check the bootstraps of this join token, and nodes of its run")
    add("--bootstrap", action="append", metavar="ADDR", help="check this bootstrap too")
    add("--listen", metavar="ADDR", help="check that a node can listen there")
    add("--metrics-port", metavar="PORT", help="check that this port of /metrics is free")
    add("--engine", metavar="ENGINE", choices=config.ENGINES, help="vllm: check that its plugin is installed")
    add("--engine-url", metavar="URL", help="with --engine vllm: check that it answers")
    add("--engine-python", metavar="FILE", help="interpreter that has vLLM (default: this one)")
    add("--p2pd", metavar="FILE", help="p2pd binary to run instead of hivemind's")
    add("--read-all", action="store_true", help="read and hash all that nodes keep (may take minutes)")
    add("--repair", action="store_true", help="put right what can be put right safely, then look again")
    add("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run_command=_doctor)


KEY_FILE = "identity.key"
"""What every node's directory holds, whether it runs or not."""

GIVEN = ("run", "data_dir", "token", "bootstrap", "listen", "metrics_port", "p2pd")
"""Options of ``join`` that the doctor understands; others of the file or the environment are only checked."""


def _doctor(arguments: argparse.Namespace) -> int:
    with reporting("reading stores", is_quiet=arguments.json) as on_progress:
        return _examine(arguments, _make_subject(arguments, on_progress))


def _examine(arguments: argparse.Namespace, subject: Subject) -> int:
    from pulsenetd.doctor import checks

    findings, repaired = [], []
    if arguments.repair:
        repaired = list(checks.repair(list(checks.examine(subject))))
        for name, is_done, text in repaired:
            if not arguments.json:
                print(f"{'fixed' if is_done else 'fail':<5} {name:<11} {printable(text)}", flush=True)
    for name, finding in checks.examine(subject):
        findings.append((name, finding))
        if not arguments.json:
            print(f"{finding.grade:<5} {name:<11} {printable(_describe(finding))}", flush=True)
    code = checks.exit_code([finding for _, finding in findings])
    if arguments.json:
        listed = [
            {
                "check": name,
                "grade": str(finding.grade),
                "text": finding.text,
                "next_step": finding.next_step,
                "can_repair": finding.repair is not None,
            }
            for name, finding in findings
        ]
        done = [{"check": name, "done": is_done, "text": text} for name, is_done, text in repaired]
        print(json.dumps({"ok": code == 0, "findings": listed, "repaired": done}, indent=2))
    return code


def _describe(finding: Finding) -> str:
    step = f"; {finding.next_step}" if finding.next_step else ""
    return finding.text + step + (" (or ask again with --repair)" if finding.repair is not None else "")


def _make_subject(arguments: argparse.Namespace, on_progress: Callable[[int, int], None]) -> Subject:
    from pulsenetd.doctor.findings import Subject

    flags = {name: value for name in GIVEN if (value := getattr(arguments, name)) is not None}
    file = arguments.config or os.environ.get("PULSENET_CONFIG")
    resolved = config.resolve(flags, os.environ, Path(file) if file else None)
    chosen, home = resolved.config, data_home(os.environ)
    nodes, bootstraps, trouble = _choose_nodes(chosen, home, is_run_named=resolved.origins["run"] != "default")
    return Subject(
        home=home,
        nodes=tuple(nodes),
        bootstraps=tuple(dict.fromkeys([*chosen.bootstrap, *bootstraps])),
        run_trouble=trouble,
        listen=chosen.listen,
        p2pd=chosen.p2pd,
        metrics_host=chosen.metrics_host,
        metrics_port=chosen.metrics_port,
        engine=arguments.engine or ("vllm" if arguments.engine_url else chosen.engine),
        engine_url=arguments.engine_url or chosen.engine_url,
        engine_python=arguments.engine_python or chosen.engine_python,
        reads_all=arguments.read_all,
        on_progress=on_progress,
    )


def _choose_nodes(
    chosen: config.Config, home: Path, *, is_run_named: bool
) -> tuple[list[Path], list[str], Finding | None]:
    """Return the nodes that are meant, the bootstraps of their run, and what keeps others from joining it.

    A token, a run or a directory names them. Without any of these all nodes of the machine are meant, and no
    bootstraps: those of a run that is long over answer no more.
    """
    from pulsenet.chain.token import decode_token
    from pulsenetd import runs

    known, names, trouble = runs.list_tokens(home), [], None
    if chosen.token:
        try:
            tokens = [decode_token(chosen.token)]
        except RemoteProtocolError as error:
            raise UsageError(f"--token: {error.detail}") from error
        names = [name for name, token in known.items() if token.run_id == tokens[0].run_id]
        trouble = _judge_end(tokens[0].expires_at_ms, has_joined=bool(names))
    else:
        own = Path(chosen.data_dir).absolute() if chosen.data_dir else None
        if is_run_named:
            names = [chosen.run]
            if chosen.run != runs.LOCAL_RUN and not (home / chosen.run).is_dir():
                trouble = _miss_run(chosen.run)
        elif own is not None:
            names = [name for name in known if own in list_nodes(home, name, KEY_FILE)]
        files = [file for name in names if (file := home / name / "run.json").exists()]
        tokens = [runs.read_run_file(file).token for file in files]
    bootstraps = [address for token in tokens for address in token.bootstraps]
    if chosen.data_dir:
        return [Path(chosen.data_dir)], bootstraps, trouble
    meant = names if chosen.token or is_run_named else [None]
    return [node for name in meant for node in list_nodes(home, name, KEY_FILE)], bootstraps, trouble


def _judge_end(expires_at_ms: int | None, *, has_joined: bool) -> Finding | None:
    """Say that a token ended; nodes of a machine that knows its run start all the same."""
    from pulsenetd.doctor.findings import fail, warn

    if expires_at_ms is None or time.time() * 1_000 <= expires_at_ms:
        return None
    text = f"the join token ended {say_moment(expires_at_ms)}"
    step = "ask a member for another: 'pulsenet run token NAME'"
    return warn(f"{text}: nodes that joined by it start again, others cannot", step) if has_joined else fail(text, step)


def _miss_run(name: str) -> Finding:
    from pulsenetd.doctor.findings import fail

    step = f"give --token, or create it with 'pulsenet run create {name}'"
    return fail(f"no run '{name}' on this machine", step)
