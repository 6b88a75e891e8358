"""``pulsenet verify``: the root of any safetensors file or directory."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pulsenet.errors import IntegrityError, UsageError
from pulsenetd.commands.reporting import reporting

_EXAMPLES = (
    ("pulsenet verify weights/current", "compare it with what 'pulsenet status --json' shows"),
    ("pulsenet verify model.safetensors --json", "the same as JSON"),
)


def add_parser(commands: Any) -> None:
    """Add ``verify`` to the command line."""
    parser = commands.add_parser("verify", help="print the root of a safetensors file or directory", examples=_EXAMPLES)
    parser.add_argument("path", metavar="DIR", help="safetensors file, or directory of them")
    parser.add_argument("--root", metavar="HEX", help="fail (exit 5) unless the root is this one")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run_command=_verify)


def _verify(arguments: argparse.Namespace) -> int:
    from pulsenetd.files import offline

    expected = arguments.root
    if expected is not None and (len(expected) != 64 or set(expected.lower()) - set("0123456789abcdef")):
        raise UsageError(f"--root: '{expected}' is not 64 hexadecimal digits")
    with reporting("hashing", is_quiet=arguments.json) as on_progress:
        result = offline.verify(Path(arguments.path), on_progress)
    print(json.dumps(result) if arguments.json else result["root"])
    if expected is not None and expected.lower() != result["root"]:
        raise IntegrityError(f"{arguments.path} has root {result['root']}, not {expected.lower()}; fetch it again")
    return 0
