"""Frames of the hand-off on a Unix stream socket.

u32 little-endian size of the body, u8 message number, u8 count of file descriptors that travel with the frame's first
byte (0 or 1), then the body in canonical msgpack.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import Final

from pulsenet import limits
from pulsenet.errors import LocalProtocolError, RemoteProtocolError
from pulsenet.local.protocol import MESSAGE_TYPES, LocalMessage
from pulsenet.wire.schema import decode_value, encode_value

FRAME_SIZE_BYTES_MAX: Final = limits.TABLE_SIZE_BYTES_MAX + (1 << 20)
"""The largest body: a parameter table, or a reply full of rollout batches."""

_NUMBERS: Final = {cls: number for number, cls in MESSAGE_TYPES.items()}
_HEADER: Final = struct.Struct("<IBB")

HEADER_SIZE_BYTES: Final = _HEADER.size


def encode_frame(message: LocalMessage, *, descriptor_count: int = 0) -> bytes:
    """Return the bytes of one frame.

    Raises:
        LocalProtocolError: The message breaks its own bounds.
    """
    body = encode_value(message)
    if len(body) > FRAME_SIZE_BYTES_MAX:
        raise LocalProtocolError(f"a {type(message).__name__} of {len(body)} bytes, {FRAME_SIZE_BYTES_MAX} allowed")
    return _HEADER.pack(len(body), _NUMBERS[type(message)], descriptor_count) + body


@dataclass(slots=True)
class Frame:
    """A decoded message and the descriptor that came with it, which the receiver owns."""

    message: LocalMessage
    descriptor: int | None

    def take_descriptor(self) -> int:
        """Return the descriptor; the caller owns it from now on.

        Raises:
            RemoteProtocolError: None came (``handoff-descriptor``).
        """
        if self.descriptor is None:
            raise RemoteProtocolError("handoff-descriptor", "the frame came without its memory")
        descriptor, self.descriptor = self.descriptor, None
        return descriptor

    def close(self) -> None:
        """Close a descriptor nobody took."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class FrameReader:
    """Puts frames together from what a socket yields. Feed it at most :attr:`wanted_size_bytes` at a time."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._descriptors: list[int] = []
        self._body_size_bytes: int | None = None

    @property
    def wanted_size_bytes(self) -> int:
        """Bytes still missing from the header, or from the body of the frame in work."""
        whole = HEADER_SIZE_BYTES + (self._body_size_bytes or 0)
        return whole - len(self._buffer)

    @property
    def is_between_frames(self) -> bool:
        """Whether the stream may end here."""
        return not self._buffer

    def feed(self, data: bytes, descriptors: list[int]) -> Frame | None:
        """Take what was read, and return the frame it completes.

        Raises:
            RemoteProtocolError: ``framing``, ``message-unknown``, ``decode`` or ``schema``; descriptors are closed.
        """
        self._descriptors += descriptors
        self._buffer += data
        try:
            return self._advance()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close descriptors of a frame that never became whole."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def _advance(self) -> Frame | None:
        if len(self._descriptors) > 1:
            raise RemoteProtocolError("framing", "more than one descriptor in a frame")
        if len(self._buffer) < HEADER_SIZE_BYTES:
            return None
        size_bytes, number, descriptor_count = _HEADER.unpack_from(self._buffer)
        if size_bytes > FRAME_SIZE_BYTES_MAX or descriptor_count > 1:
            raise RemoteProtocolError("framing", f"{size_bytes} bytes and {descriptor_count} descriptors declared")
        self._body_size_bytes = size_bytes
        if len(self._buffer) < HEADER_SIZE_BYTES + size_bytes:
            return None
        if len(self._descriptors) != descriptor_count:
            raise RemoteProtocolError(
                "framing", f"{descriptor_count} descriptors declared, {len(self._descriptors)} came"
            )
        message_type = MESSAGE_TYPES.get(number)
        if message_type is None:
            raise RemoteProtocolError("message-unknown", f"number {number}")
        message = decode_value(message_type, bytes(self._buffer[HEADER_SIZE_BYTES:]))
        descriptor = self._descriptors.pop() if self._descriptors else None
        self._buffer.clear()
        self._body_size_bytes = None
        return Frame(message, descriptor)
