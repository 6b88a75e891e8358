"""The manual page, written from the parser: no option can be missing, and none can outlive its removal."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib.metadata import version
from typing import Final

from pulsenetd.errors import EXIT_MEANINGS
from pulsenetd.parsing import Parser

ENVIRONMENT: Final = (
    ("PULSENET_CONFIG", "TOML file with options of join, if --config is not given"),
    ("PULSENET_<OPTION>", "value of an option of join, as PULSENET_DATA_DIR; a flag beats it, it beats the file"),
    ("XDG_DATA_HOME", "where runs and nodes live, in pulsenet/ (default ~/.local/share)"),
    ("NO_COLOR", "set to anything: no colours"),
    ("PAGER", "shows help that is longer than the terminal"),
)
FILES: Final = (
    ("$XDG_DATA_HOME/pulsenet/RUN/run.json", "token and live bootstraps of a run"),
    ("$XDG_DATA_HOME/pulsenet/RUN/ROLE[-N]/", "a node without --data-dir: its key, store, sockets and weights"),
)


def write_manual(parser: Parser) -> str:
    """Return pulsenet(1) in the language of man(7)."""
    lines = [
        f'.TH PULSENET 1 "" "pulsenet {version("pulsenet")}" "User Commands"',
        ".SH NAME",
        r"pulsenet \- move model weights between volunteers' machines",
        ".SH SYNOPSIS",
        ".B pulsenet",
        r".RB [ \-\-debug ]",
        ".I COMMAND",
        "[OPTIONS] ...",
        ".SH DESCRIPTION",
        escape(parser.description or ""),
        *_paragraphs(parser.epilog or ""),
        ".SH COMMANDS",
        *_write_commands(parser),
        ".SH EXIT STATUS",
        *_table((str(code), text) for code, text in EXIT_MEANINGS.items()),
        ".SH ENVIRONMENT",
        *_table(ENVIRONMENT),
        ".SH FILES",
        *_table(FILES),
        ".SH EXAMPLES",
        *_write_examples(parser),
    ]
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """Return text that troff prints as it stands."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-")
    return "\n".join(rf"\&{line}" if line[:1] in (".", "'") else line for line in escaped.splitlines())


def _write_commands(parser: argparse.ArgumentParser, text: str = "") -> Iterator[str]:
    children = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not children:
        assert isinstance(parser, Parser)
        yield f'.SS "{escape(parser.prog)}{_name_places(parser)}"'
        yield escape(parser.description or text[:1].upper() + text[1:] + ".")
        yield from _write_options(parser)
        yield from _paragraphs(parser.epilog or "")
        yield from _write_examples(parser)
    for action in children:
        helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
        for name, child in action.choices.items():
            yield from _write_commands(child, helps.get(name, ""))


def _name_places(parser: Parser) -> str:
    places = [action for action in parser._actions if not action.option_strings and action.help != argparse.SUPPRESS]
    return "".join(f" [{place.metavar}]" if place.nargs == "?" else f" {place.metavar}" for place in places)


def _write_options(parser: Parser) -> Iterator[str]:
    for action in parser._actions:
        if action.help is argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
            continue
        label = action.metavar or "{" + ",".join(map(str, action.choices or ())) + "}"
        names = ", ".join(rf"\fB{escape(name)}\fR" for name in action.option_strings)
        value = "" if action.nargs == 0 else rf" \fI{escape(str(label))}\fR"
        yield ".TP"
        yield names + value if names else value.strip()
        yield escape((action.help or "").replace("%%", "%"))


def _write_examples(parser: Parser) -> Iterator[str]:
    for index, (command, text) in enumerate(parser.examples):
        if index or parser.prog.count(" "):
            yield ".PP"
        yield escape(text[:1].upper() + text[1:]) + ":"
        yield from (".PP", ".nf", ".RS", escape(command), ".RE", ".fi")


def _paragraphs(text: str) -> Iterator[str]:
    for block in text.strip().split("\n\n"):
        if block:
            yield from (".PP", escape(block))


def _table(rows: Iterator[tuple[str, str]] | tuple[tuple[str, str], ...]) -> Iterator[str]:
    for name, text in rows:
        yield from (".TP", rf"\fB{escape(name)}\fR", escape(text))
