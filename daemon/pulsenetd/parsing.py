"""The parser of the command line: help that fits a screen, examples, and mistakes that name what was meant."""

from __future__ import annotations

import argparse
import difflib
import pydoc
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from pulsenet.errors import UsageError

COLUMNS_MAX: Final = 100
"""Wider lines are hard to read, however wide the terminal."""

USAGE_OPTIONS_MAX: Final = 8
"""A usage line that names more options says less than ``[OPTIONS]``."""

NEAREST_RATIO_MIN: Final = 0.6

NO_NUMBER: Final = {"int": "is no whole number", "float": "is no number"}
"""What ``argparse`` says in the words of a program."""

Example = tuple[str, str]
"""A command as it would be typed, and what it does."""


class HelpFormatter(argparse.HelpFormatter):
    """Fills paragraphs and leaves indented lines alone, so that examples keep their columns."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=min(shutil.get_terminal_size().columns, COLUMNS_MAX) - 2)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        blocks = re.split(r"\n\s*\n", text.strip("\n"))
        return "\n\n".join(
            textwrap.indent(block, indent)
            if re.search(r"^ ", block, re.MULTILINE)
            else textwrap.fill(" ".join(block.split()), width, initial_indent=indent, subsequent_indent=indent)
            for block in blocks
        )


class Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that usage errors leave through the same door as all others.

    Args:
        examples: Shown at the end of the help; the tests parse each.
        options: What :class:`argparse.ArgumentParser` takes.
    """

    def __init__(self, *, examples: Sequence[Example] = (), **options: Any) -> None:
        options.setdefault("formatter_class", HelpFormatter)
        # A guessed flag is a usage error: half a name may mean another flag in the next release.
        super().__init__(allow_abbrev=False, **options)
        self.examples = tuple(examples)
        # Below the options, argparse shows a list of commands under the name of the group.
        self._positionals.title = "arguments"

    def error(self, message: str) -> NoReturn:
        """Refuse the command line.

        Raises:
            UsageError: Always.
        """
        message = re.sub(r"invalid (int|float) value: (.+)", lambda found: f"{found[2]} {NO_NUMBER[found[1]]}", message)
        raise UsageError(f"{message}; see '{self.prog} --help'")

    def format_help(self) -> str:
        """Return the help, with examples at its end."""
        self._shorten_usage()
        text = super().format_help()
        return f"{text}\n{format_examples(self.examples, HelpFormatter(self.prog)._width)}" if self.examples else text

    def print_help(self, file: Any = None) -> None:
        """Print the help; through a pager where it is longer than the terminal."""
        text = self.format_help()
        is_long = text.count("\n") >= shutil.get_terminal_size().lines
        if file is None and sys.stdout.isatty() and is_long:
            pydoc.pager(text)  # $PAGER, else less; none where the terminal is dumb
        else:
            super().print_help(file)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse what is left over here, where the options that may have been meant are known."""
        found, extras = super().parse_known_args(args, namespace)
        if extras:
            unknown = extras[0].split("=")[0]
            near = difflib.get_close_matches(unknown, self._option_string_actions, n=1, cutoff=NEAREST_RATIO_MIN)
            hint = f"; did you mean {near[0]}?" if near and unknown.startswith("-") else ""
            self.error(f"unrecognized arguments: {' '.join(extras)}{hint}")
        return found, extras

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        near: Sequence[str] = ()
        if action.choices is not None and value not in action.choices:
            names = [str(choice) for choice in action.choices]
            near = difflib.get_close_matches(str(value), names, n=1, cutoff=NEAREST_RATIO_MIN)
        if near:
            if isinstance(action, argparse._SubParsersAction):
                self.error(f"there is no command {value!r}; did you mean '{near[0]}'?")
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}; did you mean '{near[0]}'?")
        super()._check_value(action, value)

    def _shorten_usage(self) -> None:
        if self.usage is not None or sum(bool(action.option_strings) for action in self._actions) <= USAGE_OPTIONS_MAX:
            return
        wanted = [action for action in self._actions if action.required and action.option_strings]
        places = [
            action
            for action in self._actions
            if not action.option_strings and action.help is not argparse.SUPPRESS and action.nargs is None
        ]
        words = [f"{action.option_strings[-1]} {action.metavar}" for action in wanted]
        self.usage = " ".join([self.prog, *words, "[OPTIONS]", *(str(action.metavar) for action in places)])


def format_examples(examples: Sequence[Example], width: int) -> str:
    """Return examples beside what they do, or below where a line would be too long."""
    column = max(len(command) for command, _ in examples) + 4
    is_beside = all(column + len(text) <= width for _, text in examples)
    lines = ["examples:"]
    for command, text in examples:
        if is_beside:
            lines.append(f"  {command:<{column - 2}}{text}")
        else:
            parts = textwrap.wrap(command, width - 4, subsequent_indent="    ", break_on_hyphens=False)
            lines += [f"  # {text}", "  " + " \\\n  ".join(parts)]
    return "\n".join(lines) + "\n"
