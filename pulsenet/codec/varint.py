"""Unsigned LEB128 numbers and a reader that never looks past its bytes (SPEC codec, "Numbers")."""

from __future__ import annotations

from typing import Final

from pulsenet.errors import RemoteProtocolError

VARINT_SIZE_BYTES_MAX: Final = 9
"""Numbers stay below 2^63."""


def encode_varint(value: int) -> bytes:
    """Return ``value`` (0 to 2^63 - 1) as unsigned LEB128 in its shortest form."""
    if 0 <= value < 0x80:
        return bytes((value,))
    assert 0 <= value < 1 << 63
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class VarintParser:
    """Takes a number byte by byte, for a stream that may end anywhere."""

    def __init__(self) -> None:
        self._value = 0
        self._size = 0

    def feed(self, byte: int) -> int | None:
        """Return the number once ``byte`` was its last, else ``None``.

        Raises:
            RemoteProtocolError: ``patch-varint`` when the number is too long or not in its shortest form.
        """
        self._value |= (byte & 0x7F) << (7 * self._size)
        self._size += 1
        if byte >= 0x80:
            if self._size == VARINT_SIZE_BYTES_MAX:
                raise RemoteProtocolError("patch-varint", f"more than {VARINT_SIZE_BYTES_MAX} bytes")
            return None
        if byte == 0 and self._size > 1:
            raise RemoteProtocolError("patch-varint", "not in the shortest form")
        return self._value


class BodyReader:
    """Reads the fields of one record's body; running past its end is ``patch-truncated``."""

    def __init__(self, body: bytes | bytearray | memoryview) -> None:
        self._body = memoryview(body)
        self._offset = 0

    def read_varint(self) -> int:
        """Return the next number."""
        byte = self.read_byte()
        if byte < 0x80:
            return byte
        parser = VarintParser()
        value = parser.feed(byte)
        while value is None:
            value = parser.feed(self.read_byte())
        return value

    def read_byte(self) -> int:
        """Return the next byte."""
        if self._offset == len(self._body):
            raise RemoteProtocolError("patch-truncated", f"a body of {self._offset} bytes")
        self._offset += 1
        return self._body[self._offset - 1]

    def take(self, size_bytes: int) -> memoryview:
        """Return the next ``size_bytes`` bytes without copying them."""
        end = self._offset + size_bytes
        if end > len(self._body):
            raise RemoteProtocolError("patch-truncated", f"{size_bytes} bytes wanted at {self._offset} of a body")
        taken = self._body[self._offset : end]
        self._offset = end
        return taken

    def take_rest(self) -> memoryview:
        """Return all bytes that are left without copying them."""
        return self.take(len(self._body) - self._offset)

    def expect_end(self) -> None:
        """Refuse bytes after the last field (``patch-trailing``)."""
        if self._offset != len(self._body):
            raise RemoteProtocolError("patch-trailing", f"{len(self._body) - self._offset} bytes after a body")
