"""The bytes of a parameter table: a small canonical subset of msgpack, read without trusting any count.

The reader takes values one at a time in the order the format fixes, so a header that claims four thousand million
items costs nothing: the data ends first.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgpack

from pulsenet import limits
from pulsenet.errors import RemoteProtocolError


@dataclass(frozen=True, slots=True)
class RawTable:
    """What the bytes say, before the table's own rules are checked."""

    tensors: list[tuple[str, str, list[int]]]
    aliases: list[tuple[str, str]]
    excluded: list[str]


def pack_table(table: RawTable) -> bytes:
    """Return the map ``{"aliases", "excluded", "tensors"}`` in that order, as shortest-form msgpack."""
    value = {"aliases": table.aliases, "excluded": table.excluded, "tensors": table.tensors}
    return bytes(msgpack.packb(value, use_bin_type=True))


def unpack_table(data: bytes) -> RawTable:
    """Return what ``data`` says.

    Raises:
        RemoteProtocolError: ``table-decode``.
    """
    reader = _Reader(data)
    reader.expect_map(3)
    reader.expect_key("aliases")
    aliases = []
    for _ in range(reader.read_count(limits.TENSORS_MAX)):
        reader.expect_count(2)
        aliases.append((reader.read_text(), reader.read_text()))
    reader.expect_key("excluded")
    excluded = [reader.read_text() for _ in range(reader.read_count(limits.TENSORS_MAX))]
    reader.expect_key("tensors")
    tensors = []
    for _ in range(reader.read_count(limits.TENSORS_MAX)):
        reader.expect_count(3)
        name, dtype = reader.read_text(), reader.read_text()
        shape = [reader.read_integer() for _ in range(reader.read_count(limits.TENSOR_DIMENSIONS_MAX))]
        tensors.append((name, dtype, shape))
    reader.expect_end()
    return RawTable(tensors=tensors, aliases=aliases, excluded=excluded)


class _Reader:
    """Reads one msgpack value at a time; anything but the asked kind is ``table-decode``."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._offset = 0

    def expect_map(self, count: int) -> None:
        if self._take(1)[0] != 0x80 | count:
            raise self._error("not a map of the right size")

    def expect_key(self, key: str) -> None:
        if self.read_text() != key:
            raise self._error(f"key {key!r} is missing or out of order")

    def expect_count(self, count: int) -> None:
        if self.read_count(count) != count:
            raise self._error(f"not an array of {count}")

    def expect_end(self) -> None:
        if self._offset != len(self._data):
            raise self._error("bytes after the end")

    def read_count(self, count_max: int) -> int:
        head = self._take(1)[0]
        if head & 0xF0 == 0x90:
            count = head & 0x0F
        elif head in (0xDC, 0xDD):
            count = self._take_integer(2 if head == 0xDC else 4)
        else:
            raise self._error("not an array")
        if count > count_max:
            raise self._error(f"an array of {count}, at most {count_max}")
        return count

    def read_text(self) -> str:
        head = self._take(1)[0]
        if head & 0xE0 == 0xA0:
            size_bytes = head & 0x1F
        elif head in (0xD9, 0xDA):
            size_bytes = self._take_integer(1 if head == 0xD9 else 2)
        else:
            raise self._error("not a text")
        if size_bytes > limits.TENSOR_NAME_SIZE_BYTES_MAX:
            raise self._error(f"a text of {size_bytes} bytes")
        try:
            return self._take(size_bytes).decode()
        except UnicodeDecodeError as error:
            raise self._error("a text that is not UTF-8") from error

    def read_integer(self) -> int:
        head = self._take(1)[0]
        if head < 0x80:
            return head
        if 0xCC <= head <= 0xCF:
            return self._take_integer(1 << (head - 0xCC))
        raise self._error("not an unsigned integer")

    def _take_integer(self, size_bytes: int) -> int:
        return int.from_bytes(self._take(size_bytes), "big")

    def _take(self, size_bytes: int) -> bytes:
        taken = self._data[self._offset : self._offset + size_bytes]
        if len(taken) != size_bytes:
            raise self._error("cut short")
        self._offset += size_bytes
        return taken

    def _error(self, detail: str) -> RemoteProtocolError:
        return RemoteProtocolError("table-decode", f"at byte {self._offset}: {detail}")
