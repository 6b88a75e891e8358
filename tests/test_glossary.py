"""Options, metrics, messages, records and errors are named in the words of docs/glossary.md."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from pulsenet.chain import records
from pulsenet.wire import messages
from pulsenetd.cli import build_parser
from pulsenetd.errors import EXIT_MEANINGS
from pulsenetd.metrics import REASONS, Metrics

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "glossary.md").read_text()
MEANT, _, UNUSED = TEXT.partition("## Words that are not used")

PLAIN = {
    # What is done with the things of the glossary, and what they consist of.
    "get", "push", "exchange", "reply", "ack", "hello", "refusal", "address", "name", "entry", "list", "kind", "join",
    "signed", "rejection",
}  # fmt: skip

OTHERWISE_MEANT = {"--worker-threads": "threads that work beside the event loop, no peers"}


def words_of(names: str) -> set[str]:
    """Return the words of a text, in the singular."""
    return {re.sub(r"s$", "", re.sub(r"ies$", "y", word)) for word in re.findall(r"[a-z]+", names.lower())}


TERMS = words_of(" ".join(re.findall(r"^\| ([^|]+) \|", MEANT, re.MULTILINE)))
BANNED = {
    word
    for cell in re.findall(r"^\| ([^|]+) \| [^|]+ \|$", UNUSED, re.MULTILINE)[2:]
    for word in re.findall(r"[a-z]+", re.sub(r"\(.*?\)", "", cell))
}


def list_classes(module: ModuleType) -> list[str]:
    return [
        name for name, found in vars(module).items() if inspect.isclass(found) and found.__module__ == module.__name__
    ]


def list_options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield name
                yield from list_options(command)
        else:
            yield from map(str, action.choices or ())


def list_series() -> Iterator[str]:
    for collector, names in Metrics().registry._collector_to_names.items():
        yield from names
        yield from collector._labelnames  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [*list_classes(messages), *list_classes(records)])
def test_messages_and_records_are_named_in_words_of_the_glossary(name: str) -> None:
    for word in re.findall(r"[A-Z][a-z]*", name):
        assert words_of(word) <= TERMS | words_of(" ".join(PLAIN)), (
            f"{name}: what is a {word.lower()}? Say so in docs/glossary.md"
        )


def test_no_name_has_a_second_word_for_something_of_the_glossary() -> None:
    names = [*list_options(build_parser()), *list_series(), *REASONS, *EXIT_MEANINGS.values()]
    names += [*list_classes(messages), *list_classes(records)]
    found = {
        name: banned
        for name in set(names) - OTHERWISE_MEANT.keys()
        if (banned := BANNED & set(re.findall(r"[a-z]+", re.sub(r"(?<!^)([A-Z])", r" \1", name).lower())))
    }
    assert not found


def test_the_words_that_are_not_used_are_read() -> None:
    assert {"session", "delta", "leader", "gradient"} <= BANNED
    assert not BANNED & {"run", "peer", "trainer", "as", "roles"}
