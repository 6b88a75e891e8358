"""The last lines of the log, for people who look at a node from outside its terminal."""

from __future__ import annotations

import contextlib
import logging
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pulsenet.chain.token import PREFIX
from pulsenetd.logs import printable

LINES_MAX: Final = 1_000
LINES_SHOWN_MAX: Final = 200
FILTER_SIZE_MAX: Final = 200
"""Characters of a filter that count."""

LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

_TOKEN: Final = re.compile(rf"\b{PREFIX}[a-z2-7]{{8,}}")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line, printable, without paths and tokens."""

    number: int
    """Counts every line since the start, from 1."""
    time_ms: int
    level: str
    text: str


def find_hidden(data_directory: Path) -> dict[str, str]:
    """Return the directories that log lines are shown without, to what stands for them."""
    hidden = {str(data_directory): "DATA-DIR"}
    with contextlib.suppress(RuntimeError):  # a user without a home, as in containers
        hidden[str(Path.home())] = "~"
    return hidden


class LogTail(logging.Handler):
    """Keeps the last lines; the oldest goes first.

    Args:
        hidden: What must not be read by others than the operator, to what stands for it: directories, mostly.
        lines_max: How many lines are kept.
    """

    def __init__(self, hidden: Mapping[str, str], lines_max: int = LINES_MAX) -> None:
        super().__init__()
        # The longest first: a data directory lies in the home that is hidden too.
        self._hidden = sorted(
            ((real, name) for real, name in hidden.items() if len(real) > 1), key=lambda it: -len(it[0])
        )
        self._lines: deque[LogLine] = deque(maxlen=lines_max)
        self._count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record, with the last line of its traceback."""
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f" ({type(record.exc_info[1]).__name__}: {record.exc_info[1]})"
        for real, name in self._hidden:
            text = text.replace(real, name)
        text = _TOKEN.sub(f"{PREFIX}...", text)
        self._count += 1
        self._lines.append(LogLine(self._count, int(record.created * 1000), _name(record.levelno), printable(text)))

    def select(self, level: str = "debug", text: str = "") -> dict[str, Any]:
        """Return the newest lines of at least a level that hold a text, newest first; called from any thread.

        Args:
            level: Of :data:`LEVELS`; another is taken as the lowest.
            text: Looked for without regard to case.
        """
        wanted = text[:FILTER_SIZE_MAX].casefold()
        level = level if level in LEVELS else "debug"
        self.acquire()
        try:
            lines = list(self._lines)
        finally:
            self.release()
        found = [
            line for line in reversed(lines) if LEVELS[line.level] >= LEVELS[level] and wanted in line.text.casefold()
        ]
        return {
            "level": level,
            "text": text[:FILTER_SIZE_MAX],
            "kept_count": len(lines),
            "found_count": len(found),
            "lines": [
                {"number": line.number, "time_ms": line.time_ms, "level": line.level, "text": line.text}
                for line in found[:LINES_SHOWN_MAX]
            ],
        }


def _name(level: int) -> str:
    return next((name for name, least in reversed(LEVELS.items()) if level >= least), "debug")
