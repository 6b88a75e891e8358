"""The patch file: a patch blob with all that is needed to check it against its base, without any network.

::

    8 bytes   magic "PULSEPF1"
    4 bytes   size of the header, little-endian
    header    canonical msgpack of :class:`PatchFileHeader`
    blob      as in the swarm (SPEC codec, "Patch blob"), to the end of the file
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, Final

from blake3 import blake3

from pulsenet import limits
from pulsenet.errors import RemoteProtocolError, StorageError, UsageError
from pulsenet.ids import Digest
from pulsenet.tensors.params import ParameterTable
from pulsenet.wire.schema import SizeMax, decode_value, encode_value

MAGIC: Final = b"PULSEPF1"
HEADER_SIZE_BYTES_MAX: Final = limits.TABLE_SIZE_BYTES_MAX + 4096
PIECE_SIZE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class PatchFileHeader:
    """What a patch file says about itself."""

    table: Annotated[bytes, SizeMax(limits.TABLE_SIZE_BYTES_MAX)]
    """An encoded ``ParameterTable``."""
    base_root: Digest
    root: Digest
    codec_id: int
    """Highest codec id used; 0 without changes."""
    changed_count: int
    blob_size_bytes: int
    blob_digest: Digest
    """BLAKE3 of the blob's bytes."""


@dataclass(frozen=True, slots=True)
class PatchFile:
    """An opened patch file whose size and digest fit its header."""

    path: Path
    header: PatchFileHeader
    table: ParameterTable
    blob_start: int

    @property
    def size_bytes(self) -> int:
        return self.blob_start + self.header.blob_size_bytes

    def read_blob(self) -> Iterator[bytes]:
        """Yield the blob in pieces."""
        with self.path.open("rb") as file:
            file.seek(self.blob_start)
            yield from read_pieces(file)


def open_patch(path: Path) -> PatchFile:
    """Read and check a patch file's header, size and digest.

    Raises:
        UsageError: It is not there or is no patch file.
        StorageError: It is damaged.
    """
    try:
        with path.open("rb") as file:
            prefix = file.read(len(MAGIC) + 4)
            if not prefix.startswith(MAGIC):
                raise UsageError(f"{path} is no patch file: make one with 'pulsenet patch make'")
            header_size_bytes = int.from_bytes(prefix[len(MAGIC) :], "little")
            if header_size_bytes > HEADER_SIZE_BYTES_MAX:
                raise damaged(path, f"a header of {header_size_bytes} bytes")
            header = decode_value(PatchFileHeader, file.read(header_size_bytes))
            table = ParameterTable.decode(header.table)
            blob_start = file.tell()
            hasher, size_bytes = blake3(), 0
            for piece in read_pieces(file):
                hasher.update(piece)
                size_bytes += len(piece)
    except FileNotFoundError as error:
        raise UsageError(f"{path} does not exist: make a patch with 'pulsenet patch make'") from error
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
    except RemoteProtocolError as error:
        raise damaged(path, str(error)) from error
    if size_bytes != header.blob_size_bytes or hasher.digest() != header.blob_digest:
        raise damaged(path, f"{size_bytes} of {header.blob_size_bytes} bytes, or other bytes than were written")
    return PatchFile(path=path, header=header, table=table, blob_start=blob_start)


def write_patch(file: BinaryIO, header: PatchFileHeader, blob: Iterable[bytes]) -> None:
    """Write a patch file."""
    encoded = encode_value(header)
    file.write(MAGIC + len(encoded).to_bytes(4, "little") + encoded)
    for piece in blob:
        file.write(piece)


def read_pieces(file: BinaryIO) -> Iterator[bytes]:
    """Yield the rest of a file in pieces."""
    while piece := file.read(PIECE_SIZE_BYTES):
        yield piece


def damaged(path: Path, detail: str) -> StorageError:
    """Return the error that says a patch file cannot be used."""
    return StorageError(f"{path} is damaged ({detail}): copy or make it again", "damaged")
