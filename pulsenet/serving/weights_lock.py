"""Many readers or one writer: what keeps a forward pass from seeing half of an update."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pulsenet.errors import LocalProtocolError


class WeightsLock:
    """Lets any number of readers in, or one writer. A waiting writer goes before new readers, so none starves.

    A thread that already reads may enter again, even while a writer waits.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._reader_count = 0
        self._waiting_writer_count = 0
        self._writer: int | None = None
        """The thread that writes."""
        self._held = threading.local()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold the weights as they are until the block ends.

        Raises:
            LocalProtocolError: This thread changes them.
        """
        depth = getattr(self._held, "depth", 0)
        if depth == 0:
            with self._condition:
                self._refuse_own_writing()
                self._condition.wait_for(lambda: self._writer is None and self._waiting_writer_count == 0)
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
        """Wait until every reader has left, then keep everyone else out until the block ends.

        Raises:
            LocalProtocolError: This thread is one of the readers, or changes the weights already.
        """
        if getattr(self._held, "depth", 0):
            raise LocalProtocolError("this thread holds the weights: an update inside engine.weights() would never end")
        with self._condition:
            self._refuse_own_writing()
            self._waiting_writer_count += 1
            try:
                self._condition.wait_for(lambda: self._writer is None and self._reader_count == 0)
                self._writer = threading.get_ident()
            finally:
                self._waiting_writer_count -= 1
        try:
            yield
        finally:
            with self._condition:
                self._writer = None
                self._condition.notify_all()

    def _refuse_own_writing(self) -> None:
        if self._writer == threading.get_ident():
            raise LocalProtocolError("this thread changes the weights: it cannot wait for itself, as in on_applied")
