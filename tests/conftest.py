"""What goes through the same lines thousands of times is not measured meanwhile: that would take four times as long."""

from __future__ import annotations

import sys
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Stop the measurement of coverage, if there is one, for the length of a test marked ``unmeasured``."""
    coverage = sys.modules.get("coverage")
    measured = coverage.Coverage.current() if coverage and item.get_closest_marker("unmeasured") else None
    if measured is None:
        return (yield)
    measured.stop()
    try:
        return (yield)
    finally:
        measured.start()
