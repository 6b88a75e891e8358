"""Tests on a real TRL; skipped where it is not installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

# Tests are no package: the harness beside them is found by its directory.
sys.path.insert(0, str(Path(__file__).parent))

HAS_TRL = importlib.util.find_spec("trl") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.trl)
            if not HAS_TRL:
                item.add_marker(pytest.mark.skip(reason="TRL is not installed here; .ci/trl makes an environment"))
