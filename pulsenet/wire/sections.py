"""Chunks of a contribution: each section starts one, so that a slice can be fetched alone (SPEC codec, "Sections").

Which chunks hold a section follows from the sizes in the chunk list, so nobody needs a directory.
"""

from __future__ import annotations

from typing import Final

from pulsenet import limits
from pulsenet.codec.contribution import HEADER_SIZE_BYTES, MAGIC
from pulsenet.codec.sections import count_pad_bytes, find_slice_sections
from pulsenet.codec.stream import END_OF_RECORDS
from pulsenet.codec.varint import VarintParser
from pulsenet.errors import LocalProtocolError, RemoteProtocolError
from pulsenet.outer.mixing.payload import MAGIC as MIXING_MAGIC
from pulsenet.wire.chunks import Chunk, ChunkCutter, ChunkList, GrowingCutter

_HEAD_NUMBERS: Final = 2
"""Numbers after the first byte of a record, and of a section's end."""


def list_sections(chunk_list: ChunkList, chunk_size_bytes: int = limits.CHUNK_SIZE_BYTES) -> list[range]:
    """Return which chunks of a contribution's list each section takes, the header first as if it were one.

    Raises:
        RemoteProtocolError: ``chunk-list`` for a list that was not cut at sections.
    """
    # A section is full chunks and then one that is not: its encoding never fills a whole number of them.
    ends = [place + 1 for place, (size, _) in enumerate(chunk_list.entries) if size < chunk_size_bytes]
    if not ends or ends[-1] != len(chunk_list.entries):
        raise RemoteProtocolError("chunk-list", "a contribution that is not cut at its sections")
    return [range(start, end) for start, end in zip((0, *ends), ends, strict=False)]


def find_slice_chunks(
    chunk_list: ChunkList, slice_index: int, slice_count: int, chunk_size_bytes: int = limits.CHUNK_SIZE_BYTES
) -> tuple[range, range]:
    """Return the places of the chunks that hold a contribution's header, and those that hold one slice.

    Raises:
        RemoteProtocolError: ``chunk-list``.
    """
    header, *sections = list_sections(chunk_list, chunk_size_bytes)
    wanted = find_slice_sections(len(sections), slice_index, slice_count)
    if not wanted:
        return header, range(header.stop, header.stop)
    return header, range(sections[wanted.start].start, sections[wanted.stop - 1].stop)


def find_slice_range(chunk_list: ChunkList, slice_index: int, slice_count: int) -> tuple[int, int]:
    """Return where one slice lies in a contribution's blob: offset and size in bytes.

    Raises:
        RemoteProtocolError: ``chunk-list``.
    """
    _, body = find_slice_chunks(chunk_list, slice_index, slice_count)
    sizes = [size for size, _ in chunk_list.entries]
    return sum(sizes[: body.start]), sum(sizes[body.start : body.stop])


class BlobCutter:
    """Cuts any blob of the rounds as the specification says (section 5), by what it begins with."""

    def __init__(self) -> None:
        self._head = b""
        self._cutter: SectionCutter | ChunkCutter | None = None

    def feed(self, piece: bytes | bytearray | memoryview) -> list[Chunk]:
        """Take more of the blob and return the chunks it completes.

        Raises:
            LocalProtocolError: a contribution that is none.
        """
        if self._cutter is not None:
            return self._cutter.feed(piece)
        self._head += bytes(piece)
        return self._begin() if len(self._head) >= len(MAGIC) else []

    def finish(self) -> list[Chunk]:
        """End the blob; return the last chunk, if any is left.

        Raises:
            LocalProtocolError: a contribution that is none.
        """
        chunks = self._begin() if self._cutter is None else []
        assert self._cutter is not None
        return chunks + self._cutter.finish()

    @property
    def chunk_list(self) -> ChunkList:
        """The finished blob's list."""
        assert self._cutter is not None
        return self._cutter.chunk_list

    def _begin(self) -> list[Chunk]:
        if self._head.startswith(MAGIC):
            self._cutter = SectionCutter(HEADER_SIZE_BYTES)
        else:
            self._cutter = GrowingCutter() if self._head.startswith(MIXING_MAGIC) else ChunkCutter()
        return self._cutter.feed(self._head)


class SectionCutter:
    """Cuts a contribution blob into chunks, starting afresh at each section; it reads heads, and no weights.

    Args:
        header_size_bytes: Of the blob's header, which has chunks of its own.

    Raises:
        LocalProtocolError: from :meth:`feed` or :meth:`finish`, bytes that are no contribution blob.
    """

    def __init__(self, header_size_bytes: int) -> None:
        self._cutter = ChunkCutter()
        self._skip = header_size_bytes
        """Bytes that need no look: of the header, of a body, or after an end."""
        self._ends_at_skip = True
        """Whether a section, or the header, ends with them."""
        self._codec_id: int | None = None
        self._numbers: list[int] = []
        self._parser = VarintParser()
        self._section_size_bytes = header_size_bytes

    def feed(self, piece: bytes | bytearray | memoryview) -> list[Chunk]:
        """Take more of the blob and return the chunks it completes."""
        view = memoryview(piece).cast("B")
        chunks: list[Chunk] = []
        start = place = 0
        while place < len(view):
            taken = min(self._skip, len(view) - place)
            self._skip -= taken
            place += taken
            if self._skip:
                break
            if not self._ends_at_skip:
                if place == len(view):
                    break
                self._read(view[place])
                place += 1
            if self._ends_at_skip and not self._skip:
                chunks += [*self._cutter.feed(view[start:place]), *self._cutter.boundary()]
                start, self._ends_at_skip, self._section_size_bytes = place, False, 0
        return chunks + self._cutter.feed(view[start:])

    def finish(self) -> list[Chunk]:
        """End the blob; return the last chunk, if any is left."""
        if self._skip or self._section_size_bytes:
            raise LocalProtocolError("a contribution blob that ends inside a section")
        return self._cutter.finish()

    @property
    def chunk_list(self) -> ChunkList:
        """The finished blob's list."""
        return self._cutter.chunk_list

    def _read(self, byte: int) -> None:
        """Take one byte of a record's head or a section's end."""
        self._section_size_bytes += 1
        if self._codec_id is None:
            self._codec_id, self._numbers = byte, []
            return
        try:
            value = self._parser.feed(byte)
        except RemoteProtocolError as error:
            raise LocalProtocolError(f"no contribution blob: {error}") from error
        if value is None:
            return
        self._numbers.append(value)
        self._parser = VarintParser()
        if len(self._numbers) < _HEAD_NUMBERS:
            return
        if self._codec_id == END_OF_RECORDS:
            self._ends_at_skip = True
            self._skip = count_pad_bytes(self._section_size_bytes)
        else:
            self._skip = self._numbers[1]
        self._section_size_bytes += self._skip
        self._codec_id = None
