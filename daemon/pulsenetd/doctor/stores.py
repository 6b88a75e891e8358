"""What nodes of this machine keep on disk: is it whole, as far as a quick look can tell."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pulsenet.chain.records import Descriptor
from pulsenet.chain.signing import decode_signed
from pulsenet.errors import RemoteProtocolError
from pulsenet.wire.chunks import ChunkList
from pulsenetd.doctor.findings import Finding, Subject, fail, ok, warn
from pulsenetd.storage.store import DATABASE_NAME

BUSY_SECONDS: Final = 2.0


def look_at_stores(subject: Subject) -> Sequence[Finding]:
    """Look at the database of each node and at the sizes of its chunks; what is in them, only a scrub tells."""
    nodes = [node for node in subject.nodes if (node / DATABASE_NAME).exists()]
    return [_judge(node) for node in nodes] or [ok("no node of this run keeps anything yet")]


def _judge(node: Path) -> Finding:
    database = node / DATABASE_NAME
    set_aside = f"stop the node, 'mv {database} {database}.damaged', start it: it fetches again what it needs"
    try:
        connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=BUSY_SECONDS)
        try:
            (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if found != "ok":
                return fail(f"{database} is damaged: {found}", set_aside)
            lists = [row[0] for row in connection.execute("SELECT chunk_list FROM blobs WHERE released = 0")]
            records = [
                row[0] for row in connection.execute("SELECT encoded FROM records WHERE type = ?", (Descriptor.TYPE,))
            ]
        finally:
            connection.close()
    except sqlite3.DatabaseError as error:
        return fail(f"{database} cannot be read: {error}", set_aside)
    scrub = f"stop the node and run 'pulsenet scrub --data-dir {node}'"
    try:
        for record in records:
            decode_signed(record)
        entries = dict.fromkeys(entry for data in lists for entry in ChunkList.decode(data).entries)
    except RemoteProtocolError as error:
        return warn(f"{database} holds what is no record: {error}", scrub)
    wrong = [
        digest for size, digest in entries if not _has_size(node / "chunks" / digest.hex()[:2] / digest.hex(), size)
    ]
    if wrong:
        return warn(
            f"{node}: {len(wrong)} of {len(entries)} chunks are missing or short (or still being fetched)", scrub
        )
    return ok(f"{node}: {len(lists)} blobs, {len(entries)} chunks of the right size; a scrub reads them")


def _has_size(path: Path, size_bytes: int) -> bool:
    try:
        return path.stat().st_size == size_bytes
    except OSError:
        return False
