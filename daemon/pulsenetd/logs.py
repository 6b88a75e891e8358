"""Log lines for people and for machines."""

from __future__ import annotations

import json
import logging
import sys
from typing import Final

logger: Final = logging.getLogger("pulsenet")
"""The daemon's logger."""

TEXT_SIZE_MAX: Final = 2_000
"""Longest log line, in characters: a peer's words cannot fill the disk."""


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = self.formatTime(record, "%H:%M:%S")
        mark = "" if record.levelno == logging.INFO else record.levelname.lower() + ": "
        return f"{moment} {mark}{printable(record.getMessage())}" + self._traceback(record)

    def _traceback(self, record: logging.LogRecord) -> str:
        return "\n" + _printable_lines(self.formatException(record.exc_info)) if record.exc_info else ""


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"time": record.created, "level": record.levelname.lower(), "text": printable(record.getMessage())}
        if record.exc_info:
            line["traceback"] = _printable_lines(self.formatException(record.exc_info))
        return json.dumps(line)


class _Handler(logging.Handler):
    """Writes to what standard error is at that moment: while a bar is drawn, lines go above it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


def printable(text: str) -> str:
    """Escape control characters, so that words from a peer cannot forge lines or colour the terminal."""
    escaped = "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )
    return escaped if len(escaped) <= TEXT_SIZE_MAX else escaped[:TEXT_SIZE_MAX] + "..."


def _printable_lines(text: str) -> str:
    """Escape each line of a traceback: what an error says may hold a peer's words."""
    return "\n".join(map(printable, text.split("\n")))


def set_up(level: str, *, as_json: bool) -> None:
    """Send the daemon's lines to standard error in one of two forms."""
    handler = _Handler()
    handler.setFormatter(_JsonFormatter() if as_json else _TextFormatter())
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
