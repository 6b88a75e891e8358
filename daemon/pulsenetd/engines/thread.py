"""The thread of an engine: an error that nobody expected ends it, and with it the node."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Never

from pulsenetd.logs import logger


class EngineThread(threading.Thread):
    """Runs an engine, and passes on what ended it.

    Args:
        work: What it does until the node stops.
        name: The thread's.
    """

    def __init__(self, work: Callable[[], None], *, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self.failure: Future[Never] = Future()
        """Gets the error that ended it, and nothing else."""
        self.failure.set_running_or_notify_cancel()  # who waits for it and is cancelled cancels nothing here

    def run(self) -> None:
        """Work."""
        try:
            self._work()
        except Exception as error:
            logger.error("%s ended by an error of pulsenet's own (%r): the node ends too", self.name, error)
            self.failure.set_exception(error)
