"""Messages in length-prefixed frames (SPEC section 3).

A frame is a u32 little-endian length, then that many bytes: one byte of message number and the message's
canonical msgpack. The length counts the number byte, so it is never 0.
"""

from __future__ import annotations

import struct
from typing import Final

from pulsenet import limits
from pulsenet.errors import LocalProtocolError, RemoteProtocolError
from pulsenet.wire.messages import MESSAGE_TYPES, Message
from pulsenet.wire.schema import decode_value, encode_value

LENGTH_SIZE_BYTES: Final = 4
"""The frame's length prefix."""

_NUMBERS: Final = {message_type: number for number, message_type in MESSAGE_TYPES.items()}


def encode_message(message: Message) -> bytes:
    """Return ``message`` as one frame.

    Raises:
        LocalProtocolError: the message breaks its schema or does not fit a frame.
    """
    body = encode_value(message)
    size_bytes = 1 + len(body)
    if size_bytes > limits.FRAME_SIZE_BYTES_MAX:
        raise LocalProtocolError(f"{type(message).__name__} of {size_bytes} bytes does not fit a frame")
    return struct.pack("<IB", size_bytes, _NUMBERS[type(message)]) + body


def decode_message(payload: bytes | bytearray | memoryview) -> Message:
    """Return the message in a frame's payload (the bytes after the length prefix).

    Raises:
        RemoteProtocolError: ``framing``, ``message-unknown``, ``decode`` or ``schema``.
    """
    check_frame_size(len(payload))
    number = payload[0]
    message_type = MESSAGE_TYPES.get(number)
    if message_type is None:
        raise RemoteProtocolError("message-unknown", f"message number {number}")
    return decode_value(message_type, payload[1:])


def check_frame_size(size_bytes: int, size_bytes_max: int = limits.FRAME_SIZE_BYTES_MAX) -> None:
    """Refuse a frame length before anything of the frame is read or allocated.

    Raises:
        RemoteProtocolError: ``framing``.
    """
    if not 1 <= size_bytes <= size_bytes_max:
        raise RemoteProtocolError("framing", f"frame of {size_bytes} bytes, 1..{size_bytes_max} allowed")


class FrameDecoder:
    """Turns the bytes of one direction of a stream into messages, however they are split.

    It buffers at most one frame besides what was fed last. An error is final: the stream is closed, and
    messages that arrived in the same ``feed`` as the fault are dropped with it. Who takes messages one by one
    decodes no more than it is about to answer.
    """

    __slots__ = ("_broken", "_buffer", "size_bytes_max")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._broken = False
        self.size_bytes_max: int = limits.FRAME_SIZE_BYTES_MAX
        """Longest frame taken; a smaller one holds before the Hello came."""

    @property
    def buffered_size_bytes(self) -> int:
        """Bytes held of a frame that is not whole yet."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> list[Message]:
        """Take received bytes and return the messages they complete, in order.

        Raises:
            RemoteProtocolError: ``framing``, ``message-unknown``, ``decode`` or ``schema``.
            LocalProtocolError: fed after an error.
        """
        self.push(data)
        messages: list[Message] = []
        while (message := self.next_message()) is not None:
            messages.append(message)
        return messages

    def push(self, data: bytes | bytearray | memoryview) -> None:
        """Take received bytes without looking at them; :meth:`next_message` does.

        Raises:
            LocalProtocolError: after an error.
        """
        if self._broken:
            raise LocalProtocolError("this stream already broke the specification; close it")
        self._buffer += data

    def next_message(self) -> Message | None:
        """Return the next message, or ``None`` if it is not whole yet.

        Raises:
            RemoteProtocolError: ``framing``, ``message-unknown``, ``decode`` or ``schema``.
        """
        try:
            return self._take_message()
        except RemoteProtocolError:
            self._broken = True
            self._buffer.clear()
            raise

    def eof(self) -> None:
        """Say that the stream ended.

        Raises:
            RemoteProtocolError: ``framing`` when it ended inside a frame.
        """
        if self._buffer:
            self._broken = True
            raise RemoteProtocolError("framing", f"stream ended {len(self._buffer)} bytes into a frame")

    def _take_message(self) -> Message | None:
        if len(self._buffer) < LENGTH_SIZE_BYTES:
            return None
        size_bytes = int.from_bytes(self._buffer[:LENGTH_SIZE_BYTES], "little")
        check_frame_size(size_bytes, self.size_bytes_max)
        end = LENGTH_SIZE_BYTES + size_bytes
        if len(self._buffer) < end:
            return None
        message = decode_message(bytes(self._buffer[LENGTH_SIZE_BYTES:end]))
        del self._buffer[:end]
        return message
