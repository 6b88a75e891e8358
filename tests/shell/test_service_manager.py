"""systemd is told over its own kind of socket, and what it is not there for costs nothing."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from pulsenetd.service_manager import BEATS_PER_LIMIT, ServiceManager


class Scene:
    """A manager's socket; the test reads what arrives there."""

    def __init__(self, address: str) -> None:
        self.now = 100.0
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.listener.bind("\0" + address[1:] if address.startswith("@") else address)
        self.listener.setblocking(False)
        self.environment = {"NOTIFY_SOCKET": address, "HOME": "/root"}

    def manager(self, **variables: str) -> ServiceManager:
        self.environment |= variables
        return ServiceManager.take_from(self.environment, 77, lambda: self.now)

    def heard(self) -> list[str]:
        messages = []
        while True:
            try:
                messages.append(self.listener.recv(4096).decode())
            except BlockingIOError:
                return messages


@pytest.fixture(params=["path", "abstract"])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    opened = Scene(str(tmp_path / "notify") if request.param == "path" else f"@pulsenet-{secrets.token_hex(8)}")
    yield opened
    opened.listener.close()


def test_start_and_end_are_told(scene: Scene) -> None:
    manager = scene.manager()
    manager.ready()
    manager.stopping()
    assert scene.heard() == ["READY=1", "STOPPING=1"]


def test_signs_of_life_come_in_time_and_no_more_often(scene: Scene) -> None:
    manager = scene.manager(WATCHDOG_USEC="40000000", WATCHDOG_PID="77")
    for _ in range(40):
        manager.beat("")
        scene.now += 1.0
    assert scene.heard() == ["WATCHDOG=1"] * BEATS_PER_LIMIT


def test_what_the_node_is_at_is_told_when_it_changes(scene: Scene) -> None:
    manager = scene.manager()
    for text in ("version 3", "version 3", "version 4\nREADY=1"):
        manager.beat(text)
    assert scene.heard() == ["STATUS=version 3", "STATUS=version 4\\nREADY=1"]


@pytest.mark.parametrize("variables", [{"WATCHDOG_PID": "76"}, {}], ids=["of another process", "not asked for"])
def test_no_signs_of_life_are_sent_that_nobody_waits_for(scene: Scene, variables: dict[str, str]) -> None:
    manager = scene.manager(**variables, **({"WATCHDOG_USEC": "5000000"} if variables else {}))
    manager.beat("")
    assert scene.heard() == []


def test_processes_that_a_node_starts_do_not_speak_for_it(scene: Scene) -> None:
    scene.manager(WATCHDOG_USEC="5000000", WATCHDOG_PID="77")
    assert scene.environment == {"HOME": "/root"}


def test_without_a_manager_nothing_happens(tmp_path: Path) -> None:
    alone = ServiceManager.take_from({}, 77, lambda: 0.0)
    gone = ServiceManager.take_from({"NOTIFY_SOCKET": str(tmp_path / "gone"), "WATCHDOG_USEC": "x"}, 77, lambda: 0.0)
    for manager in (alone, gone):
        manager.ready()
        manager.beat("version 1")
        manager.stopping()
