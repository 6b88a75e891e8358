"""The ``pulsenet`` command: parse, dispatch, and turn every failure into one line and an exit code."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from pulsenet.errors import PulsenetError
from pulsenetd.commands import (
    bench,
    completion,
    config,
    demo,
    doctor,
    join,
    keygen,
    patch,
    plan,
    run,
    scrub,
    sim,
    status,
    verify,
)
from pulsenetd.errors import exit_code
from pulsenetd.logs import printable
from pulsenetd.parsing import Parser

_EPILOG = """\
Every option of 'join' is also a PULSENET_* variable and a key of the TOML file given with --config. 'pulsenet COMMAND
--help' has the options and examples of each; NO_COLOR is heard; exit codes are in 'pulsenet manual | man -l -'.
"""

_EXAMPLES = (
    ("pulsenet demo --model tiny", "a whole swarm on this machine"),
    ("pulsenet join --role trainer", "open the private run 'local'"),
    ("pulsenet join --role inferencer", "second terminal: follow it"),
    ("pulsenet status --watch", "what the nodes of this machine do"),
    ("pulsenet doctor", "what keeps them from working well"),
)


def build_parser() -> Parser:
    """Return the parser of the whole command line."""
    parser = Parser(
        prog="pulsenet",
        description="Move model weights and pseudo-gradients between volunteers' machines.",
        epilog=_EPILOG,
        examples=_EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"pulsenet {version('pulsenet')}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    order = (join, run, keygen, status, doctor, scrub, verify, patch, bench, plan, sim, config, demo, completion)
    for module in order:
        module.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    _open_standard_streams()
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    try:
        # Taken at any place, because it is added to a command that has just failed.
        parsed = build_parser().parse_args([word for word in given if word != "--debug"])
        code: int = parsed.run_command(parsed)
        sys.stdout.flush()
        return code
    except PulsenetError as error:
        if debug:
            raise
        for line in str(error).splitlines():
            print(f"pulsenet: {printable(line)}", file=sys.stderr)
        return exit_code(error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (head, less) has left; keep the interpreter from complaining about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        # Every part names its own failures of the system; this one escaped, and still is no reason for a traceback.
        if debug:
            raise
        print(f"pulsenet: the system refused: {printable(str(error))}; --debug shows where", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        # The library alone brings this command along, but not what a node needs.
        if debug or error.name is None or error.name.startswith("pulsenet"):
            raise
        extra = "demo" if given[:1] == ["demo"] else "daemon"
        package = error.name.split(".")[0]
        step = f"pip install 'pulsenet[{extra}]'"
        print(f"pulsenet: this needs {package}, which is not installed: {step}", file=sys.stderr)
        return 1


def _open_standard_streams() -> None:
    """Lead what the caller closed to nowhere, and let no character fail on the way out."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # Without this the number goes to the next file opened, and whatever p2pd prints goes into that file.
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, open(number, "r" if number == 0 else "w"))  # noqa: SIM115 - open to the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names may hold what this terminal cannot show


if __name__ == "__main__":
    sys.exit(main())
