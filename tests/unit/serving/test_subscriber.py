"""How a failed update is named; the loop itself is tested against a real local server (shell/edges)."""

from __future__ import annotations

import subprocess
import sys

import pytest

import pulsenet.serving
from pulsenet.errors import (
    IntegrityError,
    PatchMismatchError,
    RemoteProtocolError,
    StorageError,
    StructureError,
    UnavailableError,
)
from pulsenet.serving.engine import name_failure


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (StructureError("x"), "structure"),
        (PatchMismatchError("x"), "base_mismatch"),
        (IntegrityError("x"), "root_mismatch"),
        (RemoteProtocolError("table-invalid"), "decode"),
        (RemoteProtocolError("changes-index"), "decode"),
        (StorageError("x", "enospc"), "enospc"),
        (UnavailableError("x"), "engine"),
        (RuntimeError("x"), "engine"),
    ],
)
def test_each_kind_of_failure_has_a_stable_reason(error: BaseException, reason: str) -> None:
    """A-APP-3."""
    assert name_failure(error) == reason


def test_the_serving_edge_needs_no_torch() -> None:
    code = "import sys, pulsenet.serving; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_name_of_the_edge_is_there() -> None:
    for name in pulsenet.serving.__all__:
        assert getattr(pulsenet.serving, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pulsenet.serving.nothing
