"""The lab's fixtures. Where this machine allows no network namespaces, its tests are skipped with the reason."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Tests are no package: the lab, and the harness of the end-to-end tests, are found by their directories.
sys.path.insert(0, str(Path(__file__).parent.parent / "e2e"))
sys.path.insert(0, str(Path(__file__).parent))

from namespaces import why_not
from swarm import open_swarms


@pytest.fixture(scope="session", autouse=True)
def lab_allowed() -> None:
    """Skip what cannot run here."""
    reason = why_not()
    if reason:
        pytest.skip(f"no lab: {reason}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Add the logs of every node to the report of a failure."""
    report = yield
    if report.failed:
        for opened in open_swarms:
            report.sections.extend(opened.describe())
    return report
