"""The example of docs/engines.md, as it stands there, against a real local server."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pulsenet
from pulsenet.errors import IntegrityError
from pulsenet.ids import Digest, Version

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "engines.md"
EXAMPLE_LINES_MAX = 40
Serve = Callable[[Path], None]


def read_blocks() -> tuple[str, str]:
    blocks = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2, "the document has an engine and its use; say here what the others are for"
    return blocks[0], blocks[1]


def run(directory: Path, *blocks: str) -> dict[str, Any]:
    """Run blocks as one program and return its names."""
    program = directory / "program.py"
    program.write_text("\n".join(blocks))
    return runpy.run_path(str(program))


@pytest.fixture
def data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a node of the private run listens if nobody says otherwise."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path / "pulsenet" / "local" / "inferencer"


def test_the_example_is_short() -> None:
    engine, _ = read_blocks()
    start = engine.index("class MyEngine")
    assert engine[start:].count("\n") <= EXAMPLE_LINES_MAX


def test_the_example_holds_the_newest_version(
    serve: Serve, node: Any, weights: Sequence[Any], data_directory: Path, tmp_path: Path
) -> None:
    serve(data_directory)
    node.staged = [weights[0].stage_full()]
    names = run(tmp_path, *read_blocks())
    assert names["version"] == Version(0, 0)
    table = weights[0].table
    expected = table.view(weights[0].region, table.index_of("weight")).reshape(3, 4)
    assert np.array_equal(names["weight_bits"], expected)
    assert [(item.version, item.ok, item.held) for item in node.confirmations] == [(Version(0, 0), True, Version(0, 0))]


def test_the_example_follows_and_says_what_it_refuses(
    serve: Serve, node: Any, weights: Sequence[Any], data_directory: Path, tmp_path: Path
) -> None:
    """A-APP-3."""
    serve(data_directory)
    engine = run(tmp_path, read_blocks()[0])["MyEngine"]({"bias": ("BF16", (3,)), "weight": ("BF16", (3, 4))})
    node.staged = [
        weights[0].stage_full(),
        weights[1].stage_from(weights[0], root=Digest(bytes(32))),
        weights[2].stage_from(weights[0]),
    ]
    with pulsenet.attach_engine(engine) as subscriber:
        subscriber.step()
        with pytest.raises(IntegrityError, match="have root"):
            subscriber.step()
        assert engine.version == Version(0, 0)
        subscriber.step()
    assert np.array_equal(engine.held[-1], weights[2].region)
    assert node.asked == [None, Version(0, 0), Version(0, 0)]
    assert node.asked_roots == [None, weights[0].root, weights[0].root]
    assert [(item.ok, item.held) for item in node.confirmations] == [
        (True, Version(0, 0)),
        (False, Version(0, 0)),
        (True, Version(0, 2)),
    ]
    assert node.confirmations[1].reason.startswith("root_mismatch: ")
