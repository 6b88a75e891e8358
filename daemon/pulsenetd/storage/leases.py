"""What may not be deleted yet because somebody reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from pulsenet.ids import Digest

RELEASED_SECONDS_MAX: Final = 3_600.0
"""A blob that was released goes after so long whoever reads it: a peer that comes back every minute would keep it."""


class Leases:
    """Until when blobs and chunks are protected, in monotonic seconds. The caller's lock guards it."""

    def __init__(self) -> None:
        self._until: dict[Digest, float] = {}
        self._released_at: dict[Digest, float] = {}

    def take(self, digest: Digest, until: float) -> None:
        """Protect a blob, or the blobs a chunk belongs to."""
        self._until[digest] = max(until, self._until.get(digest, until))

    def take_kept(self, blob_id: Digest, until: float) -> None:
        """Protect a blob, unless it was released: who has only asked what it consists of reads nothing yet."""
        if blob_id not in self._released_at:
            self.take(blob_id, until)

    def advance(self, released: Iterable[Digest], now: float) -> None:
        """Drop leases that ran out, and learn which blobs are released now."""
        self._until = {digest: until for digest, until in self._until.items() if until > now}
        self._released_at = {blob_id: self._released_at.get(blob_id, now) for blob_id in released}

    def protect(self, blob_id: Digest, find_chunks: Callable[[], Iterable[Digest]], now: float) -> bool:
        """Say whether a released blob has to stay."""
        if now >= self._released_at.get(blob_id, now) + RELEASED_SECONDS_MAX:
            return False
        return blob_id in self._until or any(digest in self._until for digest in find_chunks())
