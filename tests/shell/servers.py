"""A local server as a node has it, the other end of it, and how tests wait for what happens there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from pulsenet.local import protocol, rounds_protocol
from pulsenet.local.framing import Frame
from pulsenet.local.shared_memory import create_memory, seal_snapshot, write_at
from pulsenet.local.sockets import Channel, socket_path
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


class RawProcess:
    """The other end of a local server: raw messages, so that it may break every rule.

    Args:
        directory: The node's.
    """

    def __init__(self, directory: Path) -> None:
        self.channel = Channel(socket_path(directory), 5.0)
        self.ask(protocol.Attach(protocol.PROTOCOL_VERSION, "test"))

    def send(self, message: Any, descriptor: int | None = None) -> None:
        self.channel.send(message, descriptor=descriptor, timeout_seconds=5.0)

    def receive(self) -> Frame:
        return self.channel.receive(10.0)

    def ask(self, message: Any, descriptor: int | None = None) -> Any:
        self.send(message, descriptor)
        frame = self.receive()
        frame.close()
        return frame.message

    def put(
        self, data: bytes, *, is_last: bool = True, is_first: bool = True, said_size_bytes: int | None = None
    ) -> Any:
        """Put a part of a blob; return the answer."""
        descriptor = create_memory("pulsenet-test", len(data))
        write_at(descriptor, data, 0)
        seal_snapshot(descriptor)
        try:
            return self.ask(rounds_protocol.PutBlobPart(said_size_bytes or len(data), is_last, is_first), descriptor)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        self.channel.close()


def refusal(answer: Any) -> str:
    """Return the code of an answer that is a refusal."""
    assert isinstance(answer, protocol.LocalRefusal), answer
    return answer.code


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)
