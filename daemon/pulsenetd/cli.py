"""The ``pulsenet`` command: parse, dispatch, and turn every failure into one line and an exit code."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NoReturn

from pulsenet.errors import PulsenetError, UsageError
from pulsenetd.commands import (
    bench,
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

_EPILOG = """\
examples:
  pulsenet demo                                 a whole swarm on this machine
  pulsenet join --role trainer                  open the private run 'local'
  pulsenet join --role inferencer               second terminal: follow it
  pulsenet patch make OLD NEW -o FILE           what a patch of your own checkpoints costs
  pulsenet bench codec OLD NEW                  the same in every encoding, with speeds
  pulsenet plan --params 7B --peers 8 --mbps 500 --step-seconds 4
                                                what a link can carry, before anybody trains
  pulsenet sim --seed 7 --faults all            a simulated swarm under faults

Every option of 'join' is also a PULSENET_* variable and a key of the TOML file given with --config.
"""


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that usage errors leave through the same door as all others."""

    def __init__(self, **options: Any) -> None:
        # A guessed flag is a usage error: half a name may mean another flag in the next release.
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see '{self.prog} --help'")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = _Parser(
        prog="pulsenet",
        description="Move model weights and pseudo-gradients between volunteers' machines.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pulsenet {version('pulsenet')}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for module in (join, run, keygen, status, doctor, scrub, verify, patch, bench, plan, sim, config, demo):
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
