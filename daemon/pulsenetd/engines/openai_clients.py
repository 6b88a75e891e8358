"""What clients of the OpenAI port may not do: hold a connection by drops, fill the memory together, or leave unseen."""

from __future__ import annotations

import io
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


class Incoming(io.RawIOBase):
    """A client's bytes. Reading raises ``TimeoutError`` when none come, and when the time for all of them is over.

    Args:
        connection: Whose time-out stays ``idle_seconds`` for what is sent.
        idle_seconds: For the next bytes.
        clock: Monotonic seconds.
    """

    def __init__(
        self, connection: socket.socket, idle_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._connection = connection
        self._idle_seconds = idle_seconds
        self._clock = clock
        self.give_up_at = float("inf")

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Wait for bytes and put them into ``buffer``; return how many, 0 at the end."""
        seconds = self.give_up_at - self._clock()
        if seconds <= 0:
            raise TimeoutError("the request did not come in time")
        self._connection.settimeout(min(seconds, self._idle_seconds))
        try:
            return self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(self._idle_seconds)


class MemoryBudget:
    """Bytes that all requests at one time may hold; safe to use from any thread.

    Args:
        size_bytes: Together.
    """

    def __init__(self, size_bytes: int) -> None:
        self._left = size_bytes
        self._mutex = threading.Lock()

    @property
    def left_bytes(self) -> int:
        """What is free now."""
        return self._left

    def take(self, size_bytes: int) -> bool:
        """Take so many bytes, or none and return ``False`` if they are not free."""
        with self._mutex:
            if size_bytes > self._left:
                return False
            self._left -= size_bytes
            return True

    def give_back(self, size_bytes: int) -> None:
        """Give back what was taken."""
        with self._mutex:
            self._left += size_bytes


class HangUpWatch:
    """One thread that notices clients that went away, and shuts the engine's side of their requests.

    The engine then cancels what nobody waits for.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._epoll = select.epoll()
        self._others: dict[int, socket.socket] = {}
        self._wake, self._waker = socket.socketpair()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="openai-hang-ups", daemon=True)
        self._thread.start()

    @contextmanager
    def over(self, client: socket.socket, engine: socket.socket) -> Iterator[None]:
        """Watch over one request while the block runs."""
        number = client.fileno()
        with self._mutex:
            self._others[number] = engine
            self._epoll.register(number, select.EPOLLRDHUP | select.EPOLLONESHOT)
        try:
            yield
        finally:
            with self._mutex:
                del self._others[number]
                self._epoll.unregister(number)

    def close(self) -> None:
        """Shut the engine's side of every request, and stop watching."""
        self._waker.close()
        self._thread.join()
        with self._mutex:
            for engine in self._others.values():
                _shut(engine)

    def _run(self) -> None:
        while True:
            for number, _ in self._epoll.poll():
                if number == self._wake.fileno():
                    self._wake.close()
                    return
                with self._mutex:
                    engine = self._others.get(number)
                    if engine is not None:
                        _shut(engine)


def _shut(engine: socket.socket) -> None:
    with suppress(OSError):
        engine.shutdown(socket.SHUT_RDWR)
