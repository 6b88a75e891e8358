"""The repository obeys its style guide."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE = ("tensors", "codec", "outer", "wire", "chain", "node")
PACKAGES = (ROOT / "pulsenet", ROOT / "daemon" / "pulsenetd")
LINES_MAX = 500
FUNCTION_LINES_MAX = 70

BANNED_TEXT = {
    r"\bpickle\b": "no pickle on any path",
    r"torch\.load\(": "no torch.load on any path",
    r"except Exception:\s*pass": "no error is swallowed",
    r"\bTODO\b(?!\(#\d+\))": "a TODO names its issue: TODO(#12)",
    r"\bFIXME\b": "fix it, or write a TODO(#issue)",
}

TESTED_ELSEWHERE = {
    "pulsenet/wire/messages.py": "declarations only; wire/framing tests cover each",
    "pulsenet/chain/records.py": "declarations only; chain/signing tests cover each",
    "pulsenet/node/events.py": "declarations only",
    "pulsenet/node/effects.py": "declarations only; shell/test_driver.py covers the order",
    "pulsenet/node/machine.py": "a protocol",
    "pulsenet/limits.py": "constants",
    "pulsenet/errors.py": "covered by shell/test_errors.py",
    "pulsenet/ids.py": "covered everywhere",
}


def tracked(pattern: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", pattern], capture_output=True, text=True, check=False
    ).stdout
    return [ROOT / line for line in listed.splitlines() if (ROOT / line).exists()]


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted(package.rglob("*.py"))


@pytest.mark.parametrize("folder", ["daemon", "proto", "tests", "deploy"])
def test_no_top_level_package_shadows_another_project(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()
    if folder == "tests":
        assert not list((ROOT / folder).rglob("__init__.py"))


def test_modules_and_functions_are_small() -> None:
    long = []
    for path in sources():
        text = path.read_text()
        count = text.count("\n")
        if count > LINES_MAX:
            long.append(f"{path.relative_to(ROOT)}: {count} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                size = node.end_lineno - node.lineno + 1
                if size > FUNCTION_LINES_MAX:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {size} lines")
    assert not long, "\n".join(long)


def test_banned_words_stay_out() -> None:
    found = []
    for path in sources():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for pattern, reason in BANNED_TEXT.items():
                if re.search(pattern, line) and "no pickle" not in line.lower():
                    found.append(f"{path.relative_to(ROOT)}:{number}: {reason}")
    assert not found, "\n".join(found)


def test_every_core_module_has_its_own_test_file() -> None:
    missing = []
    for name in CORE:
        for path in sorted((ROOT / "pulsenet" / name).glob("*.py")):
            relative = path.relative_to(ROOT).as_posix()
            if path.name == "__init__.py" or relative in TESTED_ELSEWHERE:
                continue
            if not (ROOT / "tests" / "unit" / name / f"test_{path.stem}.py").exists():
                missing.append(relative)
    assert not missing, "no test file for " + ", ".join(missing)


def test_every_public_module_and_class_says_what_it_is() -> None:
    silent = []
    for path in sources():
        tree = ast.parse(path.read_text())
        if path.name != "__init__.py" and not ast.get_docstring(tree):
            silent.append(str(path.relative_to(ROOT)))
        for node in tree.body:
            named = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if named and not node.name.startswith("_") and not ast.get_docstring(node):
                silent.append(f"{path.relative_to(ROOT)}: {node.name}")
    assert not silent, "\n".join(silent)


def test_only_the_configuration_reads_the_environment() -> None:
    # The edges look up where the daemon lives; commands start processes and find directories.
    allowed = ("daemon/pulsenetd/process.py", "daemon/pulsenetd/commands/", "pulsenet/local/directories.py")
    allowed = (*allowed, "daemon/pulsenetd/demo/")
    readers = [
        name
        for path in sources()
        if not (name := path.relative_to(ROOT).as_posix()).startswith(allowed)
        and re.search(r"os\.(environ|getenv)", path.read_text())
    ]
    assert not readers, "\n".join(readers)


def test_changelog_has_an_unreleased_section() -> None:
    assert "## Unreleased" in (ROOT / "CHANGELOG.md").read_text()


def test_relative_links_of_the_documents_lead_somewhere() -> None:
    broken = []
    for path in tracked("*.md"):
        for target in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
            if not re.match(r"[a-z]+:", target) and not (path.parent / target).exists():
                broken.append(f"{path.relative_to(ROOT)}: {target}")
    assert not broken, "\n".join(broken)
