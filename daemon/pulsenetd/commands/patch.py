"""``pulsenet patch make|apply|show``: patches between files, without any network."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pulsenetd.commands.reporting import reporting
from pulsenetd.config import CODECS

_EXAMPLES = (
    ("pulsenet patch make OLD NEW -o step.patch", "what changed between two checkpoints"),
    ("pulsenet patch show step.patch", "its size, density and encodings"),
    ("pulsenet patch apply OLD step.patch -o COPY", "bit-identical to NEW, or an error"),
)


def add_parser(commands: Any) -> None:
    """Add ``patch make|apply|show`` to the command line."""
    parser = commands.add_parser("patch", help="make, apply or look at a patch file", examples=_EXAMPLES)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    make = actions.add_parser("make", help="write the patch that turns OLD into NEW", examples=_EXAMPLES[:1])
    make.add_argument("old", metavar="OLD", help="safetensors file or directory")
    make.add_argument("new", metavar="NEW", help="safetensors file or directory")
    make.add_argument("-o", "--output", metavar="FILE", required=True, help="patch file to write")
    make.add_argument("--codec", choices=CODECS, default="auto", help="how its blocks are encoded (default: auto)")
    make.set_defaults(run_command=_make)
    apply = actions.add_parser("apply", help="apply a patch to its base", examples=_EXAMPLES[2:])
    apply.add_argument("base", metavar="BASE", help="safetensors file or directory")
    apply.add_argument("file", metavar="FILE", help="patch file")
    apply.add_argument("-o", "--output", metavar="OUT", required=True, help="file or directory to write")
    apply.set_defaults(run_command=_apply)
    show = actions.add_parser("show", help="print what a patch file holds", examples=_EXAMPLES[1:2])
    show.add_argument("file", metavar="FILE", help="patch file")
    show.set_defaults(run_command=_show)
    for action in (make, apply, show):
        action.add_argument("--json", action="store_true", help="print one JSON object")


def _make(arguments: argparse.Namespace) -> int:
    from pulsenetd.files import offline

    old, new, output = Path(arguments.old), Path(arguments.new), Path(arguments.output)
    with reporting("reading both models", is_quiet=arguments.json) as on_progress:
        result = offline.patch_make(old, new, output, codec=arguments.codec, on_progress=on_progress)
    return _print(result, as_json=arguments.json)


def _apply(arguments: argparse.Namespace) -> int:
    from pulsenetd.files import offline

    with reporting("reading the base", is_quiet=arguments.json) as on_progress:
        result = offline.patch_apply(Path(arguments.base), Path(arguments.file), Path(arguments.output), on_progress)
    return _print(result, as_json=arguments.json)


def _show(arguments: argparse.Namespace) -> int:
    from pulsenetd.files import offline

    return _print(offline.patch_show(Path(arguments.file)), as_json=arguments.json)


def _print(result: Mapping[str, Any], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(result))
        return 0
    width = max(len(name) for name in result)
    for name, value in result.items():
        if not isinstance(value, list | dict):
            print(f"{name.replace('_', ' '):<{width}}  {_shown(name, value)}")
    return 0


def _shown(name: str, value: object) -> str:
    if name.endswith("_ratio") and isinstance(value, float) and value < 1:
        return f"{value:.4%}"
    if isinstance(value, float):
        return f"{value:,.2f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)
