"""Effects that make things durable."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final

from pulsenet.errors import StorageError
from pulsenet.node.effects import Effect, Release, SaveState, StoreChunk, StoreChunkList, StoreRecord
from pulsenet.node.events import ChunkStored, StoreFailed
from pulsenetd.driver import Handler, Post
from pulsenetd.logs import logger
from pulsenetd.storage.store import Store

LEASE_SECONDS: Final = 60.0
"""A blob somebody reads from here stays this long after the last chunk they took."""


class StoreHandlers:
    """Executes persistence on a thread of its own, in the order the driver asks.

    Args:
        store: The node's store.
        thread: One worker: SQLite and fsync gain nothing from more.
        monotonic: Monotonic seconds, for leases.
    """

    def __init__(self, store: Store, thread: Executor, monotonic: Callable[[], float]) -> None:
        self._store = store
        self._thread = thread
        self._monotonic = monotonic
        self._due: list[tuple[StoreChunk, Post]] = []
        """Chunks to be written."""
        self._writing = asyncio.Lock()

    def table(self) -> dict[type[Effect], Handler]:
        """Return the handlers by effect."""
        return {
            StoreRecord: self._store_record,
            StoreChunk: self._store_chunk,
            StoreChunkList: self._store_chunk_list,
            SaveState: self._save_state,
            Release: self._release,
        }

    async def _store_record(self, effect: StoreRecord, post: Post) -> None:
        await self._run(lambda: self._store.put_record(effect.record))

    async def _store_chunk(self, effect: StoreChunk, post: Post) -> None:
        self._due.append((effect, post))
        async with self._writing:
            # All that came while others were written go together, by whoever's turn it is first.
            due, self._due = self._due, []
            if not due:
                return
            chunks = {each.digest: each.data for each, _ in due}
            failed = await asyncio.get_running_loop().run_in_executor(self._thread, self._store.put_chunks, chunks)
        for each, answer in due:
            error = failed.get(each.digest)
            answer(ChunkStored(each.digest) if error is None else StoreFailed(each.digest, error.reason))

    async def _store_chunk_list(self, effect: StoreChunkList, post: Post) -> None:
        await self._run(lambda: self._store.put_chunk_list(effect.blob_id, effect.data))

    async def _save_state(self, effect: SaveState, post: Post) -> None:
        await self._run(lambda: self._store.save_state(effect.key, effect.value))

    async def _release(self, effect: Release, post: Post) -> None:
        now = self._monotonic()
        try:
            # Not before chunks that came earlier: written afterwards, they would belong to nothing.
            async with self._writing:
                await self._run(lambda: self._let_go(effect, now))
        except StorageError as error:
            # What stays takes room and harms nothing; a later release, or the next start, lets it go.
            logger.warning("what is no longer needed could not be deleted: %s", error)

    def _let_go(self, effect: Release, now: float) -> None:
        spares = effect.spares_versions
        self._store.release(effect.blob_ids, effect.record_digests, now, spares_versions=spares)

    async def _run(self, work: Callable[[], object]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, work)
