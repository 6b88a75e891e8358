"""Upload slots and caps on both directions: the core decides, this waits."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from pulsenet import limits
from pulsenet.ids import PeerId
from pulsenet.node.rate import ByteCap
from pulsenet.node.uploads import WAIT_SECONDS_MAX, Uploads
from pulsenet.wire.messages import GetChunks

UPLOAD_SLOTS_MAX: Final = limits.SERVED_REQUESTS_MAX - 4
"""The difference stays open to small requests, so a new head never waits behind megabytes."""

RETRY_MS: Final = 2_000
"""When a reader that found no slot may come back; it adds some chance of its own."""

LOOK_SECONDS: Final = 0.1
"""How often whoever waits looks whether what moved before was less than was expected."""

FindKind = Callable[[GetChunks], Awaitable[str]]
"""Says what kind of blob a request is about."""


async def find_no_kind(request: GetChunks) -> str:
    """Say ``other``: nobody looked."""
    return "other"


class NoSlotError(Exception):
    """No upload slot came free in time."""


@dataclass(frozen=True, slots=True)
class Caps:
    """What the operator allows, in bytes per second; 0 means no cap."""

    upload: int = 0
    download: int = 0


@dataclass(slots=True)
class Passage:
    """Something that moves."""

    size_bytes: int = 0
    """What moved; known afterwards."""


class Gate:
    """Waits until more bytes may move, and counts them."""

    def __init__(self, bytes_per_second: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._cap = ByteCap(bytes_per_second)
        self._clock = clock
        self._lock = asyncio.Lock()
        self._usual_size_bytes = limits.CHUNK_SIZE_BYTES
        """What moved last; about as much is expected of what comes next."""

    @contextlib.asynccontextmanager
    async def passing(self) -> AsyncIterator[Passage]:
        """Wait until the cap allows more, and count what the block says that it moved; whoever came first goes first.

        It counts as what moved before it from the start, or all who wait would pass at once and all of it come at once.
        """
        expected = self._usual_size_bytes
        await self.take(expected)
        passage = Passage()
        try:
            yield passage
        finally:
            self._cap.note(passage.size_bytes - expected, self._clock())
            self._usual_size_bytes = passage.size_bytes or expected

    async def take(self, size_bytes: int) -> None:
        """Wait, and count bytes that are about to move."""
        async with self._lock:
            # What others turn out to have moved meanwhile is a debt that the next in line waits for. What they turn out
            # not to have moved is waited for no longer: after many large ones a small one counts as large at first.
            passes_at = self._clock() + self._cap.wait_seconds(self._clock())
            while (  # noqa: ASYNC110 - time is what it waits for
                seconds := min(passes_at - self._clock(), self._cap.wait_seconds(self._clock()))
            ) > 0:
                await asyncio.sleep(min(seconds, LOOK_SECONDS))
            self._cap.note(size_bytes, self._clock())


class Upload:
    """One transfer that has a slot."""

    def __init__(self, desk: UploadDesk, ticket: int) -> None:
        self._desk = desk
        self._ticket = ticket

    async def pace(self, size_bytes: int) -> None:
        """Wait until these bytes may leave.

        Raises:
            NoSlotError: the slot was held for long, and others wait for it.
        """
        if self._desk.must_yield(self._ticket):
            raise NoSlotError
        await self._desk.gate.take(size_bytes)

    def note_sent(self, size_bytes: int) -> None:
        """They left."""
        self._desk.note_sent(self._ticket, size_bytes)


class UploadDesk:
    """Gives upload slots to transfers.

    Args:
        bytes_per_second: Cap on all of them together; 0 means none.
        clock: Monotonic seconds.
    """

    def __init__(self, bytes_per_second: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._uploads = Uploads(UPLOAD_SLOTS_MAX, bytes_per_second)
        self.gate = Gate(bytes_per_second, clock)
        self._clock = clock
        self._tickets = itertools.count()
        self._calls: dict[int, asyncio.Future[None]] = {}

    @property
    def serving_count(self) -> int:
        """Transfers that hold a slot."""
        return self._uploads.serving_count

    @contextlib.asynccontextmanager
    async def enter(self, peer_id: PeerId, kind: str) -> AsyncIterator[Upload]:
        """Hold a slot while the block runs, waiting for one in turn.

        Raises:
            NoSlotError: the queue is full, or none came free for ``WAIT_SECONDS_MAX``; or the block gave the slot up.
        """
        ticket = next(self._tickets)
        await self._wait_for_slot(ticket, peer_id, kind)
        try:
            yield Upload(self, ticket)
        finally:
            self._uploads.end(ticket, self._clock())
            self._advance()

    def note_sent(self, ticket: int, size_bytes: int) -> None:
        """A part of a transfer left."""
        self._uploads.note_sent(ticket, size_bytes, self._clock())
        self._advance()

    def must_yield(self, ticket: int) -> bool:
        """Say whether a transfer has to end before its next chunk."""
        return self._uploads.must_yield(ticket, self._clock())

    async def _wait_for_slot(self, ticket: int, peer_id: PeerId, kind: str) -> None:
        if not self._uploads.ask(ticket, peer_id, kind):
            raise NoSlotError
        called = self._calls[ticket] = asyncio.get_running_loop().create_future()
        self._advance()
        try:
            async with asyncio.timeout(WAIT_SECONDS_MAX):
                await called
        except TimeoutError:
            self._give_up(ticket, called)
            raise NoSlotError from None
        except asyncio.CancelledError:
            self._give_up(ticket, called)
            raise
        finally:
            del self._calls[ticket]

    def _give_up(self, ticket: int, called: asyncio.Future[None]) -> None:
        """Leave the queue, or the slot that was given in the very moment of giving up."""
        if called.done() and not called.cancelled():
            self._uploads.end(ticket, self._clock())
        else:
            self._uploads.leave(ticket)
        self._advance()

    def _advance(self) -> None:
        while granted := self._uploads.advance(self._clock()):
            for ticket in granted:
                called = self._calls.get(ticket)
                if called is None or called.done():
                    self._uploads.end(ticket, self._clock())  # its reader is giving up at this moment
                else:
                    called.set_result(None)
