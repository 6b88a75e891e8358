"""Odd things in a data directory are named: none is waited for, read without end, or written through."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from pulsenet.errors import ConfigError, StorageError, UnavailableError
from pulsenet.ids import compute_digest
from pulsenetd import identity, runs
from pulsenetd.commands.status import read_status
from pulsenetd.doctor.leftovers import is_running
from pulsenetd.node_file import NODE_FILE, write_node_file
from pulsenetd.storage.database import FORMAT
from pulsenetd.storage.disk import LOCK_NAME, DirectoryLock, read_regular
from pulsenetd.storage.store import DATABASE_NAME, Store

PRECIOUS = b"somebody else's words"


def put_pipe(path: Path) -> None:
    os.mkfifo(path)


def put_directory(path: Path) -> None:
    path.mkdir()


def put_link(path: Path) -> None:
    """Lead to a file that is nobody's business here."""
    precious = path.parent.parent / "precious"
    precious.write_bytes(PRECIOUS)
    precious.chmod(0o600)
    path.symlink_to(precious)


def put_dangling(path: Path) -> None:
    path.symlink_to(path.parent.parent / "absent")


def put_loop(path: Path) -> None:
    path.symlink_to(path.name)


def put_endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


ODD = [put_pipe, put_directory, put_link, put_dangling, put_loop, put_endless]
Put = Callable[[Path], None]


@pytest.fixture
def node(tmp_path: Path) -> Path:
    directory = tmp_path / "node"
    Store.open(directory).close()
    return directory


@pytest.fixture(autouse=True)
def nothing_is_written_elsewhere(tmp_path: Path) -> object:
    yield
    precious = tmp_path / "precious"
    assert not precious.exists() or precious.read_bytes() == PRECIOUS
    assert {path.name for path in tmp_path.iterdir()} <= {"node", "precious"}


# SQLite would write beside the device if this failed, so the device stands in the lock's place alone.
@pytest.mark.parametrize(
    ("name", "put"),
    [*((LOCK_NAME, put) for put in ODD), *((DATABASE_NAME, put) for put in ODD if put is not put_endless)],
)
def test_what_is_no_file_in_the_place_of_one_stops_the_start_and_is_named(node: Path, name: str, put: Put) -> None:
    (node / name).unlink()
    put(node / name)
    with pytest.raises(StorageError, match=name):
        Store.open(node)


def test_the_lock_is_not_written_through_a_link(node: Path) -> None:
    (node / LOCK_NAME).unlink()
    put_link(node / LOCK_NAME)
    with pytest.raises(StorageError):
        DirectoryLock.acquire(node)


@pytest.mark.parametrize("put", ODD)
def test_a_key_that_is_no_key_file_is_named(node: Path, put: Put) -> None:
    put(node / "identity.key")
    with pytest.raises((ConfigError, StorageError), match=r"identity\.key"):
        identity.load_or_create(node / "identity.key")


@pytest.mark.parametrize("put", ODD)
def test_run_files_and_descriptors_that_are_none_are_named(node: Path, put: Put) -> None:
    put(node / "run.json")
    with pytest.raises((ConfigError, FileNotFoundError), match=r"run\.json"):
        runs.read_run_file(node / "run.json")
    (node / "descriptors").mkdir()
    if put is put_link:
        (node / "run.json").unlink()
    put(node / "descriptors" / "000000.record")
    with pytest.raises(StorageError, match=r"000000\.record"):
        runs.load_descriptors(node)
    (node / "precious").unlink(missing_ok=True)


@pytest.mark.parametrize("put", [put_pipe, put_directory, put_link, put_endless])
def test_a_chunk_that_became_something_else_while_the_node_runs_is_not_waited_for(node: Path, put: Put) -> None:
    store = Store.open(node)
    data = bytes(1_000)
    digest = compute_digest(data)
    store.put_chunks({digest: data})
    path = node / "chunks" / digest.hex()[:2] / digest.hex()
    path.unlink()
    if put is put_link:
        (node.parent / "precious").write_bytes(PRECIOUS)
        path.symlink_to(node.parent / "precious")
    else:
        put(path)
    if put is put_directory:
        with pytest.raises(StorageError, match=digest.hex()):
            store.chunk(digest)
    else:
        assert store.chunk(digest) is None
        assert not os.path.lexists(path)
    store.close()


def test_private_files_are_private_whatever_had_their_name(node: Path) -> None:
    put_link(node / "run.json")
    runs.write_private(node / "run.json", b"secret")
    assert not (node / "run.json").is_symlink()
    assert (node / "run.json").read_bytes() == b"secret"
    (node / "run.json").chmod(0o644)
    runs.write_private(node / "run.json", b"secret again")
    assert stat.S_IMODE((node / "run.json").stat().st_mode) == 0o600


def test_a_store_of_a_later_version_is_left_as_it_is_and_said(node: Path) -> None:
    def read_version() -> int:
        connection = sqlite3.connect(node / DATABASE_NAME)
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        connection.close()
        return int(version)

    assert read_version() == FORMAT
    connection = sqlite3.connect(node / DATABASE_NAME)
    connection.execute(f"PRAGMA user_version = {FORMAT + 1}")
    connection.execute("ALTER TABLE blobs RENAME TO blobs_of_later")
    connection.commit()
    connection.close()
    with pytest.raises(StorageError, match="later version of pulsenet"):
        Store.open(node)
    assert read_version() == FORMAT + 1
    # A store from before versions were written down is taken up.
    connection = sqlite3.connect(node / DATABASE_NAME)
    connection.execute("ALTER TABLE blobs_of_later RENAME TO blobs")
    connection.execute("PRAGMA user_version = 0")
    connection.commit()
    connection.close()
    Store.open(node).close()
    assert read_version() == FORMAT


@pytest.mark.parametrize("put", ODD)
def test_who_asks_whether_a_node_runs_waits_for_no_odd_file(node: Path, put: Put) -> None:
    (node / LOCK_NAME).unlink(missing_ok=True)
    put(node / LOCK_NAME)
    put(node / NODE_FILE)
    assert not is_running(node)
    with pytest.raises(UnavailableError):
        read_status(node)


@pytest.mark.parametrize("put", [put for put in ODD if put is not put_directory])
def test_the_file_that_says_where_a_node_is_replaces_what_has_its_name(node: Path, put: Put) -> None:
    put(node / NODE_FILE)
    write_node_file(node, {"metrics_url": "http://127.0.0.1:1"})
    assert not (node / NODE_FILE).is_symlink()
    assert json.loads((node / NODE_FILE).read_bytes()) == {"metrics_url": "http://127.0.0.1:1"}


def test_a_longer_file_than_allowed_shows_and_is_not_read_whole(node: Path) -> None:
    long = node / "long"
    with long.open("wb") as file:
        file.truncate(1 << 40)
    assert len(read_regular(long, 100)) == 101
