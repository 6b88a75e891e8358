"""The table of docs/reliability.md is true: every test it names is there and says which case it is for."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
DOCUMENT = TESTS.parent / "docs" / "reliability.md"
GROUPS = {
    "ENC", "DT", "NAME", "CHAIN", "PUB", "APP", "CACHE", "CHK", "AUTH", "DHT", "NET", "PROC", "DSK", "LOC", "PEER",
    "OBS", "CLI", "MSG", "GOS", "PRF",
}  # fmt: skip


def rows() -> list[tuple[str, str]]:
    """Return each case with each test named for it."""
    found = []
    for line in DOCUMENT.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.fullmatch(r"A-[A-Z]+-\d+", cells[0]):
            found += [(cells[0], test) for test in re.findall(r"`([\w/]+\.py::\w+)`", cells[-1]) or [""]]
    return found


@cache
def read_functions(path: Path) -> dict[str, str]:
    """Return the source of each test function of a file, decorators included, after the file's own docstring."""
    text = path.read_text()
    tree = ast.parse(text)
    lines = text.splitlines()
    about = ast.get_docstring(tree) or ""
    classes = [node.body for node in tree.body if isinstance(node, ast.ClassDef)]
    return {
        node.name: "\n".join(
            [about, *lines[min([node.lineno, *(one.lineno for one in node.decorator_list)]) - 1 : node.end_lineno]]
        )
        for node in [*tree.body, *(node for body in classes for node in body)]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def names_case(text: str, case: str) -> bool:
    """Whether the text names the case, alone or in a range such as ``A-ENC-1 to A-ENC-4``."""
    if re.search(re.escape(case) + r"\b", text):
        return True
    group, number = case.rsplit("-", 1)
    ranges = re.findall(rf"{group}-(\d+) to (?:{group}-)?(\d+)\b", text)
    return any(int(first) <= int(number) <= int(last) for first, last in ranges)


@pytest.mark.parametrize(("case", "test"), rows())
def test_a_test_of_the_table_is_there_and_names_its_case(case: str, test: str) -> None:
    assert test, f"{case} names no test"
    file, name = test.split("::")
    functions = read_functions(TESTS / file)
    assert name in functions, f"{file} has no test {name}"
    assert names_case(functions[name], case), f"{test} does not name {case}"


def test_every_case_is_listed_once_under_its_group() -> None:
    cases = re.findall(r"^\| (A-[A-Z]+-\d+) \|", DOCUMENT.read_text(), re.MULTILINE)
    assert len(cases) == len(set(cases))
    assert {case.split("-")[1] for case in cases} == GROUPS
