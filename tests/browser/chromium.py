"""A real Chromium, and the page of a scene to show it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

from scenes import Scene

from pulsenetd.admin import AdminServer

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    """Return the path of the browser this machine has, if any."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextlib.contextmanager
def serve(scene: Scene, port: int = 0) -> Iterator[str]:
    """Serve the page of a scene as a node serves its own; yields the address."""
    server = AdminServer(
        "127.0.0.1",
        port,
        metrics=bytes,
        live=dict,
        ready=dict,
        status=scene.status,
        history=scene.history.columns,
        log=scene.log_tail.select,
    )
    try:
        yield server.url
    finally:
        server.close()


def launch(playwright: Any, path: str) -> Any:
    """Start the browser for these tests' own pages.

    Without its sandbox it runs as root and in containers, and without shared memory where a container has little.
    """
    return playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
