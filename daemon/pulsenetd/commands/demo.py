"""``pulsenet demo``: a whole swarm on this machine, training a real model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pulsenet.errors import UsageError


def add_parser(commands: Any) -> None:
    """Add ``demo`` to the command line."""
    parser = commands.add_parser("demo", help="run a trainer and inferencers here, on a real model")
    parser.add_argument("--model", choices=("smollm2", "tiny"), default="smollm2", help="tiny takes under a minute")
    parser.add_argument(
        "--versions", type=int, default=None, metavar="N", help="optimiser steps, one version each (default 16, tiny 8)"
    )
    parser.add_argument("--inferencers", type=int, default=2, metavar="N", help="inferencer nodes (default 2)")
    parser.add_argument("--workdir", default=None, metavar="DIR", help="keep logs, keys and weights here")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.set_defaults(run_command=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    for name, most in (("versions", 100_000), ("inferencers", 64)):
        value = getattr(arguments, name)
        if value is not None and not 1 <= value <= most:
            raise UsageError(f"--{name}: {value} is not from 1 to {most}")
    from pulsenetd.demo.orchestrator import run_demo

    return run_demo(
        model=arguments.model,
        versions=arguments.versions,
        inferencers=arguments.inferencers,
        workdir=Path(arguments.workdir) if arguments.workdir else None,
        json_output=arguments.json,
    )
