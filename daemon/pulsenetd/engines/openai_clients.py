"""What clients of the OpenAI port may not do: hold a connection by drops, or fill the memory together."""

from __future__ import annotations

import io
import socket
import threading
import time
from collections.abc import Callable
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
