"""The training process's end of the rounds: one connection, requests and blobs over it.

Everything here blocks. The connection is of one use: after any error it is closed, and another one begins anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Self, TypeVar

from pulsenet.errors import RemoteProtocolError, StorageError
from pulsenet.ids import Digest
from pulsenet.local import rounds_protocol as local
from pulsenet.local.client import Client
from pulsenet.local.framing import Frame
from pulsenet.local.handover import REPLY_SECONDS_MAX, expect
from pulsenet.local.protocol import LocalMessage
from pulsenet.local.shared_memory import Region, create_memory, seal_snapshot, write_at
from pulsenet.local.sockets import Channel
from pulsenet.tensors.params import ParameterTable

BLOB_SECONDS_MAX: Final = 300.0
"""A part is on the disk by then, or the disk hangs."""

Reply = TypeVar("Reply")
Piece = bytes | memoryview


@dataclass(frozen=True, slots=True)
class StoredBlob:
    """A blob that the daemon stores, durable."""

    blob_id: Digest
    size_bytes: int


class RoundsConnection:
    """Speaks :mod:`pulsenet.local.rounds_protocol` with the daemon.

    Every method may raise ``UnavailableError``, if the daemon is gone or silent, and ``RemoteProtocolError``, if it
    refused or sent something that does not belong there; the connection is closed then.

    Args:
        channel: Attached; owned by this object from now on.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    @classmethod
    def connect(cls, client: Client, timeout_seconds: float) -> Self:
        """Return a connection of its own to a client's daemon, waiting so long for one that is away.

        Raises:
            UnavailableError: It did not come.
        """
        return cls(client.open_channel(timeout_seconds))

    def close(self) -> None:
        """Close it, which tells the daemon that this process is gone; a second call does nothing."""
        self._channel.close()

    def get_settings(self) -> local.RoundSettingsReply:
        """Return what the run says about its rounds (``no-rounds``, ``not-trainer``)."""
        return self._ask(local.GetRoundSettings(), local.RoundSettingsReply)

    def open(self, table: ParameterTable, self_test: Digest) -> None:
        """Take part (``table``, ``self-test``, ``busy``)."""
        self._ask(local.OpenRounds(table.encode(), self_test), local.RoundsOpened)

    def tell(self, message: LocalMessage) -> None:
        """Say something that is only taken."""
        self._ask(message, local.Waiting)

    def await_order(self, wait_seconds: float) -> local.Order | None:
        """Return the oldest order, ``None`` if none came in time."""
        request = local.AwaitOrder(int(wait_seconds * 1000))
        message = self._receive(request, wait_seconds + REPLY_SECONDS_MAX).message
        if isinstance(message, local.NoOrder):
            return None
        if isinstance(message, local.Order):
            return message
        return self._expect(message, local.GoOn)

    def put_blob(self, pieces: Iterable[Piece]) -> StoredBlob:
        """Store a blob; at most two parts of it are in memory.

        Args:
            pieces: At least one byte in all; each is used before the next is asked for.

        Raises:
            StorageError: The daemon's disk does not take it, or there is no shared memory here; the connection stays.
        """
        held: list[bytes] = []
        size_bytes, is_first = 0, True
        for piece in pieces:
            view = memoryview(piece).cast("B")
            while view:
                if size_bytes == local.PART_SIZE_BYTES_MAX:
                    self._put_part(held, size_bytes, is_last=False, is_first=is_first)
                    held, size_bytes, is_first = [], 0, False
                part = view[: local.PART_SIZE_BYTES_MAX - size_bytes]
                # A copy: what the piece shares may change when the next one is made.
                held.append(bytes(part))
                size_bytes += len(part)
                view = view[len(part) :]
        taken = self._put_part(held, size_bytes, is_last=True, is_first=is_first)
        if taken.blob_id is None:
            self.close()
            raise RemoteProtocolError("schema", "a whole blob was taken without its id")
        return StoredBlob(taken.blob_id, taken.encoded_size_bytes)

    def fetch_blob(self, blob_id: Digest, size_bytes: int) -> Iterator[memoryview]:
        """Yield the bytes of a blob that an order names; one part of it is in memory.

        Args:
            blob_id: Its id; the daemon has verified the bytes against it.
            size_bytes: Its size, as the order says; more is never read.

        Raises:
            StorageError: while iterating, the daemon cannot read it; ``reason`` is its code. The connection stays.
        """
        yield from self.fetch_range(blob_id, size_bytes, 0, size_bytes)

    def fetch_range(
        self, blob_id: Digest, blob_size_bytes: int, offset_bytes: int, size_bytes: int
    ) -> Iterator[memoryview]:
        """Yield a part of a blob; as :meth:`fetch_blob`."""
        end_bytes = offset_bytes + size_bytes
        while offset_bytes < end_bytes:
            wanted = min(local.PART_SIZE_BYTES_MAX, end_bytes - offset_bytes)
            request = local.FetchBlobPart(blob_id, offset_bytes, wanted)
            frame = self._receive(request, BLOB_SECONDS_MAX)
            region = self._open_part(frame, wanted, is_end=offset_bytes + wanted == blob_size_bytes)
            offset_bytes += region.size_bytes
            try:
                yield region.bytes.data
            finally:
                region.close()

    def _open_part(self, frame: Frame, wanted: int, *, is_end: bool) -> Region:
        try:
            if isinstance(frame.message, local.NoBlobPart):
                raise StorageError("the daemon cannot read a blob of the rounds", frame.message.reason)
            part = expect(frame.message, local.BlobPart)
            if not 1 <= part.size_bytes <= wanted or part.is_last != (is_end and part.size_bytes == wanted):
                raise RemoteProtocolError("handoff-size", f"{part.size_bytes} of {wanted} bytes of a blob")
            return Region.open_snapshot(frame.take_descriptor(), part.size_bytes)
        except RemoteProtocolError:
            self.close()
            raise
        finally:
            frame.close()

    def _put_part(self, held: list[bytes], size_bytes: int, *, is_last: bool, is_first: bool) -> local.BlobTaken:
        descriptor = create_memory("pulsenet-blob", size_bytes)
        try:
            offset_bytes = 0
            for data in held:
                write_at(descriptor, data, offset_bytes)
                offset_bytes += len(data)
            seal_snapshot(descriptor)
            frame = self._receive(local.PutBlobPart(size_bytes, is_last, is_first), BLOB_SECONDS_MAX, descriptor)
        finally:
            os.close(descriptor)
        if isinstance(frame.message, local.BlobRefused):
            raise StorageError("the daemon's disk does not take a blob of the rounds", frame.message.reason)
        return self._expect(frame.message, local.BlobTaken)

    def _ask(self, message: LocalMessage, reply_type: type[Reply]) -> Reply:
        return self._expect(self._receive(message, REPLY_SECONDS_MAX).message, reply_type)

    def _expect(self, message: LocalMessage, reply_type: type[Reply]) -> Reply:
        try:
            return expect(message, reply_type)
        except RemoteProtocolError:
            self.close()
            raise

    def _receive(self, request: LocalMessage, reply_seconds: float, descriptor: int | None = None) -> Frame:
        try:
            self._channel.send(request, descriptor=descriptor, timeout_seconds=REPLY_SECONDS_MAX)
            return self._channel.receive(reply_seconds)
        except BaseException:
            # Also when the user interrupts: the answer would be taken for that of the next request.
            self.close()
            raise
