"""The engine that a node runs itself, by a directory: it follows the node it belongs to, however late that answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from servers import wait_until

from pulsenet.ids import Version
from pulsenetd.config import Config
from pulsenetd.engines import own
from pulsenetd.engines.own import DiskEngine

Serve = Callable[[Path], None]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "RETRY_SECONDS", 0.01)


def test_a_node_that_answers_late_is_followed(
    serve: Serve, node: Any, weights: Sequence[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node.staged = [weights[0].stage_full()]
    engine = DiskEngine(Config(role="inferencer", engine="files"), tmp_path)
    engine.start()
    wait_until(lambda: "the files engine cannot follow: no daemon listens" in caplog.text)
    serve(tmp_path)
    wait_until(lambda: node.confirmations)
    engine.stop()
    assert node.confirmations[0].held == Version(0, 0)
    assert (tmp_path / "weights" / "current").resolve().name == "0.0"
