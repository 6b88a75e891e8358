"""What every demonstration needs around it: a directory, signals that clean up, words when it fails."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console

from pulsenet.errors import StorageError, UsageError
from pulsenetd.demo.processes import DemoError, read_tail
from pulsenetd.words import say_size


class Stopped(BaseException):
    """A signal arrived; not an ``Exception``, so that nothing but the cleaning up catches it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass(slots=True)
class Workdir:
    """The directory of one demonstration."""

    path: Path
    is_kept: bool


def say(console: Console, *lines: str) -> None:
    """Print lines as they are, whatever brackets are in them and however long they are."""
    for line in lines:
        console.out(line, highlight=False)


def explain(console: Console, error: DemoError, workdir: Path) -> None:
    """Print what went wrong, the end of the log that knows more, and where the rest is."""
    lines = [f"pulsenet demo: {error}"]
    if error.log is not None:
        lines += [f"the end of {error.log}:", *(f"  {line}" for line in read_tail(error.log))]
    lines.append(f"all logs are in {workdir / 'logs'}")
    say(console, *lines)


@contextmanager
def open_workdir(wanted: Path | None, needed_size_bytes: int) -> Iterator[Workdir]:
    """Make the directory of this run; one we chose ourselves is removed at the end unless it is to be kept.

    Raises:
        UsageError: The directory holds something already.
        StorageError: It cannot be made, or has less than ``needed_size_bytes`` free.
    """
    if wanted is None:
        directory = Workdir(Path(tempfile.mkdtemp(prefix="pulsenet-demo-")), is_kept=False)
    else:
        directory = Workdir(wanted.absolute(), is_kept=True)
        if wanted.exists() and (not wanted.is_dir() or any(wanted.iterdir())):
            raise UsageError(f"--workdir: {wanted} is not an empty directory; choose another or remove it")
    try:
        _prepare(directory.path, needed_size_bytes)
        yield directory
    finally:
        if not directory.is_kept:
            shutil.rmtree(directory.path, ignore_errors=True)


def _prepare(path: Path, needed_size_bytes: int) -> None:
    try:
        for name in ("data", "logs"):
            (path / name).mkdir(parents=True, mode=0o700)
        free_size_bytes = shutil.disk_usage(path).free
    except OSError as error:
        raise StorageError(f"cannot use {path}: {error.strerror}; give another directory with --workdir") from error
    if free_size_bytes < needed_size_bytes:
        raise StorageError(
            f"the demo needs {say_size(needed_size_bytes)} of disk, {path} has {say_size(free_size_bytes)} free; "
            "give a directory on a larger disk with --workdir",
            "enospc",
        )


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exception, so that our processes are stopped like after Ctrl-C.

    They have groups of their own: a terminal that closes would otherwise end this process alone.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
