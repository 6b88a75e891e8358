"""The bill of materials and the list of licences name what pyproject.toml depends on, and nothing of a machine."""

from __future__ import annotations

import json
import re
import sys
import tomllib

import pytest
from exported import ROOT
from packaging.requirements import Requirement

sys.path.insert(0, str(ROOT / ".ci"))
try:
    import sbom
finally:
    sys.path.pop(0)

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BILL = json.loads(sbom.SBOM.read_text())
COMPONENTS = {sbom.normalize(one["name"]): one for one in BILL["components"]}


def direct() -> list[str]:
    """Return what pyproject.toml names, but for development."""
    lists = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][name] for name in ("daemon", "training"))]
    lists += [PROJECT["optional-dependencies"][name] for name in ("transformers", "demo")]
    names = {sbom.normalize(Requirement(text).name) for texts in lists for text in texts}
    return sorted(names - {"pulsenet"})


@pytest.mark.parametrize("name", direct())
def test_every_dependency_is_named_with_a_version_that_pyproject_allows(name: str) -> None:
    assert name in COMPONENTS, "make sbom"
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    wanted = [one for texts in lists for one in map(Requirement, texts) if sbom.normalize(one.name) == name]
    assert all(one.specifier.contains(COMPONENTS[name]["version"]) for one in wanted), "make sbom"


def test_the_bill_is_of_this_version_and_whole() -> None:
    assert (BILL["bomFormat"], BILL["specVersion"]) == ("CycloneDX", "1.6")
    assert BILL["metadata"]["component"]["version"] == PROJECT["version"], "make sbom"
    references = {one["bom-ref"] for one in BILL["components"]} | {"root-component"}
    assert {one["ref"] for one in BILL["dependencies"]} == references
    assert all(references.issuperset(one["dependsOn"]) for one in BILL["dependencies"])
    root = next(one for one in BILL["dependencies"] if one["ref"] == "root-component")
    needed = {sbom.normalize(reference.partition("==")[0]) for reference in root["dependsOn"]}
    assert set(direct()) <= needed


def test_nothing_says_where_it_was_made() -> None:
    text = sbom.SBOM.read_text().replace(BILL["$schema"], "")
    assert not re.search(r"https?://|file:|/opt|/root|/home|/tmp|%2B", text)


def test_every_licence_is_listed() -> None:
    for one in BILL["components"]:
        assert sbom.name_licences(one), f"{one['name']} says nothing of its licence: add it to UNSAID in .ci/sbom.py"


def test_files_made_of_the_bill_are_of_this_bill() -> None:
    for path, text in sbom.make_files(BILL).items():
        assert path.read_text() == text, "make sbom"


def test_the_image_is_built_with_the_versions_of_the_bill_but_torch() -> None:
    lines = [line for line in sbom.CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    pinned = {sbom.normalize(one.name): str(one.specifier) for one in map(Requirement, lines)}
    assert pinned == {name: f"=={one['version']}" for name, one in COMPONENTS.items() if name != "torch"}
    assert "--constraint deploy/constraints.txt" in (ROOT / "Dockerfile").read_text()


def test_a_package_without_a_licence_and_local_builds_are_seen() -> None:
    found = {
        "$schema": "s", "bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1,
        "metadata": {"component": {"bom-ref": "root-component"}, "tools": {}},
        "components": [
            {"bom-ref": "torch==2+cpu", "name": "torch", "version": "2+cpu", "purl": "torch@2%2Bcpu"},
            {"bom-ref": "ruff==1", "name": "ruff", "version": "1", "purl": "ruff@1"},
        ],
        "dependencies": [{"ref": "root-component", "dependsOn": ["ruff==1", "torch==2+cpu"]}, {"ref": "torch==2+cpu"}],
    }  # fmt: skip
    bill = sbom.reduce(found, {"torch"})
    (torch,) = bill["components"]
    assert (torch["bom-ref"], torch["version"], torch["purl"]) == ("torch==2", "2", "torch@2")
    assert sbom.name_licences(torch) == []
    assert bill["dependencies"] == [
        {"ref": "root-component", "dependsOn": ["torch==2"]},
        {"ref": "torch==2", "dependsOn": []},
    ]
