"""``pulsenet config show``: what a node here would use, and where each value came from."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from pulsenet.errors import UsageError
from pulsenetd import config

_EXAMPLES = (
    ("pulsenet config show --origin", "every value, and where it comes from"),
    ("pulsenet config show --config node.toml --json", "what a node with this file would use"),
)


def add_parser(commands: Any) -> None:
    """Add ``config show`` to the command line."""
    parser = commands.add_parser("config", help="show the configuration", examples=_EXAMPLES)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="print every value", examples=_EXAMPLES)
    show.add_argument("--origin", action="store_true", help="say where each value came from")
    show.add_argument("--json", action="store_true", help="print one JSON object")
    add_options(show)
    show.set_defaults(run_command=_show)


GROUPS: Final = {
    "run and node": ("role", "run", "token", "run_file", "data_dir", "version_min", "supervise"),
    "network": (
        "bootstrap", "listen", "announce", "wait", "start_timeout_seconds", "upload_limit", "download_limit", "p2pd",
    ),
    "engine beside an inferencer": (
        "engine", "engine_dir", "engine_url", "serve", "engine_python", "engine_reload", "openai_port", "openai_host",
        "companions",
    ),
    "trainer": ("codec", "encode_cpu_seconds", "max_staleness"),
    "machine": ("store_limit_bytes", "worker_threads", "allow_uid"),
    "watching": (
        "metrics_host", "metrics_port", "ready_while_stale", "round_seconds", "watchdog_seconds", "log_level",
        "log_json",
    ),
}  # fmt: skip
"""Every field of the configuration, in the order people look for it."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every configuration field, and ``--config FILE``."""
    parser.add_argument("--config", metavar="FILE", help="TOML file (env PULSENET_CONFIG)")
    by_name = {item.name: item for item in config.fields()}
    for title, names in GROUPS.items():
        _add_group(parser.add_argument_group(title), [by_name[name] for name in names])


def _add_group(parser: argparse._ArgumentGroup, items: Sequence[dataclasses.Field[Any]]) -> None:
    for item in items:
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
        kind = item.name if item.metadata["choices"] else item.metadata["kind"]
        metavar = item.metadata["metavar"] or kind.upper()
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
