"""The documents say what the code does: commands parse, exit codes are the ones in the table."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from pulsenetd import errors
from pulsenetd.cli import build_parser

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "deploy/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]


def commands() -> Iterator[tuple[str, str]]:
    """Yield every ``pulsenet`` command shown in a document."""
    for path in DOCUMENTS:
        text = path.read_text()
        blocks = re.findall(r"^```(?:bash|console|sh)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
        # In running text a command may stand for all its uses; one with an option is meant as it stands.
        lines += re.findall(r"`(pulsenet [^`]*--[^`]+)`", text)
        for line in lines:
            command = line.split("#")[0].strip()
            if command.startswith("pulsenet ") and not re.search(r"[|<…]|\.\.\.", command):
                yield path.name, command


@pytest.mark.parametrize(("document", "command"), sorted(set(commands())))
def test_every_command_in_the_documents_parses(document: str, command: str) -> None:
    words = shlex.split(command)[1:]
    if words[-1] in ("--help", "--version"):
        with pytest.raises(SystemExit) as caught:
            build_parser().parse_args(words)
        assert caught.value.code == 0
        return
    build_parser().parse_args(words)


def test_the_exit_code_table_names_every_code() -> None:
    text = (ROOT / "docs" / "operating.md").read_text()
    shown = {int(code) for row in re.findall(r"^\| ([0-9, ]+) \|", text, re.MULTILINE) for code in row.split(",")}
    assert {code for _, code in errors.EXIT_CODES} <= shown


def test_make_targets_in_the_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in DOCUMENTS:
        used = set(re.findall(r"(?:^|`)\s*make ([a-z-]+)", path.read_text(), re.MULTILINE))
        assert used <= targets, f"{path.name}: {used - targets}"
