"""Simulations are not measured for coverage."""

from __future__ import annotations

from collections.abc import Iterator

import coverage
import pytest


@pytest.fixture(scope="package", autouse=True)
def no_coverage() -> Iterator[None]:
    """Stop the measurement of coverage, if there is one.

    Simulations go through the same lines a million times, and measured they take three times as long. What we promise
    is that direct tests cover the code; a line that only a simulation happens to reach is not covered in that sense.
    """
    measured = coverage.Coverage.current()
    if measured is not None:
        measured.stop()
    yield
    if measured is not None:
        measured.start()
