"""Parts of one snapshot on their way from the local server to the encoder, which takes each once and lets it go."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy.typing as npt

from pulsenet.errors import LocalProtocolError, PulsenetError, RemoteProtocolError
from pulsenet.local.changed_parts import TensorContent, read_changed_part
from pulsenet.local.parts import PartLayout
from pulsenet.local.protocol import Origin
from pulsenet.local.shared_memory import Region
from pulsenet.tensors.params import ParameterTable

PART_SECONDS_MAX: Final = 300.0
"""A training process that hands over nothing for this long in the middle of a publish has given it up."""


class PublishFailedError(PulsenetError):
    """Work was given up for a reason the machine knows by its ``code``."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class Part:
    """Some tensors of a snapshot, read-only."""

    def __init__(self, layout: PartLayout, region: Region) -> None:
        self._layout = layout
        self._region = region
        self.unchanged: frozenset[int] = frozenset()
        """Positions of tensors that are known to be the baseline's."""

    @property
    def tensor_indices(self) -> range:
        """Positions of the tensors in the table."""
        return self._layout.tensor_indices

    def view(self, tensor_index: int) -> npt.NDArray[Any]:
        """Return a tensor as a flat array of ``bits_dtype``; it keeps the memory alive."""
        return self._layout.view(self._region.bytes, tensor_index)

    def close(self) -> None:
        """Let go of the memory."""
        self._region.close()


class ChangedPart:
    """Some tensors of a snapshot by what changed in them since an earlier hand-over of the same process.

    Raises:
        RemoteProtocolError: ``handoff-changes``: the memory is not what it says; it is closed.
    """

    def __init__(self, layout: PartLayout, region: Region) -> None:
        self.layout = layout
        self._region = region
        try:
            self.contents: tuple[TensorContent, ...] = tuple(read_changed_part(layout, region.bytes))
        except BaseException:
            region.close()
            raise

    def close(self) -> None:
        """Let go of the memory."""
        self.contents = ()
        self._region.close()


class PartQueue:
    """Parts in table order. The event loop puts them in, one worker thread takes them out.

    Args:
        table: The snapshot's tensors.
        on_taken: Called in the worker's thread when it takes a part.
        origin: Which hand-over this is, if its process keeps a device baseline.
    """

    def __init__(
        self, table: ParameterTable, on_taken: Callable[[], None] | None = None, origin: Origin | None = None
    ) -> None:
        self.table = table
        self.origin = origin
        self.base_number: int | None = None
        """The sender's hand-over that changed parts may start from, or one before it; ``None``: whole parts only."""
        self.waited_seconds = 0.0
        """How long the worker stood idle for want of a part."""
        self._on_taken = on_taken
        self._condition = threading.Condition()
        self._waiting: deque[Part | ChangedPart] = deque()
        self._end = 0
        self._failure = ""

    @property
    def is_whole(self) -> bool:
        """Whether the last part was put in."""
        return self._end == len(self.table.tensors)

    @property
    def waiting_count(self) -> int:
        """Parts put in and not taken."""
        return len(self._waiting)

    def next_layout(self, tensor_count: int) -> PartLayout:
        """Return the layout of the next part, which is said to hold so many tensors.

        Raises:
            RemoteProtocolError: ``handoff-part``: none, or more than are missing.
        """
        if tensor_count < 1:
            raise RemoteProtocolError("handoff-part", f"a part of {tensor_count} tensors")
        try:
            return PartLayout(self.table, self._end, tensor_count)
        except LocalProtocolError as error:
            raise RemoteProtocolError("handoff-part", str(error)) from error

    def put(self, layout: PartLayout, region: Region) -> None:
        """Take a part over; it is dropped at once if nobody wants it any more."""
        self._put(layout, Part(layout, region))

    def put_changed(self, layout: PartLayout, region: Region) -> None:
        """Take a changed part over, as :meth:`put`.

        Raises:
            RemoteProtocolError: ``handoff-changes``: it is none, or none was asked for; it is closed.
        """
        if self.base_number is None:
            region.close()
            raise RemoteProtocolError("handoff-changes", "whole parts were asked for")
        self._put(layout, ChangedPart(layout, region))

    def _put(self, layout: PartLayout, part: Part | ChangedPart) -> None:
        assert layout.first == self._end
        with self._condition:
            self._end = layout.end
            if self._failure:
                part.close()
                return
            self._waiting.append(part)
            self._condition.notify_all()

    def cut(self, code: str) -> None:
        """Say that no further part will come; changes nothing once all have."""
        with self._condition:
            if not self.is_whole:
                self._fail(code)

    def close(self) -> None:
        """Drop what was not taken, and wake a worker that waits."""
        with self._condition:
            self._fail("dropped")

    def take(self) -> Iterator[Part | ChangedPart]:
        """Yield the parts; each is closed when the next is asked for.

        Raises:
            PublishFailedError: ``cut_short``, ``dropped`` or ``too_slow``: the snapshot will never be whole.
        """
        while (part := self._take_next()) is not None:
            if self._on_taken is not None:
                self._on_taken()
            try:
                yield part
            finally:
                part.close()

    def _take_next(self) -> Part | ChangedPart | None:
        started = time.monotonic()
        with self._condition:
            self._condition.wait_for(lambda: self._waiting or self._failure or self.is_whole, PART_SECONDS_MAX)
            self.waited_seconds += time.monotonic() - started
            if self._failure:
                raise PublishFailedError(self._failure)
            if self._waiting:
                return self._waiting.popleft()
            if self.is_whole:
                return None
            self._fail("too_slow")
        raise PublishFailedError("too_slow")

    def _fail(self, code: str) -> None:
        self._failure = self._failure or code
        while self._waiting:
            self._waiting.popleft().close()
        self._condition.notify_all()
