"""What clients of the OpenAI port may not do: hold a connection by drops, or ask in the name of another host."""

from __future__ import annotations

import io
import ipaddress
import socket
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit


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


def is_loopback_host(text: str) -> bool:
    """Say whether the host of ``host`` or ``host:port`` is this machine by a name no other machine has."""
    try:
        host = (urlsplit(f"//{text}").hostname if text.count(":") < 2 or "[" in text else text) or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
