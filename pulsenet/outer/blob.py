"""Contributions as blobs: what the transport carries (SPEC codec, "Contribution blob")."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from pulsenet import limits
from pulsenet.codec.contribution import (
    HEADER_SIZE_BYTES,
    ContributionHeader,
    TensorEntries,
    collect_entries,
    decode_contribution,
    encode_contribution,
    peek_contribution_header,
)
from pulsenet.codec.patch import PatchTotals, RunBlocks
from pulsenet.errors import RemoteProtocolError
from pulsenet.outer.contribution import Contribution, Entries, index_dtype
from pulsenet.outer.floats import FP32s
from pulsenet.tensors.params import ParameterTable


def encode_blob(
    contribution: Contribution,
    table: ParameterTable,
    theta: Sequence[FP32s],
    *,
    totals: PatchTotals | None = None,
    run_blocks: RunBlocks = map,
) -> Iterator[bytes]:
    """Return the pieces of a contribution's blob.

    Args:
        contribution: Sparse or dense.
        table: FP32 masters.
        theta: Of the state that the contribution starts from, a flat array a tensor.
        totals: Counts what was written.
        run_blocks: ``map``, or an executor's ``map`` to use several cores.

    Raises:
        LocalProtocolError: while iterating, entries that do not fit the table.
    """
    header = ContributionHeader(
        table.digest, contribution.state_root, contribution.round_index, contribution.inner_step_count
    )
    return encode_contribution(
        table, theta, _list_entries(contribution), header=header, totals=totals, run_blocks=run_blocks
    )


def decode_blob(
    blob: bytes, table: ParameterTable, theta: Sequence[FP32s], *, is_dense: bool, run_blocks: RunBlocks = map
) -> Contribution:
    """Return the contribution in a blob; what it says still has to pass :func:`~pulsenet.outer.checks.find_fault`.

    Args:
        blob: All of it; its state root must be that of ``theta``, which the caller knows and compares.
        table: FP32 masters.
        theta: Of the state it starts from, a flat array a tensor.
        is_dense: Whether the run's algorithm sends every element.
        run_blocks: ``map``, or an executor's ``map`` to use several cores.

    Raises:
        RemoteProtocolError: the blob breaks the specification, or a dense one leaves elements out
            (``shape``).
    """
    header = peek_contribution_header(blob[:HEADER_SIZE_BYTES])
    parts = decode_contribution([blob], table, theta, state_root=header.state_root, run_blocks=run_blocks)
    entries = []
    for spec, found in zip(table.tensors, collect_entries(table, parts), strict=True):
        values = found.value_bits.view(np.float32)
        if is_dense and values.size != spec.element_count:
            raise RemoteProtocolError("shape", f"{spec.name}: {values.size} of {spec.element_count}")
        entries.append(Entries(found.tensor_index, None if is_dense else found.indices, values))
    return Contribution(header.round_index, header.state_root, header.inner_step_count, tuple(entries))


def _list_entries(contribution: Contribution) -> Iterable[TensorEntries]:
    for entries in contribution.entries:
        bits = entries.values.view(np.uint32)
        if entries.indices is not None:
            yield TensorEntries(entries.tensor_index, entries.indices, bits)
            continue
        dtype = index_dtype(bits.size)
        for start in range(0, bits.size, limits.BLOCK_ELEMENTS):
            part = bits[start : start + limits.BLOCK_ELEMENTS]
            yield TensorEntries(entries.tensor_index, np.arange(start, start + part.size, dtype=dtype), part)
