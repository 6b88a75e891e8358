"""A disk that tears and rots: as the daemon's, it hashes what it reads, and drops what is not what its name says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pulsenet.errors import StorageError
from pulsenet.ids import Digest, compute_digest
from pulsenet.testing.fakes import Chance, FakeStore
from pulsenet.wire.chunks import ChunkList


@dataclass
class FailingStore(FakeStore):
    """A store whose chunks may be damaged. What was never damaged is not hashed again: that could only agree."""

    suspects: set[Digest] = field(default_factory=set)
    """Chunks that were damaged and not read since."""
    damaged_count: int = 0
    """Damaged chunks found, and dropped."""

    def tear(self, digest: Digest, data: bytes, draw: Chance) -> None:
        """Write a chunk in part: the power failed, and the disk had lied about what it holds."""
        if digest not in self.chunks and data:
            self.chunks[digest] = data[: draw(len(data))]
            self.suspects.add(digest)

    def flip_bit(self, draw: Chance) -> None:
        """Damage one bit of some chunk."""
        digests = [digest for digest, data in self.chunks.items() if data]
        if digests:
            digest = digests[draw(len(digests))]
            data = bytearray(self.chunks[digest])
            data[draw(len(data))] ^= 1 << draw(8)
            self.chunks[digest] = bytes(data)
            self.suspects.add(digest)

    def chunk(self, digest: Digest) -> bytes | None:
        """Return a chunk, or ``None`` if it is not held or was damaged, and is dropped now."""
        return super().chunk(digest) if self._is_sound(digest) else None

    def read_blob(self, blob_id: Digest) -> Iterator[bytes]:
        """Yield a whole blob's chunks in order.

        Raises:
            StorageError: one is damaged; every damaged one of the blob is dropped.
        """
        bad = [digest for digest in ChunkList.decode(self.lists[blob_id]).digests if not self._is_sound(digest)]
        if bad:
            raise StorageError("a chunk of the blob is missing or damaged", "damaged")
        return super().read_blob(blob_id)

    def _is_sound(self, digest: Digest) -> bool:
        if digest in self.suspects:
            self.suspects.discard(digest)
            if digest in self.chunks and compute_digest(self.chunks[digest]) != digest:
                del self.chunks[digest]
                self.damaged_count += 1
        return digest in self.chunks
