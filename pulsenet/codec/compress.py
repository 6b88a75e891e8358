"""Planes: runs of similar bytes, stored as they are or as one zstandard frame (SPEC codec, "Planes").

A frame is opened only after its own header agreed with the size the format expects, so no frame can make the
receiver spend more memory than the block it belongs to.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zstandard

from pulsenet.codec.varint import BodyReader, encode_varint
from pulsenet.errors import RemoteProtocolError

ZSTD_LEVEL: Final = 1
"""Measured: higher levels gain nothing on these planes."""

COMPRESS_SIZE_BYTES_MIN: Final = 32
"""Shorter planes cannot win back a frame's own header."""

WINDOW_SIZE_BYTES_MAX: Final = 8 << 20
"""No plane is longer, so no frame may ask for a larger window."""

Bytes = npt.NDArray[np.uint8]


_idle_compressors: Final[list[zstandard.ZstdCompressor]] = []
"""A compressor is costly to make and serves one thread at a time: whoever needs one takes it out and puts it back."""


class PlaneEncoder:
    """Encodes planes.

    Args:
        compresses: Whether frames are tried. Another release of zstandard may write other frames; without them the
            same planes are the same bytes everywhere.
    """

    def __init__(self, *, compresses: bool = True) -> None:
        self._compresses = compresses

    def encode(self, raw: Bytes) -> bytes:
        """Return the plane's size and kind, then its bytes; compressed where that is shorter."""
        data = raw.tobytes()
        if self._compresses and len(data) >= COMPRESS_SIZE_BYTES_MIN:
            frame = _compress(data)
            if len(frame) < len(data):
                return encode_varint(len(frame) << 1 | 1) + frame
        return encode_varint(len(data) << 1) + data

    def encode_integers(self, bits: npt.NDArray[Any]) -> bytes:
        """Return the byte planes of unsigned integers, least significant byte first, each encoded."""
        return b"".join(self.encode(plane) for plane in split_bytes(bits))


def _compress(data: bytes) -> bytes:
    try:
        compressor = _idle_compressors.pop()
    except IndexError:
        compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=False, write_dict_id=False)
    frame = compressor.compress(data)
    _idle_compressors.append(compressor)
    return frame


class PlaneReader(BodyReader):
    """Reads the fields of one record's body, planes among them."""

    def __init__(self, body: bytes | bytearray | memoryview) -> None:
        super().__init__(body)
        self._decompressor: zstandard.ZstdDecompressor | None = None

    def read_plane(self, *, size_min: int, size_max: int) -> Bytes:
        """Return the next plane's raw bytes, of ``size_min`` to ``size_max`` bytes.

        Raises:
            RemoteProtocolError: ``patch-plane`` for a size outside these bounds, or a frame that does not state
                its size, is damaged, or is followed by anything; ``patch-truncated``, ``patch-varint``.
        """
        head = self.read_varint()
        stored = self.take(head >> 1)
        if head & 1:
            self._decompressor = self._decompressor or make_decompressor()
            raw = open_frame(stored, self._decompressor, size_min=size_min, size_max=size_max, code="patch-plane")
            return np.frombuffer(raw, np.uint8)
        if not size_min <= len(stored) <= size_max:
            raise RemoteProtocolError("patch-plane", f"{len(stored)} bytes, expected {size_min} to {size_max}")
        return np.frombuffer(stored, np.uint8)

    def read_integers(self, *, size_bytes: int, count: int) -> npt.NDArray[Any]:
        """Return ``count`` unsigned integers of ``size_bytes`` each from their byte planes; errors as a plane's."""
        return join_bytes([self.read_plane(size_min=count, size_max=count) for _ in range(size_bytes)])


def open_frame(
    frame: bytes | memoryview, decompressor: zstandard.ZstdDecompressor, *, size_min: int, size_max: int, code: str
) -> bytes:
    """Return the content of one zstandard frame, of ``size_min`` to ``size_max`` bytes and at least one.

    Raises:
        RemoteProtocolError: ``code``: the frame does not state such a size, is damaged, or is followed by anything.
    """
    try:
        header = zstandard.get_frame_parameters(frame)
    except zstandard.ZstdError as error:
        raise RemoteProtocolError(code, f"no zstandard frame: {error}") from error
    # An unknown size reads as nearly 2^64. Size 0 is refused because the decompressor then skips every check.
    if not max(size_min, 1) <= header.content_size <= size_max:
        raise RemoteProtocolError(code, f"a frame of {header.content_size} bytes, expected {size_min} to {size_max}")
    if header.dict_id != 0 or header.window_size > WINDOW_SIZE_BYTES_MAX:
        raise RemoteProtocolError(code, f"dictionary {header.dict_id}, window {header.window_size}")
    try:
        # It allocates what the header states (checked above), streams into exactly that much, and refuses
        # both more output and unused input.
        raw: bytes = decompressor.decompress(frame, read_across_frames=False, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError) as error:
        raise RemoteProtocolError(code, f"damaged frame: {error}") from error
    if len(raw) != header.content_size:
        raise RemoteProtocolError(code, f"a frame gave {len(raw)} bytes, not {header.content_size}")
    return raw


def make_decompressor() -> zstandard.ZstdDecompressor:
    """Return what opens frames of any window that planes may have."""
    return zstandard.ZstdDecompressor(max_window_size=WINDOW_SIZE_BYTES_MAX)


def split_bytes(bits: npt.NDArray[Any]) -> list[Bytes]:
    """Return the byte planes of unsigned integers, least significant byte first."""
    width = bits.dtype.itemsize
    by_element = np.ascontiguousarray(bits.astype(f"<u{width}", copy=False)).view(np.uint8).reshape(-1, width)
    return [np.ascontiguousarray(by_element[:, position]) for position in range(width)]


def join_bytes(planes: list[Bytes]) -> npt.NDArray[Any]:
    """Undo :func:`split_bytes`."""
    width = len(planes)
    by_element = np.empty((planes[0].size, width), np.uint8)
    for position, plane in enumerate(planes):
        by_element[:, position] = plane
    return by_element.reshape(-1).view(f"<u{width}")
