"""What pulsenet asks of anything that serves weights: to take an update in two phases, and to say what it holds.

An engine is told *what* to hold, never how it came here: either the positions that differ from the version it holds
(absolute records: index, old bits, new bits) or everything. ``stage`` checks and prepares while the old version is
served; ``commit`` is short, and all or nothing::

    engine.stage(update)     # refused here: nothing has changed, nobody waited
    engine.commit()          # the new version as a whole, or the old one
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from pulsenet.codec.changes import Changes
from pulsenet.errors import (
    IntegrityError,
    LocalProtocolError,
    PatchMismatchError,
    RemoteProtocolError,
    StorageError,
    StructureError,
)
from pulsenet.ids import Digest, Version, short
from pulsenet.tensors.params import ParameterTable

Bytes = npt.NDArray[np.uint8]
Staged = TypeVar("Staged")


@dataclass(frozen=True, slots=True, eq=False)
class RecordsUpdate:
    """The changes that lead from the engine's version to ``version``."""

    base_version: Version
    """What the engine must hold; anything else is refused."""
    version: Version
    root: Digest
    """Root of ``version``."""
    table: ParameterTable
    """Names, dtypes and shapes, ascending by name."""
    changes: Callable[[], Iterator[Changes]]
    """Starts a fresh walk over the records, ascending by tensor and index; the same records every time."""
    descriptor: int = -1
    """Where the records lie in spool form, for an engine in other processes; -1 if they are only in this one."""


@dataclass(frozen=True, slots=True, eq=False)
class FullUpdate:
    """Every byte of ``version``."""

    version: Version
    root: Digest
    """Root of ``version``."""
    table: ParameterTable
    """Names, dtypes and shapes, ascending by name."""
    region: Bytes
    """The dense layout of ``table``, flat, read-only: every tensor row-major, little-endian, in its own dtype."""
    descriptor: int = -1
    """Memory that holds the region, for an engine in other processes; -1 if it is only in this one."""

    def tensor_bytes(self, tensor_index: int) -> Bytes:
        """Return the bytes of one tensor: a flat view of the region."""
        offset_bytes = self.table.offsets[tensor_index]
        return self.region[offset_bytes : offset_bytes + self.table.tensors[tensor_index].size_bytes]


EngineUpdate = RecordsUpdate | FullUpdate


class Engine(Protocol):
    """Holds weights and serves from them. One thread at a time brings it forward (docs/engines.md).

    A reader never sees a mix. When a call raises, the weights are what they were before and ``version`` stays, or
    ``version`` is ``None`` and nothing is served until a full update was committed.
    """

    @property
    def version(self) -> Version | None:
        """The version the weights are, bit by bit; ``None`` while that is not known."""

    def stage(self, update: EngineUpdate) -> None:
        """Check everything that can be checked and prepare the update, while the version held is served.

        What was staged before and not committed is given up. The update's memory is read until ``commit`` or
        ``rollback`` returns.

        Raises:
            PatchMismatchError: The engine does not hold the base, or the records do not fit it.
            StructureError: The engine's parameters are not those of the table.
            IntegrityError: The update is not what its root says.
        """

    def commit(self) -> None:
        """Make the staged update the weights, read back what was written, and move ``version``.

        Raises:
            IntegrityError: The result is not the version; a records update is rolled back first.
            LocalProtocolError: Nothing is staged.
        """

    def rollback(self) -> None:
        """Give up what is staged, and undo what a commit began and did not end. A second call does nothing."""

    def read_back(self) -> None:
        """Check that the memory served from still holds ``version``.

        Raises:
            IntegrityError: It does not; ``version`` is ``None`` now.
            LocalProtocolError: No version is held.
        """


@runtime_checkable
class SamplesWrites(Protocol):
    """What an engine may offer besides: a read-back that is cheap enough for every update."""

    def read_back_sample(self) -> None:
        """Compare some of what was written last with what is served from; errors as :meth:`Engine.read_back`."""


@runtime_checkable
class NamesRoot(Protocol):
    """What an engine may offer besides: the root of the version it holds, which no other run has under that name."""

    @property
    def version_root(self) -> Digest | None:
        """Root of ``version``; ``None`` while that is ``None``."""


def read_back_update(engine: Engine) -> None:
    """Look at what an update left behind: at a sample, if the engine offers that, or at everything.

    Raises:
        IntegrityError: The bits are others; ``version`` is ``None`` now.
    """
    if isinstance(engine, SamplesWrites):
        engine.read_back_sample()
    else:
        engine.read_back()


def apply_update(engine: Engine, update: EngineUpdate) -> None:
    """Stage and commit in one call; errors as theirs, and nothing stays staged."""
    try:
        engine.stage(update)
        engine.commit()
    except BaseException:
        engine.rollback()
        raise


def check_base(held: Version | None, update: RecordsUpdate) -> None:
    """Refuse records that start from another version than the one held.

    Raises:
        PatchMismatchError: They do.
    """
    if held != update.base_version:
        raise PatchMismatchError(
            f"records lead from {update.base_version} to {update.version}, but the engine holds "
            f"{held or 'an unknown version'}: ask for a full load"
        )


def require_staged(staged: Staged | None) -> Staged:
    """Return what ``commit`` was called for.

    Raises:
        LocalProtocolError: Nothing is staged.
    """
    if staged is None:
        raise LocalProtocolError("nothing is staged: commit follows stage")
    return staged


def check_root(version: Version, expected: Digest, found: Digest) -> None:
    """Refuse a result whose root is not the version's.

    Raises:
        IntegrityError: It is not.
    """
    if found != expected:
        raise IntegrityError(
            f"weights of version {version} have root {short(found)}, expected {short(expected)}: load them in full"
        )


def check_records(changes: Iterable[Changes], table: ParameterTable) -> int:
    """Check the structure of every record before any is written; return how many values change.

    Records ascend by tensor, and inside a tensor every index is above all before it and below the tensor's end.
    Indexing would otherwise wrap, repeat or cross into a neighbour without an error.

    Raises:
        PatchMismatchError: A record does not fit the table, or repeats or goes back.
    """
    changed_count = 0
    last_tensor_index, last_index = 0, -1
    for change in changes:
        if not last_tensor_index <= change.tensor_index < len(table.tensors):
            raise PatchMismatchError(
                f"records name tensor {change.tensor_index} after {last_tensor_index}, of {len(table.tensors)}"
            )
        if change.tensor_index > last_tensor_index:
            last_tensor_index, last_index = change.tensor_index, -1
        spec = table.tensors[change.tensor_index]
        if change.new_bits.dtype != spec.bits_dtype:
            raise PatchMismatchError(f"records of {spec.name} hold {change.new_bits.dtype}, but it has {spec.dtype}")
        if len(change) == 0:
            continue
        indices = change.indices
        if int(indices[0]) <= last_index or not bool(np.all(indices[1:] > indices[:-1])):
            raise PatchMismatchError(f"records of {spec.name} have indices that repeat or go back")
        last_index = int(indices[-1])
        if last_index >= spec.element_count:
            raise PatchMismatchError(
                f"records of {spec.name} reach index {last_index}, but it has {spec.element_count} elements"
            )
        changed_count += len(change)
    return changed_count


def describe_names(names: Iterable[str]) -> str:
    """Return the count and the first five names, for one line of an error."""
    listed = list(names)
    return f"{len(listed)} ({', '.join(listed[:5])}{', …' if len(listed) > 5 else ''})"


def name_failure(error: BaseException) -> str:
    """Return the stable code of why an update failed."""
    match error:
        case StructureError():
            return "structure"
        case PatchMismatchError():
            return "base_mismatch"
        case IntegrityError():
            return "root_mismatch"
        case RemoteProtocolError():
            return "decode"
        case StorageError():
            return error.reason
        case _:
            return "engine"
