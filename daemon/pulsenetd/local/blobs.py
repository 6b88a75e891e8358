"""Blobs between a training process and the store, over its connection: put part by part, fetched part by part."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from pulsenet.errors import RemoteProtocolError, StorageError
from pulsenet.ids import Digest
from pulsenet.local import rounds_protocol as local
from pulsenet.local.framing import Frame
from pulsenet.local.shared_memory import Region
from pulsenetd.local.link import Link
from pulsenetd.logs import logger
from pulsenetd.metrics import Metrics
from pulsenetd.storage.round_blobs import ReadPart, RoundBlobs

Result = TypeVar("Result")


class BlobTraffic:
    """Answers what a session is asked about blobs.

    Args:
        link: The connection.
        blobs: What this process puts and reads.
        threads: Where blobs are written and read.
        metrics: Where refusals are counted.
        size_bytes_max: Of a blob.
        on_damage: Told that a blob lost chunks, which are to be fetched again.
    """

    def __init__(
        self,
        link: Link,
        blobs: RoundBlobs,
        threads: Executor,
        metrics: Metrics,
        *,
        size_bytes_max: int,
        on_damage: Callable[[], None],
    ) -> None:
        self._link = link
        self.blobs = blobs
        self._threads = threads
        self._metrics = metrics
        self._size_bytes_max = size_bytes_max
        self._on_damage = on_damage
        self._refused_count = 0
        """Parts that the disk refused since it took one."""

    async def put(self, message: local.PutBlobPart, frame: Frame) -> None:
        """Take the next bytes of a blob, and say so.

        Raises:
            RemoteProtocolError: ``handoff-size``, or what the memory or the blob breaks.
        """
        if not 1 <= message.size_bytes <= local.PART_SIZE_BYTES_MAX:
            raise RemoteProtocolError("handoff-size", f"a part of {message.size_bytes} bytes")
        region: Region | None = None
        try:
            region = opened = Region.open_snapshot(frame.take_descriptor(), message.size_bytes)
            blob_id, size_bytes = await self.run(
                lambda: self.blobs.put_part(
                    opened.bytes,
                    is_first=message.is_first,
                    is_last=message.is_last,
                    size_bytes_max=self._size_bytes_max,
                )
            )
        except StorageError as error:
            self._metrics.count("rejected", error.reason)
            # The process tries again, for as long as the disk is full: said once, counted each time.
            if not self._refused_count:
                logger.warning("a blob of the training process was not taken: %s", error)
            self._refused_count += 1
            await self._link.send(local.BlobRefused(error.reason))
        else:
            if self._refused_count:
                logger.info("blobs are taken again, after %d that were not", self._refused_count)
                self._refused_count = 0
            await self._link.send(local.BlobTaken(blob_id, size_bytes))
        finally:
            if region is not None:
                region.close()

    async def fetch(self, message: local.FetchBlobPart) -> None:
        """Send bytes of a blob, or why not.

        Raises:
            RemoteProtocolError: ``handoff-size``.
        """
        if not 1 <= message.size_bytes_max <= local.PART_SIZE_BYTES_MAX:
            raise RemoteProtocolError("handoff-size", f"a part of {message.size_bytes_max} bytes is asked for")
        try:
            part: ReadPart = await self.run(
                lambda: self.blobs.read_part(message.blob_id, message.offset_bytes, message.size_bytes_max)
            )
        except StorageError as error:
            self._metrics.count("rejected", error.reason)
            if error.reason == "damaged":
                logger.warning("a blob that the training process wants lost chunks on the disk")
                self._on_damage()
            await self._link.send(local.NoBlobPart(error.reason))
            return
        try:
            await self._link.send(local.BlobPart(part.size_bytes, part.is_last), descriptor=part.descriptor)
        finally:
            os.close(part.descriptor)

    def check_put(self, blob_id: Digest, size_bytes: int) -> None:
        """Refuse a blob that this process did not put.

        Raises:
            RemoteProtocolError: ``not-found``.
        """
        if self.blobs.made_size_bytes(blob_id) != size_bytes:
            raise RemoteProtocolError("not-found", f"no blob of {size_bytes} bytes with this id was put")

    async def let_go(self) -> None:
        """A round is over: delete what nobody named."""
        await self._delete(self.blobs.let_go)

    async def close(self) -> None:
        """The process is gone: give up the blob in work."""
        await self._delete(self.blobs.close)

    async def _delete(self, work: Callable[[], None]) -> None:
        try:
            await self.run(work)
        except StorageError as error:
            # What stays takes room and harms nothing; the next start of the node deletes it.
            logger.warning("blobs that the training process left could not be deleted: %s", error)

    async def run(self, work: Callable[[], Result]) -> Result:
        """Do work that blocks."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
