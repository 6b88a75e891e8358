"""Frames over one non-blocking socket in the event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from pulsenet.errors import RemoteProtocolError, UnavailableError
from pulsenet.local.framing import Frame, FrameReader, encode_frame
from pulsenet.local.protocol import LocalMessage
from pulsenet.local.sockets import receive_part

FRAME_SECONDS_MAX: Final = 30.0
"""A frame that began has to be whole by then, and a reply taken."""

WAIT_SECONDS_MAX: Final = 300.0
"""Longest wait a process may ask for; it asks again."""

Result = TypeVar("Result")


class Link:
    """The connection to one process."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = FrameReader()

    async def receive(self, start_seconds: float | None) -> Frame:
        """Wait for a frame: so long for its first byte, ``FRAME_SECONDS_MAX`` for the rest.

        Raises:
            UnavailableError: The process closed, or was too slow.
            RemoteProtocolError: What it sent is no frame, or ended inside one.
        """
        try:
            async with asyncio.timeout(start_seconds):
                await wait_readable(self._connection)
            async with asyncio.timeout(FRAME_SECONDS_MAX):
                while True:
                    try:
                        frame = receive_part(self._connection, self._reader)
                    except BlockingIOError:
                        await wait_readable(self._connection)
                        continue
                    if frame is not None:
                        return frame
        except TimeoutError as error:
            raise UnavailableError("the process was too slow") from error
        except UnavailableError as error:
            if self._reader.is_between_frames:
                raise
            raise RemoteProtocolError("framing", "the connection closed inside a frame") from error

    async def send(self, message: LocalMessage, *, descriptor: int | None = None) -> None:
        """Send a frame.

        Raises:
            UnavailableError: The process did not take it in time.
            OSError: It is gone.
        """
        data = memoryview(encode_frame(message, descriptor_count=int(descriptor is not None)))
        try:
            async with asyncio.timeout(FRAME_SECONDS_MAX):
                while data:
                    try:
                        if descriptor is not None:
                            sent = socket.send_fds(self._connection, [data], [descriptor])
                            descriptor = None
                        else:
                            sent = self._connection.send(data)
                    except BlockingIOError:
                        await _wait_writable(self._connection)
                        continue
                    data = data[sent:]
        except TimeoutError as error:
            raise UnavailableError("the process did not read its reply") from error

    async def wait_for(self, ask: Callable[[float], Coroutine[Any, Any, Result]], timeout_ms: int) -> Result:
        """Ask, for so many seconds at most, for what the process waits for; cancelled if it goes away.

        Raises:
            UnavailableError: as :meth:`unless_closed`.
        """
        return await self.unless_closed(ask(min(timeout_ms / 1000, WAIT_SECONDS_MAX)))

    async def unless_closed(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run work for a process that waits in silence; the work is cancelled if the process goes away.

        Raises:
            UnavailableError: It went away, or spoke out of turn.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                working = tasks.create_task(work)
                watching = tasks.create_task(wait_readable(self._connection))
                await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
                is_done = working.done()
                working.cancel()
                watching.cancel()
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # the work's own: this connection's to answer for
        if not is_done:
            raise UnavailableError("the process went away while it waited")
        return working.result()

    def close(self) -> None:
        """Close the connection."""
        self._reader.close()
        self._connection.close()


async def wait_readable(connection: socket.socket) -> None:
    """Wait until there is something to read, or to accept."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(connection.fileno(), _resolve, ready)
    try:
        await ready
    finally:
        loop.remove_reader(connection.fileno())


async def _wait_writable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_writer(connection.fileno(), _resolve, ready)
    try:
        await ready
    finally:
        loop.remove_writer(connection.fileno())


def _resolve(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
