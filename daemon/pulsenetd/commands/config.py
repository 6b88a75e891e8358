"""``pulsenet config show``: what a node here would use, and where each value came from."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from pulsenet.errors import UsageError
from pulsenetd import config


def add_parser(commands: Any) -> None:
    """Add ``config show`` to the command line."""
    parser = commands.add_parser("config", help="show the configuration")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="print every value")
    show.add_argument("--origin", action="store_true", help="say where each value came from")
    show.add_argument("--json", action="store_true", help="print one JSON object")
    add_options(show)
    show.set_defaults(run_command=_show)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every configuration field, and ``--config FILE``."""
    parser.add_argument("--config", metavar="FILE", help="TOML file (env PULSENET_CONFIG)")
    for item in config.fields():
        text = item.metadata["help"].replace("%", "%%")  # argparse fills in fields named by %
        flag = config.flag_name(item.name)
        if item.metadata["kind"] == "flag":
            parser.add_argument(
                flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, dest=item.name, help=text
            )
            continue
        if item.metadata["kind"] == "rest":
            parser.add_argument(flag, action="store_true", dest=f"has_{item.name}", help=text)
            parser.add_argument(item.name, nargs="*", metavar="ARGUMENT", help=argparse.SUPPRESS)
            continue
        if item.metadata["choices"]:
            text += f": {', '.join(item.metadata['choices'])}"
        if item.default not in ("", ()):
            text += f" (default {item.default})"
        action = "append" if isinstance(item.default, tuple) else "store"
        metavar = item.metadata["metavar"] or item.metadata["kind"].upper()
        parser.add_argument(flag, action=action, default=argparse.SUPPRESS, dest=item.name, metavar=metavar, help=text)


def resolve(arguments: argparse.Namespace) -> config.ResolvedConfig:
    """Combine parsed flags with the environment and the configuration file."""
    given = vars(arguments)
    flags = {item.name: given[item.name] for item in config.fields() if item.name in given}
    for item in config.fields():
        if item.metadata["kind"] == "rest" and item.name in flags:
            rest = tuple(flags.pop(item.name))
            if given[f"has_{item.name}"]:
                flags[item.name] = rest
            elif rest:
                raise UsageError(f"unexpected argument {rest[0]!r}: arguments after '--' go with --{item.name}")
    file = arguments.config or os.environ.get("PULSENET_CONFIG")
    return config.resolve(flags, os.environ, Path(file) if file else None)


def _show(arguments: argparse.Namespace) -> int:
    resolved = resolve(arguments)
    values = {item.name: getattr(resolved.config, item.name) for item in config.fields()}
    if values["token"]:
        values["token"] = "(hidden)"  # noqa: S105 - what is shown instead of the secret
    if arguments.json:
        rows = {name: {"value": value, "origin": resolved.origins[name]} for name, value in values.items()}
        print(json.dumps(rows, indent=2))
        return 0
    for name, value in values.items():
        shown = json.dumps(value)
        print(f"{name} = {shown}" + (f"   # {resolved.origins[name]}" if arguments.origin else ""))
    return 0
