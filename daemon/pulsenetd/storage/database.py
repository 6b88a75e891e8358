"""SQLite the way the store needs it: WAL, fsync at every commit, one connection for all threads."""

from __future__ import annotations

import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from pulsenet.errors import StorageError
from pulsenetd.logs import logger
from pulsenetd.storage.disk import Disk, describe_os_error

_REASONS = {
    "SQLITE_FULL": "enospc",
    "SQLITE_READONLY": "readonly",
    "SQLITE_PERM": "readonly",
    "SQLITE_CORRUPT": "damaged",
    "SQLITE_NOTADB": "damaged",
}


FORMAT: Final = 1
"""Of the tables; a later one, which this code may read wrongly, is refused and left as it is."""


class Database:
    """One SQLite file; every failure surfaces as :class:`StorageError` naming the path."""

    def __init__(self, path: Path, disk: Disk, schema: str) -> None:
        self._path = path
        self._disk = disk
        self._schema = schema
        self._mutex = threading.RLock()
        self._connection: sqlite3.Connection | None = None

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    def open(self) -> None:
        """Open or create the file; SQLite replays its log, so a crash left whole transactions only.

        Raises:
            StorageError: Not readable, not a database, or damaged.
        """
        self._require_regular()
        try:
            connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
            self._connection = connection
            connection.execute("PRAGMA journal_mode=WAL")
            # FULL: a commit that returned survives a power cut, not only a killed process.
            connection.execute("PRAGMA synchronous=FULL")
            (found,) = connection.execute("PRAGMA user_version").fetchone()
            if found > FORMAT:
                text = (
                    f"{self._path} was written by a later version of pulsenet (format {found}, {FORMAT} is known here)"
                )
                raise StorageError(f"{text}: install that again, or use another --data-dir")
            connection.executescript(self._schema)
            if found < FORMAT:
                connection.execute(f"PRAGMA user_version = {FORMAT:d}")
        except sqlite3.Error as error:
            raise self._describe(error) from error

    def _require_regular(self) -> None:
        """SQLite follows links, and puts its log beside what they lead to."""
        try:
            is_regular = stat.S_ISREG(self._path.lstat().st_mode)
        except FileNotFoundError:
            return
        except OSError as error:
            raise describe_os_error("read", self._path, error) from error
        if not is_regular:
            raise StorageError(f"the database {self._path} is no regular file; move it away")

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        with self._mutex:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Run the block as one transaction: durable on exit, or undone on any exception.

        Raises:
            StorageError: The database refused; nothing changed.
        """
        with self._mutex:
            connection = self._require()
            try:
                connection.execute("BEGIN IMMEDIATE")
                yield connection
                self._disk.before_commit()
                connection.execute("COMMIT")
            except BaseException as error:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                if isinstance(error, sqlite3.Error):
                    raise self._describe(error) from error
                raise
            self._disk.after_commit()

    def fetch_all(self, query: str, *values: str | bytes | int) -> list[tuple[Any, ...]]:
        """Return every row of a query."""
        with self._mutex:
            try:
                return self._require().execute(query, values).fetchall()
            except sqlite3.Error as error:
                raise self._describe(error) from error

    def fetch_value(self, query: str, *values: str | bytes | int) -> bytes | None:
        """Return the first column of the first row, a BLOB, or ``None`` if there is no row."""
        rows = self.fetch_all(query, *values)
        return bytes(rows[0][0]) if rows else None

    def _require(self) -> sqlite3.Connection:
        if self._connection is None:
            raise StorageError(f"the database {self._path} is closed")
        return self._connection

    def _describe(self, error: sqlite3.Error) -> StorageError:
        name = getattr(error, "sqlite_errorname", "") or ""
        reason = next((reason for prefix, reason in _REASONS.items() if name.startswith(prefix)), "io")
        return StorageError(f"database {self._path}: {error} ({name or 'no code'})", reason)


def open_or_set_aside(database: Database, read: Callable[[], object], loss: str) -> None:
    """Open a database whose loss costs work and no safety: a damaged one is set aside, said aloud, and begun anew.

    Args:
        database: To be opened.
        read: Reads all that must be readable.
        loss: What is lost, for people.

    Raises:
        StorageError: The disk does not let it be read or written.
    """
    path = database.path
    try:
        database.open()
        read()
    except StorageError as error:
        database.close()
        if error.reason != "damaged":
            raise
        aside = path.with_suffix(".damaged")
        logger.error("%s; it is kept as %s, and %s", error, aside.name, loss)
        path.replace(aside)
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        database.open()
