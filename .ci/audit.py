#!/usr/bin/env python3
"""Looks the dependencies of this environment up among known vulnerabilities: ``.ci/audit.py [PYTHON]``.

pip-audit runs in an environment of its own and asks PyPI, then OSV. Where neither answers, as behind an index that
serves packages only, the check is *skipped* and says so: exit status 77, which is neither success nor failure.
A package that no service knows is named. A vulnerability that is looked at and does not concern us is listed below,
with the reason; everything else fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

SKIPPED: Final = 77
"""What test runners take for "skipped"."""

PIP_AUDIT: Final = "pip-audit>=2.9,<3"
SERVICES: Final = ("pypi", "osv")
LOOK_UP_SECONDS: Final = 600

ACCEPTED: Final[dict[str, str]] = {}
"""Vulnerabilities that do not concern us, by id, with the reason."""

LIST_CLOSURE: Final = """
import json, re
from importlib.metadata import PackageNotFoundError, requires, version
from packaging.requirements import Requirement
found, waiting = {}, [("pulsenet", frozenset({"daemon", "training", "transformers", "demo"}))]
seen = set()
while waiting:
    name, extras = waiting.pop()
    key = re.sub(r"[-_.]+", "-", name).lower()
    if (key, extras) in seen:
        continue
    seen.add((key, extras))
    try:
        texts = requires(name) or []
        if key != "pulsenet":
            found[key] = version(name).partition("+")[0]
    except PackageNotFoundError:
        continue
    for text in texts:
        wanted = Requirement(text)
        if wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in extras | {""}):
            waiting.append((wanted.name, frozenset(wanted.extras)))
print(json.dumps(found))
"""


def judge(report: dict[str, Any]) -> tuple[list[str], list[str], int]:
    """Return what is vulnerable, what nobody knew, and how many packages were looked up.

    Args:
        report: What ``pip-audit --format json`` printed.
    """
    vulnerable, unknown, count = [], [], 0
    for package in report["dependencies"]:
        name = f"{package['name']} {package.get('version', '?')}"
        if "vulns" not in package:
            unknown.append(f"{name}: {package.get('skip_reason', 'no reason given')}")
            continue
        count += 1
        for found in package["vulns"]:
            names = {found["id"], *found.get("aliases", ())}
            if not names & set(ACCEPTED):
                fixed = ", ".join(found.get("fix_versions", ())) or "no version yet"
                vulnerable.append(f"{name}: {' '.join(sorted(names))}; fixed in {fixed}")
    return vulnerable, unknown, count


def conclude(vulnerable: list[str], unknown: list[str], count: int, problem: str = "") -> tuple[int, list[str]]:
    """Return the exit status and what to print. Nothing looked up is never a success."""
    if vulnerable:
        return 1, ["known vulnerabilities:", *(f"  {line}" for line in vulnerable)]
    if count == 0:
        reason = problem or "; ".join(unknown[:1]) or "no package was found"
        return SKIPPED, [f"SKIPPED: no dependency was looked up among known vulnerabilities: {reason}"]
    lines = [f"{count} dependencies have no known vulnerability"]
    if unknown:
        lines += [f"{len(unknown)} could not be looked up:", *(f"  {line}" for line in unknown)]
    return 0, lines


def look_up(packages: dict[str, str], directory: Path) -> tuple[list[str], list[str], int, str]:
    """Ask each service in turn until one knows something."""
    requirements = directory / "requirements.txt"
    requirements.write_text("".join(f"{name}=={version}\n" for name, version in sorted(packages.items())))
    tool = directory / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(tool)], check=True)
    installed = subprocess.run([tool / "bin" / "python", "-m", "pip", "install", "--quiet", PIP_AUDIT], check=False)
    if installed.returncode != 0:
        return [], [], 0, "pip-audit cannot be installed from this index"
    problem, unknown = "", []
    for service in SERVICES:
        command = [tool / "bin" / "pip-audit", "-r", requirements, "--no-deps", "--disable-pip", "-s", service]
        try:
            done = subprocess.run(
                [*command, "--format", "json", "--progress-spinner", "off"],
                capture_output=True, text=True, check=False, timeout=LOOK_UP_SECONDS,
            )  # fmt: skip
            vulnerable, unknown, count = judge(json.loads(done.stdout))
        except subprocess.TimeoutExpired:
            problem = f"{service} did not answer within {LOOK_UP_SECONDS} s"
            continue
        except (ValueError, KeyError):
            problem = f"{service} cannot be reached: {(done.stderr.strip().splitlines() or ['no output'])[-1][:200]}"
            continue
        if count:
            return vulnerable, unknown, count, ""
        problem = f"{service} knows none of {len(unknown)} packages ({unknown[0] if unknown else 'none listed'})"
    return [], unknown, 0, problem


def main() -> int:
    python = sys.argv[1] if len(sys.argv) > 1 else sys.executable
    listed = subprocess.run([python, "-c", LIST_CLOSURE], capture_output=True, text=True, check=True)
    packages: dict[str, str] = json.loads(listed.stdout)
    only = os.environ.get("AUDIT_ONLY")
    if only:
        packages = {name: version for name, version in packages.items() if name in only.split(",")}
    with tempfile.TemporaryDirectory(prefix="audit-") as directory:
        status, lines = conclude(*look_up(packages, Path(directory)))
    print("\n".join(lines))
    return status


if __name__ == "__main__":
    raise SystemExit(main())
