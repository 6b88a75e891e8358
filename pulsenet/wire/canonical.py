"""A strict reader for the canonical subset of msgpack (SPEC section 2).

The subset is nil, booleans, integers, UTF-8 text, bytes, arrays, and maps whose keys are text in strictly
ascending byte order; every length and integer in its shortest form; no floats, no extension types. The reader
walks bytes that are already in memory and allocates nothing a length claims, only what it returns, so a
five-byte message cannot ask for gigabytes and a nested one cannot exhaust the stack.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from pulsenet import limits
from pulsenet.errors import RemoteProtocolError


class Kind(IntEnum):
    """What the next value is."""

    NIL = 0
    BOOL = 1
    INT = 2
    STR = 3
    BIN = 4
    ARRAY = 5
    MAP = 6


# First byte -> (kind, size of the number that follows, least number that needs this form).
_SIZED: Final[dict[int, tuple[Kind, int, int]]] = {
    0xC4: (Kind.BIN, 1, 0),
    0xC5: (Kind.BIN, 2, 1 << 8),
    0xC6: (Kind.BIN, 4, 1 << 16),
    0xCC: (Kind.INT, 1, 1 << 7),
    0xCD: (Kind.INT, 2, 1 << 8),
    0xCE: (Kind.INT, 4, 1 << 16),
    0xCF: (Kind.INT, 8, 1 << 32),
    0xD9: (Kind.STR, 1, 32),
    0xDA: (Kind.STR, 2, 1 << 8),
    0xDB: (Kind.STR, 4, 1 << 16),
    0xDC: (Kind.ARRAY, 2, 16),
    0xDD: (Kind.ARRAY, 4, 1 << 16),
    0xDE: (Kind.MAP, 2, 16),
    0xDF: (Kind.MAP, 4, 1 << 16),
}

# First byte -> (size of the signed number that follows, greatest number that needs this form).
_SIGNED: Final[dict[int, tuple[int, int]]] = {
    0xD0: (1, -(1 << 5) - 1),
    0xD1: (2, -(1 << 7) - 1),
    0xD2: (4, -(1 << 15) - 1),
    0xD3: (8, -(1 << 31) - 1),
}


class CanonicalReader:
    """Walks one encoded value from its first byte to its last.

    Every method raises ``RemoteProtocolError("decode")`` for bytes outside the subset.
    """

    __slots__ = ("_data", "_depth", "_position")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0
        self._depth = 0

    def read_head(self) -> tuple[Kind, int]:
        """Return the next value's kind and its value (nil 0, booleans, integers), size (text, bytes) or count.

        Counts and sizes were checked against the bytes that are left and against ``MESSAGE_ITEMS_MAX``.
        """
        first = self._take(1)[0]
        if first <= 0x7F:
            return Kind.INT, first
        if first <= 0x8F:
            return Kind.MAP, self._checked_count(first & 0x0F, 2)
        if first <= 0x9F:
            return Kind.ARRAY, self._checked_count(first & 0x0F, 1)
        if first <= 0xBF:
            return Kind.STR, first & 0x1F
        if first >= 0xE0:
            return Kind.INT, first - 0x100
        if first == 0xC0:
            return Kind.NIL, 0
        if first in (0xC2, 0xC3):
            return Kind.BOOL, first - 0xC2
        if first in _SIGNED:
            return Kind.INT, self._read_negative(*_SIGNED[first])
        if first not in _SIZED:
            raise self._error(f"byte 0x{first:02x} starts no value we use (float, extension or reserved)")
        kind, width, least = _SIZED[first]
        number = int.from_bytes(self._take(width), "big")
        if number < least:
            raise self._error(f"{kind.name} {number} is not in its shortest form")
        if kind is Kind.ARRAY or kind is Kind.MAP:
            return kind, self._checked_count(number, 1 if kind is Kind.ARRAY else 2)
        return kind, number

    def take_nil(self) -> bool:
        """Pass over a nil if one comes next, and say whether it did."""
        if self._data[self._position : self._position + 1] == b"\xc0":
            self._position += 1
            return True
        return False

    def read_body(self, size_bytes: int) -> bytes:
        """Return the bytes of a text or bytes value after its head."""
        return self._take(size_bytes)

    def read_text_body(self, size_bytes: int) -> str:
        """Return the text after its head; it must be valid UTF-8."""
        try:
            return self._take(size_bytes).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._error("text is not UTF-8") from error

    def read_key(self, previous: bytes | None) -> bytes:
        """Return the next map key in UTF-8; it must be text and lie above ``previous``."""
        kind, size_bytes = self.read_head()
        if kind is not Kind.STR:
            raise self._error(f"a map key is {kind.name}, not text")
        key = self.read_text_body(size_bytes).encode()
        if previous is not None and key <= previous:
            raise self._error("map keys do not ascend, or one occurs twice")
        return key

    def enter(self) -> None:
        """Step into an array or map; refuses to go deeper than ``MESSAGE_DEPTH_MAX``."""
        self._depth += 1
        if self._depth > limits.MESSAGE_DEPTH_MAX:
            raise self._error(f"nested deeper than {limits.MESSAGE_DEPTH_MAX}")

    def leave(self) -> None:
        """Step out of an array or map."""
        self._depth -= 1

    def skip(self) -> None:
        """Pass over one value of any kind, checking that it is canonical all the way down."""
        kind, argument = self.read_head()
        if kind is Kind.STR:
            self.read_text_body(argument)
        elif kind is Kind.BIN:
            self.read_body(argument)
        elif kind is Kind.ARRAY:
            self.enter()
            for _ in range(argument):
                self.skip()
            self.leave()
        elif kind is Kind.MAP:
            self.enter()
            key = None
            for _ in range(argument):
                key = self.read_key(key)
                self.skip()
            self.leave()

    def finish(self) -> None:
        """Check that nothing follows the value."""
        extra = len(self._data) - self._position
        if extra:
            raise self._error(f"{extra} trailing bytes")

    def _take(self, size_bytes: int) -> bytes:
        end = self._position + size_bytes
        if end > len(self._data):
            raise self._error(f"{size_bytes} bytes are due but {len(self._data) - self._position} are left")
        taken = self._data[self._position : end]
        self._position = end
        return taken

    def _checked_count(self, count: int, item_size_bytes_min: int) -> int:
        if count > limits.MESSAGE_ITEMS_MAX:
            raise self._error(f"{count} items declared, at most {limits.MESSAGE_ITEMS_MAX} allowed")
        if count * item_size_bytes_min > len(self._data) - self._position:
            raise self._error(f"{count} items declared in {len(self._data) - self._position} bytes")
        return count

    def _read_negative(self, width: int, greatest: int) -> int:
        number = int.from_bytes(self._take(width), "big", signed=True)
        if number > greatest:
            raise self._error(f"INT {number} is not in its shortest form")
        return number

    def _error(self, detail: str) -> RemoteProtocolError:
        return RemoteProtocolError("decode", f"at byte {self._position}: {detail}")
