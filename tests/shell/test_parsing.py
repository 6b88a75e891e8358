"""Help fits a screen or is paged, ends with examples that parse, and mistakes name what was meant (A-CLI-1)."""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import select
import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pulsenet.errors import UsageError
from pulsenetd import cli, config
from pulsenetd.commands.config import GROUPS
from pulsenetd.parsing import Parser, format_examples

SCREEN_COLUMNS = 80
SCREEN_LINES = 24
KEY = "12D3KooWS2z8DM9oktBGuW7ZeaKC56ghMPB5Yjn3ed1toUFuWwso"
PRINTS_NO_DATA = {("join",), ("completion",), ("manual",)}
"""A node logs (--log-json); the others print files for other programs."""


def list_parsers(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Parser]]:
    assert isinstance(parser, Parser)
    yield words, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from list_parsers(child, (*words, name))


PARSERS = dict(list_parsers(cli.build_parser()))
EXAMPLES = sorted({command for parser in PARSERS.values() for command, _ in parser.examples})
LEAVES = [words for words in PARSERS if not any(other[:-1] == words for other in PARSERS if other)]


@pytest.mark.parametrize("words", PARSERS, ids=" ".join)
def test_help_fits_the_width_of_a_screen_and_ends_with_examples(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(SCREEN_COLUMNS))
    text = PARSERS[words].format_help()
    assert [line for line in text.splitlines() if len(line) > SCREEN_COLUMNS] == []
    _, _, examples = text.rpartition("\nexamples:\n")
    assert examples, "no examples at the end"
    assert len(examples.strip().splitlines()) <= SCREEN_LINES


@pytest.mark.parametrize("words", LEAVES, ids=" ".join)
def test_every_argument_says_what_it_is(words: tuple[str, ...]) -> None:
    silent = [action.dest for action in PARSERS[words]._actions if not action.help]
    assert silent == []


@pytest.mark.parametrize("command", EXAMPLES)
def test_every_example_of_the_help_parses(command: str) -> None:
    typed = command.replace("12D3KooW...", KEY).split(" > ")[0].split(" | ")[0]
    program, *words = shlex.split(typed)
    assert program == "pulsenet"
    assert callable(cli.build_parser().parse_args(words).run_command)


def run_on_a_terminal(*words: str, rows: int, **environment: str) -> str:
    """Return what a command shows on a terminal of so many rows."""
    leader, follower = pty.openpty()
    surroundings = {"PATH": os.environ["PATH"], "TERM": "xterm", "COLUMNS": "80", "LINES": str(rows), **environment}
    with subprocess.Popen(
        [sys.executable, "-m", "pulsenetd.cli", *words],
        stdin=follower,
        stdout=follower,
        env=surroundings,
        close_fds=True,
    ) as process:
        os.close(follower)
        shown = b""
        while select.select([leader], [], [], 60)[0]:
            try:
                data = os.read(leader, 65_536)
            except OSError:  # the last writer has left
                break
            if not data:
                break
            shown += data
        assert process.wait(10) == 0
    os.close(leader)
    return shown.decode()


def test_help_that_is_longer_than_the_terminal_goes_through_the_pager() -> None:
    assert run_on_a_terminal("join", "--help", rows=24, PAGER="sed s/^/paged:/").startswith(
        "paged:usage: pulsenet join"
    )
    assert run_on_a_terminal("keygen", "--help", rows=24, PAGER="sed s/^/paged:/").startswith("usage: pulsenet keygen")
    assert run_on_a_terminal("join", "--help", rows=500, PAGER="sed s/^/paged:/").startswith("usage: pulsenet join")


def test_without_a_terminal_nothing_is_paged_and_nothing_is_coloured() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pulsenetd.cli", "join", "--help"],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "PAGER": "false", "FORCE_COLOR": ""},
        timeout=60,
        check=True,
    )
    assert done.stdout.startswith("usage: pulsenet join")
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["statsu"], "there is no command 'statsu'; did you mean 'status'?"),
        (["run", "shwo"], "did you mean 'show'?"),
        (["status", "--jsn"], "did you mean --json?"),
        (["join", "--datadir=x"], "did you mean --data-dir?"),
        (["run", "create", "x", "--algorithm", "pulselocco"], "did you mean 'pulseloco'?"),
    ],
)
def test_a_mistyped_word_names_the_nearest(words: list[str], hint: str) -> None:
    with pytest.raises(UsageError, match=re.escape(hint)):
        cli.build_parser().parse_args(words)


def test_what_resembles_nothing_gets_no_guess() -> None:
    with pytest.raises(UsageError) as caught:
        cli.build_parser().parse_args(["status", "--zzzzqqq"])
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("words", [words for words in LEAVES if words not in PRINTS_NO_DATA], ids=" ".join)
def test_everything_that_prints_data_prints_json_too(words: tuple[str, ...]) -> None:
    assert "--json" in PARSERS[words]._option_string_actions


def test_every_field_of_the_configuration_is_in_one_group_of_the_help() -> None:
    listed = [name for names in GROUPS.values() for name in names]
    assert sorted(listed) == sorted(item.name for item in config.fields())


def test_long_examples_are_broken_as_a_shell_reads_them() -> None:
    command = "pulsenet " + " ".join(f"--option-{number} value" for number in range(9))
    text = format_examples([(command, "many options")], 60)
    lines = text.splitlines()
    assert lines[:2] == ["examples:", "  # many options"]
    assert max(map(len, lines)) <= 60
    assert shlex.split(" ".join(line.rstrip("\\") for line in lines[2:])) == command.split()


def test_json_goes_to_standard_output_and_refusals_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "show", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)
    assert printed.err == ""
    assert cli.main(["verify", "/nonexistent", "--json"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("pulsenet: ")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("sim", "--seed", "x"), "argument --seed: 'x' is no whole number; see 'pulsenet sim --help'"),
        (("run", "create", "mine", "--expires", "soon"), "argument --expires: 'soon' is no number; see"),
    ],
)
def test_no_number_is_said_in_words(words: tuple[str, ...], text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(text)):
        cli.build_parser().parse_args(words)
