"""What the records of a store say, read again and again: each record is decoded once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Generic, TypeVar

from pulsenet.chain.records import SignedRecord
from pulsenet.chain.signing import decode_signed
from pulsenet.ids import Digest
from pulsenetd.storage.store import Store

T = TypeVar("T")


class RecordCache(Generic[T]):
    """Remembers what was read in each record for as long as the record is kept.

    Args:
        store: Where the records are.
        types: Of the records.
        read: Finds in one what is asked for.
    """

    def __init__(self, store: Store, types: Sequence[str], read: Callable[[SignedRecord], T]) -> None:
        self._store = store
        self._types = types
        self._read = read
        self._known: dict[Digest, T] = {}

    def look(self) -> Collection[T]:
        """Return what all records say now; reads those that are new.

        Raises:
            StorageError: The disk refused.
            RemoteProtocolError: It holds what is no record.
        """
        before, known = self._known, {}  # another thread may look at the same time
        for digest in (digest for name in self._types for digest in self._store.record_digests(name)):
            if digest in before:
                known[digest] = before[digest]
            elif (data := self._store.record(digest)) is not None:  # it may have been let go since
                known[digest] = self._read(decode_signed(data))
        self._known = known
        return known.values()
