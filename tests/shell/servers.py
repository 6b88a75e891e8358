"""A local server as a node has it, in a loop of its own, and how tests wait for what happens there."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from pulsenetd.local.server import LocalHooks, LocalServer


class ServerThread:
    """Serves in an event loop in a thread of its own until it is stopped."""

    def __init__(self, server: LocalServer) -> None:
        server.listen()
        self.loop = asyncio.new_event_loop()
        self._task = self.loop.create_task(server.serve())
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self.loop.run_until_complete(self._task)
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()

    def execute(self, work: Coroutine[Any, Any, Any]) -> None:
        """Have work done in the loop: now, or, for a caller that is in it, next."""
        if threading.current_thread() is self._thread:
            self.loop.create_task(work)
        else:
            asyncio.run_coroutine_threadsafe(work, self.loop).result(10)

    def stop(self) -> None:
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(10)
        assert not self._thread.is_alive()


async def _unused(*arguments: Any) -> Any:
    raise AssertionError("this process asks for nothing else")


def hooks_of(on_snapshot: Any = _unused, rounds: Any = None) -> LocalHooks:
    """Return hooks for a process that asks for nothing else."""
    return LocalHooks(on_snapshot, *[_unused] * 7, rounds=rounds)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)
