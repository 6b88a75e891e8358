"""A supervised node comes back from passing faults and from nothing else."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time

import pytest

from pulsenetd import keeper
from pulsenetd.cli import build_parser


class Scripted:
    """Hands out exit statuses one after another, and counts the pauses in between."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.commands: list[list[str]] = []
        self.pauses: list[float] = []
        self.signals: list[int] = []
        self.now = 0.0
        self.lifetime_seconds = 1.0

    def start(self, command: list[str]) -> Scripted:
        self.commands.append(command)
        return self

    def wait(self) -> int:
        self.now += self.lifetime_seconds
        return self.statuses.pop(0)

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def run(self) -> int:
        return keeper.keep(
            ["join", "--supervise"], start=self.start, sleep=self.pauses.append, monotonic=lambda: self.now
        )


def test_passing_faults_and_kills_are_retried_with_growing_pauses() -> None:
    node = Scripted(-9, 1, 7, 0)
    assert node.run() == 0
    assert node.pauses == [1.0, 2.0, 4.0]
    assert all(command[-1] == "--no-supervise" for command in node.commands)


def test_faults_a_restart_cannot_cure_end_at_once() -> None:
    for code in (2, 4, 5, 78):
        node = Scripted(code)
        assert node.run() == code
        assert node.pauses == []


def test_a_long_healthy_life_resets_the_pause() -> None:
    node = Scripted(-9, -9, -9, 0)
    node.lifetime_seconds = 1_000.0
    node.run()
    assert node.pauses == [1.0, 1.0, 1.0]


def test_a_signal_is_passed_on_and_ends_the_loop() -> None:
    before = signal.getsignal(signal.SIGTERM)
    node = Scripted(-15)
    wait = node.wait

    def interrupted() -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return wait()

    node.wait = interrupted  # type: ignore[method-assign]
    assert node.run() == 143
    assert node.signals == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_during_the_pause_ends_the_loop() -> None:
    node = Scripted(1)

    def pause(seconds: float) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    code = keeper.keep(["join"], start=node.start, sleep=pause, monotonic=lambda: node.now)
    assert code == 130


def test_a_signal_while_the_node_is_being_started_is_passed_on_to_it() -> None:
    node = Scripted(-15)

    def start_slowly(command: list[str]) -> Scripted:
        os.kill(os.getpid(), signal.SIGTERM)
        return node.start(command)

    assert keeper.keep(["join"], start=start_slowly, sleep=node.pauses.append, monotonic=lambda: node.now) == 143
    assert node.signals == [signal.SIGTERM]


def test_a_signal_between_a_death_and_the_pause_ends_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Scripted(1)
    monkeypatch.setattr(keeper.logger, "warning", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    assert node.run() == 143
    assert (node.signals, node.pauses) == ([], [])


def test_a_real_pause_ends_with_the_signal() -> None:
    node = Scripted(1)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    started = time.monotonic()
    assert keeper.keep(["join"], start=node.start, sleep=lambda _: time.sleep(30), monotonic=lambda: node.now) == 143
    assert time.monotonic() - started < 10


def test_a_node_is_started_where_our_terminals_ctrl_c_does_not_reach_it() -> None:
    child = keeper._start_apart([sys.executable, "-c", "import os, sys; sys.exit(os.getsid(0) == os.getpid())"])
    assert child.wait() == 1


def test_what_follows_two_dashes_stays_the_engines() -> None:
    """Taken as an argument of the engine, the last word would leave the child a supervisor of another one."""
    node = Scripted(0)
    words = ["join", "--supervise", "--engine", "vllm", "--serve", "--", "--model", "/base"]
    assert keeper.keep(words, start=node.start, sleep=node.pauses.append, monotonic=lambda: node.now) == 0
    (command,) = node.commands
    parsed = build_parser().parse_args(command[command.index("join") :])
    assert (parsed.supervise, parsed.serve) == (False, ["--model", "/base"])


def test_a_signal_that_the_shell_ruled_out_ends_nothing() -> None:
    """As under nohup, whose terminal is closed later."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    node = Scripted(0)
    wait = node.wait

    def hang_up() -> int:
        os.kill(os.getpid(), signal.SIGHUP)
        return wait()

    node.wait = hang_up  # type: ignore[method-assign]
    try:
        assert node.run() == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert node.signals == []


def test_a_machine_without_room_for_a_process_is_tried_again() -> None:
    node = Scripted(0)
    refusals = [OSError(errno.ENOMEM, "Cannot allocate memory"), OSError(errno.EAGAIN, "no room")]

    def start(command: list[str]) -> Scripted:
        if refusals:
            raise refusals.pop()
        return node.start(command)

    assert keeper.keep(["join"], start=start, sleep=node.pauses.append, monotonic=lambda: node.now) == 0
    assert node.pauses == [1.0, 2.0]
