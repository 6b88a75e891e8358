"""Blobs of rounds between a training process and the store: put part by part, read part by part, bounded memory."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import dataclass

from pulsenet.errors import LocalProtocolError, RemoteProtocolError, StorageError
from pulsenet.ids import Digest
from pulsenet.local.shared_memory import Bytes, create_memory, seal_snapshot, write_at
from pulsenet.wire.chunks import ChunkList
from pulsenet.wire.sections import BlobCutter
from pulsenetd.storage.blob_writer import BlobWriter
from pulsenetd.storage.store import Store

MEMORY_NAME = "pulsenet-blob-part"


@dataclass(frozen=True, slots=True)
class ReadPart:
    """Bytes of a blob, in a sealed memfd that its receiver owns."""

    descriptor: int
    size_bytes: int
    is_last: bool


class RoundBlobs:
    """What one training process puts and reads. All methods block; calls may come from several threads.

    Args:
        store: Where the blobs go.
        left: Blobs that earlier processes put, shared by all of a node: they are let go as well.
    """

    def __init__(self, store: Store, left: set[Digest] | None = None) -> None:
        self._store = store
        self._left = set() if left is None else left
        self._mutex = threading.Lock()
        self._writer: BlobWriter | None = None
        self._size_bytes = 0
        self._made: dict[Digest, int] = {}
        self._made_before: tuple[Digest, ...] = ()
        self._last_list: tuple[Digest, ChunkList] | None = None

    def put_part(
        self, data: Bytes, *, is_last: bool, size_bytes_max: int, is_first: bool = True
    ) -> tuple[Digest | None, int]:
        """Append bytes to the blob in work; whole, it is durable.

        Args:
            data: The bytes.
            is_last: Whether the blob ends with them.
            size_bytes_max: The most that a blob may have.
            is_first: Whether they begin a blob; one in work is given up.

        Returns:
            The blob's id once it is whole, and its size so far.

        Raises:
            StorageError: The disk refused; nothing of the blob stays.
            RemoteProtocolError: ``handoff-size``: it outgrows its limit, ``message-unexpected``: nothing is in work, or
                ``decode``: it begins like a contribution and is none; nothing of it stays either.
        """
        with self._mutex:
            if is_first:
                self._abandon()
            elif self._writer is None:
                raise RemoteProtocolError("message-unexpected", "a part of no blob")
            try:
                if self._size_bytes + data.size > size_bytes_max:
                    raise RemoteProtocolError("handoff-size", f"a blob of more than {size_bytes_max} bytes")
                self._store.require_space(data.size)
                if self._writer is None:
                    self._writer = self._store.begin_blob(BlobCutter())
                self._writer.feed(data.data)
                self._size_bytes += data.size
                size_bytes = self._size_bytes
                if not is_last:
                    return None, size_bytes
                blob_id = self._writer.finish().blob_id
            except (StorageError, RemoteProtocolError):
                self._abandon()
                raise
            except LocalProtocolError as error:
                self._abandon()
                raise RemoteProtocolError("decode", str(error)) from error
            self._writer, self._size_bytes = None, 0
            self._made[blob_id] = size_bytes
            return blob_id, size_bytes

    def made_size_bytes(self, blob_id: Digest) -> int | None:
        """Return the size of a blob that was put here, if it is still kept for whoever names it."""
        return self._made.get(blob_id)

    def hand_over(self, blob_id: Digest) -> None:
        """Let a machine decide from now on how long a blob that was put here stays: until it releases it."""
        with self._mutex:
            self._made.pop(blob_id, None)
            self._store.keep_blob(blob_id)

    def let_go(self) -> None:
        """A round is over: blobs put before the round before, which no record names by now, are deleted."""
        with self._mutex:
            before, self._made_before = self._made_before, (*self._made, *(self._left - set(self._made)))
            self._left.clear()
            for blob_id in before:
                self._made.pop(blob_id, None)
                self._store.discard_blob(blob_id)

    def close(self) -> None:
        """Give up the blob in work, and leave those that are whole to the next process."""
        with self._mutex:
            self._left.update(self._made, self._made_before)
            self._abandon()

    def _abandon(self) -> None:
        writer, self._writer, self._size_bytes = self._writer, None, 0
        if writer is not None:
            writer.abandon()

    def read_part(self, blob_id: Digest, offset_bytes: int, size_bytes_max: int) -> ReadPart:
        """Copy bytes of a blob into a sealed memfd.

        Raises:
            StorageError: ``not-found``, ``range`` for an offset at or beyond the end, ``damaged`` for a chunk that is
                missing or was damaged and is deleted now, like others of the blob, or ``memory``.
        """
        chunk_list = self._find_list(blob_id)
        if not 0 <= offset_bytes < chunk_list.size_bytes:
            raise StorageError(f"offset {offset_bytes} of a blob of {chunk_list.size_bytes} bytes", "range")
        size_bytes = min(size_bytes_max, chunk_list.size_bytes - offset_bytes)
        descriptor = create_memory(MEMORY_NAME, size_bytes)
        try:
            self._copy(blob_id, chunk_list, descriptor, offset_bytes, size_bytes)
            seal_snapshot(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return ReadPart(descriptor, size_bytes, offset_bytes + size_bytes == chunk_list.size_bytes)

    def _find_list(self, blob_id: Digest) -> ChunkList:
        known = self._last_list
        if known is not None and known[0] == blob_id:
            return known[1]
        chunk_list = self._store.read_list(blob_id)
        if chunk_list is None:
            raise StorageError("no such blob is held", "not-found")
        self._last_list = (blob_id, chunk_list)
        return chunk_list

    def _copy(self, blob_id: Digest, chunk_list: ChunkList, descriptor: int, start: int, size_bytes: int) -> None:
        at = 0
        for chunk_size_bytes, digest in chunk_list.entries:
            low, high = max(at, start), min(at + chunk_size_bytes, start + size_bytes)
            if low < high:
                data = self._store.chunk(digest)
                if data is None:
                    # Damage seldom comes alone: reading the blob finds the rest of it, so that one fetch mends all.
                    with suppress(StorageError):
                        for _ in self._store.read_blob(blob_id):
                            pass
                    raise StorageError("a chunk of the blob is missing or damaged", "damaged")
                write_at(descriptor, memoryview(data)[low - at : high - at], low - start)
            at += chunk_size_bytes
            if at >= start + size_bytes:
                return
