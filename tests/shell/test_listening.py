"""HTTP ports of a node ask no name service, and outlast a want of descriptors without turning in a circle."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from pulsenetd.engines.openai_server import OpenAiServer
from pulsenetd.listening import ACCEPT_PAUSE_SECONDS
from pulsenetd.read_only_http import Server


def test_no_name_is_looked_up_to_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine whose own name does not resolve it would take half a minute, in the event loop."""

    def look_up(*_: Any) -> str:
        raise AssertionError("a name service was asked")

    for name in ("getfqdn", "gethostbyaddr"):
        monkeypatch.setattr(socket, name, look_up)
    for host in ("127.0.0.1", "0.0.0.0"):  # noqa: S104
        server = Server(host, 0, {})
        assert server.url.startswith(f"http://{host}:")
        server.stop()
        OpenAiServer(host, 0, lambda: pytest.fail("nobody asks")).close()


@contextmanager
def no_descriptors_left() -> Iterator[None]:
    """Take every descriptor that this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.dup(0)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 64, hard))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_a_descriptor_who_waits_is_taken_in_later_and_no_core_is_burnt() -> None:
    tries: list[float] = []
    are_three = threading.Event()

    class CountingServer(Server):
        def get_request(self) -> Any:
            tries.append(time.monotonic())
            if len(tries) == 3:
                are_three.set()
            return super().get_request()

    server = CountingServer("127.0.0.1", 0, {"/": lambda _: (200, "text/plain", b"here")})
    with socket.create_connection(server.server_address[:2], timeout=30) as client:  # type: ignore[arg-type]
        with no_descriptors_left():
            server.start()
            assert are_three.wait(30)
        assert tries[2] - tries[0] >= 2 * ACCEPT_PAUSE_SECONDS
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    server.stop()
    assert answer.endswith(b"here")
