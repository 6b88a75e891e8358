"""Everything a node must not lose: signed records, named state, blobs with their chunks.

Records, state and chunk lists live in SQLite (WAL, synchronous FULL): a transaction is whole or absent. Chunks
are content-addressed files (:mod:`pulsenetd.storage.chunk_files`). The order is always chunks, then chunk list,
then the records that name it, so that nothing durable ever points at something that is not.

All methods block and may be called from any thread.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pulsenet.chain.records import Manifest, SignedRecord
from pulsenet.chain.signing import decode_signed, encode_signed, record_digest
from pulsenet.errors import IntegrityError, StorageError
from pulsenet.ids import Digest, short
from pulsenet.wire.chunks import ChunkCutter, ChunkList
from pulsenet.wire.schema import decode_value
from pulsenet.wire.sections import BlobCutter
from pulsenetd.logs import logger
from pulsenetd.storage import list_parts
from pulsenetd.storage.blob_writer import BlobWriter
from pulsenetd.storage.chunk_files import ChunkFiles
from pulsenetd.storage.database import Database
from pulsenetd.storage.disk import (
    DirectoryLock,
    Disk,
    check_writable,
    free_size_bytes,
    make_directory,
    require_free_space,
)
from pulsenetd.storage.leases import Leases
from pulsenetd.storage.naming import NAMING, decode_own_list, find_blobs_of, is_sound

_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (digest BLOB PRIMARY KEY, type TEXT NOT NULL, encoded BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS records_by_type ON records (type);
CREATE TABLE IF NOT EXISTS state (key TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS blobs (
    blob_id BLOB PRIMARY KEY, chunk_list BLOB NOT NULL,
    made_here INTEGER NOT NULL,  -- encoded by this node: an orphan unless a record names it
    released INTEGER NOT NULL    -- nobody here needs it: goes once no lease protects it
);
"""

DATABASE_NAME = "store.sqlite"
FREE_SIZE_BYTES_MIN = 64 << 20
"""Left free on the disk, so that records and the database can still be written."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What the store holds, for status and limits."""

    chunk_size_bytes: int
    free_size_bytes: int
    damaged_count: int
    """Chunks found damaged and deleted since the start."""


class Store:
    """The durable side of one node; open it with :meth:`open`.

    Core machines look things up in it, as :class:`pulsenet.node.fetch.StoreIndex` says.
    """

    def __init__(self, directory: Path, disk: Disk, lock: DirectoryLock | None) -> None:
        self.directory = directory
        self.disk = disk
        self._directory_lock = lock
        self._mutex = threading.RLock()
        self._chunks = ChunkFiles(directory / "chunks", disk)
        self._references: Counter[Digest] = Counter()
        """How many chunk lists name a chunk, plus one while a writer holds it."""
        self._uncommitted: set[Digest] = set()
        """Blobs made by this process that no stored record names yet."""
        self._leases = Leases()
        self.dropped_record_count = 0
        """Records that were damaged when the store was opened, and are deleted."""
        self._database = Database(directory / DATABASE_NAME, disk, _SCHEMA + list_parts.SCHEMA)

    @classmethod
    def open(cls, directory: Path, *, disk: Disk | None = None, lock: DirectoryLock | None = None) -> Store:
        """Open or create the store and repair what a crash left.

        Partial files and damaged records go, blobs made here that no record names go, chunks no list names go, and the
        chunks of half-fetched blobs are checked again.

        Args:
            directory: The node's data directory; created if absent.
            disk: Seam for fault tests.
            lock: A lock on ``directory`` the caller already holds; otherwise the store takes one.

        Raises:
            DirectoryLockedError: Another process has the directory; nothing was touched.
            StorageError: Not writable, or damaged; names path and errno.
        """
        disk = disk if disk is not None else Disk()
        make_directory(disk, directory)
        check_writable(directory)
        own_lock = DirectoryLock.acquire(directory) if lock is None else None
        store = cls(directory, disk, own_lock)
        try:
            store._database.open()
            store._recover()
        except BaseException:
            store.close()
            raise
        return store

    def close(self) -> None:
        """Close the database and give the directory up; a second call does nothing."""
        with self._mutex:
            self._database.close()
            if self._directory_lock is not None:
                self._directory_lock.release()
                self._directory_lock = None

    # Records and state

    def put_record(self, record: SignedRecord) -> Digest:
        """Keep a verified signed record, durable on return, and return the digest of its payload."""
        return self.commit([record], [])[0]

    def commit(self, records: Sequence[SignedRecord], state: Sequence[tuple[str, bytes]]) -> tuple[Digest, ...]:
        """Make records and state durable in one transaction: after a crash all of it is there, or nothing.

        Raises:
            StorageError: The disk refused; nothing changed.
        """
        rows = [(record_digest(record), record.type, encode_signed(record)) for record in records]
        with self._mutex, self._database.transaction() as database:
            database.executemany("INSERT OR REPLACE INTO records VALUES (?, ?, ?)", rows)
            database.executemany("INSERT OR REPLACE INTO state VALUES (?, ?)", state)
        with self._mutex:
            for record in records:
                self._uncommitted -= find_blobs_of(record)
        return tuple(Digest(row[0]) for row in rows)

    def record(self, digest: Digest) -> bytes | None:
        """Return the encoded signed record whose payload has this digest, or ``None``."""
        return self._database.fetch_value("SELECT encoded FROM records WHERE digest = ?", digest)

    def records_of_type(self, record_type: str) -> list[bytes]:
        """Return every encoded signed record of a type, in no order."""
        return [row[0] for row in self._database.fetch_all("SELECT encoded FROM records WHERE type = ?", record_type)]

    def record_digests(self, record_type: str) -> list[Digest]:
        """Return the digest of every record of a type, in no order; reads no record."""
        return [
            Digest(row[0]) for row in self._database.fetch_all("SELECT digest FROM records WHERE type = ?", record_type)
        ]

    def manifests(self) -> list[tuple[Digest, Manifest]]:
        """Return every stored manifest with its digest, in no order."""
        records = [decode_signed(encoded) for encoded in self.records_of_type(Manifest.TYPE)]
        return [(record_digest(record), decode_value(Manifest, record.payload)) for record in records]

    def whole_manifests(self) -> dict[Digest, Manifest]:
        """Return the manifests whose blobs are whole here."""
        return {digest: manifest for digest, manifest in self.manifests() if self.is_complete(manifest.blob_id)}

    def save_state(self, key: str, value: bytes) -> None:
        """Replace a named value, durable on return."""
        self.commit([], [(key, value)])

    def state(self, key: str) -> bytes | None:
        """Return a named value, or ``None`` if it was never saved."""
        return self._database.fetch_value("SELECT value FROM state WHERE key = ?", key)

    # Blobs

    def put_chunk_list(self, blob_id: Digest, data: bytes) -> None:
        """Keep a verified encoded chunk list; its chunks may come later, in any order.

        Raises:
            IntegrityError: ``data`` is not this blob's list.
            RemoteProtocolError: It cannot be decoded.
        """
        chunk_list = ChunkList.decode(data)
        if chunk_list.blob_id != blob_id:
            raise IntegrityError(f"chunk list of blob {short(blob_id)} has digest {short(chunk_list.blob_id)}")
        self._keep_list(chunk_list, made_here=False)

    def chunk_list(self, blob_id: Digest) -> bytes | None:
        """Return the encoded chunk list of a blob, or ``None``."""
        return self._database.fetch_value("SELECT chunk_list FROM blobs WHERE blob_id = ?", blob_id)

    def chunk_list_slice(self, blob_id: Digest, offset: int, size_bytes: int) -> tuple[int, bytes] | None:
        """Return the size of a blob's encoded chunk list and a slice of it, or ``None``; reads the slice alone."""
        return list_parts.read_slice(self._database, blob_id, offset, size_bytes)

    def read_list(self, blob_id: Digest) -> ChunkList | None:
        """Return the chunk list of a blob decoded, or ``None``."""
        data = self.chunk_list(blob_id)
        return None if data is None else ChunkList.decode(data)

    def put_chunks(self, chunks: Mapping[Digest, bytes]) -> dict[Digest, StorageError]:
        """Keep chunks whose digests the caller has checked, durable on return; many take little longer than one.

        Returns:
            Why which were not kept; nothing half-written stays of them.
        """
        failed: dict[Digest, StorageError] = {}
        for digest, data in chunks.items():
            try:
                self._chunks.write(digest, data)
            except StorageError as error:
                failed[digest] = error
        kept = [digest for digest in chunks if digest not in failed]
        try:
            self._chunks.sync(kept)
        except StorageError as error:
            failed |= dict.fromkeys(kept, error)
        return failed

    def has_chunk(self, digest: Digest) -> bool:
        """Return whether a chunk is held (its bytes are checked when they are read)."""
        return digest in self._chunks

    def chunk(self, digest: Digest) -> bytes | None:
        """Return a chunk's verified bytes; ``None`` if it is absent, or was damaged and is now deleted."""
        return self._chunks.get(digest)

    def missing_chunks(self, blob_id: Digest) -> list[tuple[int, Digest]]:
        """Return (size, digest) of the blob's chunks that are not held, in order, each once.

        Raises:
            StorageError: The blob's chunk list is not held.
        """
        entries = self._require_list(blob_id).entries
        return [(size, digest) for size, digest in dict.fromkeys(entries) if digest not in self._chunks]

    def is_complete(self, blob_id: Digest) -> bool:
        """Return whether the blob's list and all its chunks are held."""
        chunk_list = self.read_list(blob_id)
        return chunk_list is not None and all(digest in self._chunks for _, digest in chunk_list.entries)

    def read_blob(self, blob_id: Digest) -> Iterator[bytes]:
        """Yield the blob's verified chunks in order, one in memory at a time.

        Raises:
            StorageError: A chunk is missing or damaged (reason ``damaged``).
        """
        for _, digest in self._require_list(blob_id).entries:
            data = self._chunks.get(digest)
            if data is None:
                raise self._describe_damage(blob_id, digest)
            yield data

    def read_arriving_blob(self, blob_id: Digest, gives_up: Callable[[], bool]) -> Iterator[bytes]:
        """Yield the blob's verified chunks in order, waiting for each to be kept; the blob's list is held already.

        Args:
            blob_id: Names the blob.
            gives_up: Whether to wait no longer for a chunk that is missing. Call :meth:`wake_readers` when it changes.

        Raises:
            StorageError: A chunk is missing and it was given up, or one is damaged (reason ``damaged``).
        """
        for _, digest in self._require_list(blob_id).entries:
            if not self._chunks.wait_for(digest, gives_up):
                raise StorageError(f"chunk {short(digest)} of blob {short(blob_id)} did not come", "damaged")
            data = self._chunks.get(digest)
            if data is None:
                raise self._describe_damage(blob_id, digest)
            yield data

    def _describe_damage(self, blob_id: Digest, digest: Digest) -> StorageError:
        """Return the error of a chunk that is missing or damaged, after looking at the blob's other chunks.

        Damage seldom comes alone: found chunk by chunk, it would take a fetch and a failed hop for each of them.
        """
        for _, other in self._require_list(blob_id).entries:
            self._chunks.get(other)
        return StorageError(f"chunk {short(digest)} of blob {short(blob_id)} is missing or damaged", "damaged")

    def wake_readers(self) -> None:
        """Make those who wait for chunks ask again whether to give up."""
        self._chunks.wake()

    @contextmanager
    def writing_blob(self, cutter: BlobCutter | None = None) -> Iterator[BlobWriter]:
        """Cut, keep and name a blob made here; on an exception its chunks are deleted again. See :meth:`begin_blob`."""
        writer = self.begin_blob(cutter)
        try:
            yield writer
        except Exception:
            writer.abandon()
            raise

    def begin_blob(self, cutter: BlobCutter | None = None) -> BlobWriter:
        """Begin a blob made here; whoever begins it finishes or abandons it.

        Args:
            cutter: Says where chunks begin; ``None`` cuts every MiB.
        """
        return BlobWriter(
            self._chunks,
            ChunkCutter() if cutter is None else cutter,
            hold=self._add_references,
            let_go=self._drop_references,
            keep_list=partial(self._keep_list, made_here=True),
        )

    def blob_ids(self) -> list[Digest]:
        """Return the blobs whose lists are kept, in no order."""
        return [Digest(row[0]) for row in self._database.fetch_all("SELECT blob_id FROM blobs WHERE released = 0")]

    def unnamed_blobs(self) -> set[Digest]:
        """Return the blobs that no record names, but for those that this process made and a record may yet name."""
        with self._mutex:
            return set(self.blob_ids()) - self._find_named_blobs() - self._uncommitted

    def chunk_digests(self) -> list[Digest]:
        """Return the chunks held, in no order; reading one (:meth:`chunk`) checks it."""
        return list(self._chunks)

    def records(self) -> list[tuple[Digest, bytes]]:
        """Return every record with the digest it is kept under, in no order."""
        return [(Digest(row[0]), row[1]) for row in self._database.fetch_all("SELECT digest, encoded FROM records")]

    def take_damaged_blobs(self) -> list[Digest]:
        """Return the blobs that lost a chunk to damage since the last call."""
        lost = self._chunks.take_damaged()
        lists = ((blob_id, self.read_list(blob_id)) for blob_id in self.blob_ids()) if lost else ()
        return [blob_id for blob_id, held in lists if held is not None and not lost.isdisjoint(held.digests)]

    def discard_blob(self, blob_id: Digest) -> None:
        """Delete a blob made here that no record will name; one that a record names stays."""
        with self._mutex:
            if blob_id in self._uncommitted:
                self._uncommitted.discard(blob_id)
                if blob_id not in self._find_named_blobs():
                    self._delete_blobs([blob_id])

    def keep_blob(self, blob_id: Digest) -> None:
        """Keep a blob made here, through restarts, until it is released: no record names it, but durable state does."""
        with self._mutex, self._database.transaction() as database:
            database.execute("UPDATE blobs SET made_here = 0 WHERE blob_id = ?", (blob_id,))
            self._uncommitted.discard(blob_id)

    # Retention

    def lease(self, digest: Digest, until: float) -> None:
        """Protect a blob, or the blobs a chunk belongs to, from release until this monotonic time."""
        with self._mutex:
            self._leases.take(digest, until)

    def lease_kept(self, blob_id: Digest, until: float) -> None:
        """Protect a blob that was not released yet; asking what one consists of keeps none that was."""
        with self._mutex:
            self._leases.take_kept(blob_id, until)

    def release(
        self,
        blob_ids: Iterable[Digest],
        record_digests: Iterable[Digest],
        now: float,
        *,
        spares_versions: bool = False,
    ) -> None:
        """Delete records at once, and blobs as soon as no lease protects them.

        Args:
            blob_ids: Blobs nobody here needs; unknown ones are ignored.
            record_digests: Records nobody here needs.
            now: Monotonic time.
            spares_versions: Leave blobs of versions alone, published or in work: others chose what is released.
        """
        with self._mutex, self._database.transaction() as database:
            database.executemany("DELETE FROM records WHERE digest = ?", [(digest,) for digest in record_digests])
            gone = set(blob_ids)
            if gone and spares_versions:
                gone -= {manifest.blob_id for _, manifest in self.manifests()} | self._uncommitted
            database.executemany("UPDATE blobs SET released = 1 WHERE blob_id = ?", [(blob,) for blob in gone])
        self.sweep(now)

    def sweep(self, now: float) -> int:
        """Delete released blobs whose leases have run out, and return how many went."""
        with self._mutex:
            released = [
                Digest(row[0]) for row in self._database.fetch_all("SELECT blob_id FROM blobs WHERE released = 1")
            ]
            self._leases.advance(released, now)
            free = [blob_id for blob_id in released if not self._is_leased(blob_id, now)]
            self._delete_blobs(free)
            return len(free)

    def usage(self) -> Usage:
        """Return what the store holds now."""
        return Usage(
            chunk_size_bytes=self._chunks.total_size_bytes,
            free_size_bytes=free_size_bytes(self.directory),
            damaged_count=self._chunks.damaged_count,
        )

    def require_space(self, size_bytes: int) -> None:
        """Refuse, before a fetch or an encode starts, what the disk cannot hold.

        Raises:
            StorageError: Reason ``enospc``.
        """
        require_free_space(self.directory, size_bytes + FREE_SIZE_BYTES_MIN)

    # Inside

    def _keep_list(self, chunk_list: ChunkList, *, made_here: bool) -> None:
        blob_id = chunk_list.blob_id
        with self._mutex:
            is_new = self.chunk_list(blob_id) is None
            with self._database.transaction() as database:
                list_parts.keep_list(database, blob_id, chunk_list.encode(), made_here=made_here)
            if is_new:
                self._references.update({digest for _, digest in chunk_list.entries})
            if made_here and is_new:
                self._uncommitted.add(blob_id)

    def _recover(self) -> None:
        self._chunks.scan()
        self._drop_damaged_records()
        named = self._find_named_blobs()
        lists: list[ChunkList] = []
        dead: list[Digest] = []
        for blob_id, data, made_here, released in self._database.fetch_all("SELECT * FROM blobs"):
            chunk_list = decode_own_list(data)
            if chunk_list is None or released or (made_here and blob_id not in named):
                dead.append(Digest(blob_id))
                continue
            lists.append(chunk_list)
            self._references.update({digest for _, digest in chunk_list.entries})
        self._delete_rows(dead)
        list_parts.complete_parts(self._database)
        for digest in self._chunks:
            if not self._references[digest]:
                self._chunks.remove(digest)
        for chunk_list in lists:
            self._check_chunks(chunk_list)

    def _drop_damaged_records(self) -> None:
        """Delete records in which bits flipped: SQLite does not notice it, and whoever reads them would end of it."""
        bad = [digest for digest, encoded in self.records() if not is_sound(digest, encoded)]
        if bad:
            with self._database.transaction() as database:
                database.executemany("DELETE FROM records WHERE digest = ?", [(digest,) for digest in bad])
            self.dropped_record_count = len(bad)
            logger.warning("%d stored records were damaged and are deleted; others have what is needed", len(bad))

    def _find_named_blobs(self) -> set[Digest]:
        records = (decode_signed(data) for kind in NAMING for data in self.records_of_type(kind.TYPE))
        return {blob_id for record in records for blob_id in find_blobs_of(record)}

    def _check_chunks(self, chunk_list: ChunkList) -> None:
        """Drop chunks of a wrong size; read every chunk of a blob a crash may have interrupted."""
        sizes = [(size, digest, self._chunks.size_bytes(digest)) for size, digest in chunk_list.entries]
        is_partial = any(held is None for _, _, held in sizes)
        for size, digest, held in sizes:
            if held is not None and (is_partial or held != size):
                self._chunks.get(digest)

    def _delete_blobs(self, blob_ids: Sequence[Digest]) -> None:
        lists = [chunk_list for blob_id in blob_ids if (chunk_list := self.read_list(blob_id)) is not None]
        # Rows first: a crash in between leaves chunks without a list, which the next start deletes.
        self._delete_rows(blob_ids)
        for chunk_list in lists:
            self._drop_references({digest for _, digest in chunk_list.entries})

    def _delete_rows(self, blob_ids: Sequence[Digest]) -> None:
        if blob_ids:
            with self._mutex, self._database.transaction() as database:
                list_parts.drop_lists(database, blob_ids)

    def _add_references(self, digests: Iterable[Digest]) -> None:
        with self._mutex:
            self._references.update(digests)

    def _drop_references(self, digests: Iterable[Digest]) -> None:
        with self._mutex:
            for digest in digests:
                self._references[digest] -= 1
                if self._references[digest] <= 0:
                    del self._references[digest]
                    self._chunks.remove(digest)

    def _is_leased(self, blob_id: Digest, now: float) -> bool:
        return self._leases.protect(blob_id, lambda: [digest for _, digest in self._require_list(blob_id).entries], now)

    def _require_list(self, blob_id: Digest) -> ChunkList:
        chunk_list = self.read_list(blob_id)
        if chunk_list is None:
            raise StorageError(f"blob {short(blob_id)} is not held", "damaged")
        return chunk_list
