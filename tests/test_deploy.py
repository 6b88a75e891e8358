"""What is offered for deployment is read by the real parser and names only what exists."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pulsenetd import config
from pulsenetd.cli import build_parser

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"


@pytest.mark.parametrize("path", sorted((DEPLOY / "config").glob("*.toml")), ids=lambda path: path.name)
def test_example_configurations_are_accepted(path: Path) -> None:
    resolved = config.resolve({}, {}, path)
    assert resolved.config.role == path.stem


def test_the_commands_of_image_and_unit_parse() -> None:
    image = re.search(r"^CMD \[(.*)\]", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    unit = re.search(r"^ExecStart=\S+ (.*)", (DEPLOY / "systemd" / "pulsenet@.service").read_text(), re.MULTILINE)
    assert image is not None
    assert unit is not None
    build_parser().parse_args([word.strip(' "') for word in image[1].split(",")])
    build_parser().parse_args(unit[1].split())


def test_everything_the_image_copies_exists() -> None:
    for names in re.findall(r"^COPY (?!--from)(.*) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE):
        for name in names.split():
            assert (ROOT / name).exists(), name


def test_the_unit_is_accepted_by_systemd(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = (DEPLOY / "systemd" / "pulsenet@.service").read_text()
    # The binary is not installed where the tests run; everything else is checked.
    path = tmp_path / "pulsenet@test.service"
    path.write_text(unit.replace("/opt/pulsenet/bin/pulsenet", shutil.which("true") or "/bin/true"))
    result = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False)
    complaints = [line for line in result.stderr.splitlines() if "pulsenet@test" in line]
    assert not complaints, "\n".join(complaints)
