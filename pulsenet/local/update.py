"""New weights on their way to an engine."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass

from pulsenet.codec.changes import Changes, decode_changes
from pulsenet.errors import LocalProtocolError, RemoteProtocolError, StorageError
from pulsenet.ids import Digest, Version
from pulsenet.local.protocol import UpdateKind
from pulsenet.local.shared_memory import Region
from pulsenet.tensors.params import ParameterTable


@dataclass(slots=True)
class Update:
    """New weights for an engine. Close it, best as a context manager, once they are applied."""

    generation: int
    kind: UpdateKind
    base_version: Version | None
    """What records start from; ``None`` for a full update."""
    version: Version
    root: Digest
    table: ParameterTable
    size_bytes: int
    descriptor: int
    """Read-only; owned by this object until taken by :meth:`open_region`."""

    def read_changes(self) -> Iterator[Changes]:
        """Return an iterator over the records, ascending by tensor; may be called again for another pass.

        Their arrays share the update's memory and keep it alive.

        Raises:
            LocalProtocolError: This is a full update, or it was closed.
            RemoteProtocolError: The records are damaged.
            StorageError: The system refused to map them (reason ``memory``).
        """
        if self.kind is not UpdateKind.RECORDS:
            raise LocalProtocolError("a full update has no records")
        self._check_held()
        if not self.size_bytes:
            return iter(())
        found = os.fstat(self.descriptor).st_size
        if found != self.size_bytes:
            raise RemoteProtocolError("handoff-size", f"{found} bytes, {self.size_bytes} announced")
        try:
            mapping = mmap.mmap(self.descriptor, self.size_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except OSError as error:
            raise StorageError(f"cannot map the update to {self.version}: {error.strerror}", "memory") from error
        return decode_changes(memoryview(mapping), self.table)

    def open_region(self) -> Region:
        """Map the whole version for reading; the region owns the memory from now on.

        Raises:
            LocalProtocolError: These are records, or the memory was taken before.
            RemoteProtocolError: The memory is not sealed or has the wrong size.
        """
        if self.kind is not UpdateKind.FULL:
            raise LocalProtocolError("an update of records has no region")
        self._check_held()
        descriptor, self.descriptor = self.descriptor, -1
        return Region.open_lent(descriptor, self.table.layout_size_bytes)

    def close(self) -> None:
        """Let go of the memory; a second call does nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _check_held(self) -> None:
        if self.descriptor < 0:
            raise LocalProtocolError(f"the update to {self.version} was closed, or its region opened before")

    def __enter__(self) -> Update:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
