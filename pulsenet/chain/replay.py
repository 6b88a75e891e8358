"""Which numbers of a rising sequence were taken already (SPEC section 6.6)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pulsenet import limits
from pulsenet.errors import StorageError

_SEQUENCE_SIZE_BYTES = 8
_BITS_SIZE_BYTES = limits.ROLLOUT_WINDOW_COUNT // 8
_BITS_MASK = (1 << limits.ROLLOUT_WINDOW_COUNT) - 1


class Seen(StrEnum):
    """What a window knows of a number."""

    NEW = "new"
    TAKEN = "taken"
    TOO_OLD = "too_old"
    """Below the window: it may have been taken, and nobody remembers."""


@dataclass(frozen=True, slots=True)
class ReplayWindow:
    """The highest number taken, and which of the ``ROLLOUT_WINDOW_COUNT`` numbers up to it were."""

    highest: int = -1
    bits: int = 0
    """Bit i: the number ``highest - i`` was taken."""

    def look_up(self, sequence: int) -> Seen:
        """Return whether a number of 0 or more was taken."""
        behind = self.highest - sequence
        if behind < 0:
            return Seen.NEW
        if behind >= limits.ROLLOUT_WINDOW_COUNT:
            return Seen.TOO_OLD
        return Seen.TAKEN if self.bits >> behind & 1 else Seen.NEW

    def take(self, sequence: int) -> ReplayWindow:
        """Return the window after a new number was taken."""
        assert self.look_up(sequence) is Seen.NEW
        ahead = sequence - self.highest
        if ahead <= 0:
            return ReplayWindow(self.highest, self.bits | 1 << -ahead)
        # Numbers may jump far ahead: nothing is shifted that falls out anyway.
        kept = self.bits << min(ahead, limits.ROLLOUT_WINDOW_COUNT)
        return ReplayWindow(sequence, (kept | 1) & _BITS_MASK)

    def encode(self) -> bytes:
        """Return the stored form."""
        return self.highest.to_bytes(_SEQUENCE_SIZE_BYTES, "big", signed=True) + self.bits.to_bytes(
            _BITS_SIZE_BYTES, "big"
        )

    @classmethod
    def decode(cls, data: bytes) -> ReplayWindow:
        """Return a stored window.

        Raises:
            StorageError: It was not written by :meth:`encode` (``damaged``).
        """
        if len(data) != _SEQUENCE_SIZE_BYTES + _BITS_SIZE_BYTES:
            raise StorageError(f"a replay window of {len(data)} bytes", "damaged")
        return cls(
            int.from_bytes(data[:_SEQUENCE_SIZE_BYTES], "big", signed=True),
            int.from_bytes(data[_SEQUENCE_SIZE_BYTES:], "big"),
        )
