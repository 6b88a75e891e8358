"""Progress of a command's long work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def reporting(
    label: str, format_amount: Callable[[float], str] | None = None, *, is_quiet: bool
) -> Iterator[Callable[[int, int], None]]:
    """Lend what takes how much of how much is done.

    Args:
        label: What is being done.
        format_amount: Writes amounts; bytes if not given.
        is_quiet: A program reads the output.
    """
    # Imported late: most commands are over before a bar could be drawn.
    from pulsenetd.progress import open_reporter
    from pulsenetd.words import say_size

    reporter = open_reporter(label, format_amount=format_amount or say_size, is_quiet=is_quiet)
    try:
        yield reporter.update
    finally:
        reporter.close()
