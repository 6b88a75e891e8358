"""Slots for requests, with some kept free of bulk transfers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Lanes:
    """At most ``count`` requests at once, of which at most ``bulk_count`` move chunks.

    The difference stays open to small requests, so a new head never waits behind megabytes.
    """

    __slots__ = ("_all", "_bulk", "bulk_free")

    def __init__(self, count: int, bulk_count: int) -> None:
        assert 0 < bulk_count < count
        self._all = asyncio.Semaphore(count)
        self._bulk = asyncio.Semaphore(bulk_count)
        self.bulk_free = bulk_count
        """Slots that a transfer of chunks would get without waiting for another one."""

    @contextlib.asynccontextmanager
    async def enter(self, *, bulk: bool) -> AsyncIterator[None]:
        """Hold a slot while the block runs, waiting for one in turn."""
        async with contextlib.AsyncExitStack() as held:
            if bulk:
                await held.enter_async_context(self._bulk)
                held.callback(self._free_bulk)
                self.bulk_free -= 1
            await held.enter_async_context(self._all)
            yield

    def _free_bulk(self) -> None:
        self.bulk_free += 1
