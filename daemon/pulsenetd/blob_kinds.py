"""What kind of blob a request for chunks is about, found in the signed records that name blobs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from itertools import chain
from typing import Final

from pulsenet.chain.records import Aggregate, Contribution, Manifest, SignedRecord, StateAnchor
from pulsenet.errors import RemoteProtocolError, StorageError
from pulsenet.ids import Digest
from pulsenet.wire.messages import GetChunks
from pulsenet.wire.schema import decode_value
from pulsenetd.logs import logger
from pulsenetd.storage.naming import NAMING, find_blobs_of
from pulsenetd.storage.record_cache import RecordCache
from pulsenetd.storage.store import Store

LOOK_SECONDS: Final = 2.0
"""New records are read at most this often, however many unknown blobs are asked for."""

_KINDS: Final = {Contribution.TYPE: "contribution", StateAnchor.TYPE: "state", Aggregate.TYPE: "slice"}


class BlobKinds:
    """Finds kinds; asked once per request.

    Args:
        store: The node's store.
        threads: Where it is read.
        monotonic: Monotonic seconds.
    """

    def __init__(self, store: Store, threads: Executor, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._threads = threads
        self._monotonic = monotonic
        self._records = RecordCache(store, [kind.TYPE for kind in NAMING], _name_blobs)
        self._kinds: dict[Digest, str] = {}
        self._looked_at = float("-inf")

    async def find(self, request: GetChunks) -> str:
        """Return ``patch``, ``skip``, ``anchor``, ``contribution``, ``slice``, ``state``, or ``other``.

        Where the disk fails, or holds what is no record, it is ``other``: no transfer ends for not being counted.
        """
        if request.blob_id is None:
            return "other"
        if request.blob_id not in self._kinds and self._monotonic() >= self._looked_at + LOOK_SECONDS:
            self._looked_at = self._monotonic()
            try:
                self._kinds = await asyncio.get_running_loop().run_in_executor(self._threads, self._read)
            except (StorageError, RemoteProtocolError) as error:
                logger.debug("which blob is of which kind cannot be told: %s", error)
        return self._kinds.get(request.blob_id, "other")

    def _read(self) -> dict[Digest, str]:
        return dict(chain.from_iterable(self._records.look()))


def _name_blobs(record: SignedRecord) -> list[tuple[Digest, str]]:
    if record.type == Manifest.TYPE:
        manifest = decode_value(Manifest, record.payload)
        return [(manifest.blob_id, str(manifest.kind))]
    return [(blob_id, _KINDS[record.type]) for blob_id in find_blobs_of(record)]
