"""Long chunk lists in parts, so that a peer's question for a slice costs no more disk than the slice.

SQLite reads a value from its beginning, however little of its end is asked for. Lists longer than a part are kept in
parts beside the whole, in the transaction that keeps or drops the list.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Final

from pulsenet.ids import Digest
from pulsenetd.storage.database import Database

PART_SIZE_BYTES: Final = 128 << 10
"""A shorter list is read whole: that of a blob of 3.6 GB in chunks of the usual size."""

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS list_parts (
    blob_id BLOB NOT NULL, part INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (blob_id, part)
);
"""


def keep_list(connection: sqlite3.Connection, blob_id: Digest, encoded: bytes, *, made_here: bool) -> None:
    """Keep a blob's list and its parts; one that is held already is needed again."""
    query = "INSERT INTO blobs VALUES (?, ?, ?, 0) ON CONFLICT (blob_id) DO UPDATE SET released = 0"
    connection.execute(query, (blob_id, encoded, int(made_here)))
    _keep_parts(connection, blob_id, encoded)


def _keep_parts(connection: sqlite3.Connection, blob_id: Digest, encoded: bytes) -> None:
    if len(encoded) > PART_SIZE_BYTES:
        starts = range(0, len(encoded), PART_SIZE_BYTES)
        rows = [(blob_id, part, encoded[start : start + PART_SIZE_BYTES]) for part, start in enumerate(starts)]
        connection.executemany("INSERT OR REPLACE INTO list_parts VALUES (?, ?, ?)", rows)


def drop_lists(connection: sqlite3.Connection, blob_ids: Sequence[Digest]) -> None:
    """Drop blobs' lists and their parts."""
    rows = [(blob_id,) for blob_id in blob_ids]
    connection.executemany("DELETE FROM blobs WHERE blob_id = ?", rows)
    connection.executemany("DELETE FROM list_parts WHERE blob_id = ?", rows)


def complete_parts(database: Database) -> None:
    """Cut the lists that were kept before there were parts, and drop parts of lists that are gone.

    Raises:
        StorageError: The disk refused.
    """
    long = database.fetch_all(
        "SELECT blob_id FROM blobs WHERE length(chunk_list) > ? AND blob_id NOT IN (SELECT blob_id FROM list_parts)",
        PART_SIZE_BYTES,
    )
    orphans = database.fetch_all("SELECT 1 FROM list_parts WHERE blob_id NOT IN (SELECT blob_id FROM blobs) LIMIT 1")
    if not long and not orphans:
        return
    with database.transaction() as connection:
        for (blob_id,) in long:
            (encoded,) = connection.execute("SELECT chunk_list FROM blobs WHERE blob_id = ?", (blob_id,)).fetchone()
            _keep_parts(connection, blob_id, encoded)
        connection.execute("DELETE FROM list_parts WHERE blob_id NOT IN (SELECT blob_id FROM blobs)")


def read_slice(database: Database, blob_id: Digest, offset: int, size_bytes: int) -> tuple[int, bytes] | None:
    """Return the size of a blob's encoded list and a slice of it, cut at its end; ``None`` if it is not held.

    Args:
        database: The store's.
        blob_id: Names the blob.
        offset: Where the slice begins; 0 or more.
        size_bytes: How long it is; 1 or more.

    Raises:
        StorageError: The disk refused.
    """
    # The length stands beside the value: SQLite does not read the value for it.
    found = database.fetch_all("SELECT length(chunk_list) FROM blobs WHERE blob_id = ?", blob_id)
    if not found:
        return None
    total = int(found[0][0])
    if offset >= total:
        return total, b""
    if total <= PART_SIZE_BYTES:
        whole = database.fetch_value("SELECT chunk_list FROM blobs WHERE blob_id = ?", blob_id)
        return None if whole is None else (total, whole[offset : offset + size_bytes])
    first, last = offset // PART_SIZE_BYTES, (offset + size_bytes - 1) // PART_SIZE_BYTES
    query = "SELECT data FROM list_parts WHERE blob_id = ? AND part BETWEEN ? AND ? ORDER BY part"
    data = b"".join(row[0] for row in database.fetch_all(query, blob_id, first, last))
    start = offset - first * PART_SIZE_BYTES
    return (total, data[start : start + size_bytes]) if data else None  # dropped between the questions
