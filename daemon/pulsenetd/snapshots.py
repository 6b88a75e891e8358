"""What a publisher remembers of a snapshot that it lets go part by part."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from pulsenet.codec.changes import Changes
from pulsenet.errors import IntegrityError
from pulsenet.local.shared_memory import Region
from pulsenet.tensors.params import ParameterTable
from pulsenetd.storage.filling import WholePart
from pulsenetd.storage.parts import PartQueue
from pulsenetd.storage.spools import Spool, SpoolDirectory, SpoolWriter

SPOOL_RATIO_PUBLISHER: Final = 1.0
"""Spools kept for skip patches, together, up to this share of the model; older skips are made by comparing."""


@dataclass(slots=True)
class Snapshot:
    """Weights offered, and what became of them while they were encoded."""

    parts: PartQueue
    hashes: list[bytes] = field(default_factory=list)
    """Of the tensors read so far, in table order."""
    region: Region | None = None
    """The weights themselves, where there was no baseline to spool changes against."""
    spool: Spool | None = None
    """Changes since the baseline, if they were encoded as a patch and are few enough."""
    is_read: bool = False
    """Whether every part was encoded; they are gone then."""

    @property
    def table(self) -> ParameterTable:
        return self.parts.table

    def close(self) -> None:
        self.parts.close()
        if self.region is not None:
            self.region.close()
            self.region = None
        self.drop_spool()

    def drop_spool(self) -> None:
        if self.spool is not None:
            self.spool.remove()
            self.spool = None


class CheckedSpool:
    """Spools what an encoder makes, having checked it against the part it came from; a context manager."""

    def __init__(self, spools: SpoolDirectory, table: ParameterTable) -> None:
        self.part: WholePart | None = None
        """The part in work."""
        self._table = table
        self._size_bytes_max = int(table.size_bytes * SPOOL_RATIO_PUBLISHER)
        self._writer: SpoolWriter | None = spools.begin(table)

    def take(self, changes: Changes) -> None:
        """Spool the changes of one block, decoded as a receiver will.

        That no change is missing is not looked at: it would cost as much as encoding, and receivers check the root.

        Raises:
            IntegrityError: A change gives other bits than the snapshot.
            StorageError: The disk refused.
        """
        assert self.part is not None
        if (self.part.view(changes.tensor_index)[changes.indices] != changes.new_bits).any():
            name = self._table.tensors[changes.tensor_index].name
            raise IntegrityError(f"the patch does not give the snapshot in tensor {name!r}")
        if self._writer is None:
            return
        self._writer.write(changes)
        if self._writer.size_bytes > self._size_bytes_max:
            # So much changed that reading the patch again costs less than keeping this.
            self._abandon()

    def finish(self) -> Spool | None:
        """Return the spool, or ``None`` if the changes were too many to keep."""
        spool = None if self._writer is None else self._writer.finish()
        self._writer = None
        return spool

    def __enter__(self) -> CheckedSpool:
        return self

    def __exit__(self, *_: object) -> None:
        self._abandon()

    def _abandon(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.abandon()
