"""docs/limits.md says what the code does: every limit with its value, and no other."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from pulsenet import limits
from pulsenet.node import standing
from pulsenetd.network import admission

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "limits.md"
COLUMNS = 5


def rows() -> list[list[str]]:
    lines = [line.strip("| ").split(" | ") for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line] for line in lines]


def constants_of(module: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if re.fullmatch(r"[A-Z][A-Z0-9_]+", name)}


def read_value(text: str) -> Any:
    numbers = [float(number.replace(",", "")) for number in text.split(", ")]
    return numbers[0] if len(numbers) == 1 else tuple(numbers)


def find(name: str) -> Any:
    """Return the constant a row is about: of the protocol's limits, or of the module it names."""
    module, _, constant = name.rpartition(".")
    return getattr(importlib.import_module(module) if module else limits, constant)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0].strip("`"))
def test_a_row_has_the_value_of_the_code_its_unit_its_reason_and_what_happens_beyond(row: list[str]) -> None:
    assert len(row) == COLUMNS
    assert all(row)
    value = find(row[0].strip("`"))
    assert read_value(row[1]) == (tuple(map(float, value)) if isinstance(value, tuple) else float(value))


def test_every_limit_of_the_protocol_has_one_row() -> None:
    named = [row[0].strip("`") for row in rows()]
    assert len(named) == len(set(named))
    assert sorted(name for name in named if "." not in name) == sorted(constants_of(limits))


@pytest.mark.parametrize("module", [admission, standing])
def test_every_budget_of_a_node_has_a_row(module: Any) -> None:
    prefix = module.__name__ + "."
    named = {row[0].strip("`").removeprefix(prefix) for row in rows() if prefix in row[0]}
    assert named == set(constants_of(module))


def test_what_a_row_says_comes_of_it_is_a_code_of_the_specification() -> None:
    specification = "".join(path.read_text() for path in sorted((ROOT / "proto").glob("*.md")))
    codes = {code for row in rows() for code in re.findall(r"`([a-z-]+)`", row[-1])}
    assert codes
    # What a process of this machine is told is no matter of the wire, but has the same words.
    assert {code for code in codes if f"`{code}`" not in specification} <= {"expiry"}
