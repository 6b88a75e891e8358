"""Swarms of real processes, whose logs are shown when a test fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Tests are no package: the harness beside them is found by its directory.
sys.path.insert(0, str(Path(__file__).parent))

from swarm import Swarm, open_swarm, open_swarms


@pytest.fixture(scope="module")
def swarm() -> Iterator[Swarm]:
    """Lend a swarm that the tests of one module share."""
    with open_swarm() as opened:
        yield opened


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the walk-throughs: no other file takes as long, and files that run side by side end together."""
    items.sort(key=lambda item: item.path.name != "test_walk_throughs.py")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Add the logs of every node to the report of a failure."""
    report = yield
    if report.failed and "e2e" in item.keywords:
        for opened in open_swarms:
            report.sections.extend(opened.describe())
    return report
