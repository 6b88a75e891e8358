"""Vectors of a trainer as blobs and back: what a mixing through the daemon asks of a training process.

Only here are blobs made from arrays and arrays from blobs on this side; the daemon combines what others sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from pulsenet.codec.patch import RunBlocks
from pulsenet.errors import LocalProtocolError, RemoteProtocolError, StorageError, UnavailableError
from pulsenet.ids import Digest
from pulsenet.local import mixing_protocol as local
from pulsenet.local.mixing_client import MixingConnection
from pulsenet.outer.checks import ContentCheck, Expected
from pulsenet.outer.contribution import Entries, find_run
from pulsenet.outer.floats import FP32s, fp32_to_bits
from pulsenet.outer.mixing.mean import add_debt, compute_debt, spread
from pulsenet.outer.mixing.payload import (
    MIXING_HEADER_SIZE_BYTES,
    NO_BASE,
    JobTable,
    MixingHeader,
    decode_part,
    encode_part,
    make_job_table,
    peek_mixing_header,
    spread_all,
    write_slice_values,
)
from pulsenet.outer.mixing.settings import Job, MixingKind, MixingSettings, MixingVariant, Vector
from pulsenet.outer.state import compute_state_root
from pulsenet.tensors.digest import hash_tensor
from pulsenet.tensors.params import ParameterTable
from pulsenet.training.mixer import Adoption, Mixed

BLOB_FAULTS: Final = frozenset({"mixing-header", "shape", "codec-unknown", "patch-truncated", "patch-trailing"})
"""What may be wrong with a blob itself, among the codes of its decoder; others are the connection's."""


@dataclass(frozen=True, slots=True, eq=False)
class HandedOver:
    """A job whose vector is with the daemon."""

    message: local.StorePart
    job_table: JobTable
    base_root: Digest
    """Of its headers."""
    entries: tuple[Entries, ...]
    """By tensor of the joint table, debts added."""
    own: list[FP32s]
    """The same, every element; means are written over them."""

    def restore(self, slice_index: int, slice_count: int) -> None:
        """Put the own values of a slice back."""
        for place, start, end in self.job_table.list_blocks(slice_index, slice_count):
            part = self.entries[place]
            if part.indices is None:
                self.own[place][start:end] = part.values[start:end]
                continue
            low, high = find_run(part.indices, start, end)
            self.own[place][start:end] = 0.0
            self.own[place][part.indices[low:high]] = part.values[low:high]


class MixingWork:
    """Encodes and decodes for one trainer.

    Args:
        table: FP32 masters.
        settings: Of the run.
        run_blocks: ``map``, or an executor's ``map`` to use several cores.
    """

    def __init__(self, table: ParameterTable, settings: MixingSettings, *, run_blocks: RunBlocks = map) -> None:
        self._table = table
        self._settings = settings
        self._run_blocks = run_blocks
        self._added: dict[Job, frozenset[local.DebtName]] = {}
        """Debts in the last vector of a job; named again, and not added, until the daemon could note that."""

    def forget_debts(self) -> None:
        """Go back to a state in which nothing that was added is for certain."""
        self._added.clear()

    def job_table(self, job: Job, round_index: int, subset: Sequence[int]) -> JobTable:
        """Return the table of a job that mixes something; an empty subset is all tensors."""
        chosen = tuple(subset) or tuple(range(len(self._table.tensors)))
        found = make_job_table(self._table, self._settings, job, round_index=round_index, subset=chosen)
        assert found is not None, f"{job.name} mixes nothing in this variant"
        return found

    def put(
        self,
        connection: MixingConnection,
        job: Job,
        opened: local.RoundOpened,
        sections: Sequence[Iterable[Entries]],
        *,
        mixed_root: Digest | None,
    ) -> HandedOver:
        """Add the debts to a vector and store it, slice by slice.

        Raises:
            LocalProtocolError: values that nobody would take, such as a NaN; its text is the code.
            StorageError: the daemon's disk does not take it, or a debt cannot be read.
        """
        plan = opened.mix1 if job is Job.MIX1 else opened.mix2
        job_table = self.job_table(job, opened.round_index, opened.subset if job is Job.MIX2 else ())
        entries = [
            replace(one, tensor_index=place)
            for place, one in enumerate(entry for section in sections for entry in section)
        ]
        known = self._added.get(job, frozenset())
        settled = [
            debt.name for debt in plan.debts if debt.name in known or self._settle(connection, job_table, entries, debt)
        ]
        base_root = mixed_root if job is Job.MIX1 and job_table.gated and mixed_root is not None else NO_BASE
        slices = []
        for index in range(plan.slice_count):
            header = MixingHeader(job_table.digest, job, opened.round_index, base_root, index, plan.slice_count)
            norm = measure_slice(job_table, entries, header, self._settings.norm_max)
            blob = connection.put_blob(encode_part(job_table, entries, header=header, run_blocks=self._run_blocks))
            count = sum(end - start for _, start, end in job_table.list_blocks(index, plan.slice_count))
            slices.append(local.PartBlob(blob.blob_id, blob.size_bytes, count, fp32_to_bits(norm)))
        self._added[job] = frozenset(settled)
        message = local.StorePart(opened.round_index, int(job), tuple(slices), tuple(settled), mixed_root)
        return HandedOver(message, job_table, base_root, tuple(entries), spread_all(job_table, entries))

    def take(self, connection: MixingConnection, handed: HandedOver, done: local.MixDone) -> Mixed:
        """Write the means that came over the own values; a slice that cannot be read keeps them."""
        job_table, count, reason = handed.job_table, max(1, len(done.slices)), done.reason
        contributor_counts = []
        for index, piece in enumerate(done.slices):
            if piece.mean is None:
                continue
            contributors = max(1, piece.contributor_count)
            header = MixingHeader(
                job_table.digest, job_table.job, done.round_index, handed.base_root, index, count, contributors
            )
            try:
                self._read_into(connection, piece.mean, job_table, header, handed.own)
            except (RemoteProtocolError, StorageError, UnavailableError) as error:
                handed.restore(index, count)
                reason = reason or _code_of(error)
                continue
            contributor_counts.append(piece.contributor_count)
        is_whole = 0 < len(done.slices) == len(contributor_counts)
        is_common = is_whole and self._settings.variant.kind(job_table.job) is MixingKind.GLOBAL
        return self.gather(handed, min(contributor_counts, default=1), reason, is_common=is_common)

    @staticmethod
    def gather(handed: HandedOver, contributor_count: int, reason: str, *, is_common: bool = False) -> Mixed:
        """Return what stands in a job's values now."""
        values, width = tuple(handed.own), len(handed.job_table.tensor_indices)
        sections = tuple(values[start : start + width] for start in range(0, len(values), width))
        return Mixed(sections, contributor_count, reason, is_common=is_common)

    def put_iterate(
        self, connection: MixingConnection, round_index: int, iterate: Iterable[Entries]
    ) -> local.StoreIterate:
        """Store z as one blob, for joiners.

        Raises:
            LocalProtocolError: as :meth:`put`.
            StorageError: the daemon's disk does not take it.
        """
        job_table = self._state_table(round_index)
        entries = list(iterate)
        header = MixingHeader(job_table.digest, Job.MIX1, round_index)
        norm = measure_slice(job_table, entries, header, self._settings.norm_max)
        blob = connection.put_blob(encode_part(job_table, entries, header=header, run_blocks=self._run_blocks))
        part = local.PartBlob(blob.blob_id, blob.size_bytes, self._table.element_count, fp32_to_bits(norm))
        return local.StoreIterate(round_index, part)

    def read_state(self, connection: MixingConnection, begin: local.Begin) -> Adoption:
        """Return the z that a new process begins from.

        Raises:
            RemoteProtocolError: a code of ``BLOB_FAULTS``.
            StorageError: the daemon cannot read it.
            UnavailableError: it went away.
        """
        job_table: JobTable | None = None
        values: list[FP32s] = []
        for index, blob in enumerate(begin.parts):
            pieces = connection.fetch_blob(blob.blob_id, blob.encoded_size_bytes)
            data = b"".join(bytes(piece) for piece in pieces)
            header = peek_mixing_header(data[:MIXING_HEADER_SIZE_BYTES])
            if (header.slice_index, header.slice_count) != (index, len(begin.parts)):
                raise RemoteProtocolError("mixing-header", f"slice {header.slice_index} of {header.slice_count}")
            if job_table is None:
                job_table = self._find_table(header)
                values = [np.zeros(spec.element_count, np.float32) for spec in job_table.table.tensors]
            parts = list(decode_part([data], job_table, header=header, run_blocks=self._run_blocks))
            write_slice_values(values, parts, job_table, slice_index=index, slice_count=len(begin.parts))
        assert job_table is not None
        width = len(job_table.tensor_indices)
        return Adoption(tuple(values[:width]), begin.is_consensus)

    def _find_table(self, header: MixingHeader) -> JobTable:
        """Return the table of a state, which is z alone or a mean that Mix1 made."""
        state_table = self._state_table(header.round_index)
        if header.table_digest == state_table.digest:
            return state_table
        if self._settings.vectors(Job.MIX1):
            mix1_table = self.job_table(Job.MIX1, header.round_index, ())
            if header.table_digest == mix1_table.digest and not mix1_table.gated:
                return mix1_table
        raise RemoteProtocolError("mixing-header", "a state of other tensors")

    def _state_table(self, round_index: int) -> JobTable:
        plain = replace(self._settings, variant=MixingVariant.LOCAL_M1_M2, mixes_momentum=False, mixing_gate=False)
        found = make_job_table(self._table, plain, Job.MIX1, round_index=round_index)
        assert found is not None
        assert found.vectors == (Vector.ITERATE,)
        return found

    def _settle(
        self, connection: MixingConnection, job_table: JobTable, entries: list[Entries], debt: local.DebtBlobs
    ) -> bool:
        """Add a debt to the entries, on the tensors that both have; tell whether it could be read."""
        name = debt.name
        owed_table = self.job_table(job_table.job, name.round_index, debt.subset if job_table.job is Job.MIX2 else ())
        read = []
        try:
            for blob, count in ((debt.own, 1), (debt.mean, 2)):
                header = MixingHeader(owed_table.digest, owed_table.job, name.round_index, contributor_count=count)
                values = [np.zeros(spec.element_count, np.float32) for spec in owed_table.table.tensors]
                read.append(self._read_into(connection, blob, owed_table, header, values))
        except (RemoteProtocolError, StorageError) as error:
            if isinstance(error, RemoteProtocolError) and error.code not in BLOB_FAULTS:
                raise
            return False
        for place, (kept, agreed) in enumerate(zip(*read, strict=True)):
            vector, tensor_index = owed_table.source(place)
            if tensor_index not in job_table.tensor_indices:
                continue
            here = job_table.place(vector, tensor_index)
            owed = compute_debt(Entries(here, None, agreed), Entries(here, None, kept), element_count=kept.size)
            entries[here] = _add(entries[here], owed)
        return True

    def _read_into(
        self,
        connection: MixingConnection,
        blob: local.MixBlob,
        job_table: JobTable,
        header: MixingHeader,
        values: list[FP32s],
    ) -> list[FP32s]:
        """Write what a blob holds over the values of its slice."""
        pieces = (bytes(piece) for piece in connection.fetch_blob(blob.blob_id, blob.encoded_size_bytes))
        parts = decode_part(pieces, job_table, header=header, run_blocks=self._run_blocks)
        write_slice_values(values, parts, job_table, slice_index=header.slice_index, slice_count=header.slice_count)
        return values


def measure_slice(job_table: JobTable, entries: Sequence[Entries], header: MixingHeader, norm_max: float) -> float:
    """Return the Euclidean norm of a slice, summed as whoever decodes it does.

    Raises:
        LocalProtocolError: what nobody would take: a value that is not finite, or a norm above the limit.
    """
    expected = Expected(job_table.table, header.round_index, header.base_root, is_dense=False, norm_max=norm_max)
    check = ContentCheck(expected, round_index=header.round_index, state_root=header.base_root, inner_step_count=1)
    for place, start, end in job_table.list_blocks(header.slice_index, header.slice_count):
        values, indices = entries[place].values, entries[place].indices
        if indices is not None:
            start, end = find_run(indices, start, end)
        check.take(place, np.ascontiguousarray(values[start:end]))
    fault = check.finish()
    if fault is not None:
        raise LocalProtocolError(str(fault.code))
    return check.norm


def compute_mixed_root(table: ParameterTable, round_index: int, values: Sequence[FP32s]) -> Digest:
    """Return the root of a mean of the outer iterates: what all members hold that took the same one.

    As the root of an outer state whose momentum is empty.
    """
    nothing = hash_tensor(np.empty(0, np.float32))
    return compute_state_root(table, round_index=round_index, hashes=[(hash_tensor(one), nothing) for one in values])


def _add(entries: Entries, owed: Entries) -> Entries:
    """Return entries with a dense debt added: where it is nothing, gated entries stay absent."""
    values = spread(entries, len(owed)).copy()
    add_debt(values, owed)
    if entries.indices is None:
        return Entries(entries.tensor_index, None, values)
    is_owed = np.flatnonzero(owed.values)
    positions = np.union1d(entries.indices, is_owed.astype(entries.indices.dtype))
    return Entries(entries.tensor_index, positions, values[positions])


def _code_of(error: RemoteProtocolError | StorageError | UnavailableError) -> str:
    if isinstance(error, RemoteProtocolError):
        return error.code
    return error.reason if isinstance(error, StorageError) else "away"
