"""What can follow what on the command line, as the parser knows it."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from pulsenetd import config


class Value(StrEnum):
    """What a word is to be."""

    NONE = "none"
    """Nothing follows: a flag."""
    ANY = "any"
    """Only the person who types knows."""
    FILE = "file"
    DIRECTORY = "directory"
    RUN = "run"
    """A run that is known on this machine."""
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class Word:
    """An option, or a place for a word."""

    names: tuple[str, ...]
    """Its spellings; none for a place."""
    help: str
    label: str
    value: Value
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """A command, or a group of commands."""

    path: tuple[str, ...]
    """The words that lead to it, without the program's name."""
    help: str
    options: tuple[Word, ...]
    places: tuple[Word, ...]
    actions: tuple[tuple[str, str], ...]
    """Commands below it, each with its help."""

    @property
    def at(self) -> str:
        """The path as one text, a blank before every word."""
        return "".join(f" {word}" for word in self.path)

    @property
    def place(self) -> Word | None:
        """What can be said about its places: the first that is no free text."""
        return next((place for place in self.places if place.value is not Value.ANY), None)


FILES: Final = ("FILE", "PATH", "OUT", "OLD", "NEW", "A", "B", "BASE")
DIRECTORIES: Final = ("DIR",)
RUN_COMMANDS: Final = ("show", "token", "admit", "revoke", "promote", "own", "disown", "epoch", "countersign")


def list_commands(parser: argparse.ArgumentParser, path: tuple[str, ...] = (), text: str = "") -> Iterator[Command]:
    """Yield every command of a parser, groups before what they hold."""
    options, places = [], []
    children: list[tuple[str, str, argparse.ArgumentParser]] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            shown = {choice.dest: choice.help or "" for choice in action._choices_actions}
            children = [(name, shown.get(name, ""), child) for name, child in action.choices.items()]
        elif action.option_strings:
            options.append(_make_word(action, path))
        elif action.help is not argparse.SUPPRESS:
            places.append(_make_word(action, path))
    yield Command(
        path, text, tuple(options), tuple(places), tuple((name, help_text) for name, help_text, _ in children)
    )
    for name, help_text, child in children:
        yield from list_commands(child, (*path, name), help_text)


def _make_word(action: argparse.Action, path: tuple[str, ...]) -> Word:
    label = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    names, text = tuple(action.option_strings), (action.help or "").replace("%%", "%")
    choices = tuple(map(str, action.choices or ())) or _configured_choices(action.dest)
    if action.nargs == 0:
        return Word(names, text, "", Value.NONE)
    if choices:
        return Word(names, text, label, Value.CHOICE, choices)
    is_run = label == "NAME" and (action.dest == "run" or (path[-1:] and path[-1] in RUN_COMMANDS))
    if is_run:
        return Word(names, text, label, Value.RUN)
    if label in DIRECTORIES and names:
        return Word(names, text, label, Value.DIRECTORY)
    return Word(names, text, label, Value.FILE if label in (*FILES, *DIRECTORIES) else Value.ANY)


def _configured_choices(name: str) -> tuple[str, ...]:
    """Return what a field of the configuration may be; its parser takes any text, to refuse it in one voice."""
    fields: dict[str, dataclasses.Field[object]] = {item.name: item for item in config.fields()}
    return tuple(fields[name].metadata["choices"]) if name in fields else ()
