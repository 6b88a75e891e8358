"""Tests in a real Chromium, driven by Playwright; skipped where either is missing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Tests are no package: helpers of several files are found by their directory.
sys.path.insert(0, str(Path(__file__).parent))

from chromium import find_chromium, launch  # found by the line above


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One browser for all tests of a module; each opens pages of its own.

    No longer than that: while Playwright is open, its event loop runs in this thread, and no test can start another.
    """
    api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed (pip install playwright)")
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium is installed (Debian: apt install chromium)")
    with api.sync_playwright() as playwright:
        browser = launch(playwright, path)
        yield browser
        browser.close()
