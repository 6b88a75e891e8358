"""The manual page is the parser's, and troff has nothing to complain about."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pulsenetd import cli, errors
from pulsenetd.completion.words import list_commands
from pulsenetd.manual import escape, write_manual

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "deploy" / "man" / "pulsenet.1"


def read_page() -> str:
    return re.sub(r"\\f.", "", write_manual(cli.build_parser())).replace(r"\-", "-")


def test_the_committed_page_is_what_the_parser_says() -> None:
    assert PAGE.read_text() == write_manual(cli.build_parser()), "pulsenet manual > deploy/man/pulsenet.1"


def test_every_command_and_option_is_on_it() -> None:
    page = read_page()
    for command in list_commands(cli.build_parser()):
        if not command.actions:
            assert f'.SS "pulsenet {" ".join(command.path)}' in page
        for option in command.options:
            assert option.help is argparse.SUPPRESS or option.names[0] in page


def test_values_have_names_and_sentences_keep_their_capitals() -> None:
    page = read_page()
    assert "{}" not in page
    assert "Write the patch that turns OLD into NEW." in page


def test_every_exit_code_is_on_it() -> None:
    assert {code for _, code in errors.EXIT_CODES} | {0, 130, 143} == set(errors.EXIT_MEANINGS)
    table = read_page().split(".SH EXIT STATUS")[1].split(".SH ENVIRONMENT")[0]
    assert [int(line) for line in table.splitlines() if line.isdecimal()] == list(errors.EXIT_MEANINGS)


def test_what_troff_would_take_for_an_order_is_escaped() -> None:
    assert escape(".x\n'y\n--z \\") == "\\&.x\n\\&'y\n\\-\\-z \\e"


def test_whoever_has_a_wheel_alone_is_told_where_documents_are() -> None:
    page = " ".join(read_page().split())
    assert len(re.findall(r"docs/\w+\.md(?!, in pulsenet's source archive)", page)) == 0


@pytest.mark.skipif(shutil.which("mandoc") is None, reason="needs mandoc")
def test_mandoc_has_no_complaint() -> None:
    done = subprocess.run(
        ["mandoc", "-T", "lint", "-W", "warning", str(PAGE)], capture_output=True, text=True, timeout=60, check=False
    )
    assert [line for line in done.stdout.splitlines() if "missing date" not in line] == []
