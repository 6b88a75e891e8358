"""Combines a round's counted contributions: the same bits in any arrival order (SPEC outer, "Reduction").

Per element: start at +0, one FP32 addition for each contribution that has an entry there, in ascending order of the
senders' keys, then one division by the number of contributions. An entry that is absent and an entry of zero give
the same sum, so sparse and dense contributions combine to the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pulsenet import limits
from pulsenet.errors import LocalProtocolError
from pulsenet.outer.contribution import Entries, Indices, find_run
from pulsenet.outer.floats import FP32s, settle_nans
from pulsenet.outer.residual import SCALE_ONE, split_scaled
from pulsenet.outer.settings import Combination, OuterSettings
from pulsenet.tensors.jit import compile_loop
from pulsenet.tensors.params import index_dtype


@dataclass(frozen=True, slots=True, eq=False)
class Counted:
    """One contribution's entries of one tensor, with the scale its receipt gives."""

    entries: Entries
    scale: np.float32 = SCALE_ONE

    def values(self) -> FP32s:
        """Return what the round counts of the sent values."""
        return split_scaled(self.entries.values, self.scale)[0]


@compile_loop
def _add_loop(sums: FP32s, touched: npt.NDArray[np.bool_], indices: Indices, values: FP32s, block_start: int) -> None:
    for i in range(indices.size):
        position = np.int64(indices[i]) - block_start
        sums[position] += values[i]
        touched[position] = True


def sum_part(
    parts: Iterable[tuple[Indices | None, FP32s]], *, start: int, element_count: int
) -> tuple[FP32s, npt.NDArray[np.bool_]]:
    """Return the sums of a run of elements, and where a sparse part has an entry: what a mean is before its division.

    Args:
        parts: In ascending order of the senders' keys: positions in the tensor, or ``None`` for every element, and
            counted values.
        start: First element of the run.
        element_count: Its length.
    """
    sums, touched = np.zeros(element_count, np.float32), np.zeros(element_count, np.bool_)
    with np.errstate(all="ignore"):
        for indices, values in parts:
            if indices is None:
                sums += values
            else:
                _add_loop(sums, touched, indices, values, start)
    return sums, touched


def sum_trimmed_part(values: Sequence[FP32s], trim_count: int) -> FP32s:
    """Return the sums of a run of elements without the ``trim_count`` smallest and largest of each, before division."""
    block = np.stack(values)
    # -0 and +0 sort as equals in any order, so the negative zeros go first: x + 0 == x for every other x.
    block += np.float32(0.0)
    block.sort(axis=0)
    sums = np.zeros(block.shape[1], np.float32)
    with np.errstate(all="ignore"):
        for row in block[trim_count : len(values) - trim_count]:
            sums += row
    return sums


def reduce_mean(contributions: Mapping[bytes, Counted], *, tensor_index: int, element_count: int) -> Entries:
    """Return the mean of one tensor's contributions: the union of their positions, dense if any of them is.

    Args:
        contributions: By sender's key, in any order.
        tensor_index: The tensor all of them are of.
        element_count: Its elements.

    Raises:
        LocalProtocolError: nothing to combine, another tensor, or entries outside it.
    """
    parts = _in_key_order(contributions, tensor_index=tensor_index, element_count=element_count)
    values = [part.values() for part in parts]
    is_dense = any(part.entries.indices is None for part in parts)
    dtype = index_dtype(element_count)
    found_indices, found_values = [np.empty(0, dtype)], [np.empty(0, np.float32)]
    for start in range(0, element_count, limits.BLOCK_ELEMENTS):
        end = min(start + limits.BLOCK_ELEMENTS, element_count)
        cut = (_cut(part.entries.indices, sent, start, end) for part, sent in zip(parts, values, strict=True))
        sums, touched = sum_part(cut, start=start, element_count=end - start)
        positions = slice(None) if is_dense else np.flatnonzero(touched)
        means = divide(sums[positions], len(parts))
        found_values.append(means)
        if not is_dense:
            assert isinstance(positions, np.ndarray)
            found_indices.append(positions.astype(dtype) + dtype.type(start))
    indices = None if is_dense else np.concatenate(found_indices)
    return Entries(tensor_index, indices, np.concatenate(found_values))


def compute_trim_count(settings: OuterSettings, contributor_count: int) -> int:
    """Return how many contributions are left out on each side of every element: at most what leaves one or two.

    None of a mean's: settings name a number of others for the trimmed mean alone.
    """
    most = max(0, (contributor_count - 1) // 2)
    return most if settings.combination is Combination.MEDIAN else min(settings.trim_count, most)


def combine(
    contributions: Mapping[bytes, Counted], settings: OuterSettings, *, tensor_index: int, element_count: int
) -> Entries:
    """Return what a round of these settings moves one tensor by; errors as of the two functions it chooses from."""
    if settings.combination is Combination.MEAN:
        return reduce_mean(contributions, tensor_index=tensor_index, element_count=element_count)
    trim_count = compute_trim_count(settings, len(contributions))
    return reduce_trimmed(contributions, tensor_index=tensor_index, element_count=element_count, trim_count=trim_count)


def reduce_trimmed(
    contributions: Mapping[bytes, Counted], *, tensor_index: int, element_count: int, trim_count: int
) -> Entries:
    """Return the coordinate-wise mean without the ``trim_count`` smallest and largest of each element.

    Those left are added in ascending order of value, from +0, and divided by their number. Only for dense
    contributions: where few trainers send an entry, the median of the rest is zero and nothing would ever move.

    Raises:
        LocalProtocolError: as :func:`reduce_mean`, a contribution that is not dense, or nothing left.
    """
    parts = _in_key_order(contributions, tensor_index=tensor_index, element_count=element_count)
    if any(part.entries.indices is not None for part in parts):
        raise LocalProtocolError("median and trimmed mean need dense contributions")
    kept_count = len(parts) - 2 * trim_count
    if trim_count < 0 or kept_count < 1:
        raise LocalProtocolError(f"{trim_count} trimmed on each side of {len(parts)} contributions")
    values = [part.values() for part in parts]
    found = [np.empty(0, np.float32)]
    for start in range(0, element_count, limits.BLOCK_ELEMENTS):
        sums = sum_trimmed_part([sent[start : start + limits.BLOCK_ELEMENTS] for sent in values], trim_count)
        found.append(divide(sums, kept_count))
    return Entries(tensor_index, None, np.concatenate(found))


def divide(sums: FP32s, count: int) -> FP32s:
    """Return ``sums / count``, a true FP32 division of each element."""
    # By an array, as on every backend: dividing by a Python number makes CUDA multiply by the reciprocal.
    with np.errstate(all="ignore"):
        return settle_nans(np.divide(sums, np.full_like(sums, count)))


def _cut(indices: Indices | None, values: FP32s, start: int, end: int) -> tuple[Indices | None, FP32s]:
    if indices is None:
        return None, values[start:end]
    low, high = find_run(indices, start, end)
    return indices[low:high], values[low:high]


def _in_key_order(contributions: Mapping[bytes, Counted], *, tensor_index: int, element_count: int) -> list[Counted]:
    if not contributions:
        raise LocalProtocolError("a round without contributions has no aggregate")
    parts = [contributions[key] for key in sorted(contributions)]
    for part in parts:
        entries = part.entries
        if entries.tensor_index != tensor_index:
            raise LocalProtocolError(f"entries of tensor {entries.tensor_index} among those of {tensor_index}")
        is_outside = (
            len(entries) != element_count
            if entries.indices is None
            else len(entries) > 0 and int(entries.indices[-1]) >= element_count
        )
        if is_outside:
            raise LocalProtocolError(f"tensor {tensor_index}: entries do not fit {element_count} elements")
    return parts
