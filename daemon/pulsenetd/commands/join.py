"""``pulsenet join``: run a node until it is told to stop."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from pulsenetd.commands.config import add_options, resolve

_EXAMPLES = (
    ("pulsenet join --role trainer", "open or re-open the private run 'local' on loopback"),
    ("pulsenet join --role inferencer", "follow it from a second terminal"),
    ("pulsenet join --role inferencer --token pulse1...", "follow somebody's run"),
    ("pulsenet join --role seed --token pulse1... --listen /ip4/0.0.0.0/tcp/4001", "store and serve what it publishes"),
    (
        "pulsenet join --role inferencer --token pulse1... --engine vllm --engine-url http://127.0.0.1:8000",
        "patch a running vLLM",
    ),
)


def add_parser(commands: Any) -> None:
    """Add ``join`` to the command line."""
    parser = commands.add_parser(
        "join",
        help="run a node",
        examples=_EXAMPLES,
        description="Join a run and stay in it. Each option may also be given as PULSENET_<NAME> or in --config.",
    )
    add_options(parser)
    parser.set_defaults(run_command=_join)


def _join(arguments: argparse.Namespace) -> int:
    resolved = resolve(arguments)
    if resolved.config.supervise:
        from pulsenetd import keeper, logs

        logs.set_up(resolved.config.log_level, as_json=resolved.config.log_json)
        return keeper.keep(sys.argv[1:])
    from pulsenetd import process

    return process.run_node(resolved.config)
