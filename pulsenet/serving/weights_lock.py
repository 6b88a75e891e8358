"""Many readers or one writer: what keeps a forward pass from seeing half of an update."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class WeightsLock:
    """Lets any number of readers in, or one writer. A waiting writer goes before new readers, so none starves.

    A thread that already reads may enter again, even while a writer waits.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._reader_count = 0
        self._waiting_writer_count = 0
        self._is_writing = False
        self._held = threading.local()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold the weights as they are until the block ends."""
        depth = getattr(self._held, "depth", 0)
        if depth == 0:
            with self._condition:
                self._condition.wait_for(lambda: not self._is_writing and self._waiting_writer_count == 0)
                self._reader_count += 1
        self._held.depth = depth + 1
        try:
            yield
        finally:
            self._held.depth = depth
            if depth == 0:
                with self._condition:
                    self._reader_count -= 1
                    self._condition.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Wait until every reader has left, then keep everyone else out until the block ends."""
        with self._condition:
            self._waiting_writer_count += 1
            try:
                self._condition.wait_for(lambda: not self._is_writing and self._reader_count == 0)
                self._is_writing = True
            finally:
                self._waiting_writer_count -= 1
        try:
            yield
        finally:
            with self._condition:
                self._is_writing = False
                self._condition.notify_all()
