"""What a mixing gives: the mean of its parts, the same bits in any arrival order (SPEC outer, "Mean" of "Mixing").

Per element: start at +0, one FP32 addition for each part in ascending order of the senders' keys, then one division by
the number of parts. In a gated part an absent entry counts as zero. The mean of a pair is that of two parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pulsenet.errors import LocalProtocolError
from pulsenet.outer.contribution import Entries, Indices
from pulsenet.outer.floats import FP32s, settle_nans
from pulsenet.outer.reduce import Counted, divide, reduce_mean, sum_part


def mean_entries(parts: Mapping[bytes, Entries], *, tensor_index: int, element_count: int) -> Entries:
    """Return the mean of one tensor's parts: dense if any of them is, else of the union of their positions.

    Args:
        parts: By sender's key, in any order.
        tensor_index: The tensor all of them are of.
        element_count: Its elements.

    Raises:
        LocalProtocolError: no parts, another tensor, or entries outside it.
    """
    counted = {key: Counted(entries) for key, entries in parts.items()}
    return reduce_mean(counted, tensor_index=tensor_index, element_count=element_count)


def mean_block(parts: Sequence[tuple[Indices | None, FP32s]], element_count: int) -> tuple[Indices | None, FP32s]:
    """Return the mean of a run of elements with the bits of :func:`mean_entries`: positions (``None``: all), values.

    Args:
        parts: In ascending order of the senders' keys, one for each sender: positions in the run, or ``None`` for every
            element, and values.
        element_count: Of the run.
    """
    sums, touched = sum_part(parts, start=0, element_count=element_count)
    if any(positions is None for positions, _ in parts):
        return None, divide(sums, len(parts))
    found = np.flatnonzero(touched).astype(np.uint32)
    return found, divide(sums[found], len(parts))


def compute_debt(mean: Entries, own: Entries, *, element_count: int) -> Entries:
    """Return ``mean - own``: what a trainer owes itself while it does not know whether its partner applied the mean.

    The partner has moved to the mean and this one has not, so their sum is off by this much. Sparse if both are.

    Raises:
        LocalProtocolError: entries of different tensors, or outside them.
    """
    if mean.tensor_index != own.tensor_index:
        raise LocalProtocolError(f"tensors {mean.tensor_index} and {own.tensor_index}")
    with np.errstate(all="ignore"):
        debt = settle_nans(spread(mean, element_count) - spread(own, element_count))
    if mean.indices is None or own.indices is None:
        return Entries(mean.tensor_index, None, debt)
    positions = np.union1d(mean.indices, own.indices)
    return Entries(mean.tensor_index, positions, debt[positions])


def add_debt(values: FP32s, debt: Entries) -> None:
    """Add a debt to the next vector that is handed over for the same job, in place.

    Raises:
        LocalProtocolError: entries outside ``values``.
    """
    if debt.indices is None:
        if len(debt) != values.size:
            raise LocalProtocolError(f"a debt of {len(debt)} elements for {values.size}")
        where: slice | np.ndarray = slice(None)
    else:
        if debt.indices.size and int(debt.indices[-1]) >= values.size:
            raise LocalProtocolError(f"a debt at {int(debt.indices[-1])} for {values.size} elements")
        where = debt.indices
    with np.errstate(all="ignore"):
        values[where] += debt.values
    settle_nans(values)


def spread(entries: Entries, element_count: int) -> FP32s:
    """Return entries as every element of their tensor, zero where there is none; dense ones are not copied.

    Raises:
        LocalProtocolError: they do not fit.
    """
    if entries.indices is None:
        if len(entries) != element_count:
            raise LocalProtocolError(f"{len(entries)} values for {element_count} elements")
        return entries.values
    if entries.indices.size and int(entries.indices[-1]) >= element_count:
        raise LocalProtocolError(f"an entry at {int(entries.indices[-1])} among {element_count} elements")
    values = np.zeros(element_count, np.float32)
    values[entries.indices] = entries.values
    return values
