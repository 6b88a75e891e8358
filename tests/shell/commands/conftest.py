"""``pulsenet run create`` in a directory of the test's own, and what it signed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pulsenet.chain.records import Descriptor
from pulsenet.wire.schema import decode_value
from pulsenetd import cli, runs
from pulsenetd.identity import load_or_create, to_libp2p_text


@pytest.fixture
def create(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Create the run ``mine`` with options; return the exit code and what was said on standard error."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    key = to_libp2p_text(load_or_create(tmp_path / "a.key").peer_id)

    def run(*options: str) -> tuple[int, str]:
        code = cli.main(["run", "create", "mine", "--authority", key, "--json", *options])
        return code, capsys.readouterr().err

    return run


@pytest.fixture
def read_descriptor(tmp_path: Path) -> Callable[[], Descriptor]:
    return lambda: decode_value(Descriptor, runs.load_descriptors(tmp_path / "pulsenet" / "mine")[-1].payload)
