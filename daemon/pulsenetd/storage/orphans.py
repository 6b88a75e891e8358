"""Letting go of what nothing refers to when a node's machines are built.

What is to be deleted is known to the machines alone, and whoever is killed before it is deleted never says so again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pulsenet.chain.records import Aggregate, Catalogue, Contribution, Head, Manifest, Receipt, StateAnchor
from pulsenet.errors import StorageError
from pulsenet.ids import Digest
from pulsenetd.logs import logger
from pulsenetd.storage.store import Store

Kind = type[Head | Catalogue | Manifest | Contribution | Receipt | StateAnchor | Aggregate]


@dataclass(frozen=True, slots=True)
class Needs:
    """What one part of a node refers to."""

    kinds: tuple[Kind, ...] = ()
    """Kinds of records of which this part, and those that speak of them too, need no others than they name."""
    records: frozenset[Digest] = frozenset()
    blob_ids: frozenset[Digest] = frozenset()
    """Blobs that no record names."""


def release_orphans(store: Store, needs: Collection[Needs], now: float) -> None:
    """Delete the records that no part needs, and then the blobs that nothing names; other kinds of records stay.

    Costs a look at the names of records and blobs, whatever is in them. A disk that refuses keeps no node from its
    start: the next one tries again.

    Args:
        store: Nothing writes to it meanwhile.
        needs: Of all parts of the node.
        now: Monotonic time.
    """
    kinds = {kind.TYPE for each in needs for kind in each.kinds}
    kept = {digest for each in needs for digest in each.records}
    records = [digest for kind in sorted(kinds) for digest in store.record_digests(kind) if digest not in kept]
    try:
        if records:
            store.release((), records, now)
        blob_ids = store.unnamed_blobs().difference(*(each.blob_ids for each in needs))
        if blob_ids:
            store.release(blob_ids, (), now)
    except StorageError as error:
        logger.warning("what an earlier life of this node left could not be deleted: %s", error)
        return
    if records or blob_ids:
        logger.info("%d records and %d blobs that nothing needs any more were deleted", len(records), len(blob_ids))
