"""Ports for what must be known before anybody listens on it."""

from __future__ import annotations

import random
import socket
from typing import Final

PORT_MIN: Final = 20_000
PORT_MAX: Final = 32_767
"""Below those that the system gives to whoever asks for any: there a test that runs beside this one would soon have it,
and answer whoever still dials."""


def find_free_port() -> int:
    """Return a port of loopback that was free a moment ago."""
    while True:
        port = random.randint(PORT_MIN, PORT_MAX)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
