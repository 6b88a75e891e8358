"""What the sources must not hold, and that the look-up of known vulnerabilities never passes by looking nothing up."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (ROOT / "pulsenet", ROOT / "daemon" / "pulsenetd")
PROGRAMS = (*PACKAGES, ROOT / ".ci", ROOT / "deploy", ROOT / "proto")

UNSAFE_MODULES = {
    "pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal",
    "multiprocessing", "shelve",
}  # fmt: skip
"""They turn bytes into code, or would for a caller who does not look."""

UNSAFE_CALLS = {"torch.load", "torch.save", "torch.hub", "torch.package", "pickle.load", "pickle.loads", "yaml.load"}

UNSAFE_OPTIONS = ("allow_pickle", "trust_remote_code", "shell")

COLLECTIVES = re.compile(r"^(all_gather|broadcast|scatter|gather|send|recv)_object(_list)?$")
"""torch.distributed pickles what it passes by these, among the ranks of one training job, which run one program."""

RANKS_OF_ONE_JOB = ("pulsenet/training/",)

COMES_WITH = {
    "_typeshed": "type checkers alone; nothing imports it where the program runs",
    "google": "hivemind: its messages are protobuf of the version it pins",
    "llvmlite": "numba: of the very version numba needs",
    "huggingface_hub": "vllm: read only where vLLM runs",
    "vllm": "an environment of its own",
}
"""What is imported without being a dependency of ours."""

IMPORT_NAMES = {"prometheus-client": "prometheus_client"}


def sources(*folders: Path) -> Iterator[tuple[str, str]]:
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text()


def imports_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            if name in ("import_module", "__import__") and isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value)


def find_unsafe(path: str, text: str) -> list[str]:
    """Return what a source holds that turns bytes into code."""
    tree = ast.parse(text)
    found = [f"{path}: import {name}" for name in imports_of(tree) if name.partition(".")[0] in UNSAFE_MODULES]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            called = f"{ast.unparse(node.value)}.{node.attr}"
            may_collect = path.startswith(RANKS_OF_ONE_JOB)
            if called in UNSAFE_CALLS or (COLLECTIVES.match(node.attr) and not may_collect):
                found.append(f"{path}:{node.lineno}: {called}")
        elif isinstance(node, ast.Name) and node.id in ("eval", "exec", "compile"):
            found.append(f"{path}:{node.lineno}: {node.id}")
        elif isinstance(node, ast.keyword) and node.arg in UNSAFE_OPTIONS and not _is(node.value, False):
            found.append(f"{path}:{node.value.lineno}: {node.arg}")
    return found


def _is(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def test_nothing_turns_bytes_into_code() -> None:
    assert [found for path, text in sources(*PROGRAMS) for found in find_unsafe(path, text)] == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import importlib; importlib.import_module('dill')",
        "import torch; torch.load('x')",
        "load = torch.load",
        "import numpy as np; np.load('x', allow_pickle=True)",
        "import subprocess; subprocess.run('x', shell=True)",
        "torch.distributed.broadcast_object_list([1])",
        "eval('1')",
    ],
)
def test_what_would_is_found(text: str) -> None:
    assert find_unsafe("daemon/pulsenetd/any.py", text)


def test_each_security_rule_that_is_switched_off_says_why() -> None:
    silent = [
        f"{path}: {line.strip()}"
        for path, text in sources(*PROGRAMS)
        for line in text.splitlines()
        if re.search(r"#\s*noqa:.*\bS\d{3}", line) and not re.search(r"\bS\d{3}\b\W+\w.{8}", line)
    ]
    settings = (ROOT / "pyproject.toml").read_text().partition("[tool.ruff.lint]")[2].partition("[tool.mypy]")[0]
    assert '"S"' in settings
    silent += [line for line in settings.splitlines() if re.search(r'"S\d{3}"', line) and "#" not in line]
    assert silent == []


# Dependencies


def dependencies() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *(one for extra in extras.values() for one in extra)]


@pytest.mark.parametrize("wanted", [one for one in dependencies() if not one.startswith("pulsenet[")])
def test_a_dependency_has_a_lower_bound(wanted: str) -> None:
    assert re.match(r"^[A-Za-z0-9._-]+>=\d", wanted)


def test_whatever_is_imported_is_a_dependency_or_comes_with_one() -> None:
    declared = {re.split(r"[>=<\[;]", one)[0] for one in dependencies()}
    declared = {IMPORT_NAMES.get(name, name) for name in declared}
    known = declared | set(COMES_WITH) | set(sys.stdlib_module_names) | {"pulsenet", "pulsenetd"}
    tops = {name.partition(".")[0] for _, text in sources(*PACKAGES) for name in imports_of(ast.parse(text))}
    assert tops - known == set()
    assert set(COMES_WITH) <= tops


# Known vulnerabilities


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", ROOT / ".ci" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def package(name: str, *found: dict[str, Any], skipped: str = "") -> dict[str, Any]:
    return {"name": name, "version": "1.0", **({"skip_reason": skipped} if skipped else {"vulns": list(found)})}


HOLE = {"id": "PYSEC-1", "aliases": ["CVE-2026-1"], "fix_versions": ["1.1"]}


def test_a_known_vulnerability_fails_and_says_what_mends_it(audit: ModuleType) -> None:
    report = {"dependencies": [package("good"), package("bad", HOLE)]}
    status, lines = audit.conclude(*audit.judge(report))
    assert status == 1
    assert lines == ["known vulnerabilities:", "  bad 1.0: CVE-2026-1 PYSEC-1; fixed in 1.1"]


def test_one_that_was_looked_at_and_does_not_concern_us_is_let_by(audit: ModuleType, monkeypatch: Any) -> None:
    monkeypatch.setitem(audit.ACCEPTED, "CVE-2026-1", "only in a function nobody calls")
    status, lines = audit.conclude(*audit.judge({"dependencies": [package("bad", HOLE)]}))
    assert (status, lines) == (0, ["1 dependencies have no known vulnerability"])


def test_where_nothing_could_be_looked_up_the_check_is_skipped_and_says_why(audit: ModuleType) -> None:
    report = {"dependencies": [package("one", skipped="not found on PyPI")]}
    status, lines = audit.conclude(*audit.judge(report), "pypi cannot be reached")
    assert (status, lines) == (
        77,
        ["SKIPPED: no dependency was looked up among known vulnerabilities: pypi cannot be reached"],
    )
    assert audit.conclude([], [], 0)[0] == 77


def test_what_nobody_knows_is_named_beside_what_was_looked_up(audit: ModuleType) -> None:
    report = {"dependencies": [package("good"), package("odd", skipped="not found on PyPI")]}
    status, lines = audit.conclude(*audit.judge(report))
    assert status == 0
    assert lines[1:] == ["1 could not be looked up:", "  odd 1.0: not found on PyPI"]


def test_the_gate_runs_the_look_up_and_tells_when_it_was_skipped() -> None:
    gate = (ROOT / ".ci" / "run").read_text()
    assert re.search(r"^begin audit \S+ \.ci/audit\.py$", gate, re.MULTILINE)
    assert re.search(r'^may_skip "[^"]+" finish audit$', gate, re.MULTILINE)
    assert 'step "done${skipped:+; skipped: $skipped}"' in gate
