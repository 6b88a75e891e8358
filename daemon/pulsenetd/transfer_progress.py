"""What a node says while it fetches for long: its first anchor, what it missed, the state of a round."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from pulsenetd.logs import logger
from pulsenetd.progress import Reporter, open_reporter
from pulsenetd.words import say_size, say_version


class TransferProgress:
    """Looks at what the machines report, and shows it while anything is missing.

    Args:
        fields: What the machines reported last.
        is_quiet: Log lines are for programs, which ask for ``/status``.
        open_with: Opens a reporter for a piece of work.
    """

    def __init__(
        self,
        fields: Callable[[], Mapping[str, Any]],
        *,
        is_quiet: bool,
        open_with: Callable[[str], Reporter] | None = None,
    ) -> None:
        self._fields = fields
        self._open = (lambda label: _open(label, is_quiet=is_quiet)) if open_with is None else open_with
        self._reporter: Reporter | None = None

    def look(self) -> None:
        """Look once; called every second."""
        fields = self._fields()
        wanted = (fields.get("fetch_wanted_bytes") or 0) + (fields.get("rounds_wanted_size_bytes") or 0)
        held = (fields.get("fetch_held_bytes") or 0) + (fields.get("rounds_held_size_bytes") or 0)
        if wanted <= held:
            self.close()
            return
        label = describe_fetch(fields)
        if self._reporter is None:
            self._reporter = self._open(label)
        self._reporter.update(held, wanted, label)

    def close(self) -> None:
        """Stop showing."""
        if self._reporter is not None:
            self._reporter.close()
            self._reporter = None


def describe_fetch(fields: Mapping[str, Any]) -> str:
    """Return what is being fetched, in few words: a bar and its figures stand on the same line."""
    if not fields.get("fetch_wanted_bytes"):
        return f"fetching round {fields.get('round_index', '?')}"
    newest = say_version(fields, "latest_seen")
    held = fields.get("applied_version")
    held = fields.get("mirror_version") if held is None else held
    if held is None:
        return f"first version, {newest}"
    return f"catching up, {fields.get('applied_epoch') or 0}.{held} to {newest}"


def _open(label: str, *, is_quiet: bool) -> Reporter:
    """Draw a bar below the log, or write lines into it."""
    return open_reporter(
        label,
        format_amount=say_size,
        is_quiet=is_quiet or not logger.isEnabledFor(logging.INFO),
        say=lambda text: logger.info("%s", text),
        says_end=False,
    )
