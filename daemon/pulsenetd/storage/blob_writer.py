"""Writes a blob made here, chunk by chunk; made by :meth:`pulsenetd.storage.store.Store.writing_blob`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pulsenet.ids import Digest
from pulsenet.wire.chunks import ChunkCutter, ChunkList
from pulsenet.wire.sections import BlobCutter
from pulsenetd.storage.chunk_files import ChunkFiles


class BlobWriter:
    """Cuts the bytes fed to it into chunks and keeps each.

    Args:
        chunks: Where they are written.
        cutter: Says where they begin.
        hold: Told of chunks that a blob names from now on.
        let_go: Told that this blob does not name them any more.
        keep_list: Makes the list durable, and names its chunks.
    """

    def __init__(
        self,
        chunks: ChunkFiles,
        cutter: ChunkCutter | BlobCutter,
        *,
        hold: Callable[[Iterable[Digest]], None],
        let_go: Callable[[Iterable[Digest]], None],
        keep_list: Callable[[ChunkList], None],
    ) -> None:
        self._chunks = chunks
        self._cutter = cutter
        self._hold = hold
        self._drop = let_go
        self._keep_list = keep_list
        self._held: set[Digest] = set()

    def feed(self, piece: bytes | bytearray | memoryview) -> None:
        """Append bytes to the blob.

        Raises:
            StorageError: The disk refused.
        """
        self._keep(self._cutter.feed(piece))

    def boundary(self) -> None:
        """Let the next byte start a new chunk."""
        assert not isinstance(self._cutter, BlobCutter)
        self._keep(self._cutter.boundary())

    def finish(self) -> ChunkList:
        """Make the blob durable and servable, and return its list.

        It stays only if a record that names it is committed: see :meth:`pulsenetd.storage.store.Store.discard_blob`.
        """
        self._keep(self._cutter.finish())
        self._chunks.sync(self._held)
        chunk_list = self._cutter.chunk_list
        self._keep_list(chunk_list)
        self._let_go()
        return chunk_list

    def abandon(self) -> None:
        """Delete what was written, but for chunks other blobs name; does nothing after ``finish``."""
        self._let_go()

    def _keep(self, chunks: Iterable[tuple[Digest, bytes]]) -> None:
        for digest, data in chunks:
            if digest not in self._held:
                # Referenced before it is written: deleting another blob must not take it away.
                self._hold([digest])
                self._held.add(digest)
                self._chunks.write(digest, data)

    def _let_go(self) -> None:
        held, self._held = self._held, set()
        self._drop(held)
