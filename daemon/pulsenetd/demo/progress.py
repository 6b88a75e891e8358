"""What is known about each version while the demonstration runs, and how it is shown."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pulsenetd.demo.reports import Applied, Published
from pulsenetd.demo.stage import say
from pulsenetd.words import say_size

STAGES: Final = ("fetch", "decode", "verify", "apply")
"""Stages of an update; all but *apply*, which such engines measure themselves, come from the nodes' metrics."""
VLLM_STAGES: Final = ("fetch", "decode", "verify", "stage", "pause")
"""The same with vLLM: *stage* beside its serving, *pause* while its requests wait."""

ROWS_SHOWN_MAX: Final = 16
CAPTION: Final = "seconds of the slowest inferencer; lag: from publish() to its engine"


@dataclass(slots=True)
class VersionRow:
    """One version: what was published, and how it reached the inferencers."""

    published: Published
    applied: dict[str, Applied] = field(default_factory=dict)
    """By inferencer."""
    stage_seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    """By inferencer, then by stage."""

    @property
    def label(self) -> str:
        """The version as people read it."""
        return f"{self.published.epoch}.{self.published.number}"

    @property
    def ratio(self) -> float:
        """Dense bytes over the bytes that travel."""
        return self.published.raw_size_bytes / max(1, self.published.encoded_size_bytes)

    @property
    def lag_seconds(self) -> float | None:
        """From the call of ``publish`` to the last inferencer's engine; ``None`` while none serves it."""
        if not self.applied:
            return None
        return max(applied.applied_at for applied in self.applied.values()) - self.published.offered_at

    def slowest(self, stage: str) -> float | None:
        """Return the seconds a stage took where it took longest."""
        if stage == "apply":
            return max((applied.apply_seconds for applied in self.applied.values()), default=None)
        return max((seconds[stage] for seconds in self.stage_seconds.values() if stage in seconds), default=None)

    def cells(self, stages: Sequence[str] = STAGES) -> tuple[str, ...]:
        """Return the row as text, in the order of :func:`name_columns`."""
        share = self.published.changed_count / max(1, self.published.element_count)
        return (
            self.label,
            "all" if self.published.is_first else f"{share:.2%}",
            say_size(self.published.encoded_size_bytes),
            f"{self.ratio:.0f}x" if not self.published.is_first else "1x",
            *(_format_seconds(self.slowest(stage)) for stage in stages),
            _format_seconds(self.lag_seconds),
            "-" if self.published.is_first else f"{self.published.reward:.3f}",
        )


def name_columns(stages: Sequence[str]) -> tuple[str, ...]:
    """Return the headings of the table."""
    return ("version", "changed", "patch", "ratio", *stages, "lag", "reward")


@dataclass(slots=True)
class Progress:
    """All versions so far, and a sentence about what is going on."""

    inferencers: tuple[str, ...]
    phase: str = "starting"
    stages: tuple[str, ...] = STAGES
    """What the table shows of each update."""
    rows: dict[int, VersionRow] = field(default_factory=dict)
    """By version number."""
    _early: dict[int, dict[str, tuple[Applied, dict[str, float]]]] = field(default_factory=dict)
    """What inferencers applied before the trainer's own report of it came."""

    def add_published(self, published: Published) -> None:
        """Open the row of a version."""
        self.rows[published.number] = VersionRow(published)
        for name, (applied, stage_seconds) in self._early.pop(published.number, {}).items():
            self.add_applied(name, applied, stage_seconds)

    def add_applied(self, name: str, applied: Applied, stage_seconds: Mapping[str, float]) -> None:
        """Enter when an inferencer's engine came to a version, and what the stages before took."""
        row = self.rows.get(applied.number)
        if row is None:
            self._early.setdefault(applied.number, {})[name] = (applied, dict(stage_seconds))
            return
        row.applied[name] = applied
        row.stage_seconds[name] = dict(stage_seconds)

    def is_complete(self, number: int) -> bool:
        """Return whether every inferencer serves this version or has gone past it."""
        reached = {name for later, row in self.rows.items() if later >= number for name in row.applied}
        return number in self.rows and reached.issuperset(self.inferencers)


class Screen(AbstractContextManager["Screen"]):
    """Shows the progress: a live table on a terminal, else one plain line per version.

    Args:
        console: Where to draw.
        title: Above the table.
    """

    def __init__(self, console: Console, title: str, progress: Progress) -> None:
        self._console = console
        self._title = title
        self._progress = progress
        self._started_at = time.monotonic()
        self._printed: set[int] = set()
        self._phase = ""
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(self._draw(), console=console, refresh_per_second=4, get_renderable=self._draw)

    def __enter__(self) -> Screen:
        if self._live is not None:
            self._live.start()
        else:
            say(self._console, f"{self._title}\n({CAPTION})")
        return self

    def __exit__(self, *_: object) -> None:
        self.update(is_over=True)
        if self._live is not None:
            self._live.stop()

    def update(self, *, is_over: bool = False) -> None:
        """Show what has changed; without a terminal a version is printed once it is complete."""
        if self._live is not None:
            return
        if self._phase != self._progress.phase:
            self._phase = self._progress.phase
            say(self._console, f"[{self._elapsed():6.1f} s] {self._phase}")
        for number, row in sorted(self._progress.rows.items()):
            if number not in self._printed and (is_over or self._progress.is_complete(number)):
                if not self._printed:
                    self._print_cells(name_columns(self._progress.stages))
                self._printed.add(number)
                self._print_cells(row.cells(self._progress.stages))

    def _print_cells(self, cells: Sequence[str]) -> None:
        line = f"{cells[0]:<8}" + "".join(f"{cell:>9}" for cell in cells[1:])
        say(self._console, line)

    def _elapsed(self) -> float:
        return time.monotonic() - self._started_at

    def _draw(self) -> Group:
        table = Table(title=self._title, title_justify="left", caption=CAPTION, caption_justify="left", box=None)
        # narrow enough for a terminal of 80 columns
        table.padding = (0, 1, 0, 0)
        for column in name_columns(self._progress.stages):
            table.add_column(column, justify="left" if column == "version" else "right", no_wrap=True)
        for _, row in sorted(self._progress.rows.items())[-ROWS_SHOWN_MAX:]:
            table.add_row(*row.cells(self._progress.stages))
        return Group(table, Text(f"{self._elapsed():5.0f} s  {self._progress.phase}"))


def _format_seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f}"
