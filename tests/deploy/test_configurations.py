"""Example configurations are read by the parser that reads an operator's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from exported import ROOT

from pulsenetd import config

EXAMPLES = sorted((ROOT / "deploy" / "config").glob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_configurations_are_accepted(path: Path) -> None:
    resolved = config.resolve({}, {}, path)
    assert path.stem.startswith(resolved.config.role)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_what_is_commented_out_is_accepted_as_well(path: Path, tmp_path: Path) -> None:
    """Lines that a reader is to uncomment, such as '# upload_limit = "5M"'."""
    text = re.sub(r"^# (\w+ = )", r"\1", path.read_text(), flags=re.MULTILINE)
    whole = tmp_path / path.name
    whole.write_text(text)
    assert config.resolve({}, {}, whole).config.role in path.stem


def test_every_role_has_an_example() -> None:
    assert {config.resolve({}, {}, path).config.role for path in EXAMPLES} == set(config.ROLES)
