"""What authorities signed of the sums of each round (SPEC section 6.14).

Authorities that sum the same contributions name the same blobs, so their records are one record. A second one for a
round proves that somebody summed wrongly; then nobody's word counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pulsenet.chain.records import Aggregate, SignedRecord
from pulsenet.chain.signing import record_digest
from pulsenet.ids import Digest

KEPT_PER_ROUND: Final = 2
"""Different statements kept of one round: two prove a dispute, and more add nothing."""


class Aggregates:
    """Statements by round; checked before they come here."""

    def __init__(self) -> None:
        self._known: dict[int, dict[Digest, tuple[Aggregate, SignedRecord]]] = {}

    def add(self, aggregate: Aggregate, signed: SignedRecord) -> bool:
        """Keep a statement; say whether it is news."""
        known = self._known.setdefault(aggregate.round_index, {})
        digest = record_digest(signed)
        if digest in known or len(known) == KEPT_PER_ROUND:
            return False
        known[digest] = (aggregate, signed)
        return True

    def get(self, round_index: int) -> Aggregate | None:
        """Return what all who spoke say of a round; ``None`` before anybody did, or if they disagree."""
        known = list(self._known.get(round_index, {}).values())
        return known[0][0] if len(known) == 1 else None

    def is_disputed(self, round_index: int) -> bool:
        """Say whether two statements of a round differ."""
        return len(self._known.get(round_index, {})) > 1

    def signed(self, round_index: int) -> list[SignedRecord]:
        """Return the statements of a round as they travel."""
        return [signed for _, signed in self._known.get(round_index, {}).values()]

    def digests(self) -> tuple[Digest, ...]:
        """Return the digests of all statements."""
        return tuple(digest for known in self._known.values() for digest in known)

    def records(self) -> Iterator[SignedRecord]:
        """Yield all statements."""
        for round_index in self._known:
            yield from self.signed(round_index)

    def forget_before(self, round_index: int) -> tuple[set[Digest], list[Digest]]:
        """Drop statements of earlier rounds; return the blobs that they name, and their own digests."""
        gone = [self._known.pop(index) for index in list(self._known) if index < round_index]
        named = [aggregate for known in gone for aggregate, _ in known.values()]
        blob_ids = {name.blob_id for aggregate in named for name in aggregate.slices}
        return blob_ids, [digest for known in gone for digest in known]
