"""Contributions as blobs: what the transport carries (SPEC codec, "Contribution blob")."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from pulsenet.codec.contribution import (
    HEADER_SIZE_BYTES,
    ContributionHeader,
    collect_entries,
    decode_contribution,
    encode_contribution,
    peek_contribution_header,
)
from pulsenet.codec.patch import PatchTotals, RunBlocks
from pulsenet.codec.stream import Piece
from pulsenet.errors import RemoteProtocolError
from pulsenet.outer.aggregate import list_parts
from pulsenet.outer.checks import ContentCheck, Expected, FaultCode
from pulsenet.outer.contribution import Contribution, Entries
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
        table, theta, list_parts(contribution), header=header, totals=totals, run_blocks=run_blocks
    )


def decode_blob(
    blob: bytes, table: ParameterTable, theta: Sequence[FP32s], *, is_dense: bool, run_blocks: RunBlocks = map
) -> Contribution:
    """Return the contribution in a blob; what it says still has to pass :func:`pulsenet.outer.checks.find_fault`.

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


@dataclass(frozen=True, slots=True)
class BlobContent:
    """What was found in the blob of a contribution."""

    reason: str
    """Empty if it may be counted; else ``base``, ``shape``, ``finite``, ``norm`` or ``decode`` (SPEC section 6.9)."""
    detail: str
    """For a person."""
    entry_count: int
    norm: float
    """Euclidean norm of the entries."""
    inner_step_count: int


def inspect_blob(
    pieces: Iterable[Piece], expected: Expected, theta: Sequence[FP32s], *, run_blocks: RunBlocks = map
) -> BlobContent:
    """Look into a contribution's blob, in memory for a few blocks.

    Args:
        pieces: All of it, cut anywhere.
        expected: What it must be.
        theta: Of the state that ``expected`` names.
        run_blocks: ``map``, or an executor's ``map`` to use several cores.
    """
    check, inner_step_count = None, 0
    rest, head = iter(pieces), b""
    try:
        while len(head) < HEADER_SIZE_BYTES and (piece := next(rest, None)) is not None:
            head += piece
        header = peek_contribution_header(head)
        inner_step_count = header.inner_step_count
        check = ContentCheck(
            expected,
            round_index=header.round_index,
            state_root=header.state_root,
            inner_step_count=header.inner_step_count,
        )
        for part in decode_contribution(
            chain([head], rest), expected.table, theta, state_root=expected.state_root, run_blocks=run_blocks
        ):
            check.take(part.tensor_index, part.value_bits.view(np.float32))
    except RemoteProtocolError as error:
        reason = _REASONS.get(error.code, "decode")
        return BlobContent(reason, str(error), 0 if check is None else check.entry_count, 0.0, inner_step_count)
    fault = check.finish()
    if fault is None:
        return BlobContent("", "", check.entry_count, check.norm, inner_step_count)
    # A blob of another round than its record's is no fault of the round that is open.
    reason = "decode" if fault.code is FaultCode.ROUND else str(fault.code)
    return BlobContent(reason, fault.detail, check.entry_count, check.norm, inner_step_count)


_REASONS = {"contribution-base": "base", "contribution-table": "shape"}
