"""docs/status-page.md names every field of ``/status``, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
REPORT = ROOT / "daemon" / "pulsenetd" / "status" / "report.py"


def documented() -> set[str]:
    section = (ROOT / "docs" / "status-page.md").read_text().split("\n## The same as JSON\n")[1]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([a-z0-9_*]+)`", row.split("|")[1])}


def reported() -> Iterator[str]:
    """Yield the names of the fields that machines report."""
    for path in (ROOT / "pulsenet" / "node").rglob("*.py"):
        text = path.read_text()
        if not re.search(r"\bReport\(", text) or path.name == "effects.py":
            continue
        for scope in ast.walk(ast.parse(text)):
            is_report = isinstance(scope, ast.FunctionDef) and ("report" in scope.name or scope.name == "_fields")
            for node in ast.walk(scope) if is_report else ():
                first = node.elts[0] if isinstance(node, ast.Tuple) and len(node.elts) == 2 else None
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    yield first.value


def shown() -> Iterator[str]:
    """Yield the names that the node itself adds."""
    for node in ast.walk(ast.parse(REPORT.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == "status":
            for one in ast.walk(node):
                if isinstance(one, ast.Dict):
                    yield from (key.value for key in one.keys if isinstance(key, ast.Constant))
                if isinstance(one, ast.Subscript) and isinstance(one.ctx, ast.Store):
                    assert isinstance(one.slice, ast.Constant)
                    yield one.slice.value


def test_every_field_is_explained() -> None:
    names = documented()
    found = {*reported(), *shown()}
    assert len(found) > 50
    missing = {one for one in found if not any(fnmatch(one, name) for name in names)}
    assert not missing, f"give it a row in docs/status-page.md: {sorted(missing)}"


def test_no_field_is_explained_that_does_not_exist() -> None:
    sources = [*(ROOT / "pulsenet").rglob("*.py"), *(ROOT / "daemon").rglob("*.py")]
    text = "\n".join(path.read_text() for path in sources)
    unknown = {
        name
        for name in documented()
        if not re.search(rf"[\"']{name.replace('*', '')}|\b{name.replace('*', '')}\w*=", text)
    }
    assert not unknown, f"no such field: {sorted(unknown)}"
