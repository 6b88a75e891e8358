"""A running node reads all it keeps, little by little, and has fetched again what its disk damaged.

It also measures what rounds keep: `--store-limit-bytes` is for both, and versions get what rounds leave.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final

from pulsenet.ids import Digest
from pulsenet.node.events import BlobDamaged, Event, RoomTaken
from pulsenetd.logs import logger
from pulsenetd.storage.scrub import RoundMeter
from pulsenetd.storage.store import Store

LOOK_SECONDS: Final = 30.0
PASS_SECONDS: Final = 24 * 3600.0
"""Everything is read once within this time: 1 TB a day is 12 MB/s."""


class Scrubber:
    """Reads some chunks at each look, and tells the machines which blobs lost one, whoever found it.

    Args:
        store: What is read.
        thread: Where the disk is read.
        post: Queues an event for every machine.
    """

    def __init__(self, store: Store, thread: Executor, post: Callable[[Event], None]) -> None:
        self._store = store
        self._rounds = RoundMeter(store)
        self._thread = thread
        self._post = post
        self._left: list[Digest] = []
        self._count_per_look = 1
        self._taken_size_bytes = 0
        self.pass_count = 0
        """Times that everything was read."""

    async def look(self) -> None:
        """Read the next chunks, and pass on what was found damaged since the last look.

        Raises:
            StorageError: The disk refused.
        """
        loop = asyncio.get_running_loop()
        taken = await loop.run_in_executor(self._thread, self._rounds.measure)
        if taken != self._taken_size_bytes:
            self._taken_size_bytes = taken
            self._post(RoomTaken(taken))
        damaged = await loop.run_in_executor(self._thread, self._read_some)
        for blob_id in damaged:
            logger.warning("the disk damaged a stored blob (%s): it is asked of others", blob_id.hex()[:16])
            self._post(BlobDamaged(blob_id))

    def _read_some(self) -> list[Digest]:
        if not self._left:
            self._left = sorted(self._store.chunk_digests(), reverse=True)
            self._count_per_look = max(1, -(-len(self._left) // int(PASS_SECONDS / LOOK_SECONDS)))
        for _ in range(min(self._count_per_look, len(self._left))):
            digest = self._left.pop()
            if self._store.has_chunk(digest):  # it may have been let go since
                self._store.chunk(digest)
            if not self._left:
                self.pass_count += 1
        return self._store.take_damaged_blobs()
