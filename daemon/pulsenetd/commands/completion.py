"""``pulsenet completion`` and ``pulsenet manual``: what shells and ``man`` need, written from the parser."""

from __future__ import annotations

import argparse
import sys
from typing import Any, Final

SHELLS: Final = ("bash", "zsh", "fish")

_COMPLETION_EXAMPLES: Final = (
    (
        "pulsenet completion bash | install -Dm644 /dev/stdin ~/.local/share/bash-completion/completions/pulsenet",
        "bash",
    ),
    (
        "pulsenet completion zsh | install -Dm644 /dev/stdin ~/.zfunc/_pulsenet",
        "zsh, with ~/.zfunc in fpath before compinit",
    ),
    ("pulsenet completion fish | install -Dm644 /dev/stdin ~/.config/fish/completions/pulsenet.fish", "fish"),
)
_MANUAL_EXAMPLES: Final = (("pulsenet manual | man -l -", "read it"),)


def add_parser(commands: Any) -> None:
    """Add ``completion`` and ``manual`` to the command line."""
    parser = commands.add_parser(
        "completion", help="print the completion script of a shell", examples=_COMPLETION_EXAMPLES
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
    parser.set_defaults(run_command=_complete)
    manual = commands.add_parser("manual", help="print the manual page, for man", examples=_MANUAL_EXAMPLES)
    manual.set_defaults(run_command=_print_manual)


def _complete(arguments: argparse.Namespace) -> int:
    from pulsenetd.cli import build_parser
    from pulsenetd.completion.shells import WRITERS
    from pulsenetd.completion.words import list_commands

    sys.stdout.write(WRITERS[arguments.shell](list(list_commands(build_parser()))))
    return 0


def _print_manual(arguments: argparse.Namespace) -> int:
    from pulsenetd.cli import build_parser
    from pulsenetd.manual import write_manual

    sys.stdout.write(write_manual(build_parser()))
    return 0
