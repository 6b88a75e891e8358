"""Rollout batches on their way, in a SQLite file of their own: a crash loses none and none counts twice.

Apart from the store, because batches come and go by the hundred MiB and nobody else may ask for them.
All methods block and may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pulsenet.errors import StorageError
from pulsenet.ids import PeerId
from pulsenetd.storage.database import Database, open_or_set_aside
from pulsenetd.storage.disk import Disk

_SCHEMA = """
CREATE TABLE IF NOT EXISTS batches (
    peer_id BLOB NOT NULL, sequence INTEGER NOT NULL,
    version_number INTEGER NOT NULL,  -- of the weights that the freshest sample began with
    data BLOB NOT NULL, PRIMARY KEY (peer_id, sequence)
);
CREATE TABLE IF NOT EXISTS marks (peer_id BLOB PRIMARY KEY, value BLOB NOT NULL);
"""

Name = tuple[PeerId, int]
"""Signer and number of a batch."""


@dataclass(frozen=True, slots=True)
class ShelfEntry:
    """A batch on the shelf, without its bytes."""

    peer_id: PeerId
    sequence: int
    version_number: int
    size_bytes: int

    @property
    def name(self) -> Name:
        """Signer and number."""
        return self.peer_id, self.sequence


class RolloutShelf:
    """Open one with :meth:`open`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    def open(cls, path: Path, disk: Disk | None = None) -> RolloutShelf:
        """Open or create a shelf.

        A damaged one is set aside under another name and said aloud: the node goes on without what it held.

        Raises:
            StorageError: The disk does not let it be read or written.
        """
        database = Database(path, disk or Disk(), _SCHEMA)
        shelf = cls(database)
        open_or_set_aside(database, lambda: (shelf.entries(), shelf.marks()), "rollouts that waited in it are not sent")
        return shelf

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._database.close()

    def entries(self) -> list[ShelfEntry]:
        """Return what is on the shelf, in the order it came."""
        rows = self._database.fetch_all(
            "SELECT peer_id, sequence, version_number, length(data) FROM batches ORDER BY rowid"
        )
        return [ShelfEntry(PeerId(bytes(row[0])), row[1], row[2], row[3]) for row in rows]

    def marks(self) -> dict[PeerId, bytes]:
        """Return what is remembered by key; the key whose batch came last stands last."""
        rows = self._database.fetch_all("SELECT peer_id, value FROM marks ORDER BY rowid")
        return {PeerId(bytes(row[0])): bytes(row[1]) for row in rows}

    def add(self, entry: ShelfEntry, data: bytes, mark: bytes, forgotten: PeerId | None = None) -> None:
        """Put a batch on the shelf and replace its key's mark, both or neither; durable on return.

        Args:
            entry: What is known of the batch.
            data: Its bytes.
            mark: What is remembered of its key from now on.
            forgotten: A key whose mark goes.

        Raises:
            StorageError: The disk refused; nothing changed.
        """
        with self._database.transaction() as database:
            database.execute(
                "INSERT INTO batches VALUES (?, ?, ?, ?)",
                (entry.peer_id, entry.sequence, entry.version_number, data),
            )
            if forgotten is not None:
                database.execute("DELETE FROM marks WHERE peer_id = ?", (forgotten,))
            database.execute("INSERT OR REPLACE INTO marks VALUES (?, ?)", (entry.peer_id, mark))

    def read(self, name: Name) -> bytes:
        """Return a batch's bytes.

        Raises:
            StorageError: It is not there, or cannot be read.
        """
        data = self._database.fetch_value("SELECT data FROM batches WHERE peer_id = ? AND sequence = ?", *name)
        if data is None:
            raise StorageError(f"rollout batch {name[1]} is not on the shelf", "damaged")
        return data

    def remove(self, names: Iterable[Name]) -> None:
        """Take batches off the shelf; their marks stay."""
        with self._database.transaction() as database:
            database.executemany("DELETE FROM batches WHERE peer_id = ? AND sequence = ?", list(names))
