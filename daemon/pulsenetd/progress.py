"""How far long work is: a bar on a terminal, a line every few seconds elsewhere, nothing where a program reads."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import IO, Final, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn
from rich.table import Column

from pulsenetd.logs import printable
from pulsenetd.words import ETA_SECONDS_MAX, say_seconds

QUIET_SECONDS: Final = 2.0
"""Work that is done by then never was long."""
LINE_SECONDS: Final = 5.0
"""Between two lines."""
RATE_SECONDS: Final = 15.0
"""What came within this time decides the rate; what came before says nothing of what is left."""
RATE_LOOKS_MAX: Final = 64
BAR_COLUMNS: Final = 14


class Meter:
    """Rate and time left of work of which only the amount done is known.

    Args:
        monotonic: Monotonic seconds.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._looks: deque[tuple[float, int]] = deque()
        self.begun_at = monotonic()
        self.done = 0
        self.total = 0

    @property
    def seconds(self) -> float:
        """How long the work has taken."""
        return self._monotonic() - self.begun_at

    def note(self, done: int, total: int) -> None:
        """Take how much of how much is done."""
        now = self._monotonic()
        if done < self.done or total != self.total:
            self._looks.clear()  # other work under the same name
        self.done, self.total = done, total
        if self._looks and now - self._looks[-1][0] < RATE_SECONDS / RATE_LOOKS_MAX:
            return
        self._looks.append((now, done))
        while len(self._looks) > 2 and now - self._looks[0][0] > RATE_SECONDS:
            self._looks.popleft()

    @property
    def per_second(self) -> float | None:
        """The rate of late; ``None`` while nothing can be told."""
        if len(self._looks) < 2:
            return None
        (first_at, first), (last_at, last) = self._looks[0], self._looks[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else None

    def describe(self, format_amount: Callable[[float], str]) -> str:
        """Return the share, the rate and the time left, as far as they can be told."""
        share = 100 * self.done / self.total if self.total else 100.0
        parts = [f"{share:.0f} % of {format_amount(self.total)}"]
        rate = self.per_second
        if rate is not None and (rate > 0 or self.done > 0):  # what has not begun is not stalled
            parts.append(f"{format_amount(rate)}/s")
            seconds = (self.total - self.done) / rate if rate > 0 else ETA_SECONDS_MAX
            parts.append(f"{say_seconds(seconds)} left" if seconds < ETA_SECONDS_MAX else "stalled")
        return ", ".join(parts)


class Reporter(Protocol):
    """Tells somebody how far one piece of work is. Not safe to call from several threads."""

    def update(self, done: int, total: int, label: str | None = None) -> None:
        """Tell that so much of so much is done; another label is said from now on."""

    def close(self) -> None:
        """Leave nothing on the screen but what is worth keeping."""


class SilentReporter:
    """For output that a program reads."""

    def update(self, done: int, total: int, label: str | None = None) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class LineReporter:
    """Writes a line every few seconds, and a last one if there was any.

    Args:
        label: What is being done.
        say: Takes a line.
        format_amount: Writes amounts, ``say_size`` or :func:`format_count`.
        monotonic: Monotonic seconds.
        says_end: Whether the end is worth a line; it is not where somebody else says what came of the work.
    """

    def __init__(
        self,
        label: str,
        say: Callable[[str], object],
        format_amount: Callable[[float], str],
        monotonic: Callable[[], float] = time.monotonic,
        *,
        says_end: bool = True,
    ) -> None:
        self._says_end = says_end
        self._label = label
        self._say = say
        self._format_amount = format_amount
        self._monotonic = monotonic
        self._meter: Meter | None = None
        self._said_at = QUIET_SECONDS - LINE_SECONDS
        self._has_said = False

    def update(self, done: int, total: int, label: str | None = None) -> None:
        """Write a line if the last one is old enough."""
        self._label = self._label if label is None else label
        # The work begins with the first word of it, not when somebody made ready to tell of it.
        meter = self._meter = self._meter or Meter(self._monotonic)
        meter.note(done, total)
        if meter.seconds - self._said_at < LINE_SECONDS or done >= total:
            return
        self._said_at = meter.seconds
        self._has_said = True
        self._say(f"{self._label}: {meter.describe(self._format_amount)}")

    def close(self) -> None:
        """Say how long it took, where it took long."""
        if self._has_said and self._says_end and self._meter is not None:
            amount = self._format_amount(self._meter.done)
            whole = amount if self._meter.done >= self._meter.total else f"stopped after {amount}"
            self._say(f"{self._label}: {whole} in {say_seconds(self._meter.seconds)}")


class BarReporter:
    """Draws a bar, which leaves with the work.

    Args:
        label: What is being done.
        console: The terminal.
        format_amount: Writes amounts.
        monotonic: Monotonic seconds.
    """

    def __init__(
        self,
        label: str,
        console: Console,
        format_amount: Callable[[float], str],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._format_amount = format_amount
        self._meter = Meter(monotonic)
        self._console = console
        self._label = label
        self._bar: tuple[Progress, TaskID] | None = None

    def update(self, done: int, total: int, label: str | None = None) -> None:
        """Move the bar."""
        self._label = self._label if label is None else label
        self._meter.note(done, total)
        if done >= total:
            self.close()
            return
        if self._bar is None:
            progress = Progress(*_make_columns(), console=self._console, transient=True, auto_refresh=False)
            progress.start()
            self._bar = progress, progress.add_task("", words="")
        progress, task = self._bar
        words = self._meter.describe(self._format_amount)
        progress.update(task, completed=done, total=total, words=words, description=printable(self._label))
        progress.refresh()

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None


def _make_columns() -> tuple[ProgressColumn, ...]:
    """Return columns that stay on one line of 80 characters."""
    return (
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
        BarColumn(bar_width=BAR_COLUMNS),
        TextColumn("{task.fields[words]}", markup=False, table_column=Column(no_wrap=True)),
    )


class Throttle:
    """Hands on at most some updates a second: hashing small pieces tells thousands, and drawing each takes longer.

    Args:
        reporter: Takes the rest.
        monotonic: Monotonic seconds.
    """

    SECONDS: Final = 0.1

    def __init__(self, reporter: Reporter, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._reporter = reporter
        self._monotonic = monotonic
        self._told_at = float("-inf")

    def update(self, done: int, total: int, label: str | None = None) -> None:
        """Tell, unless that was done just now; the end is always told."""
        now = self._monotonic()
        if now - self._told_at >= self.SECONDS or done >= total:
            self._told_at = now
            self._reporter.update(done, total, label)

    def close(self) -> None:
        """Close what is told."""
        self._reporter.close()


def open_reporter(
    label: str,
    *,
    format_amount: Callable[[float], str],
    is_quiet: bool = False,
    stream: IO[str] | None = None,
    say: Callable[[str], object] | None = None,
    says_end: bool = True,
) -> Reporter:
    """Return the reporter that suits who reads standard error.

    Args:
        label: What is being done.
        format_amount: Writes amounts, ``say_size`` or :func:`format_count`.
        is_quiet: A program reads: say nothing.
        stream: Where to; standard error if not given.
        say: Takes lines where no terminal is; writes them to the stream if not given.
        says_end: As of :class:`LineReporter`.
    """
    if is_quiet:
        return SilentReporter()
    stream = sys.stderr if stream is None else stream
    console = Console(file=stream, highlight=False)
    if console.is_terminal and not console.is_dumb_terminal:
        return Throttle(BarReporter(label, console, format_amount))
    write = say or (lambda text: print(text, file=stream, flush=True))
    return Throttle(LineReporter(label, write, format_amount, says_end=says_end))


def format_count(noun: str) -> Callable[[float], str]:
    """Return what writes an amount of things."""
    return lambda count: f"{count:,.0f} {noun}"
