"""Blobs as lists of chunks: cutting, naming, checking (SPEC section 5).

An encoded chunk list is 24 bytes of header, the magic ``PNCHUNK1``, the u32 chunk count, a u32 zero and
the u64 blob size, then per chunk its u32 size and its 32-byte BLAKE3; all integers little-endian. The
blob's id is the BLAKE3 of these bytes. A blob of 0 bytes has no chunks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from pulsenet import limits
from pulsenet.errors import IntegrityError, LocalProtocolError, RemoteProtocolError
from pulsenet.ids import Digest, compute_digest

MAGIC: Final = b"PNCHUNK1"
_HEADER: Final = struct.Struct("<8sIIQ")
_ENTRY: Final = struct.Struct("<I32s")

FIRST_CHUNK_SIZE_BYTES: Final = 1 << 16
"""Of a blob whose chunks grow: four of them take half a second at 4 Mbit/s."""

CHUNKS_BEFORE: Final = 256
"""So many chunks of twice the size fit into what lies before, when the size of chunks that grow doubles."""

Chunk = tuple[Digest, bytes]
"""A chunk and the digest that names it."""


@dataclass(frozen=True)  # no slots: the cached properties need a place
class ChunkList:
    """The chunks of one blob in order, each as (size in bytes, digest).

    A digest may occur more than once: equal chunks are one chunk.
    """

    entries: tuple[tuple[int, Digest], ...]

    @cached_property
    def size_bytes(self) -> int:
        """Size of the blob."""
        return sum(size_bytes for size_bytes, _ in self.entries)

    @cached_property
    def blob_id(self) -> Digest:
        """Digest of the encoded list; it names the blob."""
        return compute_digest(self.encode())

    @property
    def digests(self) -> tuple[Digest, ...]:
        """Each distinct chunk once, in the order of its first use."""
        return tuple(dict.fromkeys(digest for _, digest in self.entries))

    def encode(self) -> bytes:
        """Return the only encoding of this list.

        Raises:
            LocalProtocolError: a chunk size or the count is outside the limits.
        """
        if len(self.entries) > limits.CHUNK_LIST_ENTRIES_MAX:
            raise LocalProtocolError(f"{len(self.entries)} chunks, at most {limits.CHUNK_LIST_ENTRIES_MAX} allowed")
        for size_bytes, digest in self.entries:
            if not 1 <= size_bytes <= limits.CHUNK_SIZE_BYTES_MAX or len(digest) != 32:
                raise LocalProtocolError(f"chunk of {size_bytes} bytes with a digest of {len(digest)} bytes")
        header = _HEADER.pack(MAGIC, len(self.entries), 0, self.size_bytes)
        return header + b"".join(_ENTRY.pack(size_bytes, digest) for size_bytes, digest in self.entries)

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> ChunkList:
        """Return the list encoded in ``data``.

        Raises:
            RemoteProtocolError: ``chunk-list``.
        """
        if len(data) < _HEADER.size:
            raise RemoteProtocolError("chunk-list", f"{len(data)} bytes hold no header")
        magic, count, reserved, size_bytes = _HEADER.unpack_from(data)
        if magic != MAGIC or reserved != 0:
            raise RemoteProtocolError("chunk-list", "unknown header")
        if count > limits.CHUNK_LIST_ENTRIES_MAX or len(data) != _HEADER.size + count * _ENTRY.size:
            raise RemoteProtocolError("chunk-list", f"{count} chunks declared in {len(data)} bytes")
        entries = tuple([(size, Digest(digest)) for size, digest in _ENTRY.iter_unpack(data[_HEADER.size :])])
        if not all(1 <= size <= limits.CHUNK_SIZE_BYTES_MAX for size, _ in entries):
            raise RemoteProtocolError("chunk-list", f"a chunk is outside 1..{limits.CHUNK_SIZE_BYTES_MAX} bytes")
        if len(set(entries)) != len({digest for _, digest in entries}):
            raise RemoteProtocolError("chunk-list", "one digest has two sizes")
        chunk_list = cls(entries)
        if chunk_list.size_bytes != size_bytes:
            raise RemoteProtocolError("chunk-list", f"{size_bytes} bytes declared, {chunk_list.size_bytes} listed")
        return chunk_list


def split_digests(encoded: bytes, count: int) -> Iterator[list[Digest]]:
    """Yield the digests of a list's entries in order, so many at a time.

    Args:
        encoded: A list that was decoded before: nothing is checked again, for this is asked about lists of a million.
        count: Entries at a time; the last may be fewer.
    """
    step = count * _ENTRY.size
    for start in range(_HEADER.size, len(encoded), step):
        yield [Digest(digest) for _, digest in _ENTRY.iter_unpack(encoded[start : start + step])]


def compute_list_size_bytes_max(blob_size_bytes: int) -> int:
    """Return the most bytes the chunk list of a blob of this signed size may have.

    A requester refuses a longer list before it fetches it: full chunks, and one short chunk a tensor.
    """
    full = blob_size_bytes // limits.CHUNK_SIZE_BYTES_MAX
    count = min(limits.CHUNK_LIST_ENTRIES_MAX, blob_size_bytes, full + limits.TENSORS_MAX + 1)
    return _HEADER.size + count * _ENTRY.size


def open_chunk_list(data: bytes | bytearray | memoryview, *, blob_id: Digest, size_bytes: int) -> ChunkList:
    """Return the list in ``data`` if it is the one named by ``blob_id`` and describes ``size_bytes`` bytes.

    Raises:
        IntegrityError: the digest or the blob's size is not the signed one.
        RemoteProtocolError: ``chunk-list``.
    """
    if compute_digest(data) != blob_id:
        raise IntegrityError(f"chunk list of {len(data)} bytes is not the one named {blob_id.hex()}")
    chunk_list = ChunkList.decode(data)
    if chunk_list.size_bytes != size_bytes:
        raise IntegrityError(f"chunk list names {chunk_list.size_bytes} bytes, {size_bytes} were signed")
    return chunk_list


class ChunkCutter:
    """Cuts a stream of pieces into chunks of ``CHUNK_SIZE_BYTES``, starting afresh at each boundary.

    Pieces may have any size; the chunks depend only on the bytes and the boundaries.
    """

    __slots__ = ("_buffer", "_chunk_size_bytes", "_entries", "_finished")

    def __init__(self, chunk_size_bytes: int = limits.CHUNK_SIZE_BYTES) -> None:
        if not 1 <= chunk_size_bytes <= limits.CHUNK_SIZE_BYTES_MAX:
            raise LocalProtocolError(f"chunk size {chunk_size_bytes} outside 1..{limits.CHUNK_SIZE_BYTES_MAX}")
        self._chunk_size_bytes = chunk_size_bytes
        self._buffer = bytearray()
        self._entries: list[tuple[int, Digest]] = []
        self._finished = False

    def feed(self, piece: bytes | bytearray | memoryview) -> list[Chunk]:
        """Take more of the blob and return the chunks it completes."""
        assert not self._finished
        view = memoryview(piece).cast("B")
        chunks: list[Chunk] = []
        start = 0
        while start < len(view):
            end = start + self._chunk_size_bytes - len(self._buffer)
            self._buffer += view[start:end]
            start = end
            if len(self._buffer) == self._chunk_size_bytes:
                chunks += self.boundary()
        return chunks

    def boundary(self) -> list[Chunk]:
        """End the chunk in work, so that the next byte starts a new one; return what that completes."""
        if not self._buffer:
            return []
        if len(self._entries) == limits.CHUNK_LIST_ENTRIES_MAX:
            raise LocalProtocolError(f"a blob has more than {limits.CHUNK_LIST_ENTRIES_MAX} chunks")
        data = bytes(self._buffer)
        self._buffer.clear()
        digest = compute_digest(data)
        self._entries.append((len(data), digest))
        return [(digest, data)]

    def finish(self) -> list[Chunk]:
        """End the blob and return its last chunk, if any is left."""
        last = self.boundary()
        self._finished = True
        return last

    @property
    def chunk_list(self) -> ChunkList:
        """The finished blob's list."""
        assert self._finished
        return ChunkList(tuple(self._entries))


class GrowingCutter(ChunkCutter):
    """Cuts short chunks first and longer ones behind them (SPEC section 5), so that small blobs have dozens too.

    Members of a mixing fetch from one another over the connection on which they send, so a request waits behind the
    chunks that its sender owes. Where blobs are small, or links slow, chunks of a MiB would make it wait for seconds.
    """

    __slots__ = ("_size_bytes",)

    def __init__(self) -> None:
        super().__init__(FIRST_CHUNK_SIZE_BYTES)
        self._size_bytes = 0

    def boundary(self) -> list[Chunk]:
        """End the chunk in work; the next one is as long as its place in the blob allows."""
        done = super().boundary()
        self._size_bytes += sum(len(data) for _, data in done)
        while 2 * self._chunk_size_bytes <= min(self._size_bytes // CHUNKS_BEFORE, limits.CHUNK_SIZE_BYTES):
            self._chunk_size_bytes *= 2
        return done
