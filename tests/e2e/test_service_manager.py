"""A real node tells a service manager's socket that it serves, lives and stops."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from swarm import Swarm, wait_until

pytestmark = pytest.mark.e2e


class Manager:
    """systemd's end of the socket."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)
        self.lines: list[str] = []

    def read(self) -> list[str]:
        """Return everything that was told so far."""
        while True:
            try:
                self.lines += self._socket.recv(4096).decode().splitlines()
            except BlockingIOError:
                return self.lines

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    opened = Manager(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", str(opened.path))
    monkeypatch.setenv("WATCHDOG_USEC", "2000000")
    yield opened
    opened.close()


def test_a_node_says_when_it_serves_that_it_lives_and_that_it_stops(swarm: Swarm, manager: Manager) -> None:
    trainer = swarm.add("trainer", "trainer").start()
    wait_until("it serves", lambda: "READY=1" in manager.read())
    assert trainer.read_status() is not None, "what serves answers"
    wait_until("signs of life", lambda: manager.read().count("WATCHDOG=1") >= 3)
    wait_until("what it is at", lambda: any(line.startswith("STATUS=") for line in manager.read()))
    code, _ = trainer.stop()
    assert code == 143
    assert manager.read()[-1] == "STOPPING=1"
    assert manager.lines.count("READY=1") == 1


def test_a_node_that_cannot_start_never_says_that_it_serves(swarm: Swarm, manager: Manager) -> None:
    wrong = swarm.add("wrong", "seed", "--run=nobody-made-it", run="nobody-made-it").start()
    assert wrong.wait_exit(60) == 78, "which the unit does not start again"
    assert manager.read() == []
