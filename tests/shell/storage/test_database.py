"""SQLite as the store uses it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pulsenet.errors import StorageError
from pulsenetd.storage.database import Database
from pulsenetd.storage.disk import Disk

SCHEMA = "CREATE TABLE IF NOT EXISTS kept (key TEXT PRIMARY KEY, value BLOB NOT NULL)"


def open_database(path: Path) -> Database:
    database = Database(path, Disk(), SCHEMA)
    database.open()
    return database


def put(database: Database, key: str, value: bytes) -> None:
    with database.transaction() as connection:
        connection.execute("INSERT OR REPLACE INTO kept VALUES (?, ?)", (key, value))


def test_what_was_committed_is_there_again(tmp_path: Path) -> None:
    database = open_database(tmp_path / "x")
    put(database, "a", b"1")
    database.close()
    database.close()
    again = open_database(tmp_path / "x")
    assert again.fetch_value("SELECT value FROM kept WHERE key = ?", "a") == b"1"
    assert again.fetch_value("SELECT value FROM kept WHERE key = ?", "b") is None
    again.close()


def test_a_transaction_that_raises_leaves_nothing(tmp_path: Path) -> None:
    database = open_database(tmp_path / "x")

    def fail() -> None:
        with database.transaction() as connection:
            connection.execute("INSERT INTO kept VALUES ('a', x'00')")
            raise KeyError("a")

    with pytest.raises(KeyError):
        fail()
    assert database.fetch_all("SELECT * FROM kept") == []
    database.close()


def test_errors_of_sqlite_name_the_file(tmp_path: Path) -> None:
    database = open_database(tmp_path / "x")
    with pytest.raises(StorageError, match="no such table"):
        database.fetch_all("SELECT * FROM absent")
    with pytest.raises(StorageError, match="NOT NULL"), database.transaction() as connection:
        connection.execute("INSERT INTO kept VALUES ('a', NULL)")
    database.close()
    with pytest.raises(StorageError, match="closed"):
        database.fetch_all("SELECT * FROM kept")


def test_a_file_that_is_no_database_is_reported_as_damaged(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"not a database, " * 512)
    with pytest.raises(StorageError, match="not a database") as caught:
        open_database(tmp_path / "x")
    assert caught.value.reason == "damaged"
