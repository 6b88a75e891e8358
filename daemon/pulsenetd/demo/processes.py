"""Child processes of the demonstration: own groups, logs in files, reports on a pipe, and none left behind."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pulsenet.errors import PulsenetError
from pulsenetd.demo.reports import Report, read_report

STOP_SECONDS_MAX: Final = 12.0
"""A node promises to leave within 10 s of SIGTERM."""

LOG_TAIL_LINES: Final = 15
LOG_TAIL_SIZE_BYTES_MAX: Final = 64 << 10


class DemoError(PulsenetError):
    """The demonstration cannot go on; ``log`` is where to look."""

    def __init__(self, text: str, log: Path | None = None) -> None:
        super().__init__(text)
        self.log = log


@dataclass(slots=True)
class Child:
    """One running process and where it writes."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    may_exit: bool
    """It is expected to finish by itself, with exit code 0."""
    is_settled: bool = False
    """Its exit has been noticed and was fine."""


@dataclass(slots=True)
class Children:
    """All processes of one demonstration. Use as a context manager: leaving it stops them all."""

    logs: Path
    reports: queue.Queue[tuple[str, Report]] = field(default_factory=queue.Queue)
    """Name of the child, and what it reported."""
    _children: list[Child] = field(default_factory=list)
    _readers: list[threading.Thread] = field(default_factory=list)

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], *, may_exit: bool = False
    ) -> Child:
        """Start a process in a group of its own, so that its children can be stopped with it."""
        path = self.logs / f"{name}.log"
        with path.open("ab") as log:
            process = subprocess.Popen(
                command,
                # Unbuffered, a line of one stream would be torn apart by lines of the other.
                env={key: value for key, value in environment.items() if key != "PYTHONUNBUFFERED"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        child = Child(name, process, path, may_exit)
        self._children.append(child)
        reader = threading.Thread(target=self._read, args=(child,), name=f"reports-{name}", daemon=True)
        reader.start()
        self._readers.append(reader)
        return child

    def check(self) -> None:
        """Raise if a process has ended that should not have.

        Raises:
            DemoError: It says which, and names its log.
        """
        for child in self._children:
            code = child.process.poll()
            if code is None or child.is_settled:
                continue
            if code != 0 or not child.may_exit:
                raise DemoError(f"{child.name} ended with exit code {code}", child.log)
            child.is_settled = True

    def kill(self, name: str) -> None:
        """Kill a process and its children as a power cut would; it is not expected to go on."""
        for child in self._children:
            if child.name == name and not child.is_settled:
                _signal_group(child, signal.SIGKILL)
                child.process.wait()
                child.is_settled = True

    def stop(self) -> None:
        """End all processes: SIGTERM, and SIGKILL for what is left of their groups after ``STOP_SECONDS_MAX``."""
        for child in self._children:
            # only the leader: a node that is told to leave ends its own p2pd in good order
            child.process.terminate()
        give_up_at = time.monotonic() + STOP_SECONDS_MAX
        try:
            for child in self._children:
                with suppress(subprocess.TimeoutExpired):
                    child.process.wait(max(0.0, give_up_at - time.monotonic()))
        finally:
            # A second Ctrl-C ends the wait, never this. Where a leader is gone, a child of its own may be left.
            for child in self._children:
                _signal_group(child, signal.SIGKILL)
                child.process.wait()
        for reader in self._readers:
            reader.join(1.0)

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _read(self, child: Child) -> None:
        """Pass a child's reports on; its log gets every line, so that it tells the whole story."""
        assert child.process.stdout is not None
        with child.process.stdout as lines, child.log.open("a") as log:
            for line in lines:
                log.write(line)
                log.flush()
                report = read_report(line)
                if report is not None:
                    self.reports.put((child.name, report))


def _signal_group(child: Child, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.process.pid, number)


def run_together(commands: Sequence[Sequence[str]], environment: Mapping[str, str]) -> list[str]:
    """Run short commands side by side and return what each printed.

    Raises:
        DemoError: One of them failed; the message holds its last line of standard error.
    """
    running = [
        subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    outputs = [process.communicate() for process in running]
    for command, process, (_, errors) in zip(commands, running, outputs, strict=True):
        if process.returncode != 0:
            last = errors.strip().splitlines()[-1:] or ["no message"]
            raise DemoError(f"'{' '.join(command[2:])}' failed with exit code {process.returncode}: {last[0]}")
    return [printed for printed, _ in outputs]


def read_tail(path: Path) -> list[str]:
    """Return the last lines of a log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL_SIZE_BYTES_MAX))
            return file.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    except OSError as error:
        return [f"({path} cannot be read: {error.strerror})"]
