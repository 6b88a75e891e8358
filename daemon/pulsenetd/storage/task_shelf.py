"""Tasks that a trainer's node owes the engines' answers for, in a SQLite file of their own.

All methods block and may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pulsenet.ids import PeerId
from pulsenetd.storage.database import Database, open_or_set_aside
from pulsenetd.storage.disk import Disk

_SCHEMA = """
CREATE TABLE IF NOT EXISTS tasks (
    task_id BLOB NOT NULL UNIQUE, content TEXT NOT NULL, lease_ms INTEGER NOT NULL,
    lease_count INTEGER NOT NULL DEFAULT 0,
    peer_id BLOB,  -- who had it last
    until_ms INTEGER NOT NULL DEFAULT 0  -- Unix time at which that lease ends
);
"""


@dataclass(frozen=True, slots=True)
class ShelvedTask:
    """A task that no batch has answered yet."""

    task_id: bytes
    content: str
    lease_ms: int
    lease_count: int
    peer_id: PeerId | None
    """Who had it last; ``None`` if nobody did."""
    until_ms: int
    """Unix time in milliseconds at which that lease ends."""


class TaskShelf:
    """Open one with :meth:`open`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    def open(cls, path: Path, disk: Disk | None = None) -> TaskShelf:
        """Open or create a shelf; a damaged one is set aside under another name and said aloud.

        Raises:
            StorageError: The disk does not let it be read or written.
        """
        database = Database(path, disk or Disk(), _SCHEMA)
        shelf = cls(database)
        open_or_set_aside(database, shelf.tasks, "tasks that waited in it are not given out")
        return shelf

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._database.close()

    def tasks(self) -> list[ShelvedTask]:
        """Return what is on the shelf, in the order it came."""
        rows = self._database.fetch_all(
            "SELECT task_id, content, lease_ms, lease_count, peer_id, until_ms FROM tasks ORDER BY rowid"
        )
        return [
            ShelvedTask(bytes(task_id), content, lease_ms, count, PeerId(bytes(peer)) if peer else None, until_ms)
            for task_id, content, lease_ms, count, peer, until_ms in rows
        ]

    def add(self, tasks: Sequence[tuple[bytes, str]], lease_ms: int) -> None:
        """Put tasks (id, content) on the shelf, all or none; durable on return.

        Raises:
            StorageError: The disk refused; nothing changed.
        """
        with self._database.transaction() as database:
            database.executemany(
                "INSERT INTO tasks (task_id, content, lease_ms) VALUES (?, ?, ?)",
                [(task_id, content, lease_ms) for task_id, content in tasks],
            )

    def note_leases(self, task_ids: Sequence[bytes], peer_id: PeerId, until_ms: Sequence[int]) -> None:
        """Write down that tasks are leased, and until when by the wall clock.

        Raises:
            StorageError: The disk refused; nothing changed.
        """
        with self._database.transaction() as database:
            database.executemany(
                "UPDATE tasks SET lease_count = lease_count + 1, peer_id = ?, until_ms = ? WHERE task_id = ?",
                [(peer_id, until, task_id) for task_id, until in zip(task_ids, until_ms, strict=True)],
            )

    def remove(self, task_ids: Iterable[bytes]) -> None:
        """Take tasks off the shelf.

        Raises:
            StorageError: The disk refused; nothing changed.
        """
        with self._database.transaction() as database:
            database.executemany("DELETE FROM tasks WHERE task_id = ?", [(task_id,) for task_id in task_ids])
