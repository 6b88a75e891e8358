"""What nodes of this machine keep on disk: is it whole."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from pulsenet.chain.records import Descriptor
from pulsenet.chain.signing import decode_signed
from pulsenet.errors import RemoteProtocolError
from pulsenet.ids import Digest, compute_digest
from pulsenet.wire.chunks import ChunkList
from pulsenetd.doctor.findings import Finding, Subject, fail, ok, warn
from pulsenetd.doctor.leftovers import is_running
from pulsenetd.storage.scrub import scrub
from pulsenetd.storage.store import DATABASE_NAME, Store
from pulsenetd.words import say_count

BUSY_SECONDS: Final = 2.0

Entries = Sequence[tuple[int, Digest]]


def look_at_stores(subject: Subject) -> Sequence[Finding]:
    """Look at the database of each node and at its chunks: their sizes, and with ``reads_all`` what is in them.

    Running nodes are read beside their own work.
    """
    nodes = [node for node in subject.nodes if (node / DATABASE_NAME).exists()]
    return [_judge(node, subject) for node in nodes] or [ok("no node keeps anything yet")]


def _judge(node: Path, subject: Subject) -> Finding:
    database = node / DATABASE_NAME
    # Not done by --repair: the database holds how this key voted, and a node that forgets that may vote twice.
    set_aside = f"stop the node, 'mv {database} {database}.damaged', start it: it fetches again what it needs"
    try:
        lists, records = _read_database(database)
    except sqlite3.DatabaseError as error:
        return fail(f"{database} cannot be read: {error}", set_aside)
    except _DamagedError as error:
        return fail(f"{database} is damaged: {error}", set_aside)
    step = f"run 'pulsenet scrub --data-dir {node}'"
    repair: Callable[[], str] | None = partial(_scrub, node)
    if is_running(node):
        step = f"it reads all within a day and fetches what is damaged; to do it now, stop it and {step}"
        repair = None
    try:
        for record in records:
            decode_signed(record)
        entries = list(dict.fromkeys(entry for data in lists for entry in ChunkList.decode(data).entries))
    except RemoteProtocolError as error:
        return warn(f"{database} holds what is no record: {error}", step, repair)
    missing = sum(not _chunk_path(node, digest).exists() for _, digest in entries)
    if subject.reads_all:
        damaged, done = _count_damaged(node, entries, subject.on_progress) - missing, "all of them read and whole"
    else:
        damaged = sum(not _has_size(_chunk_path(node, digest), size) for size, digest in entries) - missing
        done = "of the right size; --read-all reads them"
    if damaged > 0:
        return warn(f"{node}: {damaged} of {len(entries)} chunks are damaged, {missing} are missing", step, repair)
    if missing > 0:
        text = f"{node}: {missing} of {len(entries)} chunks are missing, or still being fetched"
        return warn(text, "nothing to do while the node runs; one that is stopped fetches what it needs at its start")
    return ok(f"{node}: {len(lists)} blobs, {len(entries)} chunks, {done}")


class _DamagedError(Exception):
    """What SQLite itself found wrong."""


def _read_database(database: Path) -> tuple[list[bytes], list[bytes]]:
    """Return the chunk lists and the descriptors of a store, whether or not its node runs."""
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=BUSY_SECONDS)
    try:
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise _DamagedError(found)
        lists = [row[0] for row in connection.execute("SELECT chunk_list FROM blobs WHERE released = 0")]
        records = connection.execute("SELECT encoded FROM records WHERE type = ?", (Descriptor.TYPE,))
        return lists, [row[0] for row in records]
    finally:
        connection.close()


def _chunk_path(node: Path, digest: Digest) -> Path:
    return node / "chunks" / digest.hex()[:2] / digest.hex()


def _has_size(path: Path, size_bytes: int) -> bool:
    try:
        return path.stat().st_size == size_bytes
    except OSError:
        return False


def _count_damaged(node: Path, entries: Entries, on_progress: Callable[[int, int], None]) -> int:
    total, done, damaged = sum(size for size, _ in entries), 0, 0
    for size, digest in entries:
        path = _chunk_path(node, digest)
        # The size first: what is not a chunk may have no end.
        damaged += not (_has_size(path, size) and compute_digest(path.read_bytes()) == digest)
        done += size
        on_progress(done, total)
    return damaged


def _scrub(node: Path) -> str:
    # Opening a store deletes chunks of a wrong size, reading them those of wrong bytes.
    before = sum(1 for _ in node.glob("chunks/*/*"))
    store = Store.open(node)
    try:
        report = scrub(store)
        deleted = before - len(store.chunk_digests())
    finally:
        store.close()
    text = f"{say_count(deleted, 'damaged chunk')} and {say_count(report.bad_record_count, 'record')} deleted"
    return f"{node}: {text}; the node fetches what it lacks at its next start"
